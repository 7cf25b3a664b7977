"""A sampler for a user's own DataLoader: the samples of this rank on a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Sampler

from meshflash.parallel.mesh import DATA_AXES, mesh_rank, size


class MeshSampler(Sampler[int]):
    """Yield the sample indices of this rank: different on each data rank, the same on all ranks of cp and tp.

    Every sample appears exactly once per epoch. If the number of data ranks does not divide the number of samples, some
    ranks have one sample more; `meshflash.parallel.micro_batches` pads the others with blank batches. The order depends
    on the seed and the epoch only, so it is the same on any mesh.

    Args:
        data: The dataset, or the number of its samples.
        mesh: A mesh of `init_mesh`.
        shuffle: Whether to permute the samples in each epoch.
        seed: The seed of the permutation.

    >>> from meshflash import shutdown
    >>> from meshflash.parallel.mesh import init_mesh
    >>> list(MeshSampler(range(3), init_mesh(), shuffle=False))
    [0, 1, 2]
    >>> shutdown()
    """

    def __init__(self, data: Sized | int, mesh: DeviceMesh, *, shuffle: bool = True, seed: int = 0) -> None:
        self.num_samples = data if isinstance(data, int) else len(data)
        self.data_rank, self.num_data_ranks = mesh_rank(mesh, DATA_AXES), size(mesh, DATA_AXES)
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        if self.num_samples < self.num_data_ranks:
            raise ValueError(
                f"MeshSampler: {self.num_samples} samples for {self.num_data_ranks} data ranks; each rank needs one"
            )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; each epoch has its own permutation.

        Args:
            epoch: The number of the epoch, the same on all ranks.
        """
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self.num_samples)
        if self.shuffle:
            # the prime keeps (seed, epoch) pairs apart for up to a million epochs
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator)
        return iter(order[self.data_rank :: self.num_data_ranks].tolist())

    def __len__(self) -> int:
        return len(range(self.data_rank, self.num_samples, self.num_data_ranks))
