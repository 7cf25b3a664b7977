"""Ranks of `meshflash` commands that tests can kill: forked from a process that has imported torch, or under torchrun.

A forked rank is a process with the variables that mpiexec would set; it starts in a tenth of the time. As a script
under torchrun, this file runs `meshflash` with a rank that kills itself once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshflash.runtime.parent import alive

#: Time limit of a run, in seconds.
LIMIT_SECONDS = 120.0


class Job:
    """The ranks of one command; the tests make it.

    With `stall`, fsync call number `stall` of rank 0 never returns.
    """

    def __init__(self, arguments: Sequence[Any], world: int, log: Path, stall: int = 0) -> None:
        from forkserver import context  # as a script this file has no other tests beside it

        self.log = log
        job, texts = uuid.uuid4().hex, [str(argument) for argument in arguments]
        self.ranks = [
            context().Process(target=command, args=(texts, rank, world, job, str(log), stall), daemon=True)
            for rank in range(world)
        ]
        for rank in self.ranks:
            rank.start()

    def wait_for_success(self) -> str:
        """Wait until all ranks have succeeded; return the output of rank 0."""
        deadline = time.monotonic() + LIMIT_SECONDS
        for rank in self.ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        codes = [rank.exitcode for rank in self.ranks]
        if any(codes) or None in codes:
            self.kill()
            output = "\n".join(path.read_text() for path in sorted(self.log.parent.glob(f"{self.log.name}*")))
            raise AssertionError(f"ranks ended with {codes}:\n{output}")
        return Path(f"{self.log}.0").read_text()

    def are_alive(self) -> bool:
        """Do all ranks still run?"""
        return all(rank.is_alive() for rank in self.ranks)

    def kill(self) -> None:
        """Kill all ranks with SIGKILL."""
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join()


def command(arguments: list[str], rank: int, world: int, job: str, log: str, stall: int) -> None:
    """Run as a rank of a command, with output to its own file."""
    import torch

    from meshflash.cli import app

    handle = os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    variables = {"RANK": rank, "SIZE": world, "LOCAL_RANK": rank, "LOCAL_SIZE": world}
    os.environ |= {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in variables.items()}
    os.environ |= {"PMIX_NAMESPACE": job, "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)  # torch read OMP_NUM_THREADS on import
    if stall and rank == 0:
        _stall(stall, Path(f"{log}.stalled"))
    sys.argv = ["meshflash", *arguments]
    app()


def _stall(at: int, marker: Path) -> None:
    """Hang at fsync call number `at`, counted from now on, and create the marker file."""
    fsync, calls = os.fsync, [0]

    def hanging(fd: Any) -> None:
        calls[0] += 1
        if calls[0] >= at:
            marker.touch()
            time.sleep(LIMIT_SECONDS)
        fsync(fd)

    os.fsync = hanging


def family(pid: int) -> list[int]:
    """Return a process and all of its descendants, in any session."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def kill_family(pid: int) -> int:
    """Kill a launcher and its ranks with SIGKILL, wait until none runs, and return their number."""
    found = family(pid)
    for one in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_SECONDS
    while any(alive(one) for one in found) and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(found)


def die_once(rank: str, at: int, marker: Path) -> None:
    """Kill this process after step `at` if it has this rank, unless the marker file exists."""
    from meshflash.train.report import Report

    log_metrics = Report.log_metrics

    def log_and_die(self: Report, step: int, **values: Any) -> None:
        log_metrics(self, step, **values)
        if step == at and os.environ["RANK"] == rank and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    Report.log_metrics = log_and_die  # type: ignore[method-assign]


if __name__ == "__main__":
    from meshflash.cli import app

    die_once(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    sys.argv = ["meshflash", *sys.argv[4:]]
    app()
