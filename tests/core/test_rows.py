"""Row sets against Python's sets and lists."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshflash.core.rows import Rows, among, common, count, places, positions, union, without

SIZE = 24
ANY = st.sets(st.integers(0, SIZE - 1))
INTERVALS = st.lists(st.tuples(st.integers(-3, SIZE + 3), st.integers(-3, SIZE + 3)), max_size=6)
#: Ranges of a shard: in any order, with any steps.
SHARD = st.lists(
    st.builds(
        lambda start, n, step: range(start, start + n * step, step),
        st.integers(0, 30),
        st.integers(0, 7),
        st.integers(1, 4),
    ),
    max_size=4,
)


def to_rows(indices: set[int]) -> Rows:
    """Convert a Python set to sorted intervals, in the simplest way."""
    out: list[tuple[int, int]] = []
    for n in sorted(indices):
        if out and out[-1][1] == n:
            out[-1] = (out[-1][0], n + 1)
        else:
            out.append((n, n + 1))
    return tuple(out)


def to_indices(rows: Rows) -> list[int]:
    return [n for begin, end in rows for n in range(begin, end)]


def is_normal(rows: Rows) -> bool:
    return all(a < b for a, b in rows) and all(a[1] < b[0] for a, b in pairwise(rows))


@settings(deadline=None)
@given(st.lists(ANY, max_size=4))
def test_union_equals_the_union_of_python_sets(sets: list[set[int]]) -> None:
    assert union(*map(to_rows, sets)) == to_rows(set().union(*sets))


@settings(deadline=None)
@given(st.lists(INTERVALS, max_size=3))
def test_union_takes_intervals_in_any_order_even_empty_ones(lists: list[list[tuple[int, int]]]) -> None:
    assert union(*lists) == to_rows({n for intervals in lists for a, b in intervals for n in range(a, b)})


@settings(deadline=None)
@given(ANY, ANY)
def test_common_and_without_are_intersection_and_difference(a: set[int], b: set[int]) -> None:
    assert common(to_rows(a), to_rows(b)) == to_rows(a & b)
    assert without(to_rows(a), to_rows(b)) == to_rows(a - b)
    assert union(common(to_rows(a), to_rows(b)), without(to_rows(a), to_rows(b))) == to_rows(a)


@settings(deadline=None)
@given(ANY, ANY)
def test_results_are_sorted_intervals_that_do_not_touch(a: set[int], b: set[int]) -> None:
    for rows in (union(to_rows(a), to_rows(b)), common(to_rows(a), to_rows(b)), without(to_rows(a), to_rows(b))):
        assert is_normal(rows)


@settings(deadline=None)
@given(ANY)
def test_count_equals_the_number_of_rows(a: set[int]) -> None:
    assert count(to_rows(a)) == len(a)


@settings(deadline=None)
@given(ANY, ANY)
def test_places_are_indices_into_a_packed_buffer(wanted: set[int], more: set[int]) -> None:
    held = wanted | more
    found = places(to_rows(wanted), within=to_rows(held))
    assert len(found) == len(to_rows(wanted))
    assert to_indices(found) == [sorted(held).index(row) for row in sorted(wanted)]


@settings(deadline=None)
@given(ANY, ANY)
def test_places_refuses_rows_that_are_not_held(wanted: set[int], held: set[int]) -> None:
    if wanted <= held:
        places(to_rows(wanted), within=to_rows(held))
    else:
        with pytest.raises(ValueError, match=r"rows \d+ to \d+ are not within"):
            places(to_rows(wanted), within=to_rows(held))


@settings(deadline=None)
@given(SHARD, ANY)
def test_positions_of_rows_keep_the_order_of_the_shard(ranges: list[range], wanted: set[int]) -> None:
    flat = [p for r in ranges for p in r]
    found = positions(ranges, to_rows(wanted))
    assert all(len(r) for r in found)
    assert [p for r in found for p in r] == [flat[n] for n in sorted(wanted) if n < len(flat)]


@settings(deadline=None)
@given(SHARD, INTERVALS)
def test_among_returns_the_rows_whose_positions_lie_inside(
    ranges: list[range], intervals: list[tuple[int, int]]
) -> None:
    flat = [p for r in ranges for p in r]
    assert among(ranges, intervals) == to_rows({n for n, p in enumerate(flat) if any(a <= p < b for a, b in intervals)})
