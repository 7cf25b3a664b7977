"""Ulysses and hybrids: the split of heads over ranks, and the bytes that the exchange moves and saves."""

from __future__ import annotations

from itertools import product

import pytest

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import Post, Sizes
from meshflash.schedules.compose import merge_shards, split_heads
from meshflash.schedules.registry import build, verified
from meshflash.schedules.ulysses import largest_inner

SIZES = Sizes(dim=64, value_dim=64, input_bytes=2, reduce_bytes=4)
#: Bytes of one row of one head, and of its LSE or delta.
ROW_BYTES, LSE_BYTES = 64 * 2, 4
ROWS = 6
MASKS = {"full": Mask.full(), "causal": Mask.causal(), "window": Mask.causal() & Mask.window(5, 0)}
LAYOUTS = (Layout.contiguous, Layout.zigzag, Layout.striped)
#: (ranks, inner): grids of 2 x 2, 3 x 2, 2 x 3 and 2 x 4.
GRIDS = ((4, 2), (6, 2), (6, 3), (8, 4))
RINGS = ("ring", "zigzag", "striped", "allgather", "ringx1", "ringx2", "ringx3", "ringx4", "double_ring")


def problem_of(
    world: int, mask: Mask, heads: int = 8, kv_heads: int = 4, layout=Layout.contiguous, lse: bool = False
) -> Problem:
    """Return a problem with `ROWS` rows per rank."""
    held = layout(ROWS * world, world).ranges
    return Problem(held, held, mask, heads, kv_heads, lse=lse)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 2), (12, 3), (5, 1), (32, 8)])
def test_split_heads_gives_every_head_to_one_rank_in_even_shares(heads, kv_heads):
    for num_ranks, rounds in product(range(1, 20), (1, 2, 3)):
        found = split_heads(heads, kv_heads, num_ranks, rounds)
        taken = [head for share in found for piece in share for head in range(*piece.heads)]
        assert taken == list(range(heads))
        group = heads // kv_heads
        sizes = [sum(piece.shape[0] for piece in share) for share in found]
        assert max(sizes) - min(sizes) <= (1 if num_ranks > kv_heads else group)
        for piece in (piece for share in found for piece in share):
            assert piece.shape[0] % piece.shape[1] == 0
            each = piece.shape[0] // piece.shape[1]
            serving = [head // group for head in range(*piece.heads)]
            assert serving == [kv for kv in range(*piece.kv_heads) for _ in range(each)]


def test_split_heads_repeats_key_heads_only_with_more_ranks_than_key_heads():
    for heads, kv_heads, num_ranks in ((32, 8, 3), (32, 8, 8), (12, 3, 2)):
        keys = [
            kv for share in split_heads(heads, kv_heads, num_ranks) for piece in share for kv in range(*piece.kv_heads)
        ]
        assert keys == list(range(kv_heads))
    keys = [kv for share in split_heads(32, 8, 16) for piece in share for kv in range(*piece.kv_heads)]
    assert sorted(keys) == sorted([*range(8)] * 2)


def test_merge_shards_orders_the_rows_of_a_group_by_position():
    zigzag = Layout.zigzag(16, 4).ranges
    shard = merge_shards((0, 1), zigzag)
    assert shard.positions == (range(4), range(12, 16))
    assert [(run.rank, run.rows, run.group_rows) for run in shard.runs] == [
        (0, (0, 2), (0, 2)),
        (1, (0, 2), (2, 4)),
        (1, (2, 4), (4, 6)),
        (0, (2, 4), (6, 8)),
    ]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("lse", [False, True])
def test_ulysses_moves_as_many_bytes_as_other_implementations(world, mask, lse):
    """Each pass moves (N - 1) / N (2 Q + 2 K); if the caller wants the LSE, LSE and delta travel as well."""
    problem = problem_of(world, MASKS[mask], heads=24, kv_heads=24, lse=lse)
    queries, keys = ROWS * 24 * ROW_BYTES, 2 * ROWS * 24 * ROW_BYTES
    lse_bytes = ROWS * 24 * LSE_BYTES
    max_bytes = (world - 1) * (2 * queries + keys + lse * lse_bytes) // world
    reports = verified("ulysses", problem, SIZES, tables=False)
    for report in reports.values():
        assert set(report.received_bytes) == {max_bytes}
    assert set(reports["forward"].saved_bytes) == {2 * queries + keys + lse_bytes}


def test_key_heads_move_only_to_ranks_that_need_them():
    """Other implementations repeat 8 key heads over 16 ranks to 32, one for each query head; we repeat them to 16."""
    problem = problem_of(16, Mask.full(), heads=32, kv_heads=8)
    received = verified("ulysses", problem, SIZES, tables=False)["forward"].received_bytes
    assert max(received) == 15 * ROWS * (2 * ROW_BYTES + 2 * ROW_BYTES + 2 * 1 * ROW_BYTES)


@pytest.mark.parametrize(("world", "inner"), GRIDS)
@pytest.mark.parametrize("ring", RINGS)
def test_hybrid_of_every_schedule_verifies_on_every_layout(ring, world, inner):
    for n, (layout, transposed) in enumerate(product(LAYOUTS, (False, True))):
        schedule = f"hybrid(inner={inner}, ring={ring}, transposed={transposed})"
        mask = list(MASKS.values())[n % 3]
        held = layout(2 * world + 3, world).ranges
        verified(schedule, Problem(held, held, mask, *((4, 2) if n % 2 else (3, 1)), lse=n % 4 < 2))


@pytest.mark.parametrize(("world", "inner"), GRIDS)
def test_hybrid_moves_as_many_bytes_as_other_implementations(world, inner):
    """The exchange moves (A - 1) / A (2 Q + 2 K); across groups a ring moves longer shards of fewer heads."""
    num_groups = world // inner
    problem = problem_of(world, Mask.full(), heads=12, kv_heads=12)
    queries, keys = ROWS * 12 * ROW_BYTES, 2 * ROWS * 12 * ROW_BYTES
    exchanged = (inner - 1) * (2 * queries + keys) // inner
    schedule = f"hybrid(inner={inner}, ring=ring)"
    reports = verified(schedule, problem, SIZES, tables=False)
    assert max(reports["forward"].received_bytes) <= exchanged + (num_groups - 1) * keys
    assert max(reports["backward"].received_bytes) <= exchanged + (num_groups - 1) * keys + num_groups * 2 * keys


def test_turned_hybrid_exchanges_across_groups():
    problem = problem_of(4, Mask.full())

    def peers(schedule: str) -> list[set[int]]:
        steps = build(schedule, problem, 0, "forward").steps
        posts = [step for step in steps if isinstance(step, Post)]
        return [
            {part.peer for post in posts if (post.name[:2] == "in") is first for part in post.sends}
            for first in (True, False)
        ]

    assert peers("hybrid(inner=2, ring=ring)")[0] == {1}
    assert peers("hybrid(inner=2, ring=ring, transposed=True)")[0] == {2}


def test_rounds_overlap_the_exchange_with_attention():
    problem = problem_of(2, Mask.causal(), heads=8, kv_heads=8)
    texts = [str(step).split()[:3] for step in build("ulysses(rounds=2)", problem, 0, "forward").steps]
    order = [" ".join(words) for words in texts if words[0] in ("post", "attend")]
    assert [line[:9] for line in order] == [
        "post in 0",
        "post in 1",
        "attend fi",
        "post out ",
        "attend fi",
        "post out ",
    ]
    report = verified("ulysses(rounds=2)", problem, SIZES)
    assert report["forward"].received_bytes == verified("ulysses", problem, SIZES)["forward"].received_bytes


def test_default_inner_splits_no_key_head():
    def chosen(world: int, kv_heads: int) -> int:
        return largest_inner(problem_of(world, Mask.full(), 8, kv_heads))

    assert [chosen(8, kv_heads) for kv_heads in (8, 4, 2, 1)] == [8, 4, 2, 2]
    assert (chosen(6, 4), chosen(7, 4), chosen(1, 4)) == (3, 7, 1)


def test_impossible_hybrids_are_refused():
    problem = problem_of(6, Mask.full())
    with pytest.raises(
        ValueError, match=r"hybrid: inner=4 does not divide 6 ranks into groups; give an inner that divides them"
    ):
        build("hybrid(inner=4)", problem, 0, "forward")
    with pytest.raises(
        ValueError, match=r"hybrid: schedule 'ulysses' saves buffers and cannot be composed; choose another schedule"
    ):
        build("hybrid(inner=2, ring=ulysses)", problem, 0, "forward")
    with pytest.raises(ValueError, match=r"expected one of auto"):
        build("hybrid(inner=2, ring=circle)", problem, 0, "forward")
