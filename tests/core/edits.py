"""Edits that make a program wrong in one place, for tests of the verifier.

The programs are for two ranks with 3 tokens each under a full mask, with 4 query heads and 2 KV heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import Buffer, Direction, Program, Slice, Step
from meshflash.schedules.registry import build

HELD = Layout.contiguous(6, 2).ranges
PROBLEM = Problem(HELD, HELD, Mask.full(), 4, 2)
Edit = Callable[[Program], Program]


def programs_of(schedule: str, direction: Direction, problem: Problem = PROBLEM) -> list[Program]:
    return [build(schedule, problem, rank, direction) for rank in range(2)]


# one-letter names keep the rows of `wrong_buffers` and `wrong_steps` on one line
def s(name: str, rows: tuple[int, int] = (0, 3), heads: tuple[int, int] = (0, 4)) -> Slice:
    return Slice(name, rows, heads)


def k(name: str, rows: tuple[int, int] = (0, 3), heads: tuple[int, int] = (0, 2)) -> Slice:
    return Slice(name, rows, heads)


def without_lse(name: str, rows: tuple[int, int], heads: tuple[int, int]) -> Slice:
    return Slice(name, rows, heads, without_lse=True)


def put(n: int, *steps: Step) -> Edit:
    """Replace the n-th step."""
    return lambda p: replace(p, steps=(*p.steps[:n], *steps, *p.steps[n + 1 :]))


def insert(n: int, *steps: Step) -> Edit:
    """Insert steps before the n-th."""
    return lambda p: replace(p, steps=(*p.steps[:n], *steps, *p.steps[n:]))


def change(n: int, **changes: Any) -> Edit:
    """Change fields of the n-th step."""
    return lambda p: put(n, replace(p.steps[n], **changes))(p)


def buffer(name: str, **changes: Any) -> Edit:
    """Change fields of a buffer."""
    return lambda p: replace(p, buffers=tuple(replace(b, **changes) if b.name == name else b for b in p.buffers))


def extra_buffers(*buffers: Buffer) -> Edit:
    """Add buffers."""
    return lambda p: replace(p, buffers=(*p.buffers, *buffers))


def program(**changes: Any) -> Edit:
    """Change fields of the program itself."""
    return lambda p: replace(p, **changes)


def both(*edits: Edit) -> Edit:
    """Apply several edits, one after another."""

    def edit(p: Program) -> Program:
        for single in edits:
            p = single(p)
        return p

    return edit


Made = tuple[str, Direction, Problem]
RING_F: Made = ("ring", "forward", PROBLEM)
RING_B: Made = ("ring", "backward", PROBLEM)
GATHER_F: Made = ("allgather", "forward", PROBLEM)
GATHER_B: Made = ("allgather", "backward", PROBLEM)
STRIDE_F: Made = ("allgather(head_stride=1)", "forward", PROBLEM)
HEADS_F: Made = ("ulysses", "forward", PROBLEM)
HEADS_B: Made = ("ulysses", "backward", PROBLEM)
WITHOUT_LSE = replace(PROBLEM, lse=False)
WITHOUT_LSE_F: Made = ("ulysses", "forward", WITHOUT_LSE)
WITHOUT_LSE_B: Made = ("ulysses", "backward", WITHOUT_LSE)
OWN, OTHER = (range(3),), (range(3, 6),)
EXTRA_OUT = Buffer("more", "out", 3, 4, "partial")


class Wrong(NamedTuple):
    """A wrong program: its name, the correct program, the edit, the expected error, and the ranks that are edited."""

    name: str
    made: Made
    edit: Edit
    message: str
    ranks: tuple[int, ...] = (0,)
