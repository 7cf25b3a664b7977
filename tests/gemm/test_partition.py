"""Shares of a product: every slice of every tile once, equal loads, and the kernel's own questions answered."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshflash.gemm.partition import SEGMENT, Partition, begin_of, data_parallel, owner_of, place_of, split_k, stream_k

few = st.integers(1, 12)
partitions = st.builds(
    lambda share, *sizes: share(*sizes),
    st.sampled_from([data_parallel, stream_k, split_k]),
    few,
    few,
    st.integers(1, 40),
    st.integers(1, 70),
)


def loads(split: Partition) -> list[int]:
    return [sum(last - first for _, first, last in split.segments(p)) for p in range(split.programs)]


@given(partitions)
@settings(max_examples=150, deadline=None)
def test_every_slice_of_every_tile_exactly_once(split):
    seen = Counter(
        (tile, step)
        for program in range(split.programs)
        for tile, first, last in split.segments(program)
        for step in range(first, last)
    )
    assert seen == Counter({(tile, step): 1 for tile in range(split.tiles) for step in range(split.steps)})
    assert all(loads(split)), "a program without work"


@given(few, few, st.integers(1, 40), st.integers(1, 70))
@settings(max_examples=150, deadline=None)
def test_loads_of_stream_k_are_within_one_slice_of_equal(rows, columns, steps, programs):
    split = stream_k(rows, columns, steps, programs)
    tiles = rows * columns
    assert max(loads(split)) - min(loads(split)) <= 1
    assert max(loads(split)) <= -(-tiles * steps // min(programs, tiles * steps)) + (SEGMENT if tiles < programs else 0)
    if tiles >= programs:
        assert (tiles - split.shared) % split.programs == 0
        assert split.shared < (programs if tiles % programs * steps >= programs else 2 * programs)


@given(few, few, st.integers(1, 400), st.integers(1, 70))
@settings(max_examples=150, deadline=None)
def test_less_than_a_wave_is_cut_alike_where_few_programs_are_idle(rows, columns, steps, programs):
    split = stream_k(rows, columns, steps, programs)
    if split.tiles < programs and split.slots == 1:
        assert len({len(list(split.segments(program))) for program in range(split.programs)}) == 1
        assert split.programs > programs - split.tiles or split.programs == split.tiles * steps


@given(few, few, st.integers(1, 40), st.integers(1, 70))
@settings(max_examples=100, deadline=None)
def test_parts_of_split_k_are_within_one_slice_of_equal(rows, columns, steps, parts):
    split = split_k(rows, columns, steps, parts)
    assert split.programs == rows * columns * min(parts, steps)
    assert max(loads(split)) - min(loads(split)) <= 1
    assert all(len(list(split.segments(program))) == 1 for program in range(split.programs))


@given(partitions)
@settings(max_examples=150, deadline=None)
def test_who_adds_up_a_tile_finds_every_part_in_its_slot(split):
    """The kernel's rule: whoever begins a tile has it in its last slot, the others in their first."""
    written = {}
    for program in range(split.programs):
        for tile, first, last in split.segments(program):
            if last - first < split.steps:
                slot = program * split.slots + (split.slots - 1 if first == 0 else 0)
                assert slot not in written
                written[slot] = tile, first, last
    read = []
    for tile in range(split.shared):
        begin = tile * split.steps
        one, other = (owner_of(at, split.crew, split.slices) for at in (begin, begin + split.steps - 1))
        if one == other:
            continue
        slots = [one * split.slots + split.slots - 1] + [p * split.slots for p in range(one + 1, other + 1)]
        parts = [written[slot] for slot in slots]
        assert [part[0] for part in parts] == [tile] * len(parts)
        assert [part[1] for part in parts] == [0, *(part[2] for part in parts[:-1])]
        assert parts[-1][2] == split.steps
        read += slots
    assert sorted(read) == sorted(written)


@given(st.integers(1, 300), st.integers(1, 10**6), st.integers(0, 10**9))
@settings(max_examples=100, deadline=None)
def test_the_owner_of_a_slice_has_it(crew, slices, at):
    crew = min(crew, slices)
    owner = owner_of(at, crew, slices)
    assert begin_of(owner, crew, slices) <= at < begin_of(owner + 1, crew, slices)


@given(few, few, st.integers(1, 20))
def test_the_order_of_tiles_goes_through_all_of_them(rows, columns, group):
    places = [place_of(tile, rows, columns, group) for tile in range(rows * columns)]
    assert sorted(places) == [(row, column) for row in range(rows) for column in range(columns)]


@pytest.mark.parametrize("programs", [132, 264])
def test_shapes_of_a_real_device(programs):
    split = stream_k(64, 32, 128, programs)
    whole = split.tiles - split.shared
    assert whole % programs == 0
    assert 0 < split.shared < programs
    assert max(loads(split)) - min(loads(split)) == 1
    # whole tiles alone leave programs idle in the last wave
    assert max(loads(data_parallel(64, 32, 128, programs))) > max(loads(split))
