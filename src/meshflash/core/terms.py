"""Terms: every mask is a union of terms, and tiles are built from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshflash.core.documents import DocumentLengths
from meshflash.core.lengths import UNBOUNDED

#: Terms beyond this many are not compared with each other: the time grows with the square of their number.
MAX_COMPARED = 256
#: The most pairs of terms of an intersection.
MAX_INTERSECTIONS = 1 << 18


@dataclass(frozen=True)
class Term:
    """One conjunction: `lo <= j - i <= hi`, the same document in each of `documents`, i in `queries` and j in `keys`.

    These are intervals of positions, `[begin, end)`. `first_in_document` limits j to the first keys of the document in
    `documents[0]`. `batch` is the only batch row that the term holds for, or None.
    """

    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED
    documents: tuple[DocumentLengths, ...] = ()
    queries: tuple[int, int] = (0, UNBOUNDED)
    keys: tuple[int, int] = (0, UNBOUNDED)
    first_in_document: int = UNBOUNDED
    batch: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no pair can be in this term."""
        return self.lo > self.hi or self.queries[0] >= self.queries[1] or self.keys[0] >= self.keys[1]

    def is_in(self, batch: int) -> bool:
        """Return whether the term holds for a batch row."""
        return self.batch is None or self.batch == batch

    def within(self, other: Term) -> bool:
        """Whether every pair of this term is a pair of the other."""
        return (
            other.lo <= self.lo
            and self.hi <= other.hi
            and set(other.documents) <= set(self.documents)
            and _contains(other.queries, self.queries)
            and _contains(other.keys, self.keys)
            and self.first_in_document <= other.first_in_document
            and other.batch in (None, self.batch)
        )

    def __and__(self, other: Term) -> Term:
        other_row = None not in (self.batch, other.batch) and self.batch != other.batch
        return Term(
            max(self.lo, other.lo),
            min(self.hi, other.hi),
            tuple(dict.fromkeys(self.documents + other.documents)),
            (0, 0) if other_row else _common(self.queries, other.queries),
            _common(self.keys, other.keys),
            min(self.first_in_document, other.first_in_document),
            other.batch if self.batch is None else self.batch,
        )


def intersect(parts: Iterable[list[Term]]) -> list[Term]:
    """Return the intersection of several unions of terms, as a union of terms.

    Args:
        parts: The terms of each union.
    """
    found = [Term()]
    for terms in parts:
        if len(found) * len(terms) > MAX_INTERSECTIONS:
            raise ValueError(
                f"mask: an intersection of {len(found):,} and {len(terms):,} parts; expected at most "
                f"{MAX_INTERSECTIONS:,} pairs, so combine masks with fewer slices"
            )
        both = [left & right for left in found for right in terms]
        found = [term for term in both if not term.is_empty]
    return found


def without_contained(terms: Iterable[Term]) -> tuple[Term, ...]:
    """Return terms without empty ones and those that another one contains.

    If there are very many, contained ones stay, unless they are equal.

    Args:
        terms: The terms of a mask.
    """
    different = tuple(dict.fromkeys(term for term in terms if not term.is_empty))
    if len(different) > MAX_COMPARED:
        return different
    found: list[Term] = []
    for term in different:
        if any(term.within(other) for other in found):
            continue
        found = [other for other in found if not other.within(term)] + [term]
    return tuple(found)


def _contains(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _common(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return max(a[0], b[0]), min(a[1], b[1])
