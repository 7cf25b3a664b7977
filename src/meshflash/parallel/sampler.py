"""Which samples a rank has: for users' own DataLoaders."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Sampler

from meshflash.parallel.mesh import DATA, place, size


class MeshSampler(Sampler[int]):
    """Indices of this rank's samples: other ones on each rank of the data axes, the same on those of cp and tp.

    Each sample is there once: where ranks do not divide their number, some have one sample more.
    `meshflash.parallel.micro_batches` lets the others wait with blank batches. The order depends on the seed and the
    epoch (`set_epoch`) alone: taken in turns over the ranks, it is the same on any mesh.

    >>> from meshflash import shutdown
    >>> from meshflash.parallel.mesh import init_mesh
    >>> list(MeshSampler(range(3), init_mesh(), shuffle=False))
    [0, 1, 2]
    >>> shutdown()
    """

    def __init__(self, data: Sized | int, mesh: DeviceMesh, *, shuffle: bool = True, seed: int = 0) -> None:
        self.samples = data if isinstance(data, int) else len(data)
        self.place, self.ranks = place(mesh, DATA), size(mesh, DATA)
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        if self.samples < self.ranks:
            raise ValueError(f"MeshSampler: {self.samples} samples for {self.ranks} data ranks; each needs one")

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is of; every one has an order of its own."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self.samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(self.samples, generator=generator)
        return iter(order[self.place :: self.ranks].tolist())

    def __len__(self) -> int:
        return len(range(self.place, self.samples, self.ranks))
