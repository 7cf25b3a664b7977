"""The lengths of packed documents, for queries and for keys: read late, checked, and compared by value.

Masks use them to say which tokens share a document. A length may be a tensor on a device: nothing here reads it before
its values are needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from meshflash.core.lengths import Array, from_cumulative, on_host

#: How errors name the lengths of queries and of keys. The key True: the caller gave cumulative lengths.
LENGTHS_ARGUMENTS = {
    False: ("documents(lengths)", "documents(k_lengths)"),
    True: ("from_cu_seqlens(cu_seqlens)", "from_cu_seqlens(cu_seqlens_k)"),
}


@dataclass(frozen=True, eq=False, repr=False)
class DocumentLengths:
    """The lengths of documents, `[documents]` or `[batch rows, documents]`; 0 is allowed. `Mask.documents` makes it.

    Attributes:
        lengths: The lengths of the queries' documents; with `cumulative`, their cumulative lengths, `[documents + 1]`.
        k_lengths: The lengths of the keys' documents in the same form, or None if they are those of the queries.
        pad: Whether tokens after the last document are padding. Without it the documents must fill the sequence.
        cumulative: Whether both lengths are cumulative.
        was_cumulative: Whether the caller gave cumulative lengths. It stays set in a canonical mask, whose lengths
            are no longer cumulative, so that errors name the argument that the caller used.
    """

    lengths: Any
    k_lengths: Any
    pad: bool
    cumulative: bool = False
    was_cumulative: bool = False

    def __repr__(self) -> str:
        if self.cumulative:
            return f"documents({self.lengths.shape[0] - 1} lengths)"
        shape = " x ".join(str(n) for n in self.lengths.shape)
        return f"documents({shape} lengths{', pad=True' if self.pad else ''})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DocumentLengths) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def given_as_cu_seqlens(self) -> bool:
        """Whether the caller gave cumulative lengths."""
        return self.cumulative or self.was_cumulative

    @cached_property
    def rows(self) -> int | None:
        """The number of batch rows with documents of their own, or None."""
        return int(self.lengths.shape[0]) if len(self.lengths.shape) == 2 else None

    @cached_property
    def nonempty(self) -> tuple[Array, Array]:
        """The lengths of queries and keys, without documents that are empty for both. Rows of a batch keep them."""
        q, k = self._q, self._k
        # Empty documents change nothing, so equal masks must not differ by them. Rows of a batch need them: they pad
        # a row with fewer documents to the length of the others.
        if self.rows is None:
            some = (q > 0) | (k > 0)
            q, k = q[some], k[some]
        return q, k

    def q_cuts(self, batch: int) -> Array:
        """Return the first position of each document of the queries, and the end of the last one.

        Args:
            batch: The batch row, for documents of each row.
        """
        cuts: Array = self._cuts[0][batch if self.rows is not None else 0]
        return cuts

    def k_cuts(self, batch: int) -> Array:
        """Return the first position of each document of the keys, and the end of the last one.

        Args:
            batch: The batch row, for documents of each row.
        """
        cuts: Array = self._cuts[1][batch if self.rows is not None else 0]
        return cuts

    def check_lengths(self, q_tokens: int, k_tokens: int, q_offset: int) -> None:
        """Raise ValueError unless the documents add up to the sequence.

        Args:
            q_tokens: The number of queries.
            k_tokens: The number of keys.
            q_offset: The position of the first query.
        """
        q_end = q_offset + q_tokens
        if self.k_lengths is None:
            self.check_side(0, max(q_end, k_tokens))
        else:
            self.check_side(0, q_end)
            self.check_side(1, k_tokens)

    def check_side(self, side: int, tokens: int) -> None:
        """Raise ValueError unless the documents of one side add up to the sequence.

        Args:
            side: 0 for the queries, 1 for the keys.
            tokens: The number of tokens of that side.
        """
        totals = np.atleast_2d(self._k if side else self._q).sum(axis=1)
        wrong = totals > tokens if self.pad else totals != tokens
        if wrong.any():
            total = int(totals[np.argmax(wrong)])
            hint = "" if total > tokens or self.given_as_cu_seqlens else "; pad=True if the rest is padding"
            name = LENGTHS_ARGUMENTS[self.given_as_cu_seqlens][side]
            raise ValueError(f"{name}: {total} tokens in the documents, {tokens} in the sequence{hint}")

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        q, k = self.nonempty
        return self.pad, self.k_lengths is None, q.shape, q.tobytes(), k.tobytes()

    @cached_property
    def _q(self) -> Array:
        return self._on_host(self.lengths, 0)

    @cached_property
    def _k(self) -> Array:
        if self.k_lengths is None:
            return self._q
        k = self._on_host(self.k_lengths, 1)
        if k.shape != self._q.shape:
            raise ValueError(
                f"{LENGTHS_ARGUMENTS[self.given_as_cu_seqlens][1]}: shape {k.shape} for lengths of shape "
                f"{self._q.shape}; queries and keys need the same number of documents"
            )
        return k

    @cached_property
    def _cuts(self) -> tuple[Array, Array]:
        def cuts(lengths: Array) -> Array:
            ends = np.cumsum(np.atleast_2d(lengths), axis=1)
            return np.concatenate([np.zeros((len(ends), 1), np.int64), ends], axis=1)

        return cuts(self._q), cuts(self._k)

    def _on_host(self, lengths: Any, side: int) -> Array:
        name = LENGTHS_ARGUMENTS[self.given_as_cu_seqlens][side]
        return from_cumulative(lengths, name) if self.cumulative else on_host(lengths, name)
