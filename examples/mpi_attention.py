"""Attention over the ranks of a job, under any launcher.

torchrun --nproc-per-node 4 examples/mpi_attention.py
mpiexec -n 4 python examples/mpi_attention.py
srun -n 4 python examples/mpi_attention.py
python examples/mpi_attention.py
"""

import torch

from meshflash import Mask, attention, init


def main() -> None:
    """Run causal attention over one sequence; each rank holds 512 tokens of it."""
    with init() as world:
        print(f"Rank {world.rank}/{world.world_size} on device {world.device}", flush=True)
        generator = torch.Generator().manual_seed(world.rank)
        q, k, v = (torch.randn(1, 512, 8, 64, generator=generator).to(world.device) for _ in range(3))
        output = attention(q, k, v, mask=Mask.causal())
        print(f"Rank {world.rank}: Output shape {output.shape}, sum {output.double().sum():.6f}", flush=True)


if __name__ == "__main__":
    main()
