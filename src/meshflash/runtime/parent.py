"""Processes of this machine: whether one lives, and ranks that end with the one that started them, however it ends.

A launcher that is killed outright cannot tell its ranks, which would go on by themselves, and write where the next job
of the same folder does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from meshflash.runtime.launchers import LaunchError

#: The variable by which ranks of this machine know the process that started them, their parent.
STARTER = "MESHFLASH_STARTER"
_SET_DEATH_SIGNAL = 1  # of prctl


def end_with_starter() -> None:
    """Have the kernel kill this rank when its starter ends, where that is one of ours; it may have ended already."""
    said = os.environ.get(STARTER, "")
    if not said.isdigit():
        return
    if int(said) == os.getppid():
        end_with_parent()
    if not alive(int(said)):
        raise LaunchError(
            f"process {said}, which started this rank, has ended; where {STARTER} came here with the variables of "
            "another job, unset it"
        )


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; of no effect but on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that has ended and waits to be collected does not.

    >>> alive(os.getpid())
    True
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # a system without /proc, or it ended just now
        return True
    return state not in "ZX"
