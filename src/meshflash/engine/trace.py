"""Traces of real runs: when each step of each call began and ended, in files for a trace viewer.

MESHFLASH_TRACE names a folder, and every rank writes its file there when its process ends. Times on a GPU are those of
its stream: a wait is as long as the stream was idle for it. Recording does not synchronize the host.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshflash.comm.transports.contract import Transport
from meshflash.core.program import Attend, AttendGrad, Post, Program, Wait

#: The number of calls that a rank records. The file also says how many calls there were.
MOST_CALLS = 1000


def folder() -> str:
    """Return the folder of traces, from MESHFLASH_TRACE; empty if calls are not traced."""
    return os.environ.get("MESHFLASH_TRACE", "")


def active() -> Trace | None:
    """Return the trace that records calls now, or None."""
    return _asked[-1] if _asked else trace if folder() else None


@contextmanager
def recording() -> Iterator[Trace]:
    """Record the calls of this block in a trace of its own, which is not written to a file."""
    made = Trace()
    _asked.append(made)
    try:
        yield made
    finally:
        _asked.remove(made)


class _HostClock:
    """A clock whose marks are times of the host."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class _DeviceClock:
    """A clock whose marks are events in the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._device = device

    def mark(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


@dataclass(eq=False)
class _Record:
    """One call: its program, when it began, and the marks before and after each step."""

    program: Program
    group: str
    began: float
    clock: _HostClock | _DeviceClock
    base: Any
    marks: list[tuple[int, Any, Any]] = field(default_factory=list)
    #: The marks before and after the messages of posts, where the transport knows them, by step.
    moves: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    #: The step that runs now.
    present: int = 0

    def mark(self) -> Any:
        """Return a mark of the present, for messages."""
        return self.clock.mark()

    def moved(self, begin: Any, end: Any) -> None:
        """Note when the messages of the present step moved; several posts of a step are one."""
        first, _ = self.moves.get(self.present, (begin, end))
        self.moves[self.present] = first, end

    def events(self, number: int) -> list[dict[str, Any]]:
        """Return the events of a trace viewer: computation ("attend"), messages ("move") and waits ("other").

        A message lasts from its post to the end of its wait where the transport does not know when it moved.

        Args:
            number: The number of the call in its group.
        """
        out: list[dict[str, Any]] = []
        posted: dict[str, tuple[int, float]] = {}
        for index, before, after in self.marks:
            step = self.program.steps[index]
            begin, end = (self.clock.seconds(self.base, mark) for mark in (before, after))
            if isinstance(step, Post):
                posted[step.name] = index, begin
            elif isinstance(step, Wait) and step.post in posted:
                post, since = posted.pop(step.post)
                until = end
                if post in self.moves:
                    since, until = (self.clock.seconds(self.base, mark) for mark in self.moves[post])
                out.append(self._event(number, post, "move", since, until))
                out.append(self._event(number, index, "other", begin, end))
            elif isinstance(step, Attend | AttendGrad):
                out.append(self._event(number, index, "attend", begin, end))
        return out

    def seconds(self) -> list[float]:
        """Return the seconds of each step."""
        out = [0.0] * len(self.program.steps)
        for index, before, after in self.marks:
            out[index] += self.clock.seconds(before, after)
        return out

    def seconds_until(self, later: _Record) -> float:
        """Return the seconds from the beginning of this call to that of a later one on the same device."""
        return self.clock.seconds(self.base, later.base)

    def _event(self, number: int, index: int, kind: str, begin: float, end: float) -> dict[str, Any]:
        program = self.program
        return {
            "name": str(program.steps[index]),
            "cat": kind,
            "ph": "X",
            "ts": (self.began + begin) * 1e6,
            "dur": (end - begin) * 1e6,
            "pid": program.rank,
            "tid": 1 if kind == "move" else 0,
            "args": {
                "call": number,
                "step": index,
                "schedule": program.name,
                "pass": program.direction,
                "world": program.world,
                "group": self.group,
            },
        }


class Trace:
    """The recorded calls of one process, or of one `recording` block."""

    def __init__(self) -> None:
        self.records: list[_Record] = []
        self.calls = 0
        self._path: Path | None = None

    def run(
        self,
        program: Program,
        group: str,
        device: torch.device,
        steps: Sequence[tuple[int, Callable[[], Any]]],
        transport: Transport,
    ) -> None:
        """Run the steps of a call, and record when each began and ended.

        Args:
            program: The program of the call.
            group: The name of the process group.
            device: The device that computes; its stream gives the times.
            steps: The steps as functions, each with its number in the program.
            transport: The transport of the call, which tells when messages move.
        """
        if self is trace:
            self._prepare()
        self.calls += 1
        clock = _HostClock() if device.type == "cpu" else _DeviceClock(device)
        record = _Record(program, group, time.time(), clock, clock.mark())
        transport.timer = record
        try:
            for index, step in steps:
                record.present, before = index, clock.mark()
                step()
                record.marks.append((index, before, clock.mark()))
        finally:
            transport.timer = None
        if len(self.records) < MOST_CALLS:
            self.records.append(record)

    def seconds(self, kind: str) -> float:
        """Return the seconds of all steps of a kind, over all calls.

        Args:
            kind: "attend" for computation, "move" for messages, or "other" for waits.
        """
        events = [event for record in self.records for event in record.events(0) if event["cat"] == kind]
        return float(sum(event["dur"] for event in events)) * 1e-6

    def write(self) -> Path | None:
        """Write the calls recorded so far; return the path, or None if this trace has no file."""
        if self._path is None:
            return None
        numbers: Counter[str] = Counter()
        events: list[dict[str, Any]] = []
        for record in self.records:
            events += record.events(numbers[record.group])
            numbers[record.group] += 1
        ranks = dict.fromkeys(record.program.rank for record in self.records)
        named = [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}} for rank in ranks
        ] + [
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
            for rank in ranks
            for thread, name in enumerate(("attends, waits", "moves"))
        ]
        about = {"calls": self.calls, "recorded": len(self.records)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"traceEvents": named + events, "otherData": about}))
        return self._path

    def _prepare(self) -> None:
        if self._path is None:
            rank = os.environ.get("RANK", "")
            self._path = Path(folder()) / f"trace-{rank or os.getpid()}.json"
            atexit.register(self.write)


#: The trace of this process, which MESHFLASH_TRACE switches on, and the traces of open `recording` blocks.
trace = Trace()
_asked: list[Trace] = []
