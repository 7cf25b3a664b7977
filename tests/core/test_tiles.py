"""Worklists against the matrix of `Mask.visible`: every visible pair exactly once, nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from core.definition import build, slice_expressions
from meshflash.core.layout import Layout
from meshflash.core.lengths import UNBOUNDED
from meshflash.core.mask import Mask
from meshflash.core.tiles import SEGMENT, SPAN, Table, Worklist, visible_per_query, worklist

Ranges = tuple[range, ...]
Counts = npt.NDArray[np.int64]


def expand(ranges: Ranges) -> Counts:
    return np.array([p for r in ranges for p in r], dtype=np.int64)


def visible_pairs(mask: Mask, q: Ranges, k: Ranges) -> Counts:
    """Return the visible pairs as [batch, query rows, key rows] of 0 and 1."""
    i, j = expand(q), expand(k)
    rows = [mask.visible(i[:, None], j[None, :], batch=b) for b in range(mask.batch_rows or 1)]
    return np.stack(rows).astype(np.int64)


def named_entries(table: Table) -> list[tuple[dict[str, int], list[dict[str, int]]]]:
    """Return the segments of a table with their spans, with named columns."""
    return [
        (
            dict(zip(SEGMENT, segment, strict=True)),
            [
                dict(zip(SPAN, span, strict=True))
                for span in table.spans[table.indptr[s] : table.indptr[s + 1]].tolist()
            ],
        )
        for s, segment in enumerate(table.segments.tolist())
    ]


def positions_of(entry: dict[str, int]) -> Counts:
    return entry["position"] + entry["step"] * np.arange(entry["rows"], dtype=np.int64)


def tile(segment: dict[str, int], span: dict[str, int], by_key: bool) -> npt.NDArray[np.bool_]:
    """Return the visible pairs of a tile, [query rows, key rows]."""
    q, k = (span, segment) if by_key else (segment, span)
    distance = positions_of(k)[None, :] - positions_of(q)[:, None]
    shown = np.ones(distance.shape, np.bool_)
    if span["lo"] != -UNBOUNDED:
        shown &= distance >= span["lo"]
    if span["hi"] != UNBOUNDED:
        shown &= distance <= span["hi"]
    return shown


def rows_of(entry: dict[str, int]) -> slice:
    return slice(entry["row"], entry["row"] + entry["rows"])


def paint(table: Table, shape: Sequence[int], by_key: bool) -> Counts:
    """Return how often a table computes each pair, [batch, query rows, key rows]."""
    out = np.zeros(shape, np.int64)
    for segment, spans in named_entries(table):
        batch = slice(None) if segment["batch"] < 0 else segment["batch"]
        for span in spans:
            q, k = (span, segment) if by_key else (segment, span)
            out[batch, rows_of(q), rows_of(k)] += tile(segment, span, by_key)
    return out


def check_form(table: Table, own: Counts, other: Counts, batches: int | None, exact: bool, by_key: bool) -> None:
    """Check the invariants of a table that kernels rely on."""
    for array in (table.segments, table.indptr, table.spans):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
    assert table.segments.shape == (len(table), len(SEGMENT))
    assert table.spans.shape == (table.indptr[-1], len(SPAN))
    assert table.indptr.shape == (len(table) + 1,)
    assert table.indptr[0] == 0

    cover = np.zeros((batches or 1, len(own)), np.int64)
    for segment, spans in named_entries(table):
        assert (segment["batch"] == -1) if batches is None else (0 <= segment["batch"] < batches)
        assert segment["rows"] > 0
        cover[max(segment["batch"], 0), rows_of(segment)] += 1
        banded = [s for s in spans if s["lo"] != -UNBOUNDED or s["hi"] != UNBOUNDED]
        if exact or banded:
            assert (positions_of(segment) == own[rows_of(segment)]).all()
        for before, after in pairwise(spans):
            assert before["row"] <= after["row"]
            if before["row"] + before["rows"] > after["row"]:  # two bands on the same rows have no distance in common
                assert max(before["lo"], after["lo"]) > min(before["hi"], after["hi"])
        for span in spans:
            assert span["rows"] > 0
            assert span["row"] >= 0
            assert span["row"] + span["rows"] <= len(other)
            if exact or span in banded:
                assert (positions_of(span) == other[rows_of(span)]).all()
        for span in banded:
            q, k = (
                (positions_of(span), positions_of(segment)) if by_key else (positions_of(segment), positions_of(span))
            )
            assert span["lo"] == -UNBOUNDED or span["lo"] > k[0] - q[-1], "a side that cannot bind is open"
            assert span["hi"] == UNBOUNDED or span["hi"] < k[-1] - q[0], "a side that cannot bind is open"
            shown = np.asarray(tile(segment, span, by_key).any(axis=1 if by_key else 0))
            assert shown.any() or segment["step"] != span["step"], "a span without a visible pair"
            assert (shown[0] and shown[-1]) or segment["step"] > 1, "a span longer than its visible rows"
    assert (cover == 1).all()


def check_rectangles(work: Worklist, want: Counts) -> None:
    """Check that rectangles hold every visible pair once, and that `disjoint` is right."""
    rectangles = work.rectangles
    if rectangles is None:
        assert not work.disjoint
        assert any(
            span["lo"] != -UNBOUNDED or (span["hi"] != UNBOUNDED and span["step"] != segment["step"])
            for segment, spans in named_entries(work.by_query)
            for span in spans
        )
        return
    painted = np.zeros_like(want)
    q_taken, k_taken = np.zeros(want.shape[:2], int), np.zeros((want.shape[0], want.shape[2]), int)
    for r in rectangles:
        batch = slice(None) if r.batch < 0 else r.batch
        rows, columns = r.q.stop - r.q.start, r.k.stop - r.k.start
        assert rows > 0
        assert columns > 0
        whole = np.ones((rows, columns), int)
        painted[batch, r.q, r.k] += np.tril(whole) if r.causal else whole
        q_taken[batch, r.q] += 1
        k_taken[batch, r.k] += 1
    assert (painted == want).all()
    assert work.disjoint == bool((q_taken <= 1).all() and (k_taken <= 1).all())


def check(mask: Mask, q: Ranges, k: Ranges) -> None:
    """Check all invariants of the worklist of any mask over any rows."""
    i, j, want = expand(q), expand(k), visible_pairs(mask, q, k)
    for exact in (False, True):
        work = Worklist(mask, q, k, exact)
        check_form(work.by_query, i, j, mask.batch_rows, exact, by_key=False)
        check_form(work.by_key, j, i, mask.batch_rows, exact, by_key=True)
        assert (paint(work.by_query, want.shape, by_key=False) == want).all()
        assert (paint(work.by_key, want.shape, by_key=True) == want).all()
        assert work.pairs == want.sum()
        check_rectangles(work, want)


def split(draw: st.DrawFn, total: int, count: int) -> list[int]:
    """Draw `count` lengths that add up to `total`; some may be zero."""
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=count - 1, max_size=count - 1)))
    return [b - a for a, b in pairwise([0, *cuts, total])]


@st.composite
def random_documents(draw: st.DrawFn, q_tokens: int, k_tokens: int, rows: int) -> Mask:
    """Draw a document mask, shared or per batch row, padded or not."""
    pad = draw(st.booleans())
    separate_keys = draw(st.booleans())
    count = draw(st.integers(1, 6))

    def side(tokens: int) -> Any:
        return split(draw, draw(st.integers(0, tokens)) if pad else tokens, count)

    def sides(tokens: int) -> Any:
        return [side(tokens) for _ in range(rows)] if per_row else side(tokens)

    per_row = draw(st.booleans())
    if separate_keys:
        return Mask.documents(sides(q_tokens), k_lengths=sides(k_tokens), pad=pad)
    return Mask.documents(sides(max(q_tokens, k_tokens)), pad=pad)


@st.composite
def masks(draw: st.DrawFn, q_tokens: int, k_tokens: int) -> Mask:
    """Draw an expression of depth up to 3 over all primitives."""
    rows = draw(st.integers(1, 3))
    sets = draw(st.lists(random_documents(q_tokens, k_tokens, rows), min_size=1, max_size=2))
    limit = st.none() | st.integers(0, 4) | st.integers(0, 50)

    def leaf() -> Mask:
        match draw(st.integers(0, 8)):
            case 8:
                own_rows = draw(st.sampled_from([None, *{s.batch_rows for s in sets}]))
                return build(draw(slice_expressions(q_tokens, k_tokens, own_rows)), ())
            case 0:
                return Mask.causal()
            case 1:
                return Mask.window(draw(limit), draw(limit))
            case 2:
                return Mask.first(draw(st.integers(1, 50)))
            case 3 if len(sets) == 1:
                return sets[0] & Mask.first(draw(st.integers(1, 8)), per_document=True)
            case 4:
                return Mask.full()
        return draw(st.sampled_from(sets))

    def node(depth: int) -> Mask:
        kind = draw(st.sampled_from(["leaf", "and", "or"])) if depth else "leaf"
        if kind == "leaf":
            return leaf()
        left, right = node(depth - 1), node(depth - 1)
        return left & right if kind == "and" else left | right

    return node(3)


@st.composite
def layouts(draw: st.DrawFn, tokens: int) -> Layout:
    """Draw a layout: one of the standard ones, or random ranges of any step."""
    world = draw(st.integers(1, 6))
    match draw(st.integers(0, 5)):
        case 0:
            return Layout.contiguous(tokens, world)
        case 1:
            return Layout.zigzag(tokens, world)
        case 2:
            return Layout.striped(tokens, world)
        case 3:
            mask = draw(st.sampled_from([Mask.causal(), Mask.window(3, 0), Mask.full()]))
            return Layout.balanced(mask, tokens, world)
    pieces: list[range] = []
    for length in split(draw, tokens, draw(st.integers(1, 5))):
        start, step = sum(map(len, pieces)), draw(st.integers(1, 4))
        pieces += [range(start + n, start + length, step) for n in range(step)]
    held: list[list[range]] = [[] for _ in range(world)]
    for piece in draw(st.permutations(pieces)):
        if len(piece):
            held[draw(st.integers(0, world - 1))].append(piece)
    return Layout(tuple(map(tuple, held)))


@dataclass(frozen=True)
class Problem:
    """A mask over some rows of queries and keys, with a readable repr for failures."""

    mask: Mask
    q: Ranges
    k: Ranges

    def __repr__(self) -> str:
        sets = [(d._q.tolist(), d._k.tolist(), d.pad) for d in self.mask.documents_nodes]
        return f"Problem({self.mask}, q={self.q}, k={self.k}, documents={sets})"


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw a mask over one rank's queries and some ranks' keys."""
    q_tokens = draw(st.integers(0, 48))
    k_tokens = draw(st.just(q_tokens) | st.integers(0, 48))
    q_layout, k_layout = draw(layouts(q_tokens)), draw(layouts(k_tokens))
    rank = draw(st.integers(0, q_layout.world - 1))
    order = draw(st.permutations(range(k_layout.world)))
    taken = order[: draw(st.integers(0, k_layout.world))]
    k = tuple(r for n in taken for r in k_layout.ranges[n])
    return Problem(draw(masks(q_tokens, k_tokens)), q_layout.ranges[rank], k)


@given(problems())
@settings(max_examples=500, deadline=None)
@example(Problem(Mask.causal(), (), ()))
@example(Problem(Mask.causal(), (range(4),), ()))
@example(Problem(Mask.causal(), (), (range(4),)))
@example(Problem(Mask.documents([]), (range(4),), (range(4),)))
def test_tables_hold_every_visible_pair_exactly_once(problem: Problem) -> None:
    check(problem.mask, problem.q, problem.k)


@given(st.integers(0, 48).flatmap(lambda n: st.tuples(st.just(n), masks(n, n))))
@settings(max_examples=150, deadline=None)
def test_visible_per_query_counts_the_visible_keys_of_each_query(case: tuple[int, Mask]) -> None:
    tokens, mask = case
    whole = (range(tokens),)
    assert visible_per_query(mask, tokens).tolist() == visible_pairs(mask, whole, whole).sum(axis=(0, 2)).tolist()


def test_visible_per_query_refuses_a_mask_of_another_length() -> None:
    with pytest.raises(ValueError, match="5 tokens in the documents, 6 in the sequence"):
        visible_per_query(Mask.documents([2, 3]), 6)


MASKS: dict[str, Callable[[int], Mask]] = {
    "full": lambda n: Mask.full(),
    "causal": lambda n: Mask.causal(),
    "window": lambda n: Mask.window(5, 0),
    "both sides": lambda n: Mask.window(5, 3),
    "prefix": lambda n: Mask.causal() | Mask.first(n // 3),
    "sinks": lambda n: Mask.causal() & (Mask.window(4, 0) | Mask.first(2)),
    "documents": lambda n: Mask.documents([n // 4, 0, n - n // 4]) & Mask.causal(),
    "sinks of documents": lambda n: (
        Mask.documents([n // 4, n - n // 4]) & Mask.causal() & (Mask.window(4, 0) | Mask.first(2, per_document=True))
    ),
    "documents of documents": lambda n: (
        (Mask.documents([n // 4, n - n // 4]) & Mask.documents([n // 3, n // 3, n - 2 * (n // 3)])) | Mask.window(1, 0)
    ),
    "documents of rows": lambda n: (
        (Mask.documents([[n // 2, n - n // 2], [n, 0]]) & Mask.documents([n // 3, n - n // 3])) | Mask.first(2)
    ),
    "rows": lambda n: Mask.documents([[n], [n // 2, n - n // 2]]) & Mask.causal(),
    "padding": lambda n: Mask.documents([n // 4, n // 4], pad=True),
}
LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "striped": Layout.striped,
    "balanced": lambda tokens, world: Layout.balanced(Mask.causal(), tokens, world),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_worklists_of_all_ranks_cover_the_whole_matrix(mask: str, layout: str) -> None:
    tokens, world = 45, 4
    m, held = MASKS[mask](tokens), LAYOUTS[layout](tokens, world).ranges
    pairs = 0
    for q in held:
        for k in held:
            check(m, q, k)
            pairs += worklist(m, q, k).pairs
    whole = (range(tokens),)
    assert pairs == worklist(m, whole, whole).pairs == visible_pairs(m, whole, whole).sum()


def test_cross_attention_with_separate_document_lengths() -> None:
    mask = Mask.documents([[7, 0, 13], [20, 0, 0]], k_lengths=[[0, 3, 30], [33, 0, 0]])
    for q in Layout.zigzag(20, 3).ranges:
        for k in Layout.striped(33, 2).ranges:
            check(mask, q, k)
            check(mask & Mask.causal(), q, k)


def test_worklists_are_cached_by_value() -> None:
    def make(exact: bool) -> Worklist:
        mask = Mask.causal() & Mask.documents([100, 28])
        return worklist(mask, Layout.zigzag(128, 4).ranges[1], Layout.zigzag(128, 4).ranges[2], exact)

    assert make(False) is make(False)
    assert make(True) is not make(False)
    assert make(False).by_query is make(False).by_query
    assert make(False).by_key is make(False).by_key
    assert make(False).rectangles is make(False).rectangles


def zigzag_worklist(q_rank: int, k_rank: int) -> Worklist:
    held = Layout.zigzag(64, 4).ranges
    return worklist(Mask.causal(), held[q_rank], held[k_rank])


def test_zigzag_sees_the_front_half_of_an_earlier_rank() -> None:
    """Both pieces of the queries see exactly the first piece of the keys: one rectangle."""
    work = zigzag_worklist(2, 1)
    assert work.by_query.segments[:, 1:3].tolist() == [[0, 16]]
    assert work.by_query.spans[:, [0, 1, 4, 5]].tolist() == [[0, 8, -UNBOUNDED, UNBOUNDED]]
    assert work.by_key.segments[:, 1:3].tolist() == [[0, 8], [8, 8]]
    assert work.by_key.spans[:, [0, 1, 4, 5]].tolist() == [[0, 16, -UNBOUNDED, UNBOUNDED]]
    assert work.rectangles is not None
    assert [(r.q, r.k, r.causal) for r in work.rectangles] == [(slice(0, 16), slice(0, 8), False)]
    assert work.disjoint


def test_zigzag_shows_everything_to_the_back_half_of_an_earlier_rank() -> None:
    """The second piece of the queries sees both pieces of the keys: one rectangle."""
    work = zigzag_worklist(1, 2)
    assert work.by_query.segments[:, 1:3].tolist() == [[0, 8], [8, 8]]
    assert work.by_query.indptr.tolist() == [0, 0, 1]
    assert work.by_query.spans[:, [0, 1, 4, 5]].tolist() == [[0, 16, -UNBOUNDED, UNBOUNDED]]
    assert work.by_key.segments[:, 1:3].tolist() == [[0, 16]]
    assert work.by_key.spans[:, [0, 1, 4, 5]].tolist() == [[8, 8, -UNBOUNDED, UNBOUNDED]]
    assert work.rectangles is not None
    assert [(r.q, r.k, r.causal) for r in work.rectangles] == [(slice(8, 16), slice(0, 16), False)]


def test_exact_positions_prevent_merging() -> None:
    held = Layout.zigzag(64, 4).ranges
    work = worklist(Mask.causal(), held[1], held[2], exact_positions=True)
    assert work.by_query.spans.tolist() == [
        [0, 8, 16, 1, -UNBOUNDED, UNBOUNDED],
        [8, 8, 40, 1, -UNBOUNDED, UNBOUNDED],
    ]
    whole = worklist(Mask.full(), held[1], held[1] + held[2])
    assert whole.by_query.segments[:, 1:3].tolist() == [[0, 16]]
    assert whole.by_query.spans[:, :2].tolist() == [[0, 32]]


def test_causal_mask_on_own_rows_is_one_causal_rectangle() -> None:
    own = (range(32, 48),)
    work = worklist(Mask.causal(), own, own)
    assert work.by_query.segments.tolist() == [[-1, 0, 16, 32, 1]]
    assert work.by_query.spans.tolist() == [[0, 16, 32, 1, -UNBOUNDED, 0]]
    assert work.by_key.spans.tolist() == [[0, 16, 32, 1, -UNBOUNDED, 0]]
    assert work.rectangles is not None
    assert [(r.q, r.k, r.causal) for r in work.rectangles] == [(slice(0, 16), slice(0, 16), True)]
    assert work.disjoint


def test_own_rows_of_several_ranges_are_one_causal_square() -> None:
    for held in (Layout.zigzag(64, 4).ranges[1], (range(3), range(9, 16), range(20, 22), range(30, 40))):
        work = worklist(Mask.causal(), held, held)
        rows = sum(map(len, held))
        assert work.rectangles is not None
        assert [(r.q, r.k, r.causal) for r in work.rectangles] == [(slice(0, rows), slice(0, rows), True)]
        assert work.disjoint


def test_squares_that_form_no_staircase_are_not_merged() -> None:
    documents = Mask.causal() & Mask.documents([8, 8])
    work = worklist(documents, (range(16),), (range(16),))
    assert work.rectangles is not None
    assert [(r.q.start, r.k.start, r.causal) for r in work.rectangles] == [(0, 0, True), (8, 8, True)]


def test_fully_visible_neighbouring_ranges_are_one_span() -> None:
    held = Layout.contiguous(64, 4).ranges
    work = worklist(Mask.causal(), held[3], held[0] + held[1] + held[2] + held[3], exact_positions=True)
    assert work.by_query.spans.tolist() == [[0, 64, 0, 1, -UNBOUNDED, 0]]


def test_documents_of_one_device_are_disjoint_rectangles() -> None:
    whole = (range(12),)
    work = worklist(Mask.causal() & Mask.documents([4, 3, 5]), whole, whole)
    assert work.disjoint
    assert work.rectangles is not None
    assert [(r.q, r.k, r.causal) for r in work.rectangles] == [
        (slice(0, 4), slice(0, 4), True),
        (slice(4, 7), slice(4, 7), True),
        (slice(7, 12), slice(7, 12), True),
    ]


@pytest.mark.parametrize(
    ("mask", "q", "k"),
    [
        (Mask.window(8, 0), range(100, 110), range(50)),
        (Mask.window(8, 0), range(10), range(50, 60)),
        (Mask.window(None, 0), range(10), range(10, 20)),
        (Mask.documents([50, 60]), range(100, 110), range(50)),
        (Mask.first(50), range(10), range(50, 60)),
        (Mask.documents([10], pad=True), range(10, 20), range(20)),
        (Mask.window(1, 1), range(0, 64, 4), range(2, 64, 4)),
        (Mask.window(0, 0), range(0, 64, 2), range(1, 64, 2)),
        (Mask.window(2, 0), range(0, 64, 8), range(3, 64, 8)),
    ],
)
def test_rows_that_see_nothing_have_no_span(mask: Mask, q: range, k: range) -> None:
    for exact in (False, True):
        work = worklist(mask, (q,), (k,), exact)
        assert len(work.by_query.spans) == len(work.by_key.spans) == work.pairs == 0
        assert work.by_query.segments[:, 2].sum() == len(q)
        assert work.by_key.segments[:, 2].sum() == len(k)
        assert work.rectangles == ()
        assert work.disjoint


def test_striped_window_has_a_span_only_if_it_reaches_the_stripe() -> None:
    for left in range(9):
        pairs = worklist(Mask.window(left, 0), (range(3, 64, 8),), (range(0, 64, 8),)).pairs
        assert pairs == (8 if left >= 3 else 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("own_sinks", [False, True])
def test_number_of_table_entries_is_bounded_by_documents_times_ranges(layout: str, own_sinks: bool) -> None:
    """Tables of one rank against all keys have O(documents x ranges) entries, and far fewer for contiguous ranges."""
    tokens, world, count = 65536, 64, 256
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.choice(np.arange(1, tokens), count - 1, replace=False))
    mask = Mask.documents(np.diff([0, *cuts, tokens])) & Mask.causal()
    if own_sinks:
        mask = mask & (Mask.window(64, 0) | Mask.first(4, per_document=True))
    held = LAYOUTS[layout](tokens, world).ranges
    q, k = held[20], tuple(r for ranges in held for r in ranges)
    work = Worklist(mask, q, k, False)
    num_documents = len(np.unique(np.searchsorted(cuts, expand(q), "right")))
    # a document overlaps one or two contiguous ranges of keys, but one stripe of every rank
    runs = len(k) if layout == "striped" else 2
    for table in (work.by_query, work.by_key):
        assert len(table.spans) <= (1 + own_sinks) * (num_documents + len(q)) * runs
    assert len(work.by_query) <= num_documents + len(q)
    assert len(work.by_key) <= 2 * (1 + own_sinks) * count * (len(k) if layout == "striped" else 1)


@pytest.mark.parametrize(
    "huge",
    [2**30 - 1, 2**30, 2**31, 2**62, sys.maxsize, 2**63, 2**70],
)
def test_huge_limits_do_not_overflow(huge: int) -> None:
    q, k = (range(2, 6),), (range(0, 8, 2),)
    for mask in (
        Mask.window(huge, 0),
        Mask.window(0, huge),
        Mask.window(huge, huge),
        Mask.first(huge),
        Mask.documents([3, 5]) & Mask.first(huge, per_document=True),
    ):
        check(mask, q, k)


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint8])
def test_limits_may_be_numpy_integers(dtype: Any) -> None:
    whole = (range(12),)
    for left, right in ((None, 3), (3, None), (3, 2)):
        limits = [None if n is None else dtype(n) for n in (left, right)]
        mask = Mask.window(*limits) | Mask.first(dtype(2))
        work = Worklist(mask, whole, whole, False)
        plain = Worklist(Mask.window(left, right) | Mask.first(2), whole, whole, False)
        assert work.by_query.spans.tolist() == plain.by_query.spans.tolist()
        assert work.by_key.spans.tolist() == plain.by_key.spans.tolist()


def staircase(count: int) -> Mask:
    """Return a union of `count` terms, none of which contains another."""
    mask = Mask.window(0, 0) & Mask.first(2 * count)
    for n in range(1, count):
        mask = mask | (Mask.window(n, 0) & Mask.first(2 * count - n))
    return mask


@pytest.mark.parametrize("count", [2, 20, 63, 64, 70])
def test_unions_of_many_terms_hold_every_visible_pair(count: int) -> None:
    mask = staircase(count)
    assert len(mask.terms) == count
    check(mask, (range(160),), (range(160),))


def test_ranges_that_run_backwards_are_refused() -> None:
    for bad in (range(3, -1, -1), range(-2, 2)):
        for q, k in (((bad,), (range(4),)), ((range(4),), (bad,))):
            work = Worklist(Mask.causal(), q, k, False)
            for side in ("by_query", "by_key"):
                with pytest.raises(ValueError, match="runs backwards"):
                    getattr(work, side)


@pytest.mark.parametrize("start", [2**30, 2**31])
def test_positions_beyond_the_limit_are_refused(start: int) -> None:
    far = (range(start, start + 4),)
    with pytest.raises(ValueError, match="ends beyond"):
        _ = Worklist(Mask.causal(), far, far, False).by_query


@pytest.mark.parametrize(
    ("mask", "q", "k", "full"),
    [
        (Mask.full(), (range(3, 9), range(20, 30, 2)), (range(7),), True),
        (Mask.causal(), (range(40, 50), range(60, 64)), (range(8), range(16, 41)), True),
        (Mask.causal(), (range(40, 50),), (range(42),), False),
        (Mask.causal() & Mask.window(30, 0), (range(40, 50),), (range(19, 41),), True),
        (Mask.causal() & Mask.window(29, 0), (range(40, 50),), (range(19, 41),), False),
        (Mask.causal() & (Mask.window(3, 0) | Mask.first(8)), (range(40, 50),), (range(8),), True),
        (Mask.causal() & (Mask.window(3, 0) | Mask.first(7)), (range(40, 50),), (range(8),), False),
        (Mask.documents([20, 44]), (range(30, 50),), (range(20, 64),), True),
        (Mask.documents([20, 44]), (range(30, 50),), (range(19, 64),), False),
        (Mask.documents([20, 44]), (range(19, 50),), (range(20, 64),), False),
        (Mask.documents([20, 24], pad=True), (range(30, 44),), (range(20, 44),), True),
        (Mask.documents([20, 24], pad=True), (range(30, 45),), (range(20, 44),), False),
    ],
    ids=str,
)
def test_fully_visible_rows_share_one_worklist(mask, q, k, full):
    q_rows, k_rows = sum(map(len, q)), sum(map(len, k))
    found, plain = worklist(mask, q, k), Worklist(mask, q, k, False)
    assert (found is worklist(Mask.full(), (range(q_rows),), (range(k_rows),))) == full
    assert found.pairs == plain.pairs
    for a, b in ((found.by_query, plain.by_query), (found.by_key, plain.by_key)):
        # positions of fully visible rows mean nothing
        assert (a.segments[:, :3] == b.segments[:, :3]).all()
        assert (a.indptr == b.indptr).all()
        assert (a.spans[:, [0, 1, 4, 5]] == b.spans[:, [0, 1, 4, 5]]).all()
    assert not full or worklist(mask, q, k, exact_positions=True) is not found


def test_steps_of_a_ring_that_see_everything_need_one_table():
    layout = Layout.contiguous(64 * 8, 64)
    own, *others = (worklist(Mask.causal(), layout.ranges[63], layout.ranges[c]) for c in (63, *range(63)))
    assert len({id(work) for work in others}) == 1
    assert own is not others[0]
