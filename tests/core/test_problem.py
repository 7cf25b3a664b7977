"""What ranks need of each other, and query rows, against the matrix of `Mask.visible`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import MAX_TABLES, Problem
from meshflash.core.program import Ranges
from meshflash.core.rows import Rows
from meshflash.core.runs import seen

Shown = npt.NDArray[np.bool_]

STEP_ONE: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "balanced": lambda tokens, world: Layout.balanced(Mask.causal(), tokens, world),
    "backwards": lambda tokens, world: Layout(tuple(reversed(Layout.contiguous(tokens, world).ranges))),
}
LAYOUTS = STEP_ONE | {"striped": Layout.striped}


def dealt(tokens: int, world: int) -> Layout:
    """Deal pieces of 1, 2, 3, ... tokens to the ranks in an order without a pattern."""
    cuts = [min(n * (n + 1) // 2, tokens) for n in range(tokens + 1)]
    held: list[list[range]] = [[] for _ in range(world)]
    for n, (a, b) in enumerate(pairwise(cuts)):
        held[n * n * 7 % 11 % world] += [range(a, b)] if a < b else []
    return Layout(tuple(map(tuple, held)))


def mixed(tokens: int, world: int) -> Layout:
    """Stripe the first half; the ranks hold the rest in contiguous pieces, in reverse order."""
    half = tokens // 2
    rest = reversed(Layout.contiguous(tokens - half, world).ranges)
    shifted = [tuple(range(r.start + half, r.stop + half) for r in held) for held in rest]
    return Layout(tuple(a + b for a, b in zip(Layout.striped(half, world).ranges, shifted, strict=True)))


#: Layouts that take every way through `Shards`: regular ones, others, and those with several steps.
ALL_LAYOUTS = LAYOUTS | {"dealt": dealt, "mixed": mixed}


def shown(mask: Mask, q: Ranges, k: Ranges) -> Shown:
    """Return the pairs that are visible in any batch row, as [q rows, k rows]."""
    i, j = (np.array([p for r in ranges for p in r], np.int64) for ranges in (q, k))
    rows = [mask.visible(i[:, None], j[None, :], batch=b) for b in range(mask.batch_rows or 1)]
    out: Shown = np.logical_or.reduce([np.broadcast_to(row, (len(i), len(j))) for row in rows])
    return out


def expand(rows: Rows) -> list[int]:
    return [n for begin, end in rows for n in range(begin, end)]


@st.composite
def lengths(draw: Any, tokens: int) -> list[int]:
    cuts = sorted(draw(st.lists(st.integers(0, tokens), max_size=3)))
    return [int(n) for n in np.diff([0, *cuts, tokens])]


@st.composite
def masks(draw: Any, tokens: int) -> Mask:
    """Draw causal masks, windows, documents (also per batch row or padded), first keys, and combinations of them."""
    window = st.builds(Mask.window, st.integers(0, tokens), st.integers(0, tokens))
    documents = st.one_of(
        st.builds(Mask.documents, lengths(tokens)),
        st.builds(lambda a, b: Mask.documents([a, b]), lengths(tokens), lengths(tokens)),
        st.builds(lambda n: Mask.documents([n // 2, n - n // 2], pad=True), st.integers(0, tokens)),
    )
    simple = st.one_of(st.just(Mask.causal()), st.just(Mask.full()), window, st.builds(Mask.first, st.integers(1, 9)))
    form = draw(st.sampled_from(["one", "and", "or", "documents", "sinks", "own sinks"]))
    if form == "documents":
        return draw(documents) & draw(simple)
    if form == "sinks":
        return Mask.causal() & (draw(window) | draw(st.builds(Mask.first, st.integers(1, 4))))
    if form == "own sinks":
        return Mask.causal() & draw(documents) & (draw(window) | Mask.first(draw(st.integers(1, 3)), per_document=True))
    first, second = draw(simple), draw(simple)
    return first if form == "one" else first & second if form == "and" else first | second


@st.composite
def problems(draw: Any, layouts: list[str]) -> Problem:
    """Draw a problem over the named layouts."""
    tokens, world = draw(st.integers(1, 30)), draw(st.integers(1, 5))
    q, k = (LAYOUTS[draw(st.sampled_from(layouts))](tokens, world).ranges for _ in range(2))
    return Problem(q, k, draw(masks(tokens)))


@given(problems(list(LAYOUTS)))
@settings(max_examples=150, deadline=None)
def test_needs_hold_every_visible_key(problem: Problem) -> None:
    for c, held in enumerate(problem.k):
        for d, queries in enumerate(problem.q):
            wanted = np.flatnonzero(shown(problem.mask, queries, held).any(axis=0))
            assert set(wanted.tolist()) <= set(expand(problem.needs[c][d]))


@given(problems(list(STEP_ONE)))
@settings(max_examples=150, deadline=None)
def test_needs_are_minimal_on_contiguous_ranges(problem: Problem) -> None:
    for c, held in enumerate(problem.k):
        for d, queries in enumerate(problem.q):
            wanted = np.flatnonzero(shown(problem.mask, queries, held).any(axis=0))
            assert expand(problem.needs[c][d]) == wanted.tolist()


@given(problems(list(STEP_ONE)))
@settings(max_examples=100, deadline=None)
def test_q_rows_span_the_first_to_the_last_query_that_sees_a_key(problem: Problem) -> None:
    for rank, queries in enumerate(problem.q):
        for keys in problem.k:
            rows = np.flatnonzero(shown(problem.mask, queries, keys).any(axis=1))
            expected = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
            assert problem.q_rows(rank, keys) == expected


@given(problems(list(LAYOUTS)))
@settings(max_examples=100, deadline=None)
def test_q_rows_hold_every_query_that_sees_a_key(problem: Problem) -> None:
    for rank, queries in enumerate(problem.q):
        for keys in problem.k:
            begin, end = problem.q_rows(rank, keys)
            rows = np.flatnonzero(shown(problem.mask, queries, keys).any(axis=1))
            assert ((begin <= rows) & (rows < end)).all()


@given(problems(list(STEP_ONE)), st.booleans())
@settings(max_examples=100, deadline=None)
def test_seen_returns_sorted_intervals_of_visible_positions(problem: Problem, by_key: bool) -> None:
    tokens = sum(problem.q_lengths)
    for ranges in problem.q:
        intervals = seen(problem.mask, ranges, by_key)
        assert all(a < b for a, b in intervals)
        assert all(a[1] < b[0] for a, b in pairwise(intervals))
        whole = (range(tokens),)
        pairs = shown(problem.mask, whole, ranges).any(axis=1) if by_key else shown(problem.mask, ranges, whole).any(0)
        inside = {n for a, b in intervals for n in range(max(a, 0), min(b, tokens))}
        assert inside == set(np.flatnonzero(pairs).tolist())


def test_needs_of_cross_attention_match_the_visible_keys() -> None:
    mask = Mask.documents([4, 0, 6], k_lengths=[3, 5, 7])
    problem = Problem(Layout.contiguous(10, 2).ranges, Layout.contiguous(15, 2).ranges, mask)
    assert problem.needs == ((((0, 3),), ()), (((0, 7),), ((0, 7),)))
    for c, d in ((0, 0), (0, 1), (1, 0), (1, 1)):
        wanted = np.flatnonzero(shown(mask, problem.q[d], problem.k[c]).any(axis=0))
        assert expand(problem.needs[c][d]) == wanted.tolist()


def test_needs_of_queries_that_begin_later_than_keys() -> None:
    later = tuple(tuple(range(r.start + 8, r.stop + 8) for r in held) for held in Layout.contiguous(4, 2).ranges)
    problem = Problem(later, Layout.contiguous(12, 2).ranges, Mask.causal() & Mask.window(3, 0))
    assert problem.needs == ((((5, 6),), ()), (((0, 4),), ((1, 6),)))


def test_problem_derives_lengths_options_and_needs() -> None:
    problem = Problem(Layout.contiguous(5, 3).ranges, Layout.striped(2, 3).ranges, Mask.full(), 4, 2, (("stride", 1),))
    assert (problem.world, problem.q_lengths, problem.k_lengths) == (3, (2, 2, 1), (1, 1, 0))
    assert problem.option == {"stride": 1}
    assert problem.everything_needed
    assert not replace(problem, mask=Mask.window(1, 0)).everything_needed
    assert hash(problem) == hash(replace(problem))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 3), (1, 2), (4, 0), (4, -2)])
def test_problem_refuses_kv_heads_that_do_not_divide_heads(heads: int, kv_heads: int) -> None:
    held = Layout.contiguous(4, 2).ranges
    with pytest.raises(
        ValueError, match=rf"Problem\(heads={heads}, kv_heads={kv_heads}\): expected kv_heads to divide heads"
    ):
        Problem(held, held, Mask.full(), heads, kv_heads)


def test_problem_refuses_different_numbers_of_ranks_for_q_and_k() -> None:
    held = Layout.contiguous(4, 2).ranges
    with pytest.raises(ValueError, match=r"Problem\(q, k\): 2 ranks of queries, 1 of keys"):
        Problem(held, held[:1], Mask.full())
    with pytest.raises(ValueError, match=r"Problem\(q, k\): 0 ranks of queries, 0 of keys"):
        Problem((), (), Mask.full())


def test_window_narrower_than_the_stripe_needs_no_other_rank() -> None:
    layout = Layout.striped(64, 8)
    needs = Problem(layout.ranges, layout.ranges, Mask.causal() & Mask.window(2, 0)).needs
    for c, row in enumerate(needs):
        assert [d for d, need in enumerate(row) if need] == sorted((c + distance) % 8 for distance in range(3))


@st.composite
def any_problems(draw: Any) -> Problem:
    """Draw a problem over any layouts, of up to 12 ranks, with queries that may begin later than keys."""
    tokens, world = draw(st.integers(1, 60)), draw(st.integers(1, 12))
    q, k = (ALL_LAYOUTS[draw(st.sampled_from(list(ALL_LAYOUTS)))](tokens, world).ranges for _ in range(2))
    offset = draw(st.sampled_from([0, 0, 5]))
    q = tuple(tuple(range(r.start + offset, r.stop + offset, r.step) for r in held) for held in q)
    return Problem(q, k, draw(masks(tokens)))


def naive_needs(problem: Problem) -> dict[tuple[int, int], set[int]]:
    """Return the key rows by (owner, rank)."""
    world = range(problem.world)
    return {
        (c, d): set(np.flatnonzero(shown(problem.mask, problem.q[d], problem.k[c]).any(axis=0)).tolist())
        for c in world
        for d in world
    }


def rows_set(rows: Rows) -> set[int]:
    """Return the rows as a set, after checking that the intervals are sorted and do not touch."""
    assert all(a < b for a, b in rows)
    assert all(a[1] < b[0] for a, b in pairwise(rows))
    return set(expand(rows))


@given(any_problems())
@settings(max_examples=150, deadline=None)
def test_needs_of_any_layout_are_the_visible_keys(problem: Problem) -> None:
    expected, world = naive_needs(problem), range(problem.world)
    assert {pair: rows_set(problem.rows_needed(*pair)) for pair in expected} == expected
    for rank in world:
        found = problem.needed_from(rank)
        assert list(found) == [c for c in world if expected[c, rank]]
        assert {c: rows_set(rows) for c, rows in found.items()} == {c: expected[c, rank] for c in found}
        found = problem.needed_by(rank)
        assert list(found) == [d for d in world if expected[rank, d]]
        assert {d: rows_set(rows) for d, rows in found.items()} == {d: expected[rank, d] for d in found}
    needed, own = problem.table.num_needed(np.arange(problem.world))
    assert needed.tolist() == [sum(len(expected[c, d]) for c in world) for d in world]
    assert own.tolist() == [len(expected[d, d]) for d in world]
    keys = sum(problem.k_lengths)
    assert problem.everything_needed == all(sum(len(expected[c, d]) for c in world) == keys for d in world)


@given(any_problems())
@settings(max_examples=100, deadline=None)
def test_query_rows_by_owner_are_those_that_see_its_keys(problem: Problem) -> None:
    for rank, queries in enumerate(problem.q):
        table = problem.table_from(rank)
        found = problem.positions_and_q_rows(rank, table)
        assert list(found) == list(table.by_rank)
        for owner, (positions, q_rows) in found.items():
            held = [p for r in problem.k[owner] for p in r]
            assert [p for r in positions for p in r] == [held[n] for n in expand(table.by_rank[owner])]
            rows = np.flatnonzero(shown(problem.mask, queries, problem.k[owner]).any(axis=1))
            assert q_rows == (int(rows[0]), int(rows[-1]) + 1)


@given(any_problems(), st.sampled_from([1, -1]), st.data())
@settings(max_examples=100, deadline=None)
def test_hops_round_a_ring_follow_from_the_needs_of_all_pairs(problem: Problem, offset: int, data: Any) -> None:
    world = problem.world
    num_hops = data.draw(st.integers(0, world - 1))
    expected = naive_needs(problem)
    last, after = (find(offset, num_hops) for find in (problem.table.last_hops, problem.table.hops_after_first))
    total_last = total_after = 0
    for hop in range(1, num_hops + 1):
        moving = last.at_least(np.full(world, hop)).by_rank
        summed = after.at_least(np.full(world, num_hops + 1 - hop)).by_rank
        for c in range(world):
            later = set().union(*(expected[c, (c - offset * h) % world] for h in range(hop, num_hops + 1)))
            earlier = set().union(*(expected[c, (c - offset * h) % world] for h in range(1, hop + 1)))
            assert rows_set(moving.get(c, ())) == later
            assert rows_set(summed.get(c, ())) == earlier
            total_last, total_after = total_last + len(later), total_after + len(earlier)
    assert (last.total, after.total) == (total_last, total_after)


@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "dealt"])
def test_needs_of_300_ranks_match_sampled_pairs(layout: str, mask: str) -> None:
    world, tokens = 300, 2411
    lengths = np.diff(np.linspace(0, tokens, 41).astype(int)).tolist()
    masks = {"window": Mask.window(70, 0), "causal": Mask.full(), "documents": Mask.documents(lengths)}
    held = ALL_LAYOUTS[layout](tokens, world).ranges
    problem = Problem(held, held, Mask.causal() & masks[mask])
    assert len(problem.sampled_ranks) == 64
    last = problem.table.last_hops(-1, world - 1)
    for c in (0, 1, 137, 299):
        needs = [np.flatnonzero(shown(problem.mask, held[d], held[c]).any(axis=0)).tolist() for d in range(world)]
        assert [expand(problem.needed_by(c).get(d, ())) for d in range(world)] == needs
        for d in (0, 2, 137, 298):
            assert expand(problem.rows_needed(c, d)) == needs[d]
        for hop in (1, 2, 150, 299):
            later = set().union(*(needs[(c + h) % world] for h in range(hop, world)))
            assert rows_set(last.at_least(np.full(world, hop)).by_rank.get(c, ())) == later


def test_problems_do_not_keep_their_tables() -> None:
    # Every packing of documents is a problem that caches and executables keep for long; its table may have megabytes.
    layout = Layout.contiguous(64, 4)
    problems = [Problem(layout.ranges, layout.ranges, Mask.window(n, 0)) for n in range(MAX_TABLES + 1)]
    first = weakref.ref(problems[0].table)
    assert problems[0].table is first()
    for problem in problems[1:]:
        assert problem.table.mask == problem.mask
    gc.collect()
    assert first() is None
