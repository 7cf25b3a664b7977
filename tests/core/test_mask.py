"""Masks and their combinations against the definition; documents are in `test_mask_documents.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.definition import DocumentSet, Expression, assert_same, build, slice_expressions, split
from meshflash.core.lengths import UNBOUNDED
from meshflash.core.mask import Mask
from meshflash.core.terms import Term


def leaf_names(e: Expression) -> set[str]:
    return leaf_names(e[1]) | leaf_names(e[2]) if e[0] in ("and", "or") else {e[0]}


@st.composite
def document_sets(draw: st.DrawFn, q_tokens: int, k_tokens: int, rows: int) -> DocumentSet:
    """Draw document lengths, shared or per batch row, padded or not."""
    pad = draw(st.booleans())
    separate_keys = q_tokens != k_tokens or draw(st.booleans())
    count = draw(st.integers(1, 5))

    def side(tokens: int) -> list[int]:
        return split(draw, draw(st.integers(0, tokens)) if pad else tokens, count)

    if draw(st.booleans()):
        return DocumentSet(side(q_tokens), side(k_tokens) if separate_keys else None, pad)
    q = [side(q_tokens) for _ in range(rows)]
    return DocumentSet(q, [side(k_tokens) for _ in range(rows)] if separate_keys else None, pad, rows)


limits = st.none() | st.integers(0, 12)


def expressions(sets: int, slices: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    """Return a strategy for nested mask expressions over the given number of document sets, and slices."""
    leaves = [
        st.just(("full",)),
        st.just(("causal",)),
        st.tuples(st.just("window"), limits, limits),
        st.tuples(st.just("first"), st.integers(1, 12)),
        st.tuples(st.just("documents"), st.integers(0, sets - 1)),
        slices,
    ]
    if sets == 1:
        leaves.append(st.tuples(st.just("first_of_own"), st.integers(1, 6)))
    return st.recursive(st.one_of(leaves), lambda e: st.tuples(st.sampled_from(["and", "or"]), e, e), max_leaves=7)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Expression, int, int, list[DocumentSet]]:
    """Draw a mask expression with the lengths and documents that it needs."""
    q_tokens = draw(st.integers(0, 20))
    k_tokens = draw(st.integers(0, 20) | st.just(q_tokens))
    rows = draw(st.integers(1, 3))
    sets = draw(st.lists(document_sets(q_tokens, k_tokens, rows), min_size=1, max_size=2))
    own_rows = rows if any(s.rows is not None for s in sets) else None
    slices = st.one_of([slice_expressions(q_tokens, k_tokens, n) for n in {None, own_rows}])
    e = draw(expressions(len(sets), slices))
    if "first_of_own" in leaf_names(e) and "documents" not in leaf_names(e):
        e = (draw(st.sampled_from(["and", "or"])), ("documents", 0), e)
    return e, q_tokens, k_tokens, sets


@given(problems())
@settings(max_examples=250, deadline=None)
def test_visible_of_random_expressions_matches_the_definition(
    problem: tuple[Expression, int, int, list[DocumentSet]],
) -> None:
    e, q_tokens, k_tokens, sets = problem
    mask = build(e, sets)
    assert_same(mask, e, q_tokens, k_tokens, sets)
    mask.check(q_tokens, k_tokens, mask.batch_rows or 1)

    text, arrays = mask.pack()
    unpacked = Mask.unpack(text, arrays)
    assert unpacked == mask
    assert hash(unpacked) == hash(mask)
    assert repr(unpacked) == repr(mask)
    assert_same(unpacked, e, q_tokens, k_tokens, sets)


@given(problems())
@settings(max_examples=150, deadline=None)
def test_terms_cover_the_same_pairs_as_visible(
    problem: tuple[Expression, int, int, list[DocumentSet]],
) -> None:
    e, q_tokens, k_tokens, sets = problem
    mask = build(e, sets)
    i, j = np.arange(q_tokens)[:, None], np.arange(k_tokens)[None, :]
    for batch in range(mask.batch_rows or 1):
        seen = np.zeros((q_tokens, k_tokens), np.bool_)
        for term in mask.terms:
            shown = (term.lo <= j - i) & (j - i <= term.hi) & (term.batch in (None, batch))
            for position, (begin, end) in ((i, term.queries), (j, term.keys)):
                shown &= (begin <= position) & (position < end)
            sets_of_term = [documents for documents in term.documents if isinstance(documents, Mask)]
            assert len(sets_of_term) == len(term.documents)
            for documents in sets_of_term:
                shown &= documents.visible(i, j, batch=batch)
            if term.first_in_document < UNBOUNDED:
                own = Mask.first(term.first_in_document, per_document=True) & sets_of_term[0]
                shown &= own.visible(i, j, batch=batch)
            seen |= shown
        assert (seen == mask.visible(i, j, batch=batch)).all()
    for n, term in enumerate(mask.terms):
        assert not any(term.within(other) for m, other in enumerate(mask.terms) if m != n)


PRIMITIVES: list[tuple[Callable[[], Mask], Expression, str]] = [
    (Mask.full, ("full",), "full"),
    (Mask.causal, ("causal",), "causal"),
    (lambda: Mask.window(3, 0), ("window", 3, 0), "window(3, 0)"),
    (lambda: Mask.window(0, 0), ("window", 0, 0), "window(0, 0)"),
    (lambda: Mask.window(2, 4), ("window", 2, 4), "window(2, 4)"),
    (lambda: Mask.window(None, 2), ("window", None, 2), "window(None, 2)"),
    (lambda: Mask.window(2, None), ("window", 2, None), "window(2, None)"),
    (lambda: Mask.window(None, 0), ("causal",), "causal"),
    (lambda: Mask.window(None, None), ("full",), "full"),
    (lambda: Mask.first(3), ("first", 3), "first(3)"),
    (lambda: Mask.first(99), ("full",), "first(99)"),
]


@pytest.mark.parametrize(("make", "e", "text"), PRIMITIVES, ids=[p[2] for p in PRIMITIVES])
def test_primitives_match_their_definitions(make: Callable[[], Mask], e: Expression, text: str) -> None:
    mask = make()
    assert_same(mask, e, 12, 9, [])
    assert repr(mask) == text
    assert mask == make()
    assert mask.batch_rows is None
    assert mask.documents_node is None
    mask.check(12, 9, batch=5)


def test_common_masks_match_their_definitions() -> None:
    prefix_lm = Mask.causal() | Mask.first(3)
    assert_same(prefix_lm, ("or", ("causal",), ("first", 3)), 8, 8, [])
    sinks = Mask.causal() & (Mask.window(2, 0) | Mask.first(1))
    assert_same(sinks, ("and", ("causal",), ("or", ("window", 2, 0), ("first", 1))), 8, 8, [])


def test_visible_takes_numbers_lists_and_arrays() -> None:
    mask = Mask.causal() & Mask.documents([2, 3])
    assert mask.visible(3, 2) is True
    assert mask.visible(3, 4) is False
    assert mask.visible(np.int32(3), np.int64(2)) is True
    assert mask.visible(3, [1, 2, 3, 4]).tolist() == [False, True, True, False]
    assert mask.visible([3, 4], [2, 2]).tolist() == [True, True]
    assert mask.visible([], 3).tolist() == []
    assert Mask.first(2).visible(np.zeros((3, 1), int), np.zeros((1, 4), int)).shape == (3, 4)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8, np.uint32, np.uint64])
def test_visible_takes_positions_of_any_integer_type(dtype: Any) -> None:
    mask = Mask.window(2, 1) | Mask.documents([3, 5])
    p = np.arange(8)
    small = p.astype(dtype)
    assert (mask.visible(small[:, None], small) == mask.visible(p[:, None], p)).all()


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint8, np.uint32])
def test_primitives_accept_numpy_integers(dtype: Any) -> None:
    assert Mask.window(dtype(3), dtype(2)) == Mask.window(3, 2)
    assert hash(Mask.window(dtype(3), dtype(2))) == hash(Mask.window(3, 2))
    assert repr(Mask.window(dtype(3), dtype(2))) == "window(3, 2)"
    assert Mask.first(dtype(3)) == Mask.first(3)
    mask = Mask.window(dtype(3), dtype(2)) & Mask.first(dtype(4))
    assert mask.visible(5, [1, 2, 3, 4]).tolist() == [False, True, True, False]
    assert Mask.unpack(*mask.pack()) == mask


@pytest.mark.parametrize("huge", [2**30, 2**31, sys.maxsize, 2**63, 2**70])
def test_huge_limits_do_not_overflow(huge: int) -> None:
    p = np.arange(4)
    assert Mask.window(huge, huge).visible(p[:, None], p).all()
    assert Mask.first(huge).visible(p[:, None], p).all()


def test_combinations_are_flat_and_keep_their_order() -> None:
    a, b, c = Mask.causal(), Mask.first(2), Mask.window(3, 0)
    assert (a & b) & c == a & (b & c)
    assert (a | b) | c == a | (b | c)
    assert a & b != a | b
    assert repr(a & (b | c)) == "causal & (first(2) | window(3, 0))"
    assert repr((a & b) | c) == "causal & first(2) | window(3, 0)"
    assert repr((a | b) & (b | c)) == "(causal | first(2)) & (first(2) | window(3, 0))"


SAME: list[tuple[Callable[[], Mask], Callable[[], Mask]]] = [
    (lambda: Mask.causal() & Mask.full(), Mask.causal),
    (lambda: Mask.full() & Mask.causal(), Mask.causal),
    (lambda: Mask.full() & Mask.full(), Mask.full),
    (lambda: Mask.full() | Mask.causal() | Mask.first(3), Mask.full),
    (lambda: Mask.causal() & Mask.first(3) | Mask.full(), Mask.full),
    (lambda: Mask.first(2, per_document=True) | Mask.full(), Mask.full),
    (lambda: Mask.causal() & Mask.causal(), Mask.causal),
    (lambda: Mask.causal() | Mask.causal(), Mask.causal),
    (lambda: Mask.causal() & Mask.window(3, 0), lambda: Mask.window(3, 0)),
    (lambda: Mask.window(3, 0) | Mask.causal(), Mask.causal),
    (lambda: Mask.window(2, 5) & Mask.window(3, 1), lambda: Mask.window(2, 1)),
    (lambda: Mask.window(None, 5) & Mask.window(3, None), lambda: Mask.window(3, 5)),
    (lambda: Mask.window(2, 0) | Mask.window(0, 2) | Mask.window(5, 5), lambda: Mask.window(5, 5)),
    (lambda: Mask.first(2) & Mask.first(5), lambda: Mask.first(2)),
    (lambda: Mask.first(2) | Mask.first(5), lambda: Mask.first(5)),
    (lambda: Mask.documents([2, 3]) & Mask.full(), lambda: Mask.documents([2, 3])),
    (
        lambda: (Mask.causal() | Mask.first(2)) & (Mask.causal() | Mask.first(2)),
        lambda: Mask.causal() | Mask.first(2),
    ),
]


@pytest.mark.parametrize(("written", "meant"), SAME, ids=[repr(meant()) for _, meant in SAME])
def test_redundant_operands_are_removed(written: Callable[[], Mask], meant: Callable[[], Mask]) -> None:
    assert written() == meant()
    assert hash(written()) == hash(meant())
    assert repr(written()) == repr(meant())
    assert written().pack()[0] == meant().pack()[0]


def test_equal_documents_are_merged() -> None:
    documents = Mask.documents([2, 3])
    assert documents & documents is documents
    assert documents | documents is documents
    assert documents & Mask.causal() & documents == documents & Mask.causal()


def test_documents_stay_in_an_expression_for_first_per_document() -> None:
    mask = (Mask.full() | Mask.documents([2, 3])) & Mask.first(1, per_document=True)
    mask.check(5, 5, batch=1)
    assert mask.visible(4, [0, 2, 3]).tolist() == [False, True, False]
    with pytest.raises(ValueError, match="5 tokens in the documents, 6 in the sequence"):
        (Mask.full() | Mask.documents([2, 3])).check(6, 6, batch=1)


@given(problems(), st.randoms())
@settings(max_examples=150, deadline=None)
def test_canonical_is_equal_for_equivalent_expressions(
    problem: tuple[Expression, int, int, list[DocumentSet]], random: Any
) -> None:
    def shuffled(e: Expression) -> Expression:
        if e[0] not in ("and", "or"):
            return random.choice([e, ("and", ("full",), e), ("or", e, e), ("and", e, e)])
        operands = [shuffled(e[1]), shuffled(e[2])]
        random.shuffle(operands)
        return e[0], *operands

    e, q_tokens, k_tokens, sets = problem
    mask, other = build(e, sets).canonical(), build(shuffled(e), sets).canonical()
    assert_same(mask, e, q_tokens, k_tokens, sets)
    mask.check(q_tokens, k_tokens, mask.batch_rows or 1)
    assert (mask, hash(mask), repr(mask), mask.pack()[0]) == (other, hash(other), repr(other), other.pack()[0])
    assert all(np.array_equal(a, b) for a, b in zip(mask.pack()[1], other.pack()[1], strict=True))


def test_errors_of_canonical_documents_name_the_callers_argument() -> None:
    mask = (Mask.from_cu_seqlens([0, 2, 2, 5]) & Mask.causal()).canonical()
    other = (Mask.causal() & Mask.documents([2, 3])).canonical()
    assert mask == other
    assert repr(mask) == repr(other)
    assert [x.tolist() for x in mask.pack()[1]] == [x.tolist() for x in other.pack()[1]] == [[2, 3]]
    with pytest.raises(ValueError, match=r"from_cu_seqlens\(cu_seqlens\): 5 tokens"):
        mask.check(6, 6, batch=1)


def test_equal_masks_have_equal_hashes() -> None:
    def masks() -> list[Mask]:
        return [
            Mask.full(),
            Mask.causal(),
            Mask.window(3, 0),
            Mask.window(0, 3),
            Mask.first(3),
            Mask.first(3, per_document=True),
            Mask.documents([2, 3]),
            Mask.documents([3, 2]),
            Mask.documents([2, 3], pad=True),
            Mask.documents([2, 3], k_lengths=[3, 2]),
            Mask.documents([[2, 3]]),
            Mask.documents([[2, 3], [2, 3]]),
            Mask.causal() & Mask.documents([2, 3]),
            Mask.causal() | Mask.documents([2, 3]),
        ]

    assert len(set(masks())) == len(masks())
    assert set(masks()) == set(masks())
    for n, a in enumerate(masks()):
        for m, b in enumerate(masks()):
            assert (a == b) == (n == m)
    other: Any = [2, 3]
    assert Mask.causal() != other
    assert Mask.documents([2, 3]) != other


def test_terms_drop_those_that_another_term_contains() -> None:
    documents = Mask.documents([2, 3])
    assert Mask.full().terms == (Term(),)
    assert Mask.causal().terms == (Term(hi=0),)
    assert (Mask.causal() | Mask.full()).terms == (Term(),)
    assert (Mask.window(2, 0) | Mask.causal()).terms == (Term(hi=0),)
    assert (Mask.causal() | Mask.window(2, 0)).terms == (Term(hi=0),)
    assert (Mask.first(2) | Mask.first(5)).terms == (Term(keys=(0, 5)),)
    assert (documents | (documents & Mask.causal())).terms == documents.terms
    assert (Mask.causal() | (documents & Mask.window(2, 0))).terms == (Term(hi=0),)
    assert (documents | (documents & Mask.documents([4, 1]))).terms == documents.terms
    assert (documents | (documents & Mask.first(1, per_document=True))).terms == documents.terms
    assert len((Mask.window(2, 0) | Mask.window(0, 2)).terms) == 2
    assert len((Mask.causal() & (Mask.window(2, 0) | Mask.first(1))).terms) == 2
    assert len((documents & Mask.documents([4, 1])).terms[0].documents) == 2


int8: Any = np.int8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mask.window(-1, 0), r"window\(left=-1\): expected a number >= 0, or None"),
        (lambda: Mask.window(0, -2), r"window\(right=-2\): expected a number >= 0, or None"),
        (lambda: Mask.window(int8(-1), 0), r"window\(left=-1\): expected a number >= 0"),
        (lambda: Mask.window(1.5, 0), r"window\(left\): expected an integer, got 1\.5"),  # type: ignore[arg-type]
        (lambda: Mask.window(0, "2"), r"window\(right\): expected an integer, got '2'"),  # type: ignore[arg-type]
        (lambda: Mask.window(True, 0), r"window\(left\): expected an integer, got True"),
        (lambda: Mask.first(0), r"first\(n=0\): expected n >= 1"),
        (lambda: Mask.first(-3), r"first\(n=-3\): expected n >= 1"),
        (lambda: Mask.first(2.0), r"first\(n\): expected an integer, got 2\.0"),  # type: ignore[arg-type]
        (lambda: Mask.first(None), r"first\(n\): expected an integer, got None"),  # type: ignore[arg-type]
        (lambda: Mask.documents([2, -3]), r"documents\(lengths\): lengths must be >= 0, got -3"),
        (lambda: Mask.documents([[2], [-1]]), r"documents\(lengths\): lengths must be >= 0, got -1"),
        (
            lambda: Mask.documents([2], k_lengths=[-1]),
            r"documents\(k_lengths\): lengths must be >= 0, got -1",
        ),
        (lambda: Mask.documents([2.0, 3.0]), r"documents\(lengths\): expected a list of integers"),
        (lambda: Mask.documents([True, False]), r"documents\(lengths\): expected a list of integers"),
        (lambda: Mask.documents("23"), r"documents\(lengths\): expected a list of integers"),
        (lambda: Mask.documents([[[2]], [[3]]]), r"documents\(lengths\): expected a list of integers"),
        (lambda: Mask.documents([2**70]), r"documents\(lengths\): expected a list of integers"),
        (lambda: Mask.from_cu_seqlens([2, 5]), r"\(cu_seqlens\): expected \[0, n1, "),
        (lambda: Mask.from_cu_seqlens([]), r"\(cu_seqlens\): expected \[0, n1, "),
        (lambda: Mask.from_cu_seqlens(3), r"\(cu_seqlens\): expected \[0, n1, "),
        (lambda: Mask.from_cu_seqlens([[0, 2], [0, 3]]), r"\(cu_seqlens\): expected \[0, n1, "),
        (lambda: Mask.from_cu_seqlens([0, 2], [1, 2]), r"\(cu_seqlens_k\): expected \[0, n1, "),
        (lambda: Mask.from_cu_seqlens([0, 5, 3]), r"cu_seqlens\): lengths must be >= 0, got -2"),
        (lambda: Mask.from_cu_seqlens([0, 2], [0, -1]), r"cu_seqlens_k\): lengths must be >= 0, got -1"),
        (lambda: Mask.from_cu_seqlens([0.0, 2.0]), r"cu_seqlens\): expected a list of integers"),
        (lambda: Mask.unpack('["moon"]', []), r"not a mask: \['moon'\]"),
    ],
)
def test_invalid_masks_are_refused(make: Callable[[], Mask], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("other", [3, None, "causal", [True], np.array([True])])
def test_masks_combine_only_with_masks(other: Any) -> None:
    name = type(other).__name__
    with pytest.raises(TypeError, match=f"a mask combines with a mask, not with {name}"):
        Mask.causal() & other
    with pytest.raises(TypeError, match=f"a mask combines with a mask, not with {name}"):
        Mask.causal() | other
    with pytest.raises(TypeError):
        other & Mask.causal()


def test_mask_has_no_truth_value() -> None:
    with pytest.raises(TypeError, match=r"combine masks with & and \|"):
        Mask.causal() and Mask.first(3)
