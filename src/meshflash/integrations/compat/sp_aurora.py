"""Names of sp-aurora: `sp_aurora_func` runs a ring, `ulysses_flash_attn_func` exchanges heads for sequence.

`setup_mpi_distributed` and the functions beside it start a rank under torchrun, mpiexec or alone.

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


def _with_two_results(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return (output, LSE) for `return_attn_probs`: two values, as the original's Ulysses does."""

    @wraps(func)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        made = func(*arguments, **named)
        return made[:2] if isinstance(made, tuple) else made

    return wrapped


sp_aurora_func, sp_aurora_kvpacked_func, sp_aurora_qkvpacked_func = dense("sp_aurora", "ring")
ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = dense("ring_flash_attn", "ring")
ulysses_flash_attn_func, ulysses_flash_attn_kvpacked_func, ulysses_flash_attn_qkvpacked_func = forms(
    "ulysses_flash_attn_", _with_two_results(dense("ulysses_flash_attn", "ulysses")[0])
)


#: The environment variables by which sp-aurora detects MPI.
MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "MPI_RANK")


def detect_mpi_environment() -> bool:
    """Return whether MPI started this process."""
    return any(name in os.environ for name in MPI_VARIABLES)


def setup_mpi_distributed(backend: str | None = None) -> dict[str, Any]:
    """Make this process a rank of its job.

    Args:
        backend: The backend of the process group; None takes the best one for the device.

    Returns:
        A dict of rank, world_size, local_rank, device, launcher (torchrun, mpiexec or single) and backend.
    """
    world = init(_backend(backend))
    return {
        "rank": world.rank,
        "world_size": world.world_size,
        "local_rank": world.local_rank,
        "device": world.device,
        "launcher": _LAUNCHERS.get(world.launcher, "mpiexec"),
        "backend": None if world.backend is None else world.backend.rpartition(":")[2],
    }


#: sp-aurora's names of launchers by ours; all others are MPI or Slurm, which it calls mpiexec.
_LAUNCHERS = {"torchrun": "torchrun", "variables": "torchrun", "single": "single"}


def init_distributed_backend(backend: str | None = None, timeout_seconds: int = 1800) -> bool:
    """Initialize the process group; return False and log the reason if that fails.

    Args:
        backend: The backend of the process group; None takes the best one for the device.
        timeout_seconds: The timeout of its operations.
    """
    try:
        init(_backend(backend), float(timeout_seconds))
    except (LaunchError, ValueError) as error:
        log.warning("init_distributed_backend: %s", error)
        return False
    return True


def cleanup_distributed() -> None:
    """Shut down what `setup_mpi_distributed` or `init_distributed_backend` started."""
    shutdown()


def get_device_for_rank(rank: int | None = None) -> torch.device:
    """Return the device of a rank of this node.

    Args:
        rank: The local rank; None means this process.
    """
    return device_of(detect().local_rank if rank is None else rank)


def _backend(name: str | None) -> str | None:
    """Translate sp-aurora's "ccl" to torch's own backend for Intel GPUs, if it is available."""
    return "xccl" if name == "ccl" and available("xccl") else name
