"""What schedules move, counted in the programs that ranks would run, beside what peers' implementations move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from meshflash.bench.cases import Case
from meshflash.bench.peers import peer_bytes
from meshflash.core.problem import Problem
from meshflash.core.program import Sizes
from meshflash.schedules.registry import build, default_layout

PASSES = ("forward", "forward+backward")


@dataclass(frozen=True)
class BytesRow:
    """Bytes that a rank receives in a schedule on its own layout: the mean over ranks, the most, and peers'."""

    schedule: str
    direction: str
    world: int
    case: Case
    received_mean: float
    received_bytes: int
    peer_bytes: int | None


def run(case: Case, schedules: Sequence[str], world: int) -> Iterator[BytesRow]:
    """The rows of one case; gradients travel in float32."""
    sizes = Sizes(case.batch, case.head_dim, case.head_dim, case.torch_dtype.itemsize)
    for schedule in schedules:
        held = default_layout(schedule)(case.tokens, world).ranges
        problem = Problem(held, held, case.rule, case.heads, case.kv_heads, lse=False)
        forward, backward = (
            [sum(build(schedule, problem, rank, direction).received(sizes).values()) for rank in range(world)]
            for direction in ("forward", "backward")
        )
        both = [a + b for a, b in zip(forward, backward, strict=True)]
        for direction, received in zip(PASSES, (forward, both), strict=True):
            peers = peer_bytes(schedule, case, world, direction)
            yield BytesRow(schedule, direction, world, case, mean(received), max(received), peers)
