"""torchtitan's Llama 3 with FSDP2, over sequences of packed documents that are sharded over ranks.

torchrun --nproc-per-node 2 examples/torchtitan_llama.py
"""

from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtitan.models.llama3 import _debugmodel

from meshflash import init
from meshflash.integrations.torchtitan import MeshAttention, shard_inputs
from meshflash.parallel import init_mesh


def make(device: torch.device, mesh: Any) -> Any:
    """Return torchtitan's model for debugging, whose gradients are summed over ranks, as in its trainer."""
    torch.manual_seed(0)
    config = _debugmodel("flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = MeshAttention.Config()
    model = config.build().to(device)
    model.init_states(buffer_device=None)
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


def main() -> None:
    """Train for a few steps; each rank has the loss of its own tokens, divided by the number of all labels."""
    with init() as world:
        mesh = init_mesh(cp=world.world_size)["cp"]
        model = make(world.device, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        positions = torch.cat([torch.arange(137), torch.arange(263)])[None]
        for step in range(6):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(1, 8, (1, 401), generator=generator).cumsum(1) % 2048
            labels = tokens[:, 1:].clone()
            labels[:, :50] = -100
            inputs, own, extra = shard_inputs(tokens[:, :-1], labels, dict(positions=positions), mesh)
            logits = model(inputs, **extra).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, own.flatten(), reduction="sum") / (labels != -100).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            if world.rank == 0:
                print(f"step {step}: loss {total:.5f}", flush=True)


if __name__ == "__main__":
    main()
