"""Slices: rectangles of queries and keys, whole or cut by diagonals, as one table.

Masks use them to say which pairs are visible where no rule on positions does: spans of images in a causal text, frames
of a video, holes. The kinds and their names are those of MagiAttention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from meshflash.core.lengths import UNBOUNDED, Array, BoolArray, is_tensor
from meshflash.core.terms import Term

#: The kinds of slices, by number. A causal diagonal ends at the last query and the last key, and hides the keys after
#: it. An inverse causal one begins at the first query and the first key, and hides the keys before it.
KINDS = ("full", "causal", "inv_causal", "bi_causal")
#: By the number of a kind: whether it has a causal diagonal, and an inverse causal one.
DIAGONALS = ((False, False), (True, False), (False, True), (True, True))
#: Columns of a table.
BATCH, Q_BEGIN, Q_END, K_BEGIN, K_END, KIND = range(6)


@dataclass(frozen=True, eq=False, repr=False)
class SliceTable:
    """Slices, a row for each. `Mask.slices` and `Mask.from_block_mask` make it.

    Attributes:
        table: The batch row (-1 is all of them), the ranges of queries and keys, and the number of the kind, int64.
        rows: The number of batch rows with slices of their own, or None if the slices are those of all rows.
        lengths: The numbers of queries and keys of a block mask, which serves no other lengths; None for others.
    """

    table: Array
    rows: int | None = None
    lengths: tuple[int, int] | None = None

    def __repr__(self) -> str:
        counts = np.bincount(self.table[:, KIND], minlength=len(KINDS)).tolist()
        kinds = ", ".join(f"{count} {kind}" for kind, count in zip(KINDS, counts, strict=True) if count)
        by_row = f" in {self.rows} rows" if self.rows is not None else ""
        return f"slices({kinds or 'none'}{by_row})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SliceTable) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def argument(self) -> str:
        """How errors name what the caller gave."""
        return "slices(q_ranges)" if self.lengths is None else "from_block_mask(block_mask)"

    @property
    def remedy(self) -> str:
        """What errors advise if the batch has another number of rows."""
        return (
            "give one list for all rows, or a list for each row"
            if self.lengths is None
            else "create it for this batch, or with B=None"
        )

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return -1 if self.rows is None else self.rows, self.lengths or (), self.table.tobytes()

    @cached_property
    def sorted_table(self) -> Array:
        """The slices in order, each once, without empty ones."""
        table = self.table
        some = (table[:, Q_BEGIN] < table[:, Q_END]) & (table[:, K_BEGIN] < table[:, K_END])
        return np.unique(table[some], axis=0)

    def terms_of_slices(self) -> Iterator[Term]:
        """Yield each slice as a term: its rectangle, and a band if diagonals cut it."""
        for batch, q_begin, q_end, k_begin, k_end, kind in self.sorted_table.tolist():
            causal, inv_causal = DIAGONALS[kind]
            yield Term(
                k_begin - q_begin if inv_causal else -UNBOUNDED,
                k_end - q_end if causal else UNBOUNDED,
                queries=(q_begin, q_end),
                keys=(k_begin, k_end),
                batch=None if batch < 0 else batch,
            )

    def sees(self, i: Array, j: Array, batch: int) -> BoolArray:
        """Return whether the queries at positions i see the keys at positions j; arrays broadcast.

        Args:
            i: The positions of the queries.
            j: The positions of the keys.
            batch: The batch row.
        """
        seen = np.zeros(np.broadcast_shapes(i.shape, j.shape), np.bool_)
        for row, q_begin, q_end, k_begin, k_end, kind in self.table.tolist():
            queries, keys = (q_begin <= i) & (i < q_end), (k_begin <= j) & (j < k_end)
            if row not in (-1, batch) or not queries.any() or not keys.any():
                continue
            inside = queries & keys
            causal, inv_causal = DIAGONALS[kind]
            if causal:
                inside = inside & (j - i <= k_end - q_end)
            if inv_causal:
                inside = inside & (j - i >= k_begin - q_begin)
            seen |= inside
        return seen

    def check_range(self, q_end: int, k_end: int) -> None:
        """Raise ValueError if a slice ends beyond the sequence, or a block mask is one of other lengths.

        Args:
            q_end: The end of the positions of queries.
            k_end: The end of the positions of keys.
        """
        if self.lengths not in (None, (q_end, k_end)):
            raise ValueError(
                f"from_block_mask(block_mask): a mask of {self.lengths[0]} queries and {self.lengths[1]} keys, "
                f"positions end at {q_end} and {k_end}; create it for these lengths"
            )
        for name, column, end in (("q_ranges", Q_END, q_end), ("k_ranges", K_END, k_end)):
            most = int(self.table[:, column].max(initial=0))
            if most > end:
                raise ValueError(f"slices({name}): a slice ends at {most}, the sequence at {end}")


def slice_table(q_ranges: Any, k_ranges: Any, kinds: Any) -> SliceTable:
    """Return the table of some slices, as `Mask.slices` takes them.

    Args:
        q_ranges: The ranges of queries, `[begin, end)`; a list of them, or a list for each batch row.
        k_ranges: The ranges of keys in the same form.
        kinds: The kind of all slices, or of each one in the same form.
    """
    q_ranges, k_ranges = _in_order(q_ranges, "q_ranges"), _in_order(k_ranges, "k_ranges")
    if isinstance(kinds, Set):
        raise _not_kinds(kinds)
    by_row = _has_rows(q_ranges)
    q_rows, k_rows = (_by_row(x, name, by_row) for x, name in ((q_ranges, "q_ranges"), (k_ranges, "k_ranges")))
    if len(q_rows) != len(k_rows):
        raise ValueError(f"slices(k_ranges): {len(k_rows)} batch rows, q_ranges has {len(q_rows)}")
    if not any(map(len, q_rows)):
        raise ValueError("slices(q_ranges): expected at least one range; without any, every key is hidden")
    kind_rows: Sequence[Any] = [[kinds] * len(q) for q in q_rows]
    if not isinstance(kinds, str):
        try:
            kind_rows = [list(row) for row in (kinds if by_row else [kinds])]
        except TypeError:
            raise _not_kinds(kinds) from None
    if len(kind_rows) != len(q_rows):
        raise ValueError(f"slices(kinds): {len(kind_rows)} batch rows, q_ranges has {len(q_rows)}")
    parts = []
    for row, (q, k, named) in enumerate(zip(q_rows, k_rows, kind_rows, strict=True)):
        for name, count in (("k_ranges", len(k)), ("kinds", len(named))):
            if count != len(q):
                where = f" in batch row {row}" if by_row else ""
                raise ValueError(f"slices({name}): {count} entries{where}, q_ranges has {len(q)}; one for each slice")
        numbers = np.array([_number(kind) for kind in named], np.int64)
        batch = np.full(len(q), row if by_row else -1)
        parts.append(np.column_stack([batch, q, k, numbers]).astype(np.int64))
    return SliceTable(np.ascontiguousarray(np.concatenate(parts)), len(q_rows) if by_row else None)


def _in_order(ranges: Any, name: str) -> Any:
    """Return ranges that can be read twice: those of an iterator as a list. A set has no order to pair them by."""
    if isinstance(ranges, Set):
        raise _not_ranges(name, ranges)
    return list(ranges) if isinstance(ranges, Iterator) else ranges


def _has_rows(ranges: Any) -> bool:
    """Whether ranges are given for each batch row: a list of lists of pairs, of which some may be empty."""
    if hasattr(ranges, "ndim"):
        return bool(ranges.ndim == 3)
    try:
        rows = [row for row in ranges if not isinstance(row, range) and len(row)]
        return any(isinstance(row[0], range) or np.ndim(row[0]) == 1 for row in rows)
    except (TypeError, ValueError, KeyError):
        return False


def _by_row(ranges: Any, name: str, by_row: bool) -> list[Array]:
    """Return the ranges of each batch row as `[slices, 2]`; one row if they are those of all rows."""
    try:
        rows = list(ranges) if by_row else [ranges]
        found = []
        for row in rows:
            pairs = row.detach().cpu().numpy() if is_tensor(row) else row
            if not hasattr(pairs, "shape"):
                pairs = [_pair(pair) for pair in _in_order(pairs, name)]
            array = np.asarray(pairs)
            found.append(array.reshape(-1, 2) if array.size == 0 else array)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor without values
        raise _not_ranges(name, ranges) from error
    for array in found:
        if array.size and (array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu"):
            raise _not_ranges(name, ranges)
        wrong = (array[:, 0] < 0) | (array[:, 1] < array[:, 0]) | (array[:, 1] > UNBOUNDED)
        if wrong.any():
            begin, end = array[np.argmax(wrong)].tolist()
            raise ValueError(f"slices({name}): expected 0 <= begin <= end <= {UNBOUNDED}, got [{begin}, {end}]")
    return found


def _pair(pair: Any) -> Any:
    """Return a range as its ends, and other pairs as they are."""
    if not isinstance(pair, range):
        return pair
    if pair.step != 1:
        raise ValueError(f"{pair} skips positions")
    return pair.start, pair.stop


def _not_ranges(name: str, ranges: Any) -> ValueError:
    return ValueError(f"slices({name}): expected pairs [begin, end], or a list of them for each row; got {ranges!r}")


def _not_kinds(kinds: Any) -> ValueError:
    return ValueError(
        f"slices(kinds): {kinds!r}; expected one of {', '.join(KINDS)}, or a list with one for each slice"
    )


def _number(kind: Any) -> int:
    if kind not in KINDS:
        raise _not_kinds(kind)
    return KINDS.index(kind)
