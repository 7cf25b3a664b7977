"""Which key rows which ranks need, derived from intervals of positions: no table over all pairs of ranks.

A question about one rank takes O(ranks + documents + size of the answer). A question about all ranks, such as how far
each row travels round a ring, is answered for each key row by the ranks that hold an interval of queries: those that
see the row. Schedules ask through `Problem`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from meshflash.core.lengths import UNBOUNDED
from meshflash.core.mask import Mask
from meshflash.core.runs import (
    Ints,
    Runs,
    View,
    expand,
    merge_intervals,
    row_at,
    sorted_distinct,
    term_cuts,
    view_of,
    views,
)
from meshflash.core.shards import RowTable, Shards
from meshflash.core.terms import Term

#: Segments that are handled at once: arrays of this length stay in the CPU's cache.
CHUNK = 1 << 16


@dataclass(frozen=True, eq=False)
class HopTable:
    """A number of hops for each key row; rows with 0 are left out.

    Args:
        k: The keys of all ranks.
        row: The first row of each interval of rows, numbered over all ranks; sorted.
        rows: The number of rows of each interval, all of one rank.
        hops: The number of hops of these rows.
    """

    k: Shards
    row: Ints
    rows: Ints
    hops: Ints

    @property
    def total(self) -> int:
        """The sum over all rows."""
        return int(np.dot(self.rows.astype(np.int64), self.hops.astype(np.int64)))

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return int(self.rows.sum(dtype=np.int64))

    def at_least(self, limit: Ints) -> RowTable:
        """Return the rows with at least as many hops as the limit of their owner, by owner.

        Args:
            limit: The limit of each rank.
        """
        kept = self.hops >= limit[self._owner]
        row, rows, owner = self.row[kept], self.rows[kept], self._owner[kept]
        if not len(row):
            return RowTable(owner, row, row)
        apart = (row[1:] != row[:-1] + rows[:-1]) | (owner[1:] != owner[:-1])
        first, last = np.append(True, apart), np.append(apart, True)
        owner = owner[first]
        base = self.k.first_row[owner]
        return RowTable(owner, row[first] - base, row[last] + rows[last] - base)

    @cached_property
    def _owner(self) -> Ints:
        return self.k.rank_of_sorted(self.row)


@dataclass(frozen=True, eq=False)
class _Cells:
    """Intervals of key rows, each with the ranks that see all of it: some pieces of `Shards.order` of the queries."""

    row: Ints
    rows: Ints
    first: Ints
    end: Ints


class Needs:
    """Which key rows which ranks need, for a mask over queries and keys that all ranks hold.

    Args:
        mask: The mask between queries and keys.
        q: The queries of all ranks.
        k: The keys of all ranks.
    """

    def __init__(self, mask: Mask, q: Shards, k: Shards) -> None:
        self.mask, self.q, self.k = mask, q, k
        self._cells: dict[int, list[list[_Cells]]] = {}
        self._hops: dict[tuple[str, int, int, int], HopTable] = {}

    def needed_from(self, rank: int) -> RowTable:
        """Return the key rows that the queries of a rank see, by the rank that holds the keys.

        Args:
            rank: The rank that holds the queries.
        """
        _, lo, hi = self._seen(np.array([rank]))
        _, begin, end = self.k.rows_in(lo, lo, hi)
        return self._by_owner(begin, end)

    def needed_by(self, owner: int) -> RowTable:
        """Return the key rows of a rank that queries see, by the rank that holds the queries.

        Args:
            owner: The rank that holds the keys.
        """
        q, found = self.q, [np.zeros((3, 0), np.int64)]
        for view in views(self.mask, self.k.of_ranks(np.array([owner])), by_key=True):
            view = view.without_gaps(q.max_step).seeing()
            lo, hi = view.limits()
            segment, run = q.hits(lo, hi)
            runs = q.runs.take(run)
            # The first and the last query of the run that may see the segment, then the keys that they see.
            first = np.maximum(row_at(runs, lo[segment]), 0)
            last = np.minimum(row_at(runs, hi[segment]), runs.rows) - 1
            keys = view.segments.take(segment)
            first_key = row_at(keys, runs.position + runs.step * first - view.band_hi)
            end_key = row_at(keys, runs.position + runs.step * last - view.band_lo + 1)
            begin, end = np.maximum(first_key, 0), np.where(first <= last, np.minimum(end_key, keys.rows), 0)
            found.append(np.stack([q.rank[run], keys.row + begin, keys.row + end])[:, begin < end])
        rank, begin, end = np.concatenate(found, axis=1)
        base = self.k.first_row[owner]
        return RowTable.of(rank, begin - base, end - base)

    def num_needed(self, ranks: Ints) -> tuple[Ints, Ints]:
        """Return how many keys each of some ranks needs, and how many of them it holds itself.

        Args:
            ranks: The ranks, sorted.
        """
        k = self.k
        rank, lo, hi = self._seen(ranks)
        counts = k.num_before(hi) - k.num_before(lo)
        total = np.bincount(rank, counts, minlength=k.world)
        first = k.rank.searchsorted(rank, "left")
        interval, nth = expand(k.rank.searchsorted(rank, "right") - first)
        runs = k.runs.take(first[interval] + nth)
        begin = np.maximum(row_at(runs, lo[interval]), 0)
        end = np.minimum(row_at(runs, hi[interval]), runs.rows)
        own = np.bincount(rank[interval], np.maximum(end - begin, 0), minlength=k.world)
        return total[ranks].astype(np.int64), own[ranks].astype(np.int64)

    def q_rows(self, rank: int, keys: RowTable) -> Ints:
        """Return [ranks, 2]: the interval from the first to the last query row of a rank that sees keys of each rank.

        It is (0, 0) for ranks none of whose keys are seen.

        Args:
            rank: The rank that holds the queries.
            keys: The keys that the queries see, from `needed_from`.
        """
        q, k = self.q, self.k
        base = k.first_row[keys.rank]
        _, runs = k.positions(base + keys.begin, base + keys.end)
        first_row = q.first_row[rank]
        first = np.full(k.world, q.first_row[rank + 1] - first_row)
        last = np.zeros(k.world, np.int64)
        held = q.of_ranks(np.array([rank]))
        for view in views(self.mask, runs, by_key=True):
            view = view.without_gaps()
            lo, hi = view.limits()
            owner = k.rank_of_sorted(view.segments.row)
            for n in range(len(held.row)):
                run = held.take(np.array([n]))
                begin = np.maximum(row_at(run, lo), 0)
                end = np.minimum(row_at(run, hi), run.rows)
                some = (begin < end) & (lo < hi)
                np.minimum.at(first, owner[some], run.row - first_row + begin[some])
                np.maximum.at(last, owner[some], run.row - first_row + end[some])
        return np.where((first < last)[:, None], np.stack([first, last], axis=1), 0)

    def last_hops(self, offset: int, num_hops: int, ranks: Sequence[int] | None = None) -> HopTable:
        """Return the last hop at whose end a rank needs each key row, on a trip round the ring.

        Args:
            offset: 1 if ranks receive from the next rank, so that keys travel down; -1 if they travel up.
            num_hops: The number of hops of the trip.
            ranks: The owners of the keys; all ranks by default.
        """
        order = self.q.order
        search = order.above if offset > 0 else order.below

        def hops(owner: Ints, cells: _Cells) -> Ints:
            return num_hops - search(cells.first, cells.end, owner - offset * num_hops)

        return self._hop_table(hops, ranks, ("last", offset, num_hops))

    def hops_after_first(self, offset: int, num_hops: int, ranks: Sequence[int] | None = None) -> HopTable:
        """Return the hops of a trip round the ring from the first one at whose end a rank needs each key row.

        Args:
            offset: 1 if ranks receive from the next rank, so that keys travel down; -1 if they travel up.
            num_hops: The number of hops of the trip.
            ranks: The owners of the keys; all ranks by default.
        """
        order = self.q.order
        search = order.below if offset > 0 else order.above

        def hops(owner: Ints, cells: _Cells) -> Ints:
            return num_hops - search(cells.first, cells.end, owner - offset)

        return self._hop_table(hops, ranks, ("after first", offset, num_hops))

    def _hop_table(
        self, hops: Callable[[Ints, _Cells], Ints], ranks: Sequence[int] | None, name: tuple[str, int, int]
    ) -> HopTable:
        """Evaluate a function of the owners of cells and of the ranks that see them: the most of all terms counts."""
        key = (*name, self.k.world if ranks is None else len(ranks))
        if key not in self._hops:
            tables = [self._evaluate(hops, chunks) for chunks in self._cells_of(ranks)]
            self._hops[key] = tables[0] if len(tables) == 1 else _most(self.k, tables)
        return self._hops[key]

    def _evaluate(self, hops: Callable[[Ints, _Cells], Ints], chunks: list[_Cells]) -> HopTable:
        found = [np.zeros((3, 0), np.int32)]
        for cells in chunks:
            value = hops(self.k.rank_of_sorted(cells.row), cells)
            found.append(np.stack([cells.row, cells.rows, value])[:, value > 0])
        return HopTable(self.k, *np.concatenate(found, axis=1))

    def _seen(self, ranks: Ints) -> tuple[Ints, Ints, Ints]:
        """Return (rank, lo, hi): the positions of keys that the queries of some ranks see, as intervals `[lo, hi)`."""
        found = [np.zeros((3, 0), np.int64)]
        for view in views(self.mask, self.q.of_ranks(ranks), by_key=False):
            view = view.without_gaps()
            found.append(np.stack([self.q.rank_of_sorted(view.segments.row), *view.limits()]))
        return merge_intervals(*np.concatenate(found, axis=1))

    def _by_owner(self, begin: Ints, end: Ints) -> RowTable:
        """Return intervals of key rows, numbered over all ranks, by the rank that holds them."""
        owner = self.k.rank_of(begin)
        base = self.k.first_row[owner]
        return RowTable.of(owner, begin - base, end - base)

    def _cells_of(self, ranks: Sequence[int] | None) -> list[list[_Cells]]:
        """Return the cells of the keys of some ranks, in chunks, for each batch row and term. All ranks by default."""
        owners = np.arange(self.k.world) if ranks is None else np.array(ranks)
        if len(owners) not in self._cells:
            runs = self.k.of_ranks(owners)
            self._cells[len(owners)] = [
                [self._make_cells(view) for view in self._key_views(term, batch, runs)]
                for batch in range(self.mask.batch_rows or 1)
                for term in self.mask.terms
                if term.is_in(batch)
            ]
        return self._cells[len(owners)]

    def _key_views(self, term: Term, batch: int, runs: Runs) -> Iterator[View]:
        """Yield what keys see by one term, in chunks. Neighbouring keys of a segment see the same pieces of queries."""
        starts, ends = self.q.boundaries
        cuts = [term_cuts((term,), batch, by_key=True)]
        # The band of a key begins at key - term.hi and ends at key - term.lo; it meets a boundary at these keys.
        cuts += [starts + term.lo] if term.lo > -UNBOUNDED else []
        cuts += [ends + term.hi] if term.hi < UNBOUNDED else []
        cut = sorted_distinct(np.concatenate(cuts))
        pieces = cut.searchsorted(runs.last, "right") - cut.searchsorted(runs.position, "right") + 1
        chunk = np.cumsum(np.minimum(pieces, runs.rows)) // CHUNK
        bounds = chunk.searchsorted(np.arange(chunk[-1] + 2) if len(chunk) else np.zeros(0, np.int64)).tolist()
        for begin, end in pairwise(bounds):
            yield view_of(term, batch, runs.take(slice(begin, end)), True, cut)

    def _make_cells(self, view: View) -> _Cells:
        """Return the cells of keys, each with the pieces of queries that see it."""
        q = self.q
        view = replace(view, lo=np.maximum(view.lo, q.begin), hi=np.minimum(view.hi, q.end)).seeing()
        if q.period:
            view = self._split_by_period(view)
        first_key = view.segments.position
        lo, hi = np.maximum(view.lo, first_key + view.band_lo), np.minimum(view.hi, first_key + view.band_hi + 1)
        first, end = q.pieces(lo, hi)
        columns = (x.astype(np.int32) for x in (view.segments.row, view.segments.rows, first, end))
        return _Cells(*columns)

    def _split_by_period(self, view: View) -> View:
        """Cut segments of keys where other ranks begin to see them, if queries have a period."""
        period, segments = self.q.period, view.segments
        several = segments.rows > 1
        if not several.any():
            return view
        if (segments.step != period).any():
            return view.single_rows()
        # A key sees from max(lo, key + band_lo) to min(hi - 1, key + band_hi). Queries that the key sees move by whole
        # periods from row to row, so the ranks stay the same, unless one end is fixed at lo or hi. Then they change
        # until the interval is a period long. Each region where they change has at most one row.
        lo, hi, cut = view.lo[several], view.hi[several], segments.take(several)
        low, high = view.band_lo, view.band_hi
        positions = [lo - low, hi - high, lo + period - high - 1, hi - period - low + 1]
        ends = np.stack([np.clip(row_at(cut, position), 0, cut.rows) for position in positions], axis=1)
        bounds = np.concatenate([np.zeros_like(ends[:, :1]), np.sort(ends), cut.rows[:, None]], axis=1)
        segment, _ = expand(np.where(several, 5, 1))
        begin, end = np.zeros_like(segment), np.ones_like(segment)
        begin[several[segment]], end[several[segment]] = bounds[:, :-1].ravel(), bounds[:, 1:].ravel()
        some = begin < end
        return view.take(segment[some]).part(begin[some], end[some])


def _most(k: Shards, tables: list[HopTable]) -> HopTable:
    """Return the most hops of each row over several tables."""
    edges = [edge for table in tables for edge in (table.row, table.row + table.rows)]
    cuts = sorted_distinct(np.concatenate([np.zeros(0, np.int32), *edges]))
    row, rows = cuts[:-1], np.diff(cuts)
    hops = np.zeros_like(row)
    for table in tables:
        if len(table.row):
            nth = np.maximum(table.row.searchsorted(row, "right") - 1, 0)
            inside = (table.row[nth] <= row) & (row < table.row[nth] + table.rows[nth])
            hops = np.maximum(hops, np.where(inside, table.hops[nth], 0))
    return HopTable(k, row[hops > 0], rows[hops > 0], hops[hops > 0])
