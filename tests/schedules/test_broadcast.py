"""Traffic and scratch of the broadcast schedules: no more than in other implementations, less under sparse masks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import Direction, Sizes
from meshflash.core.verify import Report, verify_programs
from meshflash.schedules.broadcast import queries_move_less, queries_moved
from meshflash.schedules.registry import build

WORLDS = (2, 3, 4, 7, 8)
ROWS = 6
SIZES = Sizes(dim=64, value_dim=64, input_bytes=2, reduce_bytes=4)
#: Bytes of one row of one head.
ROW_BYTES = 64 * 2
MASKS = {
    "full": Mask.full(),
    "causal": Mask.causal(),
    "window": Mask.window(4, 3),
    "sinks": Mask.causal() & (Mask.window(5, 0) | Mask.first(3)),
}


def problem_of(world: int, mask: Mask, heads: int = 8, kv_heads: int = 4) -> Problem:
    held = Layout.contiguous(ROWS * world, world).ranges
    return Problem(held, held, mask, heads, kv_heads)


def report(schedule: str, problem: Problem, direction: Direction, sizes: Sizes = SIZES) -> Report:
    programs = [build(schedule, problem, rank, direction) for rank in range(problem.world)]
    return verify_programs(programs, problem, sizes, tables=False)


@pytest.mark.parametrize("mask", MASKS)
def test_broadcast_of_keys_receives_at_most_the_keys_of_all_other_ranks(mask):
    for world in WORLDS:
        problem = problem_of(world, MASKS[mask])
        keys = 2 * (world - 1) * ROWS * 4 * ROW_BYTES
        forward, backward = (report("ringx4", problem, direction) for direction in ("forward", "backward"))
        assert max(forward.received_bytes) <= keys
        assert max(backward.received_bytes) <= keys + 2 * keys
        if mask == "full":
            assert set(forward.received_bytes) == {keys}
            assert set(backward.received_bytes) == {3 * keys}


@pytest.mark.parametrize("mask", MASKS)
def test_broadcast_of_queries_receives_queries_and_returns_partial_results(mask):
    """Other implementations receive N (Q + 2 Q of out, and the LSE) in a forward."""
    for world in WORLDS:
        problem = problem_of(world, MASKS[mask], heads=8, kv_heads=8)
        queries = (world - 1) * ROWS * 8
        max_bytes = queries * (ROW_BYTES + 2 * ROW_BYTES + 4)
        got = report("ringx1", problem, "forward").received_bytes
        assert max(got) <= max_bytes
        if mask == "full":
            assert set(got) == {max_bytes}
        assert report("ringx2", problem, "forward").received_bytes == got


@pytest.mark.parametrize(("heads", "kv_heads", "queries"), [(8, 8, True), (8, 4, False), (32, 8, False)])
def test_backward_broadcasts_queries_or_keys_whichever_moves_less(heads, kv_heads, queries):
    for world in WORLDS:
        problem = problem_of(world, Mask.full(), heads, kv_heads)
        assert queries_move_less(problem) == queries
        got = max(report("ringx1", problem, "backward").received_bytes)
        keys_broadcast = max(report("ringx4", problem, "backward").received_bytes)
        assert got < keys_broadcast if queries else got == keys_broadcast


def test_half_precision_gradients_halve_their_traffic():
    problem = problem_of(4, Mask.full())
    halves = replace(SIZES, reduce_bytes=2)
    full, half = (max(report("ringx4", problem, "backward", sizes).received_bytes) for sizes in (SIZES, halves))
    assert (full, half) == (3 * 2 * 3 * ROWS * 4 * ROW_BYTES, 2 * 2 * 3 * ROWS * 4 * ROW_BYTES)


@pytest.mark.parametrize("schedule", ["ringx1", "ringx2", "ringx4"])
def test_scratch_does_not_grow_with_the_number_of_ranks(schedule):
    """Scratch is double buffers for received rows, own results and returned results, and the own accumulators."""
    for direction in ("forward", "backward"):
        held = [max(report(schedule, problem_of(world, Mask.full()), direction).scratch_bytes) for world in (4, 8)]
        staged = ROWS * 8 * (3 * ROW_BYTES + 8)  # a slice is packed once for all of its receivers
        assert held[1] <= held[0] + staged


def test_documents_that_no_other_rank_needs_move_nothing():
    problem = problem_of(3, Mask.documents([ROWS] * 3))
    for schedule in ("ringx1", "ringx3", "ringx4"):
        for direction in ("forward", "backward"):
            assert report(schedule, problem, direction).received_bytes == (0, 0, 0)


@pytest.mark.parametrize("layout", [Layout.contiguous, Layout.zigzag, Layout.striped])
def test_queries_that_move_are_those_that_see_keys_of_the_other_rank(layout):
    masks = (
        Mask.causal(),
        Mask.window(1, 1),
        Mask.causal() & (Mask.window(3, 0) | Mask.first(2)),
        Mask.documents([5, 11, 3, 11]),
    )
    for mask, world in product(masks, (1, 3, 4, 7)):
        layout_of = layout(30, world)
        problem = Problem(layout_of.ranges, layout_of.ranges, mask, 4, 2)
        for rank in range(world):
            received, sent = queries_moved(problem, rank)
            for other in range(world):
                for found, q, k in ((received, other, rank), (sent, rank, other)):
                    seen = mask.visible(layout_of.positions(q)[:, None], layout_of.positions(k)[None, :]).any(axis=1)
                    wanted = seen.nonzero()[0].tolist() if other != rank else []
                    assert [row for begin, end in found.get(other, ()) for row in range(begin, end)] == wanted
