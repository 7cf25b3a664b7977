"""Masks against a definition written out here, pair by pair, that shares no code with them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshflash.core.lengths import UNBOUNDED
from meshflash.core.mask import Mask, Term

# A mask as nested tuples: ("causal",), ("window", left, right), ("first", n), ("first_of_own", n),
# ("documents", which), ("and", a, b), ("or", a, b).
Expression = tuple[Any, ...]


class DocumentSet:
    """Document lengths as a user would write them, and as plain lists for each batch row."""

    def __init__(self, q: Any, k: Any = None, pad: bool = False, rows: int | None = None) -> None:
        self.q, self.k, self.pad, self.rows = q, k, pad, rows

    def mask(self) -> Mask:
        return Mask.documents(self.q, k_lengths=self.k, pad=self.pad)

    def lengths(self, batch: int) -> tuple[list[int], list[int]]:
        k = self.q if self.k is None else self.k
        return (self.q, k) if self.rows is None else (self.q[batch], k[batch])

    def __repr__(self) -> str:
        return f"DocumentSet({self.q}, {self.k}, pad={self.pad}, rows={self.rows})"


def place(lengths: list[int], position: int) -> tuple[int, int] | None:
    """(document, place in it) of a position, or None in the padding."""
    end = 0
    for document, length in enumerate(lengths):
        start, end = end, end + length
        if start <= position < end:
            return document, position - start
    return None


def sees(e: Expression, i: int, j: int, batch: int, sets: Sequence[DocumentSet]) -> bool:
    """The definition of every mask, one pair at a time."""
    match e:
        case ("full",):
            return True
        case ("causal",):
            return j <= i
        case ("window", left, right):
            return bool((left is None or j >= i - left) and (right is None or j <= i + right))
        case ("first", n):
            return bool(j < n)
        case ("documents", which):
            q, k = sets[which].lengths(batch)
            mine, theirs = place(q, i), place(k, j)
            return mine is not None and theirs is not None and mine[0] == theirs[0]
        case ("first_of_own", n):
            q, k = sets[0].lengths(batch)
            mine, theirs = place(q, i), place(k, j)
            return mine is not None and theirs is not None and mine[0] == theirs[0] and bool(theirs[1] < n)
        case ("and", a, b):
            return sees(a, i, j, batch, sets) and sees(b, i, j, batch, sets)
        case ("or", a, b):
            return sees(a, i, j, batch, sets) or sees(b, i, j, batch, sets)
    raise AssertionError(e)


def build(e: Expression, sets: Sequence[DocumentSet]) -> Mask:
    match e:
        case ("full",):
            return Mask.full()
        case ("causal",):
            return Mask.causal()
        case ("window", left, right):
            return Mask.window(left, right)
        case ("first", n):
            return Mask.first(n)
        case ("documents", which):
            return sets[which].mask()
        case ("first_of_own", n):
            return Mask.first(n, per_document=True)
        case ("and", a, b):
            return build(a, sets) & build(b, sets)
        case ("or", a, b):
            return build(a, sets) | build(b, sets)
    raise AssertionError(e)


def assert_same(mask: Mask, e: Expression, q_tokens: int, k_tokens: int, sets: Sequence[DocumentSet]) -> None:
    for batch in range(next((s.rows for s in sets if s.rows is not None), 1)):
        want = [[sees(e, i, j, batch, sets) for j in range(k_tokens)] for i in range(q_tokens)]
        got = mask.visible(np.arange(q_tokens)[:, None], np.arange(k_tokens)[None, :], batch=batch)
        assert got.dtype == np.bool_
        assert got.shape == (q_tokens, k_tokens)
        assert got.tolist() == want


def leaf_names(e: Expression) -> set[str]:
    return leaf_names(e[1]) | leaf_names(e[2]) if e[0] in ("and", "or") else {e[0]}


def split(draw: st.DrawFn, total: int, count: int) -> list[int]:
    """`count` lengths that add up to `total`, zeros among them."""
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=count - 1, max_size=count - 1)))
    return [b - a for a, b in pairwise([0, *cuts, total])]


@st.composite
def document_sets(draw: st.DrawFn, q_tokens: int, k_tokens: int, rows: int) -> DocumentSet:
    pad = draw(st.booleans())
    apart = q_tokens != k_tokens or draw(st.booleans())
    count = draw(st.integers(1, 5))

    def side(tokens: int) -> list[int]:
        return split(draw, draw(st.integers(0, tokens)) if pad else tokens, count)

    if draw(st.booleans()):
        return DocumentSet(side(q_tokens), side(k_tokens) if apart else None, pad)
    q = [side(q_tokens) for _ in range(rows)]
    return DocumentSet(q, [side(k_tokens) for _ in range(rows)] if apart else None, pad, rows)


limits = st.none() | st.integers(0, 12)


def expressions(sets: int) -> st.SearchStrategy[Expression]:
    leaves = [
        st.just(("full",)),
        st.just(("causal",)),
        st.tuples(st.just("window"), limits, limits),
        st.tuples(st.just("first"), st.integers(1, 12)),
        st.tuples(st.just("documents"), st.integers(0, sets - 1)),
    ]
    if sets == 1:
        leaves.append(st.tuples(st.just("first_of_own"), st.integers(1, 6)))
    return st.recursive(st.one_of(leaves), lambda e: st.tuples(st.sampled_from(["and", "or"]), e, e), max_leaves=7)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Expression, int, int, list[DocumentSet]]:
    q_tokens = draw(st.integers(0, 20))
    k_tokens = draw(st.integers(0, 20) | st.just(q_tokens))
    rows = draw(st.integers(1, 3))
    sets = draw(st.lists(document_sets(q_tokens, k_tokens, rows), min_size=1, max_size=2))
    e = draw(expressions(len(sets)))
    if "first_of_own" in leaf_names(e) and "documents" not in leaf_names(e):
        e = (draw(st.sampled_from(["and", "or"])), ("documents", 0), e)
    return e, q_tokens, k_tokens, sets


@given(problems())
@settings(max_examples=250, deadline=None)
def test_any_expression_follows_the_definition(
    problem: tuple[Expression, int, int, list[DocumentSet]],
) -> None:
    e, q_tokens, k_tokens, sets = problem
    mask = build(e, sets)
    assert_same(mask, e, q_tokens, k_tokens, sets)
    mask.check(q_tokens, k_tokens, mask.batch_rows or 1)

    text, arrays = mask.pack()
    again = Mask.unpack(text, arrays)
    assert again == mask
    assert hash(again) == hash(mask)
    assert repr(again) == repr(mask)
    assert_same(again, e, q_tokens, k_tokens, sets)


@given(problems())
@settings(max_examples=150, deadline=None)
def test_terms_are_a_union_of_bands_within_documents(
    problem: tuple[Expression, int, int, list[DocumentSet]],
) -> None:
    e, q_tokens, k_tokens, sets = problem
    mask = build(e, sets)
    i, j = np.arange(q_tokens)[:, None], np.arange(k_tokens)[None, :]
    for batch in range(mask.batch_rows or 1):
        seen = np.zeros((q_tokens, k_tokens), np.bool_)
        for term in mask.terms:
            shown = (term.lo <= j - i) & (j - i <= term.hi) & (j < term.first)
            for documents in term.documents:
                shown &= documents.visible(i, j, batch=batch)
            if term.first_in_document < UNBOUNDED:
                own = Mask.first(term.first_in_document, per_document=True) & term.documents[0]
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
def test_primitives(make: Callable[[], Mask], e: Expression, text: str) -> None:
    mask = make()
    assert_same(mask, e, 12, 9, [])
    assert repr(mask) == text
    assert mask == make()
    assert mask.batch_rows is None
    assert mask.documents_node is None
    mask.check(12, 9, batch=5)


DOCUMENT_SETS = [
    DocumentSet([4, 3, 5]),
    DocumentSet([12]),
    DocumentSet([0, 4, 0, 0, 8, 0]),
    DocumentSet([4, 3], pad=True),
    DocumentSet([], pad=True),
    DocumentSet([0, 0], pad=True),
    DocumentSet([4, 3, 5], [1, 9, 2]),
    DocumentSet([4, 0, 8], [0, 9, 3]),
    DocumentSet([4, 3], [5, 1], pad=True),
    DocumentSet([[4, 8], [7, 5]], rows=2),
    DocumentSet([[0, 12, 0], [6, 0, 6]], rows=2),
    DocumentSet([[1, 2, 3], [0, 0, 9]], pad=True, rows=2),
    DocumentSet([[4, 8], [7, 5]], [[12, 0], [0, 12]], rows=2),
]


@pytest.mark.parametrize("documents", DOCUMENT_SETS, ids=str)
def test_documents(documents: DocumentSet) -> None:
    mask = documents.mask()
    assert mask.batch_rows == documents.rows
    assert_same(mask, ("documents", 0), 12, 12, [documents])
    mask.check(12, 12, batch=documents.rows or 7)


@pytest.mark.parametrize("documents", DOCUMENT_SETS, ids=str)
@pytest.mark.parametrize("n", [1, 3, 50])
def test_first_of_each_document(documents: DocumentSet, n: int) -> None:
    own: Expression = ("first_of_own", n)
    for e in (
        ("and", ("documents", 0), own),
        ("or", ("and", ("causal",), ("documents", 0)), own),
        ("and", ("documents", 0), ("or", ("window", 2, 0), own)),
    ):
        assert_same(build(e, [documents]), e, 12, 12, [documents])


def test_rows_may_have_different_numbers_of_documents() -> None:
    ragged = Mask.documents([[2, 3], [5], [1, 1, 3]])
    assert ragged.batch_rows == 3
    assert ragged == Mask.documents([[2, 3, 0], [5, 0, 0], [1, 1, 3]])
    assert_same(ragged, ("documents", 0), 5, 5, [DocumentSet([[2, 3], [5], [1, 1, 3]], rows=3)])


def test_the_masks_people_use() -> None:
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
def test_numpy_integers_are_integers(dtype: Any) -> None:
    assert Mask.window(dtype(3), dtype(2)) == Mask.window(3, 2)
    assert hash(Mask.window(dtype(3), dtype(2))) == hash(Mask.window(3, 2))
    assert repr(Mask.window(dtype(3), dtype(2))) == "window(3, 2)"
    assert Mask.first(dtype(3)) == Mask.first(3)
    mask = Mask.window(dtype(3), dtype(2)) & Mask.first(dtype(4))
    assert mask.visible(5, [1, 2, 3, 4]).tolist() == [False, True, True, False]
    assert Mask.unpack(*mask.pack()) == mask


@pytest.mark.parametrize("huge", [2**30, 2**31, sys.maxsize, 2**63, 2**70])
def test_a_huge_limit_is_no_limit(huge: int) -> None:
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


def test_repr_of_documents() -> None:
    assert repr(Mask.documents([2, 3])) == "documents(2 lengths)"
    assert repr(Mask.documents([[2, 3], [5]])) == "documents(2 x 2 lengths)"
    assert repr(Mask.documents([2, 3], pad=True)) == "documents(2 lengths, pad=True)"
    own = Mask.documents([2, 3]) & Mask.first(1, per_document=True)
    assert repr(own) == "documents(2 lengths) & first(1, per_document=True)"


def test_equal_masks_are_one_key() -> None:
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


def test_documents_without_tokens_make_no_difference() -> None:
    assert Mask.documents([0, 2, 0, 3]) == Mask.documents([2, 3, 0])
    assert hash(Mask.documents([0, 2, 0, 3])) == hash(Mask.documents([2, 3, 0]))
    assert Mask.documents([2, 0], k_lengths=[3, 0]) == Mask.documents([2], k_lengths=[3])
    assert Mask.documents([2, 0], k_lengths=[3, 1]) != Mask.documents([2], k_lengths=[3])
    assert Mask.documents([2, 0, 3], k_lengths=[1, 2, 2]) != Mask.documents([2, 3], k_lengths=[1, 2])


def test_keys_with_documents_of_their_own_fit_other_lengths() -> None:
    shared, apart = Mask.documents([2, 3]), Mask.documents([2, 3], k_lengths=[2, 3])
    assert shared != apart
    shared.check(3, 5, batch=1)
    with pytest.raises(ValueError, match="5 tokens in the documents, 3 in the sequence"):
        apart.check(3, 5, batch=1)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.uint32])
def test_equality_looks_through_the_type_of_the_lengths(dtype: Any) -> None:
    lengths = np.array([2, 3], dtype=dtype)
    assert Mask.documents(lengths) == Mask.documents([2, 3]) == Mask.documents((2, 3))
    assert Mask.documents(n for n in lengths) == Mask.documents([2, 3])
    assert Mask.documents([np.array(n, dtype=dtype) for n in (2, 3)]) == Mask.documents([2, 3])
    assert Mask.documents([lengths, lengths]) == Mask.documents([[2, 3], [2, 3]])


def test_a_mask_does_not_follow_changes_to_what_it_was_made_from() -> None:
    lengths, cuts = np.array([2, 3]), np.array([0, 2, 5])
    a, b = Mask.documents(lengths), Mask.from_cu_seqlens(cuts)
    lengths[:] = cuts[1:] = 9
    assert a == b == Mask.documents([2, 3])


class Tensor:
    """What a mask may ask of a framework's tensor, counting how often it is read."""

    device = "somewhere"

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)
        self.reads: list[int] = []

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def _derived(self, values: Any) -> Tensor:
        out = Tensor(values)
        out.reads = self.reads
        return out

    def __getitem__(self, index: Any) -> Tensor:
        return self._derived(self.values[index])

    def __setitem__(self, index: Any, other: Tensor) -> None:
        self.values[index] = other.values

    def __add__(self, other: Tensor | int) -> Tensor:
        return self._derived(self.values + (other.values if isinstance(other, Tensor) else other))

    def __sub__(self, other: Tensor) -> Tensor:
        return self._derived(self.values - other.values)

    def cpu(self) -> Tensor:
        self.reads.append(1)
        return self

    def numpy(self) -> Any:
        return self.values


CUTS = pytest.mark.parametrize("make", [list, tuple, np.array, Tensor], ids=["list", "tuple", "array", "tensor"])


@CUTS
def test_from_cu_seqlens(make: Callable[[list[int]], Any]) -> None:
    mask = Mask.from_cu_seqlens(make([0, 2, 2, 5]))
    assert_same(mask, ("documents", 0), 5, 5, [DocumentSet([2, 0, 3])])
    mask.check(5, 5, batch=3)
    assert mask.positions_in_document(5).tolist() == [0, 1, 0, 1, 2]
    assert not Mask.from_cu_seqlens(make([0])).visible(0, 0)


@CUTS
def test_from_cu_seqlens_with_keys_of_their_own(make: Callable[[list[int]], Any]) -> None:
    mask = Mask.from_cu_seqlens(make([0, 2, 5]), make([0, 4, 6]))
    assert_same(mask, ("documents", 0), 5, 6, [DocumentSet([2, 3], [4, 2])])
    mask.check(5, 6, batch=1)
    text, arrays = mask.pack()
    assert Mask.unpack(text, arrays) == mask


def test_from_cu_seqlens_makes_documents() -> None:
    for cuts in ([0, 2, 2, 5], np.array([0, 2, 2, 5])):
        assert Mask.from_cu_seqlens(cuts) == Mask.documents([2, 0, 3])
    assert Mask.from_cu_seqlens([0]) == Mask.documents([])
    assert Mask.from_cu_seqlens([0, 2, 5], [0, 4, 6]) == Mask.documents([2, 3], k_lengths=[4, 2])


def test_a_tensor_makes_the_same_documents_as_a_list() -> None:
    assert Mask.from_cu_seqlens(Tensor([0, 2, 5])) == Mask.from_cu_seqlens([0, 2, 5])


def test_cumulative_lengths_of_queries_and_keys_may_be_of_two_kinds() -> None:
    mask = Mask.from_cu_seqlens(Tensor([0, 2, 5]), [0, 4, 6])
    assert_same(mask, ("documents", 0), 5, 6, [DocumentSet([2, 3], [4, 2])])


def test_a_tensor_is_read_once_and_not_before_it_is_used() -> None:
    cuts = Tensor([0, 2, 5])
    mask = Mask.causal() & Mask.from_cu_seqlens(cuts)
    assert repr(mask).startswith("causal & documents(")
    again = Mask.unpack(*mask.pack())
    assert cuts.reads == []
    assert mask.visible(3, [1, 2]).tolist() == [False, True]
    mask.check(5, 5, batch=1)
    assert mask in {mask}
    assert len(cuts.reads) == 1
    assert again == mask


def test_documents_of_a_tensor() -> None:
    shared, rows = Mask.documents(Tensor([2, 3])), Mask.documents(Tensor([[2, 3], [5, 0]]))
    assert (shared.batch_rows, rows.batch_rows) == (None, 2)
    assert shared == Mask.documents([2, 3])
    assert rows == Mask.documents([[2, 3], [5]])
    assert Mask.documents(Tensor([2, 3]), k_lengths=[1, 4]) == Mask.documents([2, 3], k_lengths=[1, 4])


def test_positions_in_document() -> None:
    assert Mask.causal().positions_in_document(4).tolist() == [0, 1, 2, 3]
    mask = Mask.causal() & (Mask.documents([2, 0, 3]) | Mask.first(1, per_document=True))
    assert mask.positions_in_document(5).tolist() == [0, 1, 0, 1, 2]
    rows = Mask.documents([[2, 3], [5]])
    assert rows.positions_in_document(5).tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]
    padded = Mask.documents([2, 1], pad=True)
    assert padded.positions_in_document(5)[:3].tolist() == [0, 1, 0]
    twice = Mask.documents([2, 3]) & Mask.documents([2, 3])
    assert twice.positions_in_document(5).tolist() == [0, 1, 0, 1, 2]
    assert Mask.documents([]).positions_in_document(0).tolist() == []


@given(st.data(), st.integers(0, 20), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_positions_in_document_follow_the_definition(data: st.DataObject, tokens: int, count: int) -> None:
    lengths = data.draw(st.composite(split)(tokens, count))
    found = Mask.documents(lengths).positions_in_document(tokens)
    assert found.tolist() == [(place(lengths, p) or (0, -1))[1] for p in range(tokens)]


def test_terms_absorb_what_they_contain() -> None:
    documents = Mask.documents([2, 3])
    assert Mask.full().terms == (Term(),)
    assert Mask.causal().terms == (Term(hi=0),)
    assert (Mask.causal() | Mask.full()).terms == (Term(),)
    assert (Mask.window(2, 0) | Mask.causal()).terms == (Term(hi=0),)
    assert (Mask.causal() | Mask.window(2, 0)).terms == (Term(hi=0),)
    assert (Mask.first(2) | Mask.first(5)).terms == (Term(first=5),)
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
def test_what_cannot_be_a_mask_is_refused(make: Callable[[], Mask], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([2, -3], r"documents\(lengths\): lengths must be >= 0, got -3"),
        ([2.0, 3.0], r"documents\(lengths\): expected a list of integers"),
        (5, r"documents\(lengths\): expected a list of integers"),
        ([[[5]]], r"documents\(lengths\): expected a list of integers"),
    ],
)
def test_a_tensor_that_cannot_be_lengths_is_refused_when_used(lengths: Any, message: str) -> None:
    mask = Mask.documents(Tensor(lengths))
    with pytest.raises(ValueError, match=message):
        mask.check(5, 5, batch=1)


def test_a_decreasing_tensor_of_cumulative_lengths_is_refused_when_used() -> None:
    mask = Mask.from_cu_seqlens(Tensor([0, 5, 3]))
    with pytest.raises(ValueError, match="lengths must be >= 0, got -2"):
        mask.check(3, 3, batch=1)


@pytest.mark.parametrize("tokens", [3, 5])
def test_a_tensor_of_cumulative_lengths_starts_at_0(tokens: int) -> None:
    mask = Mask.from_cu_seqlens(Tensor([2, 5]))
    with pytest.raises(ValueError, match=r"from_cu_seqlens\(cu_seqlens\): expected \[0, n1"):
        mask.check(tokens, tokens, batch=1)


def test_a_tensor_of_cumulative_lengths_has_one_dimension() -> None:
    with pytest.raises(ValueError, match=r"from_cu_seqlens"):
        Mask.from_cu_seqlens(Tensor([[0, 2], [0, 5]]))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32])
def test_unsigned_cumulative_lengths_may_not_decrease(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens\): lengths must be >= 0"):
        Mask.from_cu_seqlens(np.array([0, 200, 100], dtype=dtype))


@pytest.mark.parametrize(
    "lengths",
    [5, None, np.int64(5), np.array(5), [[1, 2], 3]],
    ids=["number", "None", "numpy number", "array of no dimension", "mixed"],
)
def test_what_is_no_list_of_lengths_is_refused(lengths: Any) -> None:
    with pytest.raises(ValueError, match=r"documents\(lengths\): expected a list"):
        Mask.documents(lengths)


def test_lengths_beyond_any_sequence_do_not_wrap_around() -> None:
    with pytest.raises(ValueError, match=r"documents\(lengths\)"):
        Mask.documents([2**62] * 4 + [8]).check(8, 8, batch=1)


@pytest.mark.parametrize("k_lengths", [[5], [[2, 3]], [1, 2, 2]])
def test_keys_need_as_many_documents_as_queries(k_lengths: Any) -> None:
    with pytest.raises(ValueError, match=r"queries and keys need the same number of documents"):
        Mask.documents([2, 3], k_lengths=k_lengths).check(5, 5, batch=1)


@pytest.mark.parametrize("other", [3, None, "causal", [True], np.array([True])])
def test_a_mask_combines_with_a_mask_only(other: Any) -> None:
    name = type(other).__name__
    with pytest.raises(TypeError, match=f"a mask combines with a mask, not with {name}"):
        Mask.causal() & other
    with pytest.raises(TypeError, match=f"a mask combines with a mask, not with {name}"):
        Mask.causal() | other
    with pytest.raises(TypeError):
        other & Mask.causal()


def total(name: str, documents: int, tokens: int) -> str:
    return rf"documents\({name}\): {documents} tokens in the documents, {tokens} in the sequence"


def test_documents_must_add_up_to_the_sequence() -> None:
    mask = Mask.causal() & Mask.documents([2, 3])
    mask.check(5, 5, batch=1)
    with pytest.raises(ValueError, match=total("lengths", 5, 6) + "; pad=True if the rest is padding"):
        mask.check(6, 6, batch=1)
    with pytest.raises(ValueError, match=total("lengths", 5, 4) + "$"):
        mask.check(4, 4, batch=1)
    with pytest.raises(ValueError, match=total("lengths", 4, 5)):
        Mask.documents([[5, 0], [2, 2]]).check(5, 5, batch=2)


def test_documents_of_queries_that_continue_a_sequence() -> None:
    mask = Mask.documents([2, 3])
    mask.check(2, 5, batch=1, q_offset=3)
    mask.check(3, 5, batch=1)
    with pytest.raises(ValueError, match=total("lengths", 5, 6)):
        mask.check(2, 5, batch=1, q_offset=4)


def test_padding_may_follow_the_documents_but_not_be_negative() -> None:
    mask = Mask.documents([[2, 3], [1]], pad=True)
    mask.check(5, 5, batch=2)
    mask.check(9, 9, batch=2)
    with pytest.raises(ValueError, match=total("lengths", 5, 4) + "$"):
        mask.check(4, 4, batch=2)


def test_documents_of_keys_must_add_up_too() -> None:
    mask = Mask.documents([2, 3], k_lengths=[4, 3])
    mask.check(5, 7, batch=1)
    with pytest.raises(ValueError, match=total("k_lengths", 7, 8)):
        mask.check(5, 8, batch=1)
    with pytest.raises(ValueError, match=total("lengths", 5, 6)):
        mask.check(6, 7, batch=1)
    with pytest.raises(ValueError, match=total("k_lengths", 7, 6)):
        Mask.documents([2, 3], k_lengths=[4, 3], pad=True).check(9, 6, batch=1)


def test_rows_of_documents_must_match_the_batch() -> None:
    mask = Mask.documents([[2, 3], [5]]) & Mask.causal()
    mask.check(5, 5, batch=2)
    with pytest.raises(ValueError, match="2 rows of documents for a batch of 3; give one list for all rows"):
        mask.check(5, 5, batch=3)


def test_shared_and_per_row_documents_combine() -> None:
    mask = Mask.documents([2, 3]) & Mask.documents([[1, 4], [4, 1]])
    assert mask.batch_rows == 2
    assert mask.documents_node is None
    sets = [DocumentSet([2, 3]), DocumentSet([[1, 4], [4, 1]], rows=2)]
    assert_same(mask, ("and", ("documents", 0), ("documents", 1)), 5, 5, sets)


def test_documents_of_different_batches_do_not_combine() -> None:
    mask = Mask.documents([[5], [5]]) & Mask.documents([[5], [5], [5]])
    with pytest.raises(ValueError, match=r"masks for \[2, 3\] batch rows cannot be combined"):
        mask.check(5, 5, batch=2)


def test_first_per_document_needs_one_set_of_documents() -> None:
    own = Mask.first(2, per_document=True)
    for mask, count in (
        (own, 0),
        (Mask.causal() | own, 0),
        (own & Mask.documents([2, 3]) & Mask.documents([1, 4]), 2),
        (own & Mask.documents([2, 3]) & Mask.documents([2, 3], pad=True), 2),
    ):
        with pytest.raises(ValueError, match=rf"exactly one documents\(...\), this one holds {count}"):
            mask.check(5, 5, batch=1)
        with pytest.raises(ValueError, match=r"first\(2, per_document=True\): the mask must hold"):
            mask.visible(0, 0)
        with pytest.raises(ValueError, match=r"the mask must hold exactly one documents"):
            _ = mask.terms
    twice = own & Mask.documents([2, 3]) & Mask.documents([2, 3])
    twice.check(5, 5, batch=1)


def test_positions_in_two_sets_of_documents_mean_nothing() -> None:
    with pytest.raises(ValueError, match="the mask holds more than one documents"):
        (Mask.documents([2, 3]) & Mask.documents([1, 4])).positions_in_document(5)


def test_a_mask_is_neither_true_nor_false() -> None:
    with pytest.raises(TypeError, match=r"combine masks with & and \|"):
        Mask.causal() and Mask.first(3)


@pytest.mark.parametrize("batch", [-1, 2])
def test_a_batch_row_that_is_not_there(batch: int) -> None:
    with pytest.raises(ValueError, match=rf"visible\(batch={batch}\): expected a row from 0 to 1"):
        Mask.documents([[2, 3], [5]]).visible(0, 0, batch=batch)


def test_positions_in_documents_that_do_not_add_up() -> None:
    with pytest.raises(ValueError, match=r"documents\(lengths\): 5 tokens in the documents, 10 in the sequence"):
        Mask.documents([2, 3]).positions_in_document(10)
    assert Mask.documents([2, 3], pad=True).positions_in_document(6).tolist() == [0, 1, 0, 1, 2, 0]


def test_ragged_rows_need_as_many_documents_for_the_keys() -> None:
    with pytest.raises(ValueError, match=r"documents\(k_lengths\): \[2, 2\] documents for \[2, 1\] in lengths"):
        Mask.documents([[2, 3], [5]], k_lengths=[[2, 3], [4, 1]])
