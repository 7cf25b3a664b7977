"""Slices: rectangles of queries and keys, whole or cut by diagonals, as one table.

Masks use them to say which pairs are visible where no rule on positions does: spans of images in a causal text, frames
of a video, holes. The kinds and their names are those of MagiAttention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from meshflash.core.lengths import UNBOUNDED, Array, is_tensor
from meshflash.core.terms import Term

BoolArray = npt.NDArray[np.bool_]

#: Which diagonals cut a slice: (the one that ends at its last query and last key, the one that begins at its first
#: query and first key).
KINDS = {
    "full": (False, False),
    "causal": (True, False),
    "inv_causal": (False, True),
    "bi_causal": (True, True),
}
#: The names of the columns of a table. The batch row is -1 in a table for all rows.
COLUMNS = ("batch", "q_begin", "q_end", "k_begin", "k_end", "kind")


@dataclass(frozen=True, eq=False, repr=False)
class SliceTable:
    """Slices as rows of `COLUMNS`; a kind is its place in `KINDS`. `Mask.slices` makes it.

    Attributes:
        table: The slices, int64.
        rows: The number of batch rows with slices of their own, or None if the slices are those of all rows.
    """

    table: Array
    rows: int | None = None

    def __repr__(self) -> str:
        counts = np.bincount(self.table[:, 5], minlength=len(KINDS)).tolist()
        kinds = ", ".join(f"{count} {kind}" for kind, count in zip(KINDS, counts, strict=True) if count)
        by_row = f" in {self.rows} rows" if self.rows is not None else ""
        return f"slices({kinds or 'none'}{by_row})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SliceTable) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return -1 if self.rows is None else self.rows, self.table.tobytes()

    @cached_property
    def sorted_table(self) -> Array:
        """The slices in order, each once, without empty ones."""
        some = (self.table[:, 1] < self.table[:, 2]) & (self.table[:, 3] < self.table[:, 4])
        return np.unique(self.table[some], axis=0)

    def terms_of_slices(self) -> Iterator[Term]:
        """Yield each slice as a term: its rectangle, and a band if diagonals cut it."""
        cuts = list(KINDS.values())
        for batch, q_begin, q_end, k_begin, k_end, kind in self.sorted_table.tolist():
            cut_above, cut_below = cuts[kind]
            yield Term(
                k_begin - q_begin if cut_below else -UNBOUNDED,
                k_end - q_end if cut_above else UNBOUNDED,
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
        cuts = list(KINDS.values())
        for row, q_begin, q_end, k_begin, k_end, kind in self.table.tolist():
            queries, keys = (q_begin <= i) & (i < q_end), (k_begin <= j) & (j < k_end)
            if row not in (-1, batch) or not queries.any() or not keys.any():
                continue
            inside = queries & keys
            cut_above, cut_below = cuts[kind]
            if cut_above:
                inside = inside & (j - i <= k_end - q_end)
            if cut_below:
                inside = inside & (j - i >= k_begin - q_begin)
            seen |= inside
        return seen

    def check_range(self, q_end: int, k_end: int) -> None:
        """Raise ValueError if a slice ends beyond the sequence.

        Args:
            q_end: The end of the positions of queries.
            k_end: The end of the positions of keys.
        """
        for name, column, end in (("q_ranges", 2, q_end), ("k_ranges", 4, k_end)):
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
    by_row = _has_rows(q_ranges)
    q_rows, k_rows = (_by_row(x, name, by_row) for x, name in ((q_ranges, "q_ranges"), (k_ranges, "k_ranges")))
    if len(q_rows) != len(k_rows):
        raise ValueError(f"slices(k_ranges): {len(k_rows)} batch rows, q_ranges has {len(q_rows)}")
    if not any(map(len, q_rows)):
        raise ValueError("slices(q_ranges): expected at least one range; without any, every key is hidden")
    if isinstance(kinds, str):
        kind_rows: Sequence[Any] = [[kinds] * len(q) for q in q_rows]
    else:
        kind_rows = list(kinds) if by_row else [list(kinds)]
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


def _has_rows(ranges: Any) -> bool:
    """Whether ranges are given for each batch row: a list of lists of pairs, of which some may be empty."""
    if hasattr(ranges, "ndim"):
        return bool(ranges.ndim == 3)
    try:
        return any(np.ndim(row[0]) == 1 for row in ranges if len(row))
    except (TypeError, ValueError, KeyError):
        return False


def _by_row(ranges: Any, name: str, by_row: bool) -> list[Array]:
    """Return the ranges of each batch row as `[slices, 2]`; one row if they are those of all rows."""
    try:
        rows = list(ranges) if by_row else [ranges]
        found = []
        for row in rows:
            array = np.asarray(row.cpu().numpy() if is_tensor(row) else row)
            found.append(array.reshape(-1, 2) if array.size == 0 else array)
    except (TypeError, ValueError) as error:
        raise _not_ranges(name, ranges) from error
    for array in found:
        if array.size and (array.ndim != 2 or array.shape[1] != 2 or not np.issubdtype(array.dtype, np.integer)):
            raise _not_ranges(name, ranges)
        wrong = (array[:, 0] < 0) | (array[:, 1] < array[:, 0]) | (array[:, 1] > UNBOUNDED)
        if wrong.any():
            begin, end = array[np.argmax(wrong)].tolist()
            raise ValueError(f"slices({name}): expected 0 <= begin <= end <= {UNBOUNDED}, got [{begin}, {end}]")
    return found


def _not_ranges(name: str, ranges: Any) -> ValueError:
    return ValueError(f"slices({name}): expected pairs [begin, end], or a list of them for each row; got {ranges!r}")


def _number(kind: Any) -> int:
    names = list(KINDS)
    if not isinstance(kind, str) or kind not in names:
        raise ValueError(f"slices(kinds): {kind!r}; expected one of {', '.join(names)}")
    return names.index(kind)
