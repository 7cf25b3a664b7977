"""Processes of this machine: whether one runs, and ranks that end together with the process that started them.

A launcher that gets SIGKILL cannot end its ranks. They would keep running, and write into the folder of the next job.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from meshflash.runtime.launchers import LaunchError

#: The variable that holds the pid of the process that started the ranks of this machine.
STARTER = "MESHFLASH_STARTER"
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl


def end_with_starter() -> None:
    """Have the kernel kill this rank when its starter ends, if MESHFLASH_STARTER names one.

    LaunchError if the starter has ended already.
    """
    starter = os.environ.get(STARTER, "")
    if not starter.isdigit():
        return
    if int(starter) == os.getppid():
        end_with_parent()
    if not alive(int(starter)):
        raise LaunchError(
            f"process {starter}, which started this rank, has ended; where {STARTER} came here with the variables of "
            "another job, unset it"
        )


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; does nothing except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def alive(pid: int) -> bool:
    """Return whether a process of this machine runs; a zombie does not.

    Args:
        pid: The number of the process.

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
