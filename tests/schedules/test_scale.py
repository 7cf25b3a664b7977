"""Programs of many ranks: what one rank's program costs grows with the world, not with its square.

Costs are counted, not timed: function calls, and the peak of allocated memory.
"""

from __future__ import annotations

import ast
import cProfile
import gc
import sys
import tracemalloc
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshflash.schedules
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import MAX_SAMPLED, Problem
from meshflash.core.program import Direction, Post
from meshflash.schedules.registry import build, default_layout, names

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
TOKENS_PER_RANK = 16
#: Growth that a program may have from one world to one four times as large.
MAX_GROWTH = 4.5


def causal(tokens: int) -> Mask:
    return Mask.causal()


def window(tokens: int) -> Mask:
    return Mask.causal() & Mask.window(4 * TOKENS_PER_RANK, 0)


def documents(tokens: int) -> Mask:
    cuts = np.sort(np.random.default_rng(3).choice(np.arange(1, tokens), 99, replace=False))
    return Mask.causal() & Mask.documents(np.diff([0, *cuts.tolist(), tokens]))


MASKS = [causal, window, documents]


def problem_of(schedule: str, world: int, mask: Any) -> Problem:
    tokens = TOKENS_PER_RANK * world
    ranges = default_layout(schedule)(tokens, world).ranges
    return Problem(ranges, ranges, mask(tokens), 8, 2)


def clear_caches() -> None:
    """Forget all programs and tables, so that each build is the first one."""
    for name, module in list(sys.modules.items()):
        if name.startswith("meshflash."):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def count_calls(schedule: str, problem: Problem, rank: int) -> int:
    """Return the function calls of building both programs of a rank."""
    clear_caches()
    with cProfile.Profile() as profile:
        for direction in DIRECTIONS:
            build(schedule, problem, rank, direction)
    return sum(entry.callcount for entry in profile.getstats())


def peak_bytes(schedule: str, problem: Problem, rank: int) -> int:
    """Return the most memory that building both programs of a rank takes, the programs included."""
    clear_caches()
    gc.collect()
    tracemalloc.start()
    try:
        programs = [build(schedule, problem, rank, direction) for direction in DIRECTIONS]
        assert programs
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("schedule", names())
def test_calls_and_memory_of_one_ranks_programs_grow_at_most_with_the_world(schedule: str, mask: Any) -> None:
    small, large = (problem_of(schedule, world, mask) for world in (128, 512))
    last_ranks = small.world - 1, large.world - 1
    few, many = (count_calls(schedule, p, rank) for p, rank in zip((small, large), last_ranks, strict=True))
    assert many <= MAX_GROWTH * few
    few, many = (peak_bytes(schedule, p, rank) for p, rank in zip((small, large), last_ranks, strict=True))
    assert many <= MAX_GROWTH * few


@pytest.mark.parametrize("schedule", names())
def test_windows_have_few_steps_at_any_world(schedule: str) -> None:
    few, many = (
        len(build(schedule, problem_of(schedule, world, window), world // 2, "backward").steps) for world in (64, 512)
    )
    assert many <= 2 * few + 20


def test_schedules_never_ask_for_all_pairs_of_ranks() -> None:
    for path in Path(meshflash.schedules.__path__[0]).glob("*.py"):
        tree = ast.parse(path.read_text())
        asked = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "needs"]
        assert not asked, f"{path.name}: line {asked} reads Problem.needs, which has an entry for each pair of ranks"


def messages(schedule: str, problem: Problem, direction: Direction) -> dict[tuple[int, int, str], list[list[int]]]:
    """Return for each (sender, receiver, group) the rows of all messages, as the sender and the receiver list them."""
    found: dict[tuple[int, int, str], list[list[int]]] = defaultdict(lambda: [[], []])
    for rank in range(problem.world):
        for step in build(schedule, problem, rank, direction).steps:
            if isinstance(step, Post):
                for part in step.sends:
                    found[rank, part.peer, step.group][0].append(part.slice.cells)
                for part in step.recvs:
                    found[part.peer, rank, step.group][1].append(part.slice.cells)
    return found


@pytest.mark.parametrize("schedule", names())
def test_ranks_agree_on_messages_where_decisions_come_from_sampled_ranks(schedule: str) -> None:
    world = MAX_SAMPLED + 8
    for mask in (window, documents):
        problem = problem_of(schedule, world, mask)
        for direction in DIRECTIONS:
            for route, (sent, received) in messages(schedule, problem, direction).items():
                assert sent == received, f"{schedule}, {direction}: {route}"


def test_ulysses_with_more_ranks_than_heads_leaves_ranks_without_heads() -> None:
    ranges = Layout.contiguous(2048, 512).ranges
    problem = Problem(ranges, ranges, Mask.causal(), 8, 2)
    idle, busy = (build("ulysses", problem, rank, "forward") for rank in (0, 511))
    assert not any(buffer.name == "q:0" for buffer in idle.buffers)
    assert busy.buffer["q:0"].rows == 2048
    assert len({part.peer for step in idle.steps if isinstance(step, Post) for part in step.sends}) == 8
