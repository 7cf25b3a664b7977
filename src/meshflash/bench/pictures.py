"""The pictures of `demo` and `draw`: coverage and timelines of a schedule's programs, as text and as SVG.

A timeline is simulated from rates, and its title says so; a measured one may stand beside it. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import Direction, Program, Sizes
from meshflash.core.verify import Report
from meshflash.planner.simulator import RateCosts, Rates, simulate
from meshflash.planner.timeline import Timeline
from meshflash.schedules import registry
from meshflash.viz.draw import coverage_svg, coverage_text, picture_svg, timeline_svg, timeline_text

#: Rates of no machine, for timelines without a measurement. The title gives them: the picture shows order, not speed.
RATES = Rates(pairs_per_second=1e9, bytes_per_second=2e10, latency=1e-7)


@dataclass(frozen=True)
class Programs:
    """The programs of all ranks, and the problem that they solve. `programs` makes it."""

    problem: Problem
    programs: tuple[Program, ...]
    sizes: Sizes


@dataclass(frozen=True)
class Proved(Programs):
    """Programs that passed the verifier, and its report. `prove` makes it."""

    report: Report


@dataclass(frozen=True)
class Drawing:
    """The pictures of one schedule, as text and as SVG. `measured` is empty if no measured timeline was given.

    `parts` holds the SVG of each picture by name: coverage, simulated and, if given, measured. `draw` makes it.
    """

    coverage: str
    timeline: str
    measured: str
    svg: str
    parts: dict[str, str]


def programs(
    schedule: str, tokens: int, world: int, heads: int, kv_heads: int, mask: Mask, direction: Direction, sizes: Sizes
) -> Programs:
    """Return the programs of a schedule on its default layout, without verifying them."""
    layout = registry.default_layout(schedule)(tokens, world)
    problem = Problem(layout.ranges, layout.ranges, mask, heads, kv_heads)
    return Programs(problem, tuple(registry.build(schedule, problem, rank, direction) for rank in range(world)), sizes)


def prove(
    schedule: str, tokens: int, world: int, heads: int, kv_heads: int, mask: Mask, direction: Direction = "forward"
) -> Proved:
    """Return the programs of a schedule on its default layout after verifying them.

    Raises:
        ValueError: the schedule is unknown, or its programs are wrong.
    """
    built = programs(schedule, tokens, world, heads, kv_heads, mask, direction, Sizes())
    report = registry.verified(schedule, built.problem, built.sizes)[direction]
    return Proved(built.problem, built.programs, built.sizes, report)


def draw(
    built: Programs, title: str, rates: Rates = RATES, assumes: str = "", measured: Timeline | None = None
) -> Drawing:
    """Draw the coverage of programs, their timeline simulated at these rates, and a measured timeline if given.

    Args:
        built: The programs to draw.
        title: The title above all pictures.
        rates: The rates of kernels and links that the simulation assumes.
        assumes: Where the rates come from, for the title of the timeline. Empty means no machine's.
        measured: A timeline recorded over ranks, drawn below the simulated one.
    """
    assumes = assumes or (
        f"no machine's rates: {rates.pairs_per_second:.1e} pairs a second, "
        f"links of {rates.bytes_per_second / 1e9:g} GB/s"
    )
    simulated = simulate(built.programs, RateCosts(built.problem, built.sizes, rates), assumes)
    shown = [simulated, *([] if measured is None else [measured])]
    return Drawing(
        coverage_text(built.programs, built.problem),
        timeline_text(simulated),
        "" if measured is None else timeline_text(measured),
        picture_svg(built.programs, built.problem, *shown, title=title),
        {"coverage": coverage_svg(built.programs, built.problem)} | {each.source: timeline_svg(each) for each in shown},
    )
