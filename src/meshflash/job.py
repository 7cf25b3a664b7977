"""The beginning and the end of a job: `init` and `shutdown`."""

from __future__ import annotations

from meshflash.engine.cache import cache
from meshflash.engine.group_context import close_contexts
from meshflash.engine.local import forget_worklists
from meshflash.kernels import registry as kernels
from meshflash.runtime import world
from meshflash.runtime.world import TIMEOUT, World

# Contexts close before the groups that they use end.
world.on_end.extend([cache.clear, close_contexts, forget_worklists, kernels.release])


def init(backend: str | None = None, timeout: float = TIMEOUT) -> World:
    """Make this process a rank of its job, whichever launcher started it: torchrun, mpiexec, srun or none.

    `init` finds the other ranks, takes a device and a share of the CPU cores, and makes torch's default process group.
    A second call returns the same World. A process group that exists already is used as it is. A single process gets
    no process group, and needs none.

    Args:
        backend: The backend of the process group; by default the best one that all ranks have for their devices.
        timeout: Seconds that ranks wait for each other, in `init` and in collectives.

    >>> with init() as here:
    ...     here.rank, here.world_size, here.launcher, here.backend
    (0, 1, 'single', None)
    """
    return world.begin(backend, timeout)


def shutdown() -> None:
    """Free buffers, heaps and pinned memory, end the threads of transports, and the process group that `init` made.

    No call may be running. Process groups that the caller made stay. All ranks call it: later calls start afresh, and
    ranks have to agree again.

    >>> shutdown()
    """
    world.end()
