"""The beginning and the end of a job: `init` and `shutdown`."""

from __future__ import annotations

from meshflash.engine.group_context import leave
from meshflash.engine.memory import release
from meshflash.runtime import world
from meshflash.runtime.world import TIMEOUT, World

world.on_end[:] = [leave, release]


def init(backend: str | None = None, timeout: float = TIMEOUT) -> World:
    """This process as a rank of its job, whoever started it: torchrun, mpiexec, srun, or nobody.

    Finds the other ranks, takes a device and a share of the cores, and makes the default process group. A second call
    returns the same; a process group that was there before is taken as it is. Alone there is none, and none is needed.

    Args:
        backend: of the process group; by default the best that all ranks have for their devices.
        timeout: seconds that ranks wait for each other, at the start and in collectives.

    >>> with init() as here:
    ...     here.rank, here.world_size, here.launcher, here.backend
    (0, 1, 'single', None)
    """
    return world.begin(backend, timeout)


def shutdown() -> None:
    """Free scratch, heaps and pinned memory, end the threads of transports, and the process group that `init` made.

    No call may be under way. Process groups of the caller's own stay, and later calls start afresh: on all ranks, for
    they have to agree again.

    >>> shutdown()
    """
    world.end()
