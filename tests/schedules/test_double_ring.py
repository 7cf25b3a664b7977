"""The double ring: it moves as many bytes as a ring, few of them between nodes, and inner hops never wait for outer."""

from __future__ import annotations

import pytest

from meshflash.core import rows
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import Post, Sizes
from meshflash.schedules.double_ring import Clock, keys_passing, nodes_of
from meshflash.schedules.registry import build, verified

SIZES = Sizes(dim=64, value_dim=64, input_bytes=2, reduce_bytes=4)
ROWS, KV_HEADS = 6, 4
#: Bytes of a rank's keys and values.
KV_BYTES = 2 * ROWS * KV_HEADS * 64 * 2
MASKS = {
    "full": Mask.full(),
    "causal": Mask.causal(),
    "window": Mask.window(4, 3),
    "sinks": Mask.causal() & (Mask.window(5, 0) | Mask.first(3)),
    "documents": Mask.documents([5, 11, 3, 5]),
}
#: (ranks, inner)
NODES = ((4, 2), (6, 2), (6, 3), (8, 4), (8, 8), (5, 1))


def problem_of(world: int, mask: Mask, layout=Layout.contiguous) -> Problem:
    held = layout(ROWS * world, world).ranges
    return Problem(held, held, mask, 8, KV_HEADS)


@pytest.mark.parametrize(("world", "inner"), NODES)
@pytest.mark.parametrize("layout", [Layout.contiguous, Layout.zigzag, Layout.striped])
def test_double_ring_verifies_on_every_layout(layout, world, inner):
    for mask in MASKS.values():
        tokens = 24 if mask.has_documents else 2 * world + 3
        held = layout(tokens, world).ranges
        verified(f"double_ring(inner={inner})", Problem(held, held, mask, 4, 2))


@pytest.mark.parametrize(("world", "inner"), NODES)
def test_double_ring_moves_no_more_than_a_ring(world, inner):
    for name in ("full", "causal", "window", "sinks"):
        problem = problem_of(world, MASKS[name])
        double, single = (
            verified(schedule, problem, SIZES, tables=False) for schedule in (f"double_ring(inner={inner})", "ring")
        )
        assert max(double["forward"].received_bytes) <= (world - 1) * KV_BYTES
        assert max(double["backward"].received_bytes) <= (world - 1) * KV_BYTES + (world - 1) * 2 * KV_BYTES
        if name == "full":
            for direction in ("forward", "backward"):
                assert double[direction].received_bytes == single[direction].received_bytes


def test_each_key_crosses_between_two_nodes_once():
    problem = problem_of(8, Mask.full())
    for rank, received in enumerate(verified("double_ring(inner=4)", problem, SIZES)["forward"].received):
        near = sum(n for peer, n in received.items() if peer // 4 == rank // 4)
        assert received[(rank + 4) % 8] == KV_BYTES
        assert near == 6 * KV_BYTES


def test_move_to_the_next_node_starts_before_the_inner_ring():
    steps = build("double_ring(inner=2)", problem_of(4, Mask.full()), 0, "forward").steps
    posts = [(step.name, step.group) for step in steps if isinstance(step, Post)]
    assert posts == [("far 1", "far"), ("kv 0.1", "mesh"), ("kv 1.1", "mesh")]


def test_default_inner_is_the_largest_divisor_up_to_the_square_root():
    for world, inner in ((12, 3), (16, 4), (7, 1)):
        problem = problem_of(world, Mask.full())
        assert (
            build("double_ring", problem, 1, "forward").steps
            == build(f"double_ring(inner={inner})", problem, 1, "forward").steps
        )
    with pytest.raises(ValueError, match=r"double_ring: inner=3 does not divide 4 ranks into nodes"):
        build("double_ring(inner=3)", problem_of(4, Mask.full()), 0, "forward")


@pytest.mark.parametrize("layout", [Layout.contiguous, Layout.zigzag, Layout.striped])
def test_rows_that_pass_a_rank_are_those_that_it_and_the_ranks_behind_it_need(layout):
    masks = {**MASKS, "narrow": Mask.window(1, 1)}
    for world, inner in NODES:
        for name, mask in masks.items():
            tokens = 24 if mask.has_documents else 5 * world + 3
            held = layout(tokens, world).ranges
            problem = Problem(held, held, mask, 4, 2, options=(("inner", inner),))
            nodes = nodes_of(problem)
            for rank in range(world):
                passing = keys_passing(problem, rank)
                for owner in range(world):
                    at = nodes.time(owner, rank)

                    def union(times, owner=owner, problem=problem, nodes=nodes):
                        return rows.union(*(problem.rows_needed(owner, nodes.holder(owner, time)) for time in times))

                    earlier = [Clock(at.node, hop) for hop in range(at.hop) if (at.node, hop) != (0, 0)]
                    later = [Clock(at.node, hop) for hop in range(at.hop + 1, inner)]
                    further = [Clock(n, hop) for n in range(at.node + 1, nodes.count) for hop in range(inner)]
                    assert passing.before.get(owner, ()) == union(earlier), (name, world, rank, owner)
                    assert passing.ahead.get(owner, ()) == union(later), (name, world, rank, owner)
                    assert passing.beyond.get(owner, ()) == (() if at.hop else union(further)), (name, rank, owner)
                    if owner != rank:
                        assert passing.needed.get(owner, ()) == problem.rows_needed(owner, rank)
                        kept = [at, *later, *(() if at.hop else further)]
                        assert passing.held.get(owner, ()) == union(kept), (name, world, rank, owner)
