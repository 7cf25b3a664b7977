"""A heap in memory-mapped files of one host, one file per rank, for CPUs where Triton interprets the kernels.

A file is unlinked as soon as all ranks have mapped it. If a rank is killed before that, its file stays behind, and the
next heap that is opened removes it: the process in its name is gone, and so is the lock it held. Files of living
processes are never touched.
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

from meshflash.comm.handshake import StoreBarrier
from meshflash.comm.heap.contract import Heap
from meshflash.runtime.parent import alive

#: Begin of all file names; the job, the rank and the process id follow.
PREFIX = "meshflash-heap-"


def folder() -> Path:
    """Return the folder of the files: one in memory if the system has it, else the folder of temporary files."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def sweep() -> list[str]:
    """Remove the files of processes that are gone, and return their names."""
    swept = []
    for path in folder().glob(f"{PREFIX}*"):
        pid = path.name.rpartition("-")[2]
        if not pid.isdigit() or alive(int(pid)):
            continue
        with contextlib.suppress(OSError):  # another rank has removed it already, or it is another user's
            descriptor = os.open(path, os.O_RDWR)
            try:
                # containers number their processes separately: the owner may live in another one and hold the lock
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                swept.append(path.name)
            finally:
                os.close(descriptor)
    return swept


class SharedHeap(Heap):
    """A heap in shared memory of one host; `open_heap` makes it for process groups on CPUs."""

    kind = "shared"

    def __init__(self, group: object, num_bytes: int, device: torch.device, timeout: float) -> None:
        barrier = StoreBarrier(group, timeout)
        if barrier.hosts > 1:
            raise ValueError(
                f"kind='shared': the ranks are on {barrier.hosts} hosts; all ranks of a heap must be on one host"
            )
        sweep()
        own = folder() / f"{PREFIX}{barrier.job}-{barrier.rank}-{os.getpid()}"
        descriptor = -1
        memories: list[Tensor] = []

        def create() -> str:
            nonlocal descriptor
            descriptor = os.open(own, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            _reserve(descriptor, num_bytes)
            return str(own)

        def map_all(paths: list[str]) -> None:
            memories.extend(_map_file(path, num_bytes) for path in paths)

        try:
            # each share is also a barrier: no rank maps a file before it exists, or unlinks it before all have mapped
            # it
            paths = barrier.all_gather_result(create)
            barrier.all_gather_result(lambda: map_all(paths))
        finally:
            with contextlib.suppress(FileNotFoundError):
                own.unlink()
            if descriptor >= 0:
                os.close(descriptor)
        super().__init__(memories, barrier.rank, device, timeout, barrier)

    def _finish(self) -> None:
        return


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Reserve the memory of a file now: if there is too little, a later write would kill the process with SIGBUS."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, num_bytes)
        else:
            os.ftruncate(descriptor, num_bytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        space = os.statvfs(folder())
        raise ValueError(
            f"{folder()} has {space.f_bavail * space.f_frsize:,} bytes left, and this rank's heap needs {num_bytes:,}; "
            "ask for fewer bytes, or start the container with more (--shm-size, --ipc=host)"
        ) from error


def _map_file(path: str, num_bytes: int) -> Tensor:
    """Return the bytes of a file as a tensor; the file stays mapped as long as the tensor lives."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)
