"""A fuzzing campaign over several world sizes: it runs the remaining cases, restarts ranks, and keeps a record.

The record is one small file, replaced atomically every few seconds, from which an interrupted campaign continues. It
has the numbers of finished cases and counts of their outcomes; only failures ("misses") are kept one by one.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import distributed as dist

from meshflash.check.fuzz import Settings, derive
from meshflash.check.scenario import Begun, Failed, Judged, kind_of, run_cases, run_cases_apart
from meshflash.core.files import write_whole
from meshflash.runtime.mps import variables
from meshflash.runtime.processes import RankError, run_ranks
from meshflash.runtime.world import World

#: The version of the record's format; a campaign does not continue another one.
FORMAT = 1
#: The default time limit of a case on any rank, in seconds; generous, as the machine may be busy.
LIMIT = 60.0
#: The number of cases of all worlds after which ranks are restarted.
ROUND = 1500
#: Seconds between two writes of the record.
WRITE_EVERY = 5.0
#: Characters kept of a message, from its end: the end of a traceback says most.
KEPT = 3000
OUTCOMES = ("right", "refused", "missed")
#: Fields of the header that must be unchanged to continue: counts of different programs must not be mixed.
SAME = ("machine", "versions", "commit")


class RecordError(ValueError):
    """A campaign cannot continue this record; the message says why, and what to do."""


def spans(numbers: Iterable[int]) -> str:
    """Return numbers as a text of spans.

    >>> spans([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    out: list[list[int]] = []
    for number in sorted(set(numbers)):
        if out and number == out[-1][1] + 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in out)


def numbers_of(text: str) -> list[int]:
    """Return the numbers of a text of spans, in its order.

    >>> numbers_of("5,0-2")
    [5, 0, 1, 2]
    """
    out: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        try:
            out += range(int(first), int(last or first) + 1)
        except ValueError:
            raise ValueError(f"{text!r}: expected numbers of cases, such as 12 or 3-7 or 12,3-7") from None
    return out


@dataclass
class Record:
    """The outcomes of all cases so far. `go_on` reads one from a file."""

    settings: Settings
    header: dict[str, Any] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    seconds: float = 0.0
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    refusals: dict[str, int] = field(default_factory=dict)
    dimensions: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    largest_error: dict[str, Any] = field(default_factory=dict)
    misses: list[dict[str, Any]] = field(default_factory=list)
    #: The first case that the current processes ran.
    started_at: int = 0

    def add(self, verdict: Judged) -> None:
        """Count the outcome of a case; a case counts once."""
        if verdict.number in self.done:
            return
        self.done.add(verdict.number)
        self.outcomes[verdict.outcome] += 1
        for outcome, count in verdict.calls.items():
            self.calls[outcome] += count
        for refusal in verdict.refusals:
            self.refusals[kind_of(refusal)] = self.refusals.get(kind_of(refusal), 0) + 1
        for name, values in verdict.dimensions.items():
            for value in values:
                counts = self.dimensions.setdefault(name, {}).setdefault(value, dict.fromkeys(OUTCOMES, 0))
                counts[verdict.outcome] += 1
        if verdict.share > self.largest_error.get("of allowed", 0.0):
            self.largest_error = {"of allowed": verdict.share, "of": verdict.worst, "case": verdict.number}
        if verdict.outcome == "missed":
            miss = {
                "case": verdict.number,
                "message": verdict.message,
                "rerun": self.settings.rerun(str(verdict.number)),
            }
            if verdict.number != self.started_at:  # an earlier case of these processes may be the cause
                miss["rerun with those before"] = self.settings.rerun(f"{self.started_at}-{verdict.number}")
            self.misses.append(miss)

    @property
    def refused_share(self) -> float:
        """The fraction of calls that were refused; a high value means that little was checked."""
        return self.calls["refused"] / max(1, sum(self.calls.values()))

    def write(self, path: Path) -> None:
        """Replace the file atomically: a killed process leaves either the previous record or this one."""
        sorted_dimensions = {name: dict(sorted(values.items())) for name, values in sorted(self.dimensions.items())}
        saved = {
            "format": FORMAT,
            "header": self.header,
            "settings": asdict(self.settings),
            "cases": len(self.done),
            "done": spans(self.done),
            "seconds": round(self.seconds, 1),
            "outcomes": self.outcomes,
            "calls": self.calls,
            "refused share": round(self.refused_share, 4),
            "refusals": self.refusals,
            "largest error": self.largest_error,
            "misses": self.misses,
            "dimensions": sorted_dimensions,
        }
        write_whole(path, json.dumps(saved, indent=1) + "\n")


def go_on(path: Path, settings: Settings, header: dict[str, Any]) -> Record:
    """Return the record of a file to continue; raise RecordError if it belongs to another campaign or is no record.

    Args:
        path: The file.
        settings: The settings of this campaign.
        header: Machine, versions and commit of this process.
    """
    remedy = "give another --output, or --fresh to begin anew"
    try:
        saved = json.loads(path.read_text())
        if saved["format"] != FORMAT:
            raise RecordError(f"{path} has format {saved['format']}, expected {FORMAT}; {remedy}")
        now, then = asdict(settings), saved["settings"]
        for name, value in now.items():
            value = list(value) if isinstance(value, tuple) else value
            if then[name] != value:
                raise RecordError(f"{path} is of {name}={then[name]!r}, not {value!r}; {remedy}")
        for name in SAME:
            if saved["header"][name] != header[name]:
                raise RecordError(f"{path}: its {name} is {saved['header'][name]}, here it is {header[name]}; {remedy}")
        return Record(
            *(settings, header, set(numbers_of(saved["done"])), saved["seconds"], saved["outcomes"], saved["calls"]),
            *(saved["refusals"], saved["dimensions"], saved["largest error"], saved["misses"]),
        )
    except RecordError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is no record of `meshflash check --fuzz`: {error}; {remedy}") from error


class Campaign:
    """A campaign: runs cases and keeps their record.

    Args:
        record: The record to continue.
        path: The file to write the record to, if any.
        say: A function that receives progress messages.
        limit: The time limit of a case, in seconds.
    """

    def __init__(self, record: Record, path: Path | None, say: Callable[[str], None], limit: float = LIMIT) -> None:
        self.record, self.settings, self.path, self.limit = record, record.settings, path, limit
        self._say = say
        self._total = 0
        self._begun_with = len(record.done)
        self._clock = self._written = self._start = time.monotonic()

    def run(self, numbers: Sequence[int]) -> None:
        """Run the cases that are not done on processes of this machine; a case that fails or hangs counts as missed."""
        self._total = len(set(numbers) | self.record.done)
        todo = [number for number in numbers if number not in self.record.done]
        try:
            for first in range(0, len(todo), ROUND):
                for world in self.settings.worlds:
                    own = [n for n in todo[first : first + ROUND] if self.settings.world(n) == world]
                    while own := [n for n in own if n not in self.record.done]:
                        self._over_ranks(world, own)
        finally:
            self._write()

    def run_here(self, numbers: Sequence[int], here: World) -> None:
        """Run cases as one rank of the default process group; all ranks call this, and rank 0 keeps the record.

        A case that fails or hangs ends the job.
        """
        todo = [[number for number in numbers if number not in self.record.done]]
        dist.broadcast_object_list(todo, 0)  # only rank 0 has the record, and so the list of finished cases
        self._total = len(set(numbers) | self.record.done)
        try:
            with tempfile.TemporaryDirectory(prefix="meshflash-fuzz-") as folder:
                ranks = (here.rank, here.world_size)
                run_cases(*ranks, self._take, self.settings, todo[0], self.limit, folder, here.local_rank)
        finally:
            self._write()

    def _take(self, message: Any) -> None:
        """Add a message of a rank to the record, and report progress."""
        if isinstance(message, Judged):
            self.record.add(message)
            done, counts = len(self.record.done), self.record.outcomes
            rate = 60 * (done - self._begun_with) / max(1e-3, time.monotonic() - self._start)
            self._say(
                f"{done} of {self._total or done} cases, {counts['missed']} missed, {counts['refused']} refused, "
                f"{rate:.0f} a minute"
            )
            if time.monotonic() - self._written > WRITE_EVERY:
                self._write()

    def _over_ranks(self, world: int, numbers: Sequence[int]) -> None:
        """Run cases in new processes until all are done or a case ends the processes; that case counts as missed."""
        self.record.started_at = numbers[0]
        begun: list[int] = []
        failures: list[Failed] = []

        def listen(message: Any) -> None:
            if isinstance(message, Begun):
                begun.append(message.number)
            elif isinstance(message, Failed):
                failures.append(message)
            self._take(message)

        with tempfile.TemporaryDirectory(prefix="meshflash-fuzz-") as folder:
            try:
                arguments = (self.settings, list(numbers), self.limit, folder)
                # a rank that waits for a lost peer must raise before the time limit of the case ends the process
                wait = os.environ.get("MESHFLASH_TIMEOUT") or str(max(1.0, self.limit / 2))
                with variables(MESHFLASH_TIMEOUT=wait):
                    run_ranks(
                        world, run_cases_apart, *arguments, timeout=60.0 + self.limit * len(numbers), listen=listen
                    )
            except RankError as error:
                if not begun:
                    raise  # the processes did not start
                number = failures[0].number if failures else max(begun, key=list(numbers).index)
                self._miss(number, failures, str(error), Path(folder))

    def _miss(self, number: int, failures: Sequence[Failed], error: str, folder: Path) -> None:
        """Count a case without a verdict as missed."""
        if failures:
            first = failures[0]
            message = f"rank {first.rank} raised: {first.message[-KEPT:]}"
        else:
            stacks = [f"rank {path.stem.removeprefix('rank')}: {path.read_text()}" for path in sorted(folder.iterdir())]
            hung = any("Timeout" in stack for stack in stacks)
            message = f"it took more than {self.limit:g} s\n" if hung else f"{error[-KEPT:]}\n"
            message += "\n".join(_innermost(stack) for stack in stacks if "File" in stack)
        case = derive(self.settings, number)
        self.record.add(Judged(number, "missed", {"missed": len(case.calls)}, case.dimensions, message=message))
        self._write()

    def _write(self) -> None:
        now = time.monotonic()
        self.record.seconds += now - self._clock
        self._clock = self._written = now
        if self.path is not None:
            self.record.write(self.path)


def _innermost(stack: str, frames: int = 8) -> str:
    """Return the innermost frames of each thread of a stack dump."""
    out, seen = [], 0
    for line in stack.splitlines():
        seen = 0 if "Thread" in line else seen + 1
        if seen <= frames and line.strip():
            out.append(line)
    return "\n".join(out[: 4 * frames])
