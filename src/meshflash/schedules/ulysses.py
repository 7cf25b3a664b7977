"""Ulysses and its hybrids: heads are exchanged for sequence, between all ranks or within lines of them.

`ulysses` exchanges between all ranks, and each attends to the whole sequence with its heads. `hybrid` puts the ranks
into lines of `inner` neighbours that exchange, and runs another schedule (`ring`) between the lines; with `turned`,
that schedule runs between neighbours, and the exchange goes across. `rounds` exchanges the heads of a rank in so many
turns, so that some are on their way while others are attended to.
"""

from __future__ import annotations

from math import gcd

from meshflash.core.layout import Layout
from meshflash.core.problem import Problem
from meshflash.core.program import Program
from meshflash.schedules.compose import heads_for_sequence
from meshflash.schedules.registry import Builder, Schedule, register


def builders(problem: Problem) -> tuple[Builder, Builder]:
    """Forward and backward by a problem's options; those that a schedule does not have are as in `ulysses`."""
    option = {"ring": "ring", "inner": problem.world, "turned": False, **problem.option}
    inner, rounds = int(option["inner"]) or widest(problem), int(option["rounds"])
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: expected at least one")
    return heads_for_sequence(str(option["ring"]), inner, turned=bool(option["turned"]), rounds=rounds)


def widest(problem: Problem) -> int:
    """The longest line that gives no key head to two ranks, if there is one of several ranks."""
    world = problem.world
    able = [n for n in range(2, world + 1) if gcd(n, world) == n]
    return max((n for n in able if n <= problem.kv_heads), default=min(able, default=1))


def forward(problem: Problem, rank: int, name: str) -> Program:
    """Exchange, attend, give the results back."""
    return builders(problem)[0](problem, rank, name)


def backward(problem: Problem, rank: int, name: str) -> Program:
    """Exchange the gradients of the results, and give those of queries, keys and values back."""
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
        "heads for sequence within lines of ranks, another schedule between the lines",
        (("inner", 0), ("ring", "zigzag"), ("turned", False), ("rounds", 1)),
        saves_buffers=True,
        layout_of_option="ring",
    )
)
