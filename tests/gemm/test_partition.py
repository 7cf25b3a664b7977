"""Partitions of a GEMM: every K iteration of every tile runs once, loads are equal, and partial tiles are found."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshflash.gemm.partition import (
    SEGMENT_COST_ITERS,
    Partition,
    cta_of_iter,
    data_parallel,
    first_iter_of_cta,
    split_k,
    stream_k,
    swizzle_tile,
)

num_tiles_strategy = st.integers(1, 12)
partitions = st.builds(
    lambda divide, *sizes: divide(*sizes),
    st.sampled_from([data_parallel, stream_k, split_k]),
    num_tiles_strategy,
    num_tiles_strategy,
    st.integers(1, 40),
    st.integers(1, 70),
)


def loads(split: Partition) -> list[int]:
    """Return the number of K iterations of each CTA."""
    return [sum(last - first for _, first, last in split.segments(p)) for p in range(split.num_ctas)]


@given(partitions)
@settings(max_examples=150, deadline=None)
def test_every_k_iteration_of_every_tile_runs_exactly_once(split):
    seen = Counter(
        (tile, k_iter)
        for cta in range(split.num_ctas)
        for tile, first, last in split.segments(cta)
        for k_iter in range(first, last)
    )
    assert seen == Counter(
        {(tile, k_iter): 1 for tile in range(split.num_tiles) for k_iter in range(split.iters_per_tile)}
    )
    assert all(loads(split)), "a CTA without work"


@given(num_tiles_strategy, num_tiles_strategy, st.integers(1, 40), st.integers(1, 70))
@settings(max_examples=150, deadline=None)
def test_stream_k_gives_every_cta_the_same_load_to_within_one_iteration(tiles_m, tiles_n, iters_per_tile, num_ctas):
    split = stream_k(tiles_m, tiles_n, iters_per_tile, num_ctas)
    tiles = tiles_m * tiles_n
    assert max(loads(split)) - min(loads(split)) <= 1
    assert max(loads(split)) <= -(-tiles * iters_per_tile // min(num_ctas, tiles * iters_per_tile)) + (
        SEGMENT_COST_ITERS if tiles < num_ctas else 0
    )
    if tiles >= num_ctas:
        assert (tiles - split.num_split_tiles) % split.num_ctas == 0
        assert split.num_split_tiles < (num_ctas if tiles % num_ctas * iters_per_tile >= num_ctas else 2 * num_ctas)


@given(num_tiles_strategy, num_tiles_strategy, st.integers(1, 400), st.integers(1, 70))
@settings(max_examples=150, deadline=None)
def test_less_than_one_wave_splits_all_tiles_equally_if_few_ctas_stay_idle(tiles_m, tiles_n, iters_per_tile, num_ctas):
    split = stream_k(tiles_m, tiles_n, iters_per_tile, num_ctas)
    if split.num_tiles < num_ctas and split.partials_per_cta == 1:
        assert len({len(list(split.segments(cta))) for cta in range(split.num_ctas)}) == 1
        assert split.num_ctas > num_ctas - split.num_tiles or split.num_ctas == split.num_tiles * iters_per_tile


@given(num_tiles_strategy, num_tiles_strategy, st.integers(1, 40), st.integers(1, 70))
@settings(max_examples=100, deadline=None)
def test_split_k_splits_are_equal_to_within_one_iteration(tiles_m, tiles_n, iters_per_tile, splits):
    split = split_k(tiles_m, tiles_n, iters_per_tile, splits)
    assert split.num_ctas == tiles_m * tiles_n * min(splits, iters_per_tile)
    assert max(loads(split)) - min(loads(split)) <= 1
    assert all(len(list(split.segments(cta))) == 1 for cta in range(split.num_ctas))


@given(partitions)
@settings(max_examples=150, deadline=None)
def test_combine_finds_every_partial_tile_in_its_slot(split):
    """The kernels' rule: the CTA that begins a tile stores it in its last slot, every later CTA in its first."""
    written = {}
    for cta in range(split.num_ctas):
        for tile, first, last in split.segments(cta):
            if last - first < split.iters_per_tile:
                slot = cta * split.partials_per_cta + (split.partials_per_cta - 1 if first == 0 else 0)
                assert slot not in written
                written[slot] = tile, first, last
    read = []
    for tile in range(split.num_split_tiles):
        begin = tile * split.iters_per_tile
        first_cta, last_cta = (
            cta_of_iter(at, split.ctas_per_group, split.iters_per_group)
            for at in (begin, begin + split.iters_per_tile - 1)
        )
        if first_cta == last_cta:
            continue
        slots = [first_cta * split.partials_per_cta + split.partials_per_cta - 1] + [
            p * split.partials_per_cta for p in range(first_cta + 1, last_cta + 1)
        ]
        partials = [written[slot] for slot in slots]
        assert [partial[0] for partial in partials] == [tile] * len(partials)
        assert [partial[1] for partial in partials] == [0, *(partial[2] for partial in partials[:-1])]
        assert partials[-1][2] == split.iters_per_tile
        read += slots
    assert sorted(read) == sorted(written)


@given(st.integers(1, 300), st.integers(1, 10**6), st.integers(0, 10**9))
@settings(max_examples=100, deadline=None)
def test_cta_of_iter_is_the_inverse_of_first_iter_of_cta(ctas_per_group, iters_per_group, at):
    ctas_per_group = min(ctas_per_group, iters_per_group)
    owner = cta_of_iter(at, ctas_per_group, iters_per_group)
    assert (
        first_iter_of_cta(owner, ctas_per_group, iters_per_group)
        <= at
        < first_iter_of_cta(owner + 1, ctas_per_group, iters_per_group)
    )


@given(num_tiles_strategy, num_tiles_strategy, st.integers(1, 20))
def test_swizzled_order_visits_every_tile_once(tiles_m, tiles_n, l2_swizzle):
    visited = [swizzle_tile(tile, tiles_m, tiles_n, l2_swizzle) for tile in range(tiles_m * tiles_n)]
    assert sorted(visited) == [(row, column) for row in range(tiles_m) for column in range(tiles_n)]


@pytest.mark.parametrize("num_ctas", [132, 264])
def test_stream_k_beats_data_parallel_on_a_real_shape(num_ctas):
    split = stream_k(64, 32, 128, num_ctas)
    full = split.num_tiles - split.num_split_tiles
    assert full % num_ctas == 0
    assert 0 < split.num_split_tiles < num_ctas
    assert max(loads(split)) - min(loads(split)) == 1
    # with full tiles alone, CTAs are idle in the last wave
    assert max(loads(data_parallel(64, 32, 128, num_ctas))) > max(loads(split))
