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
from meshflash.engine.trace import recording
from meshflash.viz.timeline import Rates, simulate

dist: Any = _distributed  # torch does not declare all that it exports here

#: Runs of each pass; the median counts.
RUNS = 3


@dataclass(frozen=True)
class Exposed:
    """Milliseconds of the rank that waits longest; `simulated` is None unless the transport has known rates.

    `attends`, `waits` and `rest` are means over ranks: steps that attend, waits for messages, and all other steps.
    """

    measured: float = 0.0
    simulated: float | None = None
    attends: float = 0.0
    waits: float = 0.0
    rest: float = 0.0

    def __add__(self, other: Exposed) -> Exposed:
        known = self.simulated is not None and other.simulated is not None
        return Exposed(
            self.measured + other.measured,
            (self.simulated or 0.0) + (other.simulated or 0.0) if known else None,
            self.attends + other.attends,
            self.waits + other.waits,
            self.rest + other.rest,
        )


def exposed(function: Callable[[], Any], device: torch.device, transport: Transport, group: Any) -> Exposed:
    """Return the exposed communication of a call that all ranks of a group make; the same on all of them."""
    found = [_once(function, device, transport, group) for _ in range(RUNS)]
    simulated = [one.simulated for one in found if one.simulated is not None]
    names = ("measured", "attends", "waits", "rest")
    medians = {name: statistics.median(getattr(one, name) for one in found) for name in names}
    return Exposed(simulated=statistics.median(simulated) if simulated else None, **medians)


def _once(function: Callable[[], Any], device: torch.device, transport: Transport, group: Any) -> Exposed:
    synchronize(device)
    dist.barrier(group)
    with recording() as trace:
        function()
    synchronize(device)
    waited = trace.seconds("other")
    own = [(record.program, record.seconds()) for record in trace.records]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (waited, own), group)
    by_kind = _mean_by_kind([calls for _, calls in gathered])
    found = Exposed(max(waits for waits, _ in gathered) * 1e3, None, *by_kind)
    if not isinstance(transport, Throttled):
        return found
    last = cache.newest(group_context(group.group_name))
    rates = Rates(
        1.0, transport.bytes_per_second, transport.latency
    )  # kernel times are the measured ones, so the rate of pairs does not count
    simulated = 0.0
    for calls in zip(*(calls for _, calls in gathered), strict=True):
        programs, seconds = zip(*calls, strict=True)
        timeline = simulate(programs, last.problem, last.setting.sizes, rates, seconds)
        simulated += max(map(timeline.exposed, range(timeline.world)))
    return replace(found, simulated=simulated * 1e3)


def _mean_by_kind(ranks: Sequence[Sequence[tuple[Program, list[float]]]]) -> tuple[float, float, float]:
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
