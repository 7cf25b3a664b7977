"""Lightning: ranks that share a sequence get the same batch, and DDP averages their gradients."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class ContextParallelStrategy(DDPStrategy):
    """DDP over dp times cp ranks, where data loaders are distributed over dp only.

    Shard the model's sequences over `self.trainer.strategy.mesh["cp"]` by `context_parallel` in `configure_model`.

    Args:
        cp: The number of ranks that share a sequence. It divides the number of processes.
        arguments: The arguments of `DDPStrategy`.
    """

    def __init__(self, cp: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._cp = cp
        self._mesh: DeviceMesh | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh (dp, cp), once processes have started."""
        if self._mesh is None:
            if self._cp < 1 or self.world_size % self._cp:
                raise ValueError(f"ContextParallelStrategy: cp={self._cp} does not divide {self.world_size} processes")
            if not torch.distributed.is_initialized():
                raise ValueError("ContextParallelStrategy.mesh: processes have not started; use it in configure_model")
            sizes = (self.world_size // self._cp, self._cp)
            self._mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=("dp", "cp"))
        return self._mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return dict(num_replicas=self.world_size // self._cp, rank=self.global_rank // self._cp)
