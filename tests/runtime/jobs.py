"""Real jobs for tests: start ranks by a launcher or by hand, and collect the JSON lines that they print."""

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
#: Prefixes of variables that identify a rank. Tests that run under a launcher themselves must not pass them on.
ABOUT = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "MPI_", "TORCHELASTIC", "GLOO_", "OMP_"),
    *("MESHFLASH_TOKEN", "MESHFLASH_LISTEN"),
)
SOURCE = str(Path(__file__).parents[2] / "src")


def environment(**more: str) -> dict[str, str]:
    """Return our environment without the variables that identify a rank."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(ABOUT)}
    return own | {"PYTHONPATH": SOURCE, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"} | more


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
    """Return the variables by which mpi4py and the library of an MPI are found."""
    root = Path(sys.prefix) / kind
    packages = next((root / "lib").glob("python*/site-packages"))
    return {"PYTHONPATH": f"{SOURCE}{os.pathsep}{packages}", "LD_LIBRARY_PATH": str(root / "lib")}


@dataclass(frozen=True)
class Ended:
    """A finished job: its exit code, the JSON lines of its ranks, and its whole output."""

    code: int
    told: list[dict[str, Any]]
    text: str


def start(command: Sequence[str], variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a job, or a rank of one."""
    more = environment(**(variables or {}))
    return subprocess.Popen(command, env=more, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def ended(process: subprocess.Popen[str] | Forked, timeout: float = 120.0) -> Ended:
    """Wait until a process has ended; fail the test after the timeout."""
    try:
        text, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        pytest.fail(f"still running after {timeout} s:\n{text}")
    assert process.returncode is not None
    return Ended(process.returncode, told_in(text), text)


def told_in(text: str) -> list[dict[str, Any]]:
    """Return the JSON lines of workers; a launcher may put a prefix before them."""
    return [json.loads(line[line.index("told {") + 5 :]) for line in text.splitlines() if "told {" in line]


def run(command: Sequence[str], variables: Mapping[str, str] | None = None, timeout: float = 120.0) -> Ended:
    """Start a job and wait until it has ended."""
    return ended(start(command, variables), timeout)


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
    """Return the command of a rank; `hidden` are variables that it removes first."""
    return [sys.executable, WORKER, mode, str(timeout), *hidden]


def by_hand(mode: str, world: int, timeout: float, port: int, **more: str) -> list[Forked]:
    """Start ranks by torch's own environment variables."""
    return [
        Forked(
            worker(mode, timeout, "given")[1:],
            {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
            | {"MASTER_ADDR": "127.0.0.1"}
            | more,
        )
        for rank in range(world)
    ]


def check(job: Ended, world: int, launcher: str) -> None:
    """Check that all ranks took part, know their places, and computed the right attention."""
    assert job.code == 0, job.text
    assert sorted(one["rank"] for one in job.told) == list(range(world)), job.text
    assert {one["size"] for one in job.told} == {world}
    assert {one["launcher"] for one in job.told} == {launcher}
    assert {one["backend"] for one in job.told} == {"gloo"}
    assert max(one["error"] for one in job.told) < 1e-12
