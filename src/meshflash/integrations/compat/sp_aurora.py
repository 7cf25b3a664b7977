"""sp-aurora's names: `sp_aurora_func` is a ring, `ulysses_flash_attn_func` exchanges heads for sequence.

`setup_mpi_distributed` and its like start a rank under torchrun, mpiexec or alone.

>>> from meshflash.integrations.compat.sp_aurora import sp_aurora_func
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from meshflash.integrations.compat.calls import dense, forms
from meshflash.job import init, shutdown
from meshflash.runtime.devices import available, device_of
from meshflash.runtime.launchers import LaunchError, detect
from meshflash.runtime.log import log


def _two(func: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with (output, LSE) for `return_attn_probs`: two values, as Ulysses returns them there."""

    @wraps(func)
    def two(*arguments: Any, **named: Any) -> Any:
        made = func(*arguments, **named)
        return made[:2] if isinstance(made, tuple) else made

    return two


sp_aurora_func, sp_aurora_kvpacked_func, sp_aurora_qkvpacked_func = dense("sp_aurora", "ring")
ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = dense("ring_flash_attn", "ring")
ulysses_flash_attn_func, ulysses_flash_attn_kvpacked_func, ulysses_flash_attn_qkvpacked_func = forms(
    "ulysses_flash_attn_", _two(dense("ulysses_flash_attn", "ulysses")[0])
)


#: The variables by which sp-aurora tells that MPI started a process.
MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "MPI_RANK")


def detect_mpi_environment() -> bool:
    """Whether MPI started this process."""
    return any(name in os.environ for name in MPI_VARIABLES)


def setup_mpi_distributed(backend: str | None = None) -> dict[str, Any]:
    """This process as a rank: rank, world_size, local_rank, device, launcher (torchrun, mpiexec, single), backend."""
    world = init(_backend(backend))
    return {
        "rank": world.rank,
        "world_size": world.world_size,
        "local_rank": world.local_rank,
        "device": world.device,
        "launcher": _LAUNCHERS.get(world.launcher, "mpiexec"),
        "backend": None if world.backend is None else world.backend.rpartition(":")[2],
    }


#: Any other is an MPI's, or Slurm's.
_LAUNCHERS = {"torchrun": "torchrun", "variables": "torchrun", "single": "single"}


def init_distributed_backend(backend: str | None = None, timeout_seconds: int = 1800) -> bool:
    """Initialise the process group; False, with the reason in the log, where that cannot be done."""
    try:
        init(_backend(backend), float(timeout_seconds))
    except (LaunchError, ValueError) as error:
        log.warning("init_distributed_backend: %s", error)
        return False
    return True


def cleanup_distributed() -> None:
    """End what the two above began."""
    shutdown()


def get_device_for_rank(rank: int | None = None) -> torch.device:
    """The device of a rank of this node; of this process where None."""
    return device_of(detect().local_rank if rank is None else rank)


def _backend(name: str | None) -> str | None:
    """Their "ccl" is whatever Intel's devices have."""
    return "xccl" if name == "ccl" and available("xccl") else name
