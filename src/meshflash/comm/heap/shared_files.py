"""A heap in files that all ranks of a host map, one file a rank: CPUs, where Triton's interpreter runs the kernels.

A file has its name only until all ranks have mapped it. What a rank leaves that is killed before, the next heap to be
opened takes away: the process of its name is gone, and its lock with it. What a living process has is never touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from meshflash.comm.handshake import Meeting
from meshflash.comm.heap.contract import Heap
from meshflash.runtime.parent import alive

#: How the names of files begin; the job, the rank and the process follow.
PREFIX = "meshflash-heap-"


def folder() -> Path:
    """Where files are memory, or else files."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def sweep() -> list[str]:
    """Take away the files of processes that are gone; their names."""
    swept = []
    for path in folder().glob(f"{PREFIX}*"):
        pid = path.name.rpartition("-")[2]
        if not pid.isdigit() or alive(int(pid)):
            continue
        with contextlib.suppress(OSError):  # another rank was faster, or it is another user's
            descriptor = os.open(path, os.O_RDWR)
            try:
                # a process of another container may have the number of one that is gone here: it holds the lock
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                swept.append(path.name)
            finally:
                os.close(descriptor)
    return swept


class SharedHeap(Heap):
    """A heap in shared memory of the host."""

    kind = "shared"

    def __init__(self, group: object, count: int, device: torch.device, timeout: float) -> None:
        meeting = Meeting(group, timeout)
        if meeting.hosts > 1:
            raise ValueError(f"kind='shared': the ranks are on {meeting.hosts} hosts; a heap is of ranks of one host")
        sweep()
        own = folder() / f"{PREFIX}{meeting.job}-{meeting.rank}-{os.getpid()}"
        descriptor = -1
        memories: list[Tensor] = []

        def create() -> str:
            nonlocal descriptor
            descriptor = os.open(own, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            _reserve(descriptor, count)
            return str(own)

        def map_all(paths: list[str]) -> None:
            memories.extend(_mapped(path, count) for path in paths)

        try:
            paths = meeting.share(create)
            meeting.share(lambda: map_all(paths))
        finally:
            with contextlib.suppress(FileNotFoundError):
                own.unlink()
            if descriptor >= 0:
                os.close(descriptor)
        super().__init__(memories, meeting.rank, device, timeout, meeting)

    def _finish(self) -> None:
        return


def _reserve(descriptor: int, count: int) -> None:
    """Take the memory now: where there is too little, a write would end the process later."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, count)
        else:
            os.ftruncate(descriptor, count)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        space = os.statvfs(folder())
        raise ValueError(
            f"{folder()} has {space.f_bavail * space.f_frsize:,} bytes left, and this rank's heap needs {count:,}; ask "
            "for fewer bytes, or start the container with more (--shm-size, --ipc=host)"
        ) from error


def _mapped(path: str, count: int) -> Tensor:
    """The bytes of a file; they stay mapped as long as the tensor is there."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, count), dtype=torch.uint8)
    finally:
        os.close(descriptor)
