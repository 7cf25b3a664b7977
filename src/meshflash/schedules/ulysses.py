"""Ulysses and hybrid: an all-to-all trades heads for sequence, among all ranks or among rows of a rank grid.

`ulysses` exchanges among all ranks; each rank then attends to the whole sequence with its share of the heads. `hybrid`
arranges the ranks in a grid: groups of `inner` neighbours exchange, and another schedule (option `ring`) runs across
the groups. With `transposed`, that schedule runs among neighbours and the exchange goes across. `rounds` splits the
exchange of a rank's heads, so that some heads travel while others are attended to. `compose.py` builds both.
"""

from __future__ import annotations

from meshflash.core.layout import Layout
from meshflash.core.problem import Problem
from meshflash.core.program import Program
from meshflash.schedules.compose import heads_for_sequence
from meshflash.schedules.registry import Builder, Schedule, register


def builders(problem: Problem) -> tuple[Builder, Builder]:
    """Return the forward and backward builders for the options of a problem; defaults are those of `ulysses`."""
    option = {"ring": "ring", "inner": problem.world, "transposed": False, **problem.option}
    inner, rounds = int(option["inner"]) or largest_inner(problem), int(option["rounds"])
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: expected at least 1")
    return heads_for_sequence(str(option["ring"]), inner, transposed=bool(option["transposed"]), rounds=rounds)


def largest_inner(problem: Problem) -> int:
    """Return the largest group of ranks that splits no key head; if every group does, the smallest one above 1."""
    world = problem.world
    divisors = [n for n in range(2, world + 1) if world % n == 0]
    return max((n for n in divisors if n <= problem.kv_heads), default=min(divisors, default=1))


def forward(problem: Problem, rank: int, name: str) -> Program:
    """Build the forward of one rank: exchange q, k and v, attend, and exchange the results back."""
    return builders(problem)[0](problem, rank, name)


def backward(problem: Problem, rank: int, name: str) -> Program:
    """Build the backward of one rank: exchange dout, and exchange dq, dk and dv back."""
    return builders(problem)[1](problem, rank, name)


register(
    Schedule(
        "ulysses",
        forward,
        backward,
        Layout.contiguous,
        "each rank attends to the whole sequence with its share of the heads",
        (("rounds", 1),),
        saves_buffers=True,
    )
)
register(
    Schedule(
        "hybrid",
        forward,
        backward,
        Layout.contiguous,
        "Ulysses within groups of ranks, another schedule across the groups",
        (("inner", 0), ("ring", "zigzag"), ("transposed", False), ("rounds", 1)),
        saves_buffers=True,
        layout_of_option="ring",
    )
)
