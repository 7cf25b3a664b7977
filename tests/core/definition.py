"""The definition of every mask, one pair at a time, which shares no code with `Mask`; tests compare the two."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from meshflash.core.mask import Mask

# A mask as nested tuples: ("causal",), ("window", left, right), ("first", n), ("first_of_own", n),
# ("documents", index), ("slices", ((batch or None, q_begin, q_end, k_begin, k_end, kind), ...), rows or None),
# ("and", a, b), ("or", a, b).
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


def locate(lengths: list[int], position: int) -> tuple[int, int] | None:
    """Return (document, offset in the document) of a position, or None in the padding."""
    end = 0
    for document, length in enumerate(lengths):
        start, end = end, end + length
        if start <= position < end:
            return document, position - start
    return None


def sees(e: Expression, i: int, j: int, batch: int, sets: Sequence[DocumentSet]) -> bool:
    """Return whether query i sees key j, by the definition of the mask expression."""
    match e:
        case ("full",):
            return True
        case ("causal",):
            return j <= i
        case ("window", left, right):
            return bool((left is None or j >= i - left) and (right is None or j <= i + right))
        case ("first", n):
            return bool(j < n)
        case ("documents", index):
            q, k = sets[index].lengths(batch)
            query, key = locate(q, i), locate(k, j)
            return query is not None and key is not None and query[0] == key[0]
        case ("first_of_own", n):
            q, k = sets[0].lengths(batch)
            query, key = locate(q, i), locate(k, j)
            return query is not None and key is not None and query[0] == key[0] and bool(key[1] < n)
        case ("slices", slices, _):
            return any(row in (None, batch) and sees_in_slice(i, j, *slice_) for row, *slice_ in slices)
        case ("and", a, b):
            return sees(a, i, j, batch, sets) and sees(b, i, j, batch, sets)
        case ("or", a, b):
            return sees(a, i, j, batch, sets) or sees(b, i, j, batch, sets)
    raise AssertionError(e)


def sees_in_slice(i: int, j: int, q_begin: int, q_end: int, k_begin: int, k_end: int, kind: str) -> bool:
    """Return whether a slice shows a pair: keys missing at the end for earlier queries, at the beginning for later."""
    if not (q_begin <= i < q_end and k_begin <= j < k_end):
        return False
    missing_at_end = q_end - 1 - i if kind in ("causal", "bi_causal") else 0
    missing_at_begin = i - q_begin if kind in ("inv_causal", "bi_causal") else 0
    return k_begin + missing_at_begin <= j < k_end - missing_at_end


def build_slices(slices: Sequence[Any], rows: int | None) -> Mask:
    """Return the mask of some slices."""
    lists = [[s[1:] for s in slices if s[0] == row] for row in (range(rows) if rows else [None])]
    columns = [
        [[pick(s) for s in one] for one in lists] for pick in (lambda s: s[:2], lambda s: s[2:4], lambda s: s[4])
    ]
    return Mask.slices(*(columns if rows else [column[0] for column in columns]))


@st.composite
def slice_expressions(draw: st.DrawFn, q_tokens: int, k_tokens: int, rows: int | None) -> Expression:
    """Draw some slices of a sequence, of any kind, which may be empty or overlap; for each batch row if `rows`."""

    def interval(tokens: int) -> tuple[int, int]:
        begin = draw(st.integers(0, tokens))
        return begin, draw(st.integers(begin, tokens))

    kinds = st.sampled_from(["full", "causal", "inv_causal", "bi_causal"])
    row = st.integers(0, rows - 1) if rows else st.none()
    count = draw(st.integers(1, 5))
    made = [(draw(row), *interval(q_tokens), *interval(k_tokens), draw(kinds)) for _ in range(count)]
    return "slices", tuple(made), rows


def build(e: Expression, sets: Sequence[DocumentSet]) -> Mask:
    """Return the mask of an expression."""
    match e:
        case ("full",):
            return Mask.full()
        case ("causal",):
            return Mask.causal()
        case ("window", left, right):
            return Mask.window(left, right)
        case ("first", n):
            return Mask.first(n)
        case ("documents", index):
            return sets[index].mask()
        case ("first_of_own", n):
            return Mask.first(n, per_document=True)
        case ("slices", slices, rows):
            return build_slices(slices, rows)
        case ("and", a, b):
            return build(a, sets) & build(b, sets)
        case ("or", a, b):
            return build(a, sets) | build(b, sets)
    raise AssertionError(e)


def assert_same(mask: Mask, e: Expression, q_tokens: int, k_tokens: int, sets: Sequence[DocumentSet]) -> None:
    """Check that a mask shows exactly the pairs of the expression's definition."""
    for batch in range(mask.batch_rows or 1):
        want = [[sees(e, i, j, batch, sets) for j in range(k_tokens)] for i in range(q_tokens)]
        got = mask.visible(np.arange(q_tokens)[:, None], np.arange(k_tokens)[None, :], batch=batch)
        assert got.dtype == np.bool_
        assert got.shape == (q_tokens, k_tokens)
        assert got.tolist() == want


def split(draw: st.DrawFn, total: int, count: int) -> list[int]:
    """Draw `count` lengths that add up to `total`; some may be zero."""
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=count - 1, max_size=count - 1)))
    return [b - a for a, b in pairwise([0, *cuts, total])]
