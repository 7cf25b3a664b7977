"""A process that imports torch once and forks the ranks of each case: a rank starts a hundred times faster.

The zygote runs one job at a time. It has no threads and has never computed, so that its children may do both. It also
sends the faults: a victim writes a byte into a pipe, and the zygote signals it after the delay that the case says.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
#: Seconds between two checks of the ranks of a job.
POLL = 0.01
#: Seconds until a fault must have come, and that a job without a fault may take.
LIMIT = 60.0


@dataclass(frozen=True)
class Ended:
    """A finished job, by rank. Times are from the monotonic clock; `fired` is the time of the fault."""

    folder: Path
    #: Exit codes as os.waitstatus_to_exitcode returns them: below 0 a signal. None for a rank that hung.
    codes: list[int | None]
    times: list[float]
    fired: float | None

    def report(self, rank: int) -> dict[str, Any]:
        """Return the report that a rank wrote before it ended; empty if it wrote none."""
        try:
            found: dict[str, Any] = json.loads((self.folder / f"rank-{rank}.json").read_text())
        except (OSError, ValueError):
            return {}
        return found

    def output(self, rank: int) -> str:
        """Return what a rank printed."""
        path = self.folder / f"rank-{rank}.txt"
        return path.read_text(errors="replace") if path.exists() else ""


class Zygote:
    """The client's side of a zygote process: start a job, wait for its end."""

    def __init__(self) -> None:
        paths = [str(TESTS.parent / "src"), str(TESTS)]
        own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        self._process: Any = subprocess.Popen(
            [sys.executable, "-m", "soak.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=own | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MESHFLASH_BIND": "0"},
        )

    def run(
        self,
        task: str,
        world: int,
        folder: Path,
        *,
        timeout: float,
        limit: float,
        victims: Sequence[int] = (),
        fault: int = 0,
        delay: float = 0.0,
        **arguments: Any,
    ) -> Ended:
        """Run a task of `ranks.py` on forked ranks until all have ended, or the limit has gone by.

        Args:
            task: names the function that each rank calls.
            world: is the number of ranks.
            folder: takes what the ranks report and print.
            timeout: is their MESHFLASH_TIMEOUT, and that of `init`.
            limit: is how many seconds after the fault, or after the start of a job without one, a rank counts as hung.
            victims: are the ranks that the fault hits; the first of them fires it.
            fault: is the signal.
            delay: is how many seconds the signal comes after the victim has fired it.
            arguments: are the task's own.
        """
        folder.mkdir(parents=True, exist_ok=True)
        job = {"task": task, "world": world, "folder": str(folder), "timeout": timeout, "arguments": arguments}
        self._ask(job | {"victims": list(victims), "signal": fault, "delay": delay})
        begun = time.monotonic()
        codes: list[int | None] = [None] * world
        times = [0.0] * world
        fired: float | None = None
        waited = set(range(world)) - (set(victims) if fault == signal.SIGSTOP else set())
        while True:
            told = self._ask({"poll": True})
            fired = told["fired"]
            for rank, (code, when) in told["ended"].items():
                codes[int(rank)], times[int(rank)] = code, when
            waiting = [rank for rank in waited if codes[rank] is None]
            deadline = (begun + LIMIT) if victims and fired is None else (fired or begun) + limit
            if not waiting or time.monotonic() > deadline:
                break
            time.sleep(POLL)
        told = self._ask({"kill": True})
        return Ended(folder, codes, times, fired)

    def close(self) -> None:
        """End the process and all that it has forked."""
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, message: dict[str, Any]) -> Any:
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that forks ranks has ended; look at its output")
        return json.loads(answer)


class _Job:
    """The server's side of one job."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.fired: float | None = None
        self.armed = bool(asked["victims"])
        self.ended: dict[int, tuple[int, float]] = {}
        self.pipe, fire = os.pipe()
        port = _free_port()
        sys.stdout.flush()
        self.pids = {}
        for rank in range(asked["world"]):
            pid = os.fork()
            if pid == 0:
                os.close(self.pipe)
                _be_rank(rank, port, fire, asked)
            self.pids[pid] = rank
        os.close(fire)

    def fire(self) -> None:
        """Send the fault that a victim asked for."""
        asked = self.asked
        if not os.read(self.pipe, 1):  # all ranks have ended
            self.armed = False
        elif self.fired is None:
            time.sleep(asked["delay"])
            for pid, rank in self.pids.items():
                if rank in asked["victims"] and rank not in self.ended:
                    os.kill(pid, asked["signal"])
            self.fired = time.monotonic()
            self.armed = False

    def reap(self) -> None:
        """Collect the ranks that have ended."""
        for pid, rank in self.pids.items():
            if rank not in self.ended:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.ended[rank] = os.waitstatus_to_exitcode(status), time.monotonic()

    def kill(self) -> None:
        """End the ranks that still run."""
        self.reap()
        for pid, rank in self.pids.items():
            if rank not in self.ended:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        os.close(self.pipe)


def _be_rank(rank: int, port: int, fire: int, asked: dict[str, Any]) -> None:
    """Run as a rank and never return. The interpreter exits as for a script: an exit may hang or abort, too."""
    from meshflash.runtime.parent import end_with_parent
    from soak import ranks

    end_with_parent()
    folder, world = Path(asked["folder"]), asked["world"]
    handle = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((null, 0), (handle, 1), (handle, 2)):
        os.dup2(old, new)
    if world > 1:
        place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    os.environ["MESHFLASH_TIMEOUT"] = str(asked["timeout"])
    ranks.FIRE = fire if rank in asked["victims"][:1] else None
    report: dict[str, Any]
    code = 0
    try:
        report = getattr(ranks, asked["task"])(asked["timeout"], folder, **asked["arguments"]) or {}
    except SystemExit as error:
        code, report = (error.code if isinstance(error.code, int) else 1), {}
    except BaseException as error:
        code = 3
        report = {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(report))
    sys.exit(code)


def _free_port() -> int:
    from runtime.jobs import free_port

    return free_port()


def main() -> None:
    """Serve one client, whose lines of JSON are jobs and questions, until it closes the pipe."""
    import torch._dynamo  # noqa: F401

    import meshflash.cli
    import meshflash.train.inference
    import meshflash.train.loop  # noqa: F401
    from soak import ranks  # noqa: F401

    with contextlib.suppress(ImportError):
        import typer._adapters  # noqa: F401
    gc.collect()
    gc.freeze()  # a garbage collection in a forked rank would copy every page
    answers = os.dup(1)
    os.dup2(2, 1)
    job: _Job | None = None
    lines = b""
    while True:
        watched = [0, job.pipe] if job is not None and job.armed else [0]
        ready, _, _ = select.select(watched, [], [], POLL)
        if job is not None:
            if job.pipe in ready:
                job.fire()
            job.reap()
        if 0 not in ready:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            if job is not None:
                job.kill()
            return
        *asked, lines = (lines + data).split(b"\n")
        for line in asked:
            message = json.loads(line)
            answer: Any = {}
            if "task" in message:
                job = _Job(message)
            elif "poll" in message:
                assert job is not None
                answer = {"ended": job.ended, "fired": job.fired}
            elif job is not None:
                job.kill()
                job = None
            os.write(answers, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    main()
