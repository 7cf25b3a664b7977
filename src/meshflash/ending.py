"""The end of a job, or of its attention: what was kept for the next call is freed."""

from __future__ import annotations

from meshflash.engine.membership import leave
from meshflash.engine.memory import release


def shutdown() -> None:
    """Free scratch, heaps and pinned memory, and end the threads of transports; no call may be under way.

    Process groups stay, and a later call starts afresh: on all ranks, for they have to agree again.

    >>> shutdown()
    """
    leave()
    release()
