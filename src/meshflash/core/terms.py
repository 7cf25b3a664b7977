"""Terms: every mask is a union of terms, and tiles are built from them."""

from __future__ import annotations

from dataclasses import dataclass

from meshflash.core.documents import DocumentLengths
from meshflash.core.lengths import UNBOUNDED


@dataclass(frozen=True)
class Term:
    """One conjunction: `lo <= j - i <= hi`, the same document in each of `documents`, and j among the first keys.

    `first` counts from the start of the sequence, `first_in_document` from the start of the
    document in `documents[0]`.
    """

    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED
    documents: tuple[DocumentLengths, ...] = ()
    first: int = UNBOUNDED
    first_in_document: int = UNBOUNDED

    def within(self, other: Term) -> bool:
        """Whether every pair of this term is a pair of the other."""
        return (
            other.lo <= self.lo
            and self.hi <= other.hi
            and set(other.documents) <= set(self.documents)
            and self.first <= other.first
            and self.first_in_document <= other.first_in_document
        )

    def __and__(self, other: Term) -> Term:
        return Term(
            max(self.lo, other.lo),
            min(self.hi, other.hi),
            tuple(dict.fromkeys(self.documents + other.documents)),
            min(self.first, other.first),
            min(self.first_in_document, other.first_in_document),
        )
