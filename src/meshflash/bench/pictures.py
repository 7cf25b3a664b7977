"""What `demo` and `draw` show: a schedule's programs, their timeline at given rates, and beside it a measured one."""

from __future__ import annotations

from dataclasses import dataclass

from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import Direction, Program, Sizes
from meshflash.core.verify import Report
from meshflash.schedules import registry
from meshflash.viz.draw import coverage_svg, coverage_text, picture_svg, timeline_svg, timeline_text
from meshflash.viz.timeline import Rates, Timeline, simulate

#: What a timeline is drawn for where nothing was measured, said in its title: it shows an order, not a speed.
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
    """The pictures of one schedule as text and as SVG; the measured timeline is there where one was given."""

    coverage: str
    timeline: str
    measured: str
    svg: str
    parts: dict[str, str]


def programs(
    schedule: str, tokens: int, world: int, heads: int, kv_heads: int, mask: Mask, direction: Direction, sizes: Sizes
) -> Programs:
    """The programs of a schedule on its own layout."""
    layout = registry.default_layout(schedule)(tokens, world)
    problem = Problem(layout.ranges, layout.ranges, mask, heads, kv_heads)
    return Programs(problem, tuple(registry.build(schedule, problem, rank, direction) for rank in range(world)), sizes)


def prove(
    schedule: str, tokens: int, world: int, heads: int, kv_heads: int, mask: Mask, direction: Direction = "forward"
) -> Proved:
    """The programs of a schedule on its own layout, after the verifier has passed them."""
    built = programs(schedule, tokens, world, heads, kv_heads, mask, direction, Sizes())
    report = registry.verified(schedule, built.problem, built.sizes)[direction]
    return Proved(built.problem, built.programs, built.sizes, report)


def draw(
    built: Programs, title: str, rates: Rates = RATES, assumes: str = "", measured: Timeline | None = None
) -> Drawing:
    """Draw which rank attends to what, the timeline that these rates give, and a measured one where there is one.

    `assumes` says where the rates come from; by default they are no machine's, and the title gives them.
    """
    assumes = assumes or (
        f"no machine's rates: {rates.pairs_per_second:.1e} pairs a second, "
        f"links of {rates.bytes_per_second / 1e9:g} GB/s"
    )
    simulated = simulate(built.programs, built.problem, built.sizes, rates, assumes=assumes)
    shown = [simulated, *([] if measured is None else [measured])]
    return Drawing(
        coverage_text(built.programs, built.problem),
        timeline_text(simulated),
        "" if measured is None else timeline_text(measured),
        picture_svg(built.programs, built.problem, *shown, title=title),
        {"coverage": coverage_svg(built.programs, built.problem)} | {each.source: timeline_svg(each) for each in shown},
    )
