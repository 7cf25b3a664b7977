"""Shards: the positions that all ranks hold, as arrays over all ranks, so that no question takes a loop over ranks.

Nothing here depends on a mask: `shards_of` caches by layout, so that a new packing of documents reuses all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from meshflash.core.lengths import BoolArray
from meshflash.core.program import Ranges
from meshflash.core.rows import Rows
from meshflash.core.runs import Ints, Runs, expand, merge_intervals, row_at

#: The most arithmetic sequences of ranks that `RankOrder` searches one by one.
MAX_SEQUENCES = 4


@dataclass(frozen=True, eq=False)
class RowTable:
    """Sets of local rows of several ranks: intervals `[begin, end)` of rows of `rank`, sorted, not touching."""

    rank: Ints
    begin: Ints
    end: Ints

    @staticmethod
    def of(rank: Ints, begin: Ints, end: Ints) -> RowTable:
        """Return the table of some intervals in any order, which may overlap.

        Args:
            rank: The rank of each interval.
            begin: The first row of each interval.
            end: The end of each interval.
        """
        return RowTable(*merge_intervals(rank, begin, end))

    def take(self, index: BoolArray) -> RowTable:
        """Return some of the intervals."""
        return RowTable(self.rank[index], self.begin[index], self.end[index])

    def fill_gaps(self, max_gap: int) -> RowTable:
        """Return the rows and those of gaps between them of at most `max_gap` rows."""
        if not max_gap or not len(self.rank):
            return self
        apart = (self.rank[1:] != self.rank[:-1]) | (self.begin[1:] > self.end[:-1] + max_gap)
        first, last = np.append(True, apart), np.append(apart, True)
        return RowTable(self.rank[first], self.begin[first], self.end[last])

    @cached_property
    def by_rank(self) -> dict[int, Rows]:
        """The rows of each rank that has any, in the order of ranks."""
        pairs = list(zip(self.begin.tolist(), self.end.tolist(), strict=True))
        heads = np.flatnonzero(np.diff(self.rank, prepend=-1)).tolist()
        ranks = self.rank[heads].tolist()
        return {rank: tuple(pairs[a:b]) for rank, a, b in zip(ranks, heads, [*heads[1:], None], strict=False)}


class Shards:
    """The positions of all ranks. `shards_of` makes and caches it.

    Rows have a number over all ranks: those of rank r are `first_row[r] .. first_row[r + 1]`. `runs` are in this order.

    Attributes:
        world: The number of ranks.
        first_row: The number of the first row of each rank, and of all rows.
        runs: The runs of all ranks; their rows are numbered over all ranks.
        rank: The rank of each run.
    """

    def __init__(self, ranges: tuple[Ranges, ...]) -> None:
        self.world = len(ranges)
        self.runs = Runs.of([r for held in ranges for r in held])
        lengths = np.array([sum(map(len, held)) for held in ranges], np.int64)
        self.first_row: Ints = np.concatenate([[0], np.cumsum(lengths)])
        self.rank: Ints = self.first_row.searchsorted(self.runs.row, "right") - 1
        #: The first position that a rank holds, and the end of the last one.
        self.begin = int(self.runs.position.min(initial=2**31))
        self.end = max(self.begin, int(self.runs.last.max(initial=-1)) + 1)
        self.max_step = int(self.runs.step.max(initial=1))

    def of_ranks(self, ranks: Ints) -> Runs:
        """Return the runs of some ranks, which are sorted."""
        if len(ranks) == self.world:
            return self.runs
        chosen = np.zeros(self.world, np.bool_)
        chosen[ranks] = True
        return self.runs.take(chosen[self.rank])

    def rank_of(self, row: Ints) -> Ints:
        """Return the rank of each row."""
        found: Ints = self.first_row.searchsorted(row, "right") - 1
        return found

    def rank_of_sorted(self, row: Ints) -> Ints:
        """Return the rank of each row, for many rows in order."""
        return np.repeat(np.arange(self.world, dtype=np.int32), np.diff(row.searchsorted(self.first_row)))

    def rows_in(self, key: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints]:
        """Return (key, first row, end): the rows whose positions lie in intervals `[lo, hi)`, for each run they hit.

        Args:
            key: A number for each interval.
            lo: The first position of each interval.
            hi: The end of each interval.
        """
        interval, run = self.hits(lo, hi)
        runs = self.runs.take(run)
        begin = np.maximum(row_at(runs, lo[interval]), 0)
        end = np.minimum(row_at(runs, hi[interval]), runs.rows)
        some = begin < end
        first = runs.row[some]
        return key[interval[some]], first + begin[some], first + end[some]

    def hits(self, lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
        """Return (interval, run) for all intervals `[lo, hi)` and runs that have a position in common, and maybe more.

        Args:
            lo: The first position of each interval.
            hi: The end of each interval.
        """
        if self.period:
            lo, hi = np.maximum(lo, self.begin), np.minimum(hi, self.end)
            interval, nth = expand(np.clip(hi - lo, 0, self.period))
            run = self._run_of_residue[(lo[interval] + nth) % self.period]
            return interval[run >= 0], run[run >= 0]
        order, position, reach = self._by_position
        first = reach.searchsorted(lo, "left")
        interval, nth = expand(np.maximum(position.searchsorted(hi, "left") - first, 0))
        return interval, order[first[interval] + nth]

    def positions(self, begin: Ints, end: Ints) -> tuple[Ints, Runs]:
        """Return (interval, runs): the positions of intervals of rows, in the order of rows.

        Args:
            begin: The first row of each interval, counted over all ranks; sorted.
            end: The end of each interval.
        """
        first = self.runs.row.searchsorted(begin, "right") - 1
        interval, nth = expand(self.runs.row.searchsorted(end, "left") - first)
        runs = self.runs.take(first[interval] + nth)
        low, high = begin[interval] - runs.row, end[interval] - runs.row
        return interval, runs.part(np.maximum(low, 0), np.minimum(high, runs.rows))

    def num_before(self, position: Ints) -> Ints:
        """Return how many rows of all ranks lie before each position."""
        if self.first_row[-1] == self.end - self.begin:
            return np.clip(position, self.begin, self.end) - self.begin
        starts, ends, _ = self._pieces
        total = np.concatenate([[0], np.cumsum(ends - starts)])
        piece = starts.searchsorted(position, "right")
        # Of the last piece that begins before the position, a part may lie behind it.
        behind = np.concatenate([[0], ends])[piece] - position
        return total[piece] - np.maximum(behind, 0)

    @cached_property
    def period(self) -> int:
        """The step of all runs, if each holds every position of its residue up to the ends; otherwise 0."""
        runs = self.runs
        if self.max_step == 1 or not (runs.step == self.max_step).all():
            return 0
        whole = (runs.position < self.begin + self.max_step) & (runs.last >= self.end - self.max_step)
        alone = len(np.unique(runs.position % self.max_step)) == len(runs.position)
        return self.max_step if whole.all() and alone else 0

    @cached_property
    def boundaries(self) -> tuple[Ints, Ints]:
        """The first positions of pieces, and their ends. Between them, the rank that holds a position is the same.

        Empty for shards with a period.
        """
        if self.period:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        return self._pieces[:2]

    def pieces(self, lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
        """Return the first piece of `order` and the end of the pieces that intervals `[lo, hi)` of positions touch.

        Args:
            lo: The first position of each interval, at least `begin`.
            hi: The end of each interval, at most `end`.
        """
        if self.period:
            first, length = lo % self.period, np.minimum(hi - lo, self.period)
            if len(self._residues) == 2 * self.period:
                return first, first + length
            return self._residues.searchsorted(first), self._residues.searchsorted(first + length)
        starts, ends, _ = self._pieces
        return ends.searchsorted(lo, "right"), starts.searchsorted(hi, "left")

    @cached_property
    def order(self) -> RankOrder:
        """The ranks in the order of positions: one for each piece, or two periods of them."""
        if self.period:
            run = self._run_of_residue[self._residues % self.period]
            return RankOrder(self.rank[run], self.world)
        return RankOrder(self._pieces[2], self.world)

    @cached_property
    def _by_position(self) -> tuple[Ints, Ints, Ints]:
        """Runs sorted by position: their indices, first positions, and the last position of any run up to here."""
        order = np.argsort(self.runs.position, kind="stable")
        return order, self.runs.position[order], np.maximum.accumulate(self.runs.last[order])

    @cached_property
    def _pieces(self) -> tuple[Ints, Ints, Ints]:
        """Pieces without gaps, sorted by position: first positions, ends, ranks."""
        runs, rank = self.runs, self.rank
        if self.max_step > 1:
            run, row = expand(runs.rows)
            runs, rank = runs.take(run).part(row, row + 1), rank[run]
        order = np.argsort(runs.position, kind="stable")
        return runs.position[order], runs.last[order] + 1, rank[order]

    @cached_property
    def _residues(self) -> Ints:
        """The residues of positions that some rank holds, sorted, for two periods."""
        one = np.sort(self.runs.position % self.period)
        return np.concatenate([one, one + self.period])

    @cached_property
    def _run_of_residue(self) -> Ints:
        found = np.full(self.period, -1)
        found[self.runs.position % self.period] = np.arange(len(self.runs.position))
        return found


@lru_cache(maxsize=16)
def shards_of(ranges: tuple[Ranges, ...]) -> Shards:
    """Return the shards of a layout; cached.

    Args:
        ranges: For each rank, the ranges of positions that it holds.
    """
    return Shards(ranges)


class RankOrder:
    """Some ranks in a row, and which of an interval of them is next to a given rank, counted round the ring.

    The ranks of regular layouts are a few arithmetic sequences: 0, 1, 2, ... for contiguous shards, up and down again
    for zigzag. There the answer is arithmetic. Other orders are searched with a wavelet matrix, in O(log world).
    """

    def __init__(self, ranks: Ints, world: int) -> None:
        self.ranks, self.world = ranks, world
        self._sequences = list(_sequences(ranks))

    def above(self, first: Ints, end: Ints, rank: Ints) -> Ints:
        """Return the distance from a rank up to the nearest one of an interval; the number of ranks if it is empty.

        Args:
            first: The index of the first rank of each interval.
            end: The end of each interval.
            rank: A rank for each interval, modulo the number of ranks.
        """
        return self._search(first, end, rank, 1)

    def below(self, first: Ints, end: Ints, rank: Ints) -> Ints:
        """Return the distance from a rank down to the nearest one of an interval; the number of ranks if it is empty.

        Args:
            first: The index of the first rank of each interval.
            end: The end of each interval.
            rank: A rank for each interval, modulo the number of ranks.
        """
        return self._search(first, end, rank, -1)

    def _search(self, first: Ints, end: Ints, rank: Ints, sign: int) -> Ints:
        world = self.world
        if len(self._sequences) > MAX_SEQUENCES:
            # Downwards is upwards among the negated ranks.
            wavelet, target = (self._upward, rank) if sign > 0 else (self._downward, -1 - rank)
            found = wavelet.next_above(first, end, target % world)
            return np.where(first < end, (found - target) % world, world)
        rank = rank % world
        nearest = np.full_like(rank, world)
        for begin, stop, value, slope in self._sequences:
            low, high = np.maximum(first, begin), np.minimum(end, stop) - 1
            near = low if slope == sign else high
            # `near` is the value that comes first upwards (downwards for -1), unless the rank itself is among them.
            distance = sign * (value + slope * (near - begin) - rank)
            distance += world * (distance < 0)
            distance[world - distance <= high - low] = 0
            np.minimum(nearest, distance, out=nearest, where=low <= high)
        return nearest

    @cached_property
    def _upward(self) -> _Wavelet:
        return _Wavelet(self.ranks, self.world)

    @cached_property
    def _downward(self) -> _Wavelet:
        return _Wavelet(self.world - 1 - self.ranks, self.world)


def _sequences(ranks: Ints) -> Iterator[tuple[int, int, int, int]]:
    """Yield (begin, end, first value, slope) of sequences with a slope of 1 or -1; stop when there are too many."""
    slopes = np.diff(ranks)
    changes = np.append(np.flatnonzero(np.diff(slopes)) + 1, len(slopes))
    begin = count = 0
    while begin < len(ranks) and count <= MAX_SEQUENCES:
        slope = int(slopes[begin]) if begin < len(slopes) else 1
        if abs(slope) == 1:
            end = int(changes[changes.searchsorted(begin, "right")]) + 1 if begin < len(slopes) else begin + 1
        else:
            slope, end = 1, begin + 1
        yield begin, end, int(ranks[begin]), slope
        begin, count = end, count + 1


class _Wavelet:
    """A wavelet matrix: counts and order statistics of the values in any interval of a sequence.

    For each bit from the highest, it holds how many of the first n values have the bit. The values are then sorted by
    this bit, in a stable way, and the next bit follows.
    """

    def __init__(self, values: Ints, limit: int) -> None:
        self.levels: list[tuple[int, int, Ints]] = []
        for bit in reversed(range(max(1, (limit - 1).bit_length()))):
            has = values >> bit & 1
            ones = np.concatenate([[0], np.cumsum(has)])
            self.levels.append((bit, len(values) - int(ones[-1]), ones))
            values = np.concatenate([values[has == 0], values[has == 1]])

    def next_above(self, first: Ints, end: Ints, value: Ints) -> Ints:
        """Return the smallest value of each interval that is at least `value`, or its smallest one if there is none."""
        below = self._num_below(first, end, value)
        return self._smallest(first, end, np.where(below < end - first, below, 0))

    def _num_below(self, first: Ints, end: Ints, value: Ints) -> Ints:
        below = np.zeros_like(value)
        for bit, zeros, ones in self.levels:
            has = (value >> bit & 1).astype(np.bool_)
            first_ones, end_ones = ones[first], ones[end]
            below += np.where(has, (end - end_ones) - (first - first_ones), 0)
            first = np.where(has, zeros + first_ones, first - first_ones)
            end = np.where(has, zeros + end_ones, end - end_ones)
        return below

    def _smallest(self, first: Ints, end: Ints, nth: Ints) -> Ints:
        value = np.zeros_like(nth)
        for bit, zeros, ones in self.levels:
            first_ones, end_ones = ones[first], ones[end]
            num_zeros = (end - end_ones) - (first - first_ones)
            has = nth >= num_zeros
            nth = np.where(has, nth - num_zeros, nth)
            value |= has.astype(value.dtype) << bit
            first = np.where(has, zeros + first_ones, first - first_ones)
            end = np.where(has, zeros + end_ones, end - end_ones)
        return value
