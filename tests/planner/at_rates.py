"""What the tests of simulated timelines share: a simulation at one rate of attention and one of messages."""

from __future__ import annotations

from collections.abc import Sequence

from meshflash.core.problem import Problem
from meshflash.core.program import Program, Sizes
from meshflash.planner.simulator import RateCosts, Rates, simulate
from meshflash.planner.timeline import Timeline


def simulate_at(
    programs: Sequence[Program],
    problem: Problem,
    sizes: Sizes,
    rates: Rates,
    seconds: Sequence[Sequence[float]] | None = None,
) -> Timeline:
    """Simulate programs at these rates, or with measured steps."""
    return simulate(programs, RateCosts(problem, sizes, rates, seconds))
