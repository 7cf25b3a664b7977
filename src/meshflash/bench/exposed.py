"""Exposed communication and the other steps of a call: measured, and waits also simulated from the same programs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed as _distributed

from meshflash.bench.timing import synchronize
from meshflash.comm.transports.contract import Transport
from meshflash.comm.transports.throttled import Throttled
from meshflash.core.program import Attend, AttendGrad, Program, Wait
from meshflash.engine.cache import cache
from meshflash.engine.group_context import group_context
from meshflash.engine.trace import Trace, recording
from meshflash.planner.simulator import RateCosts, Rates, simulate

dist: Any = _distributed  # torch does not declare all that it exports here

#: Calls whose median counts. They run back to back, as in the timed loops: one call before them and one after.
CALLS = 3

#: The recorded programs of one call of a rank, each with the seconds of its steps.
_Steps = Sequence[tuple[Program, list[float]]]


@dataclass(frozen=True)
class Exposed:
    """Milliseconds of the rank that waits longest; `simulated` is None unless the transport has known rates.

    `attends`, `waits` and `rest` are means over ranks: steps that attend, waits for messages, and all other steps.
    `elapsed` is the time from the beginning of a call to that of the next one, also a mean over ranks.
    """

    measured: float = 0.0
    simulated: float | None = None
    attends: float = 0.0
    waits: float = 0.0
    rest: float = 0.0
    elapsed: float = 0.0

    def __add__(self, other: Exposed) -> Exposed:
        known = self.simulated is not None and other.simulated is not None
        return Exposed(
            self.measured + other.measured,
            (self.simulated or 0.0) + (other.simulated or 0.0) if known else None,
            self.attends + other.attends,
            self.waits + other.waits,
            self.rest + other.rest,
            self.elapsed + other.elapsed,
        )


@dataclass(frozen=True)
class _Call:
    """One call of a rank: the seconds of its waits, its steps, and the seconds until the next call began."""

    waited: float
    steps: _Steps
    elapsed: float


def exposed(function: Callable[[], Any], device: torch.device, transport: Transport, group: Any) -> Exposed:
    """Return the exposed communication of a call that all ranks of a group make; the same on all of them."""
    synchronize(device)
    dist.barrier(group)
    with recording() as trace:
        for _ in range(CALLS + 2):
            function()
    synchronize(device)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, _calls(trace), group)
    found = [_over_ranks(ranks, transport, group) for ranks in zip(*gathered, strict=True)]
    simulated = [one.simulated for one in found if one.simulated is not None]
    names = ("measured", "attends", "waits", "rest", "elapsed")
    medians = {name: statistics.median(getattr(one, name) for one in found) for name in names}
    return Exposed(simulated=statistics.median(simulated) if simulated else None, **medians)


def _calls(trace: Trace) -> list[_Call]:
    """Return the calls of this rank that count. A call may run several programs."""
    if not trace.records or trace.calls != len(trace.records) or trace.calls % (CALLS + 2):
        counts = f"{trace.calls} programs, of which {len(trace.records)} are recorded"
        raise RuntimeError(f"{CALLS + 2} calls ran {counts}: too many, or not equally many in each call")
    per_call = trace.calls // (CALLS + 2)
    found = []
    for first in range(per_call, per_call * (CALLS + 1), per_call):
        own = trace.records[first : first + per_call]
        waited = sum(event["dur"] for record in own for event in record.events(0) if event["cat"] == "other") * 1e-6
        elapsed = own[0].seconds_until(trace.records[first + per_call])
        found.append(_Call(waited, [(record.program, record.seconds()) for record in own], elapsed))
    return found


def _over_ranks(ranks: Sequence[_Call], transport: Transport, group: Any) -> Exposed:
    """Return the exposed communication of one call, from what each rank recorded of it."""
    attends, waits, rest = _mean_by_kind([call.steps for call in ranks])
    elapsed = statistics.mean(call.elapsed for call in ranks) * 1e3
    found = Exposed(max(call.waited for call in ranks) * 1e3, None, attends, waits, rest, elapsed)
    if not isinstance(transport, Throttled):
        return found
    last = cache.newest(group_context(group.group_name))
    rates = Rates(
        1.0, transport.bytes_per_second, transport.latency
    )  # kernel times are the measured ones, so the rate of pairs does not count
    simulated = 0.0
    for steps in zip(*(call.steps for call in ranks), strict=True):
        programs, seconds = zip(*steps, strict=True)
        timeline = simulate(programs, RateCosts(last.problem, last.setting.sizes, rates, seconds))
        simulated += max(map(timeline.exposed, range(timeline.world)))
    return replace(found, simulated=simulated * 1e3)


def _mean_by_kind(ranks: Sequence[_Steps]) -> tuple[float, float, float]:
    """Return the milliseconds of attends, of waits and of all other steps, as means over ranks.

    Args:
        ranks: For each rank the programs of its calls, each with the seconds of its steps.
    """
    attends = waits = rest = 0.0
    for calls in ranks:
        for program, seconds in calls:
            for step, duration in zip(program.steps, seconds, strict=True):
                attends += duration * isinstance(step, Attend | AttendGrad)
                waits += duration * isinstance(step, Wait)
                rest += duration * (not isinstance(step, Attend | AttendGrad | Wait))
    per_rank = 1e3 / len(ranks)
    return attends * per_rank, waits * per_rank, rest * per_rank
