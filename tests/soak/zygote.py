"""A process that imports torch once and forks the ranks of each case: a rank starts a hundred times faster.

The zygote runs one job at a time. It starts no threads and computes nothing, so that its children may do both. It also
sends the faults: a victim writes a byte into a pipe, and the zygote signals it after the delay of the case.
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
POLL_SECONDS = 0.01
#: Seconds within which a fault must come, and within which a job without a fault must end.
LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class FinishedJob:
    """A finished job; `Zygote.run` makes it.

    Lists are indexed by rank. Times are from the monotonic clock; `fired` is the time of the fault.
    """

    folder: Path
    #: Exit codes as os.waitstatus_to_exitcode returns them: a negative code is a signal. None for a rank that hung.
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
        """Return the output of a rank."""
        path = self.folder / f"rank-{rank}.txt"
        return path.read_text(errors="replace") if path.exists() else ""


class Zygote:
    """The client of a zygote process: it starts a job and waits for its end. Tests and the campaign make it."""

    def __init__(self) -> None:
        paths = [str(TESTS.parent / "src"), str(TESTS)]
        inherited = {
            name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        }
        self._process: Any = subprocess.Popen(
            [sys.executable, "-m", "soak.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=inherited | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MESHFLASH_BIND": "0"},
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
    ) -> FinishedJob:
        """Run a task of `ranks.py` on forked ranks until all have ended, or until the limit.

        Args:
            task: Name of the function that each rank calls.
            world: Number of ranks.
            folder: Folder for the reports and the output of the ranks.
            timeout: Seconds for MESHFLASH_TIMEOUT and for `init`.
            limit: Seconds after which a rank counts as hung, from the fault, or from the start without a fault.
            victims: Ranks that get the signal; the first of them fires it.
            fault: Number of the signal.
            delay: Seconds between the request of the victim and the signal.
            arguments: Arguments of the task.
        """
        folder.mkdir(parents=True, exist_ok=True)
        job = {"task": task, "world": world, "folder": str(folder), "timeout": timeout, "arguments": arguments}
        self._request(job | {"victims": list(victims), "signal": fault, "delay": delay})
        begun = time.monotonic()
        codes: list[int | None] = [None] * world
        times = [0.0] * world
        fired: float | None = None
        awaited = set(range(world)) - (set(victims) if fault == signal.SIGSTOP else set())
        while True:
            status = self._request({"poll": True})
            fired = status["fired"]
            for rank, (code, when) in status["ended"].items():
                codes[int(rank)], times[int(rank)] = code, when
            waiting = [rank for rank in awaited if codes[rank] is None]
            deadline = (begun + LIMIT_SECONDS) if victims and fired is None else (fired or begun) + limit
            if not waiting or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        status = self._request({"kill": True})
        return FinishedJob(folder, codes, times, fired)

    def close(self) -> None:
        """End the process and all of its ranks."""
        self._process.stdin.close()
        self._process.wait()

    def _request(self, message: dict[str, Any]) -> Any:
        """Send a message to the process and return its answer."""
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that forks ranks has ended; look at its output")
        return json.loads(answer)


class _Job:
    """One job in the zygote process; `main` makes it."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.fired: float | None = None
        self.armed = bool(request["victims"])
        self.ended: dict[int, tuple[int, float]] = {}
        self.pipe, fire = os.pipe()
        port = _free_port()
        sys.stdout.flush()
        self.pids = {}
        for rank in range(request["world"]):
            pid = os.fork()
            if pid == 0:
                os.close(self.pipe)
                _run_rank(rank, port, fire, request)
            self.pids[pid] = rank
        os.close(fire)

    def fire(self) -> None:
        """Send the signal that a victim requested."""
        request = self.request
        if not os.read(self.pipe, 1):  # all ranks have ended
            self.armed = False
        elif self.fired is None:
            time.sleep(request["delay"])
            for pid, rank in self.pids.items():
                if rank in request["victims"] and rank not in self.ended:
                    os.kill(pid, request["signal"])
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


def _run_rank(rank: int, port: int, fire: int, request: dict[str, Any]) -> None:
    """Run as a rank and never return.

    The interpreter exits as it does after a script, because the exit may hang or abort, too.
    """
    from meshflash.runtime.parent import end_with_parent
    from soak import ranks

    end_with_parent()
    folder, world = Path(request["folder"]), request["world"]
    handle = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((null, 0), (handle, 1), (handle, 2)):
        os.dup2(old, new)
    if world > 1:
        place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    os.environ["MESHFLASH_TIMEOUT"] = str(request["timeout"])
    ranks.FIRE = fire if rank in request["victims"][:1] else None
    report: dict[str, Any]
    code = 0
    try:
        report = getattr(ranks, request["task"])(request["timeout"], folder, **request["arguments"]) or {}
    except SystemExit as error:
        code, report = (error.code if isinstance(error.code, int) else 1), {}
    except BaseException as error:
        code = 3
        report = {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(report))
    sys.exit(code)


def _free_port() -> int:
    """Return a free port of this machine."""
    from runtime.jobs import free_port

    return free_port()


def main() -> None:
    """Serve one client, which sends jobs and requests as JSON lines, until it closes the pipe."""
    import torch._dynamo  # noqa: F401

    import meshflash.cli
    import meshflash.train.inference
    import meshflash.train.loop  # noqa: F401
    from soak import ranks  # noqa: F401

    with contextlib.suppress(ImportError):
        import typer._adapters  # noqa: F401
    gc.collect()
    gc.freeze()  # otherwise a garbage collection in a forked rank would copy every page
    answers = os.dup(1)
    os.dup2(2, 1)
    job: _Job | None = None
    lines = b""
    while True:
        watched = [0, job.pipe] if job is not None and job.armed else [0]
        ready, _, _ = select.select(watched, [], [], POLL_SECONDS)
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
        *complete, lines = (lines + data).split(b"\n")
        for line in complete:
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
