"""Exposed communication: how long ranks wait for messages, measured and simulated from the same programs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as _distributed

from meshflash.bench.timing import synchronize
from meshflash.comm.transports.contract import Transport
from meshflash.comm.transports.throttled import Throttled
from meshflash.engine.cache import cache
from meshflash.engine.group_context import group_context
from meshflash.engine.trace import recording
from meshflash.viz.timeline import Rates, simulate

dist: Any = _distributed  # torch does not declare all that it exports here

#: Runs of each pass; the median counts.
RUNS = 3


@dataclass(frozen=True)
class Exposed:
    """Milliseconds of the rank that waits longest; `simulated` is None unless the transport has known rates."""

    measured: float = 0.0
    simulated: float | None = None

    def __add__(self, other: Exposed) -> Exposed:
        known = self.simulated is not None and other.simulated is not None
        return Exposed(
            self.measured + other.measured,
            (self.simulated or 0.0) + (other.simulated or 0.0) if known else None,
        )


def exposed(function: Callable[[], Any], device: torch.device, transport: Transport, group: Any) -> Exposed:
    """Return the exposed communication of a call that all ranks of a group make; the same on all of them."""
    found = [_once(function, device, transport, group) for _ in range(RUNS)]
    simulated = [one.simulated for one in found if one.simulated is not None]
    measured = statistics.median(one.measured for one in found)
    return Exposed(measured, statistics.median(simulated) if simulated else None)


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
    measured = max(waits for waits, _ in gathered)
    if not isinstance(transport, Throttled):
        return Exposed(measured * 1e3)
    last = cache.newest(group_context(group.group_name))
    rates = Rates(
        1.0, transport.bytes_per_second, transport.latency
    )  # kernel times are the measured ones, so the rate of pairs does not count
    simulated = 0.0
    for calls in zip(*(calls for _, calls in gathered), strict=True):
        programs, seconds = zip(*calls, strict=True)
        timeline = simulate(programs, last.problem, last.setting.sizes, rates, seconds)
        simulated += max(map(timeline.exposed, range(timeline.world)))
    return Exposed(measured * 1e3, simulated * 1e3)
