"""What `demo` and `draw` show: a schedule's programs, and their timeline at given rates."""

from __future__ import annotations

from dataclasses import dataclass

from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import Direction, Program, Sizes
from meshflash.core.verify import Report
from meshflash.plan.draw import coverage_text, picture_svg, timeline_text
from meshflash.plan.timeline import Rates, simulate
from meshflash.schedules import registry

#: What a timeline is drawn for where nothing was measured, said beside it: it shows an order, not a speed.
RATES = Rates(pairs_per_second=1e9, bytes_per_second=2e10, latency=1e-7)


@dataclass(frozen=True)
class Programs:
    """The programs of all ranks, and what they solve."""

    problem: Problem
    programs: tuple[Program, ...]
    sizes: Sizes


@dataclass(frozen=True)
class Proved(Programs):
    """Programs that the verifier has passed, and what it says of them."""

    report: Report


@dataclass(frozen=True)
class Drawing:
    """The pictures of one schedule: as text, and as one SVG."""

    coverage: str
    timeline: str
    svg: str


def programs(
    schedule: str, tokens: int, world: int, heads: int, kv_heads: int, mask: Mask, direction: Direction, sizes: Sizes
) -> Programs:
    """The programs of a schedule on its own layout."""
    layout = registry.home(schedule)(tokens, world)
    problem = Problem(layout.ranges, layout.ranges, mask, heads, kv_heads)
    return Programs(problem, tuple(registry.build(schedule, problem, rank, direction) for rank in range(world)), sizes)


def prove(
    schedule: str, tokens: int, world: int, heads: int, kv_heads: int, mask: Mask, direction: Direction = "forward"
) -> Proved:
    """The programs of a schedule on its own layout, after the verifier has passed them."""
    built = programs(schedule, tokens, world, heads, kv_heads, mask, direction, Sizes())
    report = registry.verified(schedule, built.problem, built.sizes)[direction]
    return Proved(built.problem, built.programs, built.sizes, report)


def draw(built: Programs, title: str, rates: Rates = RATES) -> Drawing:
    """Draw which rank attends to what and when, at these rates."""
    timeline = simulate(built.programs, built.problem, built.sizes, rates)
    note = (
        f"computed from the programs, for {rates.pairs_per_second:.1e} (query, key, head) pairs and "
        f"{rates.bytes_per_second / 1e9:g} GB a second on each rank"
    )
    return Drawing(
        coverage_text(built.programs, built.problem),
        f"{timeline_text(timeline)}\n{note}",
        picture_svg(built.programs, built.problem, timeline, title),
    )
