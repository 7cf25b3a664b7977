"""`Problem.needs` and query rows against the matrix of `Mask.visible`."""

from __future__ import annotations

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
from meshflash.core.problem import Problem
from meshflash.core.program import Ranges
from meshflash.core.rows import Rows
from meshflash.core.tiles import seen

Shown = npt.NDArray[np.bool_]

STEP_ONE: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "balanced": lambda tokens, world: Layout.balanced(Mask.causal(), tokens, world),
    "backwards": lambda tokens, world: Layout(tuple(reversed(Layout.contiguous(tokens, world).ranges))),
}
LAYOUTS = STEP_ONE | {"striped": Layout.striped}


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
