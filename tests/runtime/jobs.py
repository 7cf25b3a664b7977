"""Real jobs for tests: start ranks with a launcher or one by one, and collect the JSON lines that they print."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from forkserver import context

PYTHON = (sys.executable,)
WORKER = str(Path(__file__).with_name("worker.py"))
#: Prefixes of variables that identify a rank. Tests that run under a launcher must not pass them on to their jobs.
RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "MPI_", "TORCHELASTIC", "GLOO_", "OMP_"),
    *("MESHFLASH_TOKEN", "MESHFLASH_LISTEN"),
)
SOURCE = str(Path(__file__).parents[2] / "src")


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without the variables that identify a rank, and with `more`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(RANK_VARIABLES)}
    return inherited | {"PYTHONPATH": SOURCE, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"} | more


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launcher(kind: str) -> str:
    """Return the mpiexec of an MPI that `make test` has installed beside the environment; skip the test without it."""
    path = Path(sys.prefix) / kind / "bin" / "mpiexec"
    if not path.exists():
        pytest.skip(f"{kind} is not installed at {path}")
    return str(path)


def libraries(kind: str) -> dict[str, str]:
    """Return the variables with which a rank finds mpi4py and the library of an MPI."""
    root = Path(sys.prefix) / kind
    packages = next((root / "lib").glob("python*/site-packages"))
    return {"PYTHONPATH": f"{SOURCE}{os.pathsep}{packages}", "LD_LIBRARY_PATH": str(root / "lib")}


@dataclass(frozen=True)
class FinishedJob:
    """A finished job: its exit code, the JSON reports of its ranks, and its whole output; `wait_for` makes it."""

    code: int
    reports: list[dict[str, Any]]
    text: str


def start(command: Sequence[str], variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a job, or a rank of one."""
    more = environment(**(variables or {}))
    return subprocess.Popen(command, env=more, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_for(process: subprocess.Popen[str] | Forked, timeout: float = 120.0) -> FinishedJob:
    """Wait until a process ends; fail the test after the timeout."""
    try:
        text, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        pytest.fail(f"still running after {timeout} s:\n{text}")
    assert process.returncode is not None
    return FinishedJob(process.returncode, reports_in(text), text)


def reports_in(text: str) -> list[dict[str, Any]]:
    """Return the JSON reports in the output of workers; a launcher may put a prefix before each line."""
    return [json.loads(line[line.index("report {") + 7 :]) for line in text.splitlines() if "report {" in line]


def run(command: Sequence[str], variables: Mapping[str, str] | None = None, timeout: float = 120.0) -> FinishedJob:
    """Start a job and wait until it ends."""
    return wait_for(start(command, variables), timeout)


class Forked:
    """A rank forked with torch imported, rather than started as a script: the part of `Popen` that tests use."""

    def __init__(self, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        start = context()
        ours, theirs = start.Pipe(duplex=False)
        own = environment(**variables)
        self._process = start.Process(target=_as_script, args=(list(arguments), own, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.stdout = os.fdopen(os.dup(ours.fileno()), errors="replace")
        ours.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, or None while the rank runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return the rest of the output after the rank has ended; TimeoutExpired if it runs longer."""
        found: list[str] = []
        reader = threading.Thread(target=lambda: found.append(self.stdout.read()), daemon=True)
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
        self._process.join()
        return found[0], ""


def _as_script(arguments: list[str], variables: dict[str, str], output: Connection) -> None:
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def worker(mode: str, timeout: float, *hidden: str) -> list[str]:
    """Return the command of a rank; it first removes the variables `hidden`."""
    return [sys.executable, WORKER, mode, str(timeout), *hidden]


def start_ranks(mode: str, world: int, timeout: float, port: int, **more: str) -> list[Forked]:
    """Start ranks with PyTorch's own environment variables, without a launcher."""
    return [
        Forked(
            worker(mode, timeout, "given")[1:],
            {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
            | {"MASTER_ADDR": "127.0.0.1"}
            | more,
        )
        for rank in range(world)
    ]


def check(job: FinishedJob, world: int, launcher: str) -> None:
    """Assert that all ranks joined, know rank and world size, and computed correct attention."""
    assert job.code == 0, job.text
    assert sorted(report["rank"] for report in job.reports) == list(range(world)), job.text
    assert {report["size"] for report in job.reports} == {world}
    assert {report["launcher"] for report in job.reports} == {launcher}
    assert {report["backend"] for report in job.reports} == {"gloo"}
    assert max(report["error"] for report in job.reports) < 1e-12
