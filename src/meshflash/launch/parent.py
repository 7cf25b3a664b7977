"""Ranks that end with the process that started them, however that ends.

A launcher that is killed outright cannot tell its ranks, which would go on by themselves, and write where the next job
of the same folder does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from meshflash.launch.launchers import LaunchError

#: Who started the ranks of this machine: its process, which is theirs' parent.
STARTER = "MESHFLASH_STARTER"
_SET_DEATH_SIGNAL = 1  # of prctl


def end_with_starter() -> None:
    """Have the kernel kill this rank when its starter ends, where that is one of ours; it may have ended already."""
    said = os.environ.get(STARTER, "")
    if not said.isdigit():
        return
    if int(said) == os.getppid():
        end_with_parent()
    if not _runs(int(said)):
        raise LaunchError(f"process {said}, which started this rank, has ended")


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; of no effect but on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user: it is there
        return True
    return True
