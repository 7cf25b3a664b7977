"""Tiles: a mask over given query and key rows, as the worklist that kernels walk.

A worklist has two tables. `by_query` cuts the query rows into disjoint segments, each with an ordered list of key
spans; `by_key` is the transpose, for gradients of keys. Both are built from the mask by the same code, with the roles
of the two sides exchanged. Building takes O((documents + slices) x ranges), in numpy. Kernels and schedules are not
known here.

    keys ->      span 0 (full)   span 1 (band: lo <= j - i <= hi)
    segment 0   [############]  [##.         ]
    segment 1   [############]  [####.       ]

How a table is built (`_build_row`): cut the rows where a term of the mask changes (`term_cuts`, `split_runs`); for
each segment take the interval of each term (`term_intervals`); turn overlapping intervals into disjoint ones with one
band each (`_sweep`); intersect them with the ranges of the other side (`_intersect`); drop spans that no pair falls
into; merge neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from meshflash.core.lengths import UNBOUNDED, Array, BoolArray
from meshflash.core.mask import Mask
from meshflash.core.runs import Ints, Runs, expand, merge_intervals, row_at, split_runs, term_cuts, term_intervals
from meshflash.core.terms import Term

Int32 = npt.NDArray[np.int32]

#: The most pairs of an interval and a piece of it that are compared at a time.
SWEEP_CELLS = 1 << 22

#: The columns of `Table.segments`.
SEGMENT = ("batch", "row", "rows", "position", "step")
#: The columns of `Table.spans`.
SPAN = ("row", "rows", "position", "step", "lo", "hi")


@dataclass(frozen=True, eq=False)
class Table:
    """Disjoint segments of rows, each with an ordered list of spans of the other side, in CSR form.

    `segments[s]` is (batch, row, rows, position, step): local rows `row .. row + rows` at positions
    `position + step * n`, of one batch row or of all of them (-1). Its spans are `spans[indptr[s]:indptr[s + 1]]`,
    each (row, rows, position, step, lo, hi): the tile has the pairs with `lo <= j - i <= hi`, where i is the position
    of the query and j that of the key, in both tables. A limit that cannot exclude a pair of the tile is +-UNBOUNDED.
    If both are, spans of several ranges may be merged; their `position` and `step` are then meaningless. Two spans of a
    segment share rows only if their bands have no distance in common, as those of slices on both sides of a diagonal.
    """

    segments: Int32
    indptr: Int32
    spans: Int32

    def __len__(self) -> int:
        return len(self.segments)


@dataclass(frozen=True)
class Rectangle:
    """Query rows x key rows of one batch row (-1: all). If `causal`, row r sees the first r + 1 keys; else all keys."""

    batch: int
    q: slice
    k: slice
    causal: bool


@dataclass(frozen=True, eq=False)
class Worklist:
    """The tiles of one attention step: all visible pairs of given query and key rows. `worklist` makes and caches it.

    >>> work = worklist(Mask.causal(), (range(0, 4),), (range(0, 4),))
    >>> work.by_query.spans.tolist(), work.pairs
    ([[0, 4, 0, 1, -1073741824, 0]], 10)
    """

    mask: Mask
    q_ranges: tuple[range, ...]
    k_ranges: tuple[range, ...]
    exact_positions: bool

    @cached_property
    def by_query(self) -> Table:
        """Segments of query rows with spans of key rows; every query row is in one segment."""
        return _build(self.mask, self.q_ranges, self.k_ranges, False, self.exact_positions)

    @cached_property
    def by_key(self) -> Table:
        """Segments of key rows with spans of query rows; every key row is in one segment."""
        return _build(self.mask, self.k_ranges, self.q_ranges, True, self.exact_positions)

    @cached_property
    def rectangles(self) -> tuple[Rectangle, ...] | None:
        """The same pairs as full or causal rectangles, for kernels without positions, or None if impossible.

        It is impossible if a band has a left limit, or if the steps of the two sides differ.
        """
        return _rectangles(self.by_query)

    @cached_property
    def disjoint(self) -> bool:
        """Whether rectangles exist, and no query row and no key row is in two of them."""
        if self.rectangles is None:
            return False
        for side in ("q", "k"):
            taken = sorted((r.batch, getattr(r, side).start, getattr(r, side).stop) for r in self.rectangles)
            if any(a[0] == b[0] and b[1] < a[2] for a, b in pairwise(taken)):
                return False
        return True

    @cached_property
    def pairs(self) -> int:
        """The number of visible (query, key) pairs of one head, summed over the mask's batch rows."""
        return int(sum(n.sum() for _, _, n in _span_counts(self.by_query)))


def worklist(
    mask: Mask, q_ranges: tuple[range, ...], k_ranges: tuple[range, ...], exact_positions: bool = False
) -> Worklist:
    """Return the worklist of a mask over some rows; cached, so that the layers of a model share one.

    Rows that all see all keys have one worklist for each number of rows, wherever they are: the steps of a ring of
    thousands of ranks differ in positions, and need one table.

    Args:
        mask: The mask between queries and keys.
        q_ranges: The positions of the query rows.
        k_ranges: The positions of the key rows.
        exact_positions: Keep true positions in every span, which ALiBi and dropout read. Otherwise fully visible spans
            are merged across ranges.
    """
    if not exact_positions and _is_fully_visible(mask, q_ranges, k_ranges):
        q_rows, k_rows = (sum(map(len, ranges)) for ranges in (q_ranges, k_ranges))
        return _cached_worklist(Mask.full(), (range(q_rows),), (range(k_rows),), False)
    return _cached_worklist(mask, q_ranges, k_ranges, exact_positions)


@lru_cache(maxsize=256)
def _cached_worklist(
    mask: Mask, q_ranges: tuple[range, ...], k_ranges: tuple[range, ...], exact_positions: bool
) -> Worklist:
    return Worklist(mask, q_ranges, k_ranges, exact_positions)


def forget_worklists() -> None:
    """Drop all cached worklists: kernels keep tables on their device for as long as a worklist exists."""
    _cached_worklist.cache_clear()


def _is_fully_visible(mask: Mask, q_ranges: Sequence[range], k_ranges: Sequence[range]) -> bool:
    """Return whether one term of a mask alone lets all of these queries see all of these keys."""
    if mask.batch_rows or not any(map(len, q_ranges)) or not any(map(len, k_ranges)):
        return False
    first_q, last_q = min(r.start for r in q_ranges if r), max(r[-1] for r in q_ranges if r)
    first_k, last_k = min(r.start for r in k_ranges if r), max(r[-1] for r in k_ranges if r)
    for term in mask.terms:
        if not (term.lo <= first_k - last_q and last_k - first_q <= term.hi):
            continue
        if not (term.queries[0] <= first_q and last_q < term.queries[1]):
            continue
        if not (term.keys[0] <= first_k and last_k < term.keys[1]):
            continue
        for n, documents in enumerate(term.documents):
            q_cuts, k_cuts = documents.q_cuts(0), documents.k_cuts(0)
            document = int(np.searchsorted(q_cuts, first_q, "right")) - 1
            if document + 1 >= len(q_cuts) or last_q >= q_cuts[document + 1]:
                break
            if not k_cuts[document] <= first_k <= last_k < k_cuts[document + 1]:
                break
            if n == 0 and last_k - k_cuts[document] >= term.first_in_document:
                break
        else:
            return True
    return False


def visible_per_query(mask: Mask, tokens: int) -> Array:
    """Return the number of keys that each query sees, summed over the mask's batch rows.

    Args:
        mask: The mask between queries and keys.
        tokens: The length of the sequence.

    >>> visible_per_query(Mask.causal(), 4).tolist()
    [1, 2, 3, 4]
    """
    mask.check(tokens, tokens, mask.batch_rows or 1)
    whole = (range(tokens),)
    counts = np.zeros(tokens, np.int64)
    for row, rows, seen in _span_counts(_build(mask, whole, whole, False, True)):
        counts[row : row + rows] += seen
    return counts


def _span_counts(table: Table) -> list[tuple[int, int, Array]]:
    """Return, for each span of a by-query table: the first row, the rows, and the number of keys that each row sees."""
    out = []
    for s in range(len(table)):
        _, row, rows, position, step = (int(x) for x in table.segments[s])
        i = position + step * np.arange(rows, dtype=np.int64)
        for _, keys, start, key_step, lo, hi in table.spans[table.indptr[s] : table.indptr[s + 1]].tolist():
            first = -((start - i - lo) // key_step) if lo > -UNBOUNDED else np.zeros_like(i)
            last = (i + hi - start) // key_step + 1 if hi < UNBOUNDED else np.full_like(i, keys)
            out.append((row, rows, np.clip(np.minimum(last, keys) - np.maximum(first, 0), 0, None)))
    return out


def _rectangles(table: Table) -> tuple[Rectangle, ...] | None:
    """Return the tiles of a by-query table as full and causal rectangles, or None if a tile is neither."""
    out = []
    for s, (batch, row, rows, position, step) in enumerate(table.segments.tolist()):
        for k_row, k_rows, k_position, k_step, lo, hi in table.spans[table.indptr[s] : table.indptr[s + 1]].tolist():
            if hi == UNBOUNDED and lo == -UNBOUNDED:
                out.append(Rectangle(batch, slice(row, row + rows), slice(k_row, k_row + k_rows), False))
                continue
            if lo > -UNBOUNDED or step != k_step:
                return None
            # In rows instead of positions: query row r sees key rows up to r + shift. Keys before the diagonal are a
            # full rectangle, the rest a causal one; queries before the diagonal see nothing.
            shift = (hi + position - k_position) // step
            q_row, whole = row + max(0, -shift), max(0, shift)
            if whole:
                out.append(Rectangle(batch, slice(q_row, row + rows), slice(k_row, k_row + whole), False))
            out.append(Rectangle(batch, slice(q_row, row + rows), slice(k_row + whole, k_row + k_rows), True))
    return tuple(_staircase(out))


def _staircase(rectangles: list[Rectangle]) -> list[Rectangle]:
    """Merge two causal squares on a diagonal and the full rectangle below the first into one causal square.

    Under a causal mask, a rank's own rows form such a staircase, from however many ranges they come. Merging lets a
    kernel take them in one call.
    """
    out: list[Rectangle] = []
    for r in rectangles:
        out.append(r)
        if len(out) < 3:
            continue
        upper, below, lower = out[-3:]
        corner, step = (upper.q.stop, upper.k.start, upper.k.stop), (lower.q, lower.k.start)
        adjacent = (below.q.start, below.k.start, below.k.stop) == corner and (below.q, below.k.stop) == step
        square = all(side.q.stop - side.q.start == side.k.stop - side.k.start for side in (upper, lower))
        same_batch = upper.batch == below.batch == lower.batch
        if adjacent and square and same_batch and upper.causal and lower.causal and not below.causal:
            q, k = slice(upper.q.start, lower.q.stop), slice(upper.k.start, lower.k.stop)
            out[-3:] = [Rectangle(upper.batch, q, k, True)]
    return out


@dataclass(frozen=True)
class _Spans:
    """Spans of the column side, each with its segment and its band `lo <= column - row <= hi` on positions."""

    segment: Ints
    runs: Runs
    lo: Ints
    hi: Ints

    def take(self, index: Ints | BoolArray) -> _Spans:
        if index.dtype == np.bool_ and index.all():
            return self
        return _Spans(self.segment[index], self.runs.take(index), self.lo[index], self.hi[index])

    def in_order(self) -> _Spans:
        """Sort by segment, then by row."""
        return self.take(np.lexsort((self.runs.row, self.segment)))

    def merge(self, continued: bool) -> _Spans:
        """Merge neighbouring spans of a segment: fully visible ones, whatever their positions.

        With `continued`, merge spans whose positions continue under the same band instead.
        """
        runs, lo, hi = self.runs, self.lo, self.hi
        joined = (self.segment[1:] == self.segment[:-1]) & (runs.row[1:] == runs.row[:-1] + runs.rows[:-1])
        joined &= (lo[1:] == lo[:-1]) & (hi[1:] == hi[:-1])
        if continued:
            joined &= (runs.position[1:] == runs.last[:-1] + runs.step[1:]) & (runs.step[1:] == runs.step[:-1])
        else:
            joined &= (lo[1:] == -UNBOUNDED) & (hi[1:] == UNBOUNDED)
        if not joined.any():
            return self
        heads = np.flatnonzero(np.concatenate([[True], ~joined]))
        rows = np.add.reduceat(runs.rows, heads)
        kept = runs.take(heads)
        return _Spans(self.segment[heads], Runs(kept.row, rows, kept.position, kept.step), lo[heads], hi[heads])


def _build(mask: Mask, row_ranges: Sequence[range], column_ranges: Sequence[range], by_key: bool, exact: bool) -> Table:
    """Build a table; rows are queries and columns keys, or the reverse with `by_key`. Batch rows are concatenated."""
    for r in (*row_ranges, *column_ranges):
        if r.step < 1 or r.start < 0 or r.stop > UNBOUNDED:
            raise ValueError(f"worklist(ranges): {r} runs backwards, begins below 0 or ends beyond {UNBOUNDED}")
    rows, columns = Runs.of(row_ranges), Runs.of(column_ranges)
    order = np.argsort(columns.position, kind="stable")
    columns = columns.take(order)
    parts = []
    for batch in range(mask.batch_rows or 1):
        table = _build_row(mask.terms, batch, rows, columns, by_key, exact)
        table.segments[:, 0] = batch if mask.batch_rows else -1
        parts.append(table)
    if len(parts) == 1:
        return parts[0]
    counts = np.concatenate([np.diff(part.indptr) for part in parts])
    return Table(
        np.concatenate([part.segments for part in parts]),
        _indptr(counts),
        np.concatenate([part.spans for part in parts]),
    )


def _build_row(terms: tuple[Term, ...], batch: int, rows: Runs, columns: Runs, by_key: bool, exact: bool) -> Table:
    """Build the table of one batch row. Bands are on `column - row` until the end, whichever side is the row."""
    segments = split_runs(rows, term_cuts(terms, batch, by_key))
    lo, hi = term_intervals(terms, batch, segments.position, by_key)
    bands = [(-t.hi, -t.lo) if by_key else (t.lo, t.hi) for t in terms]
    segment, lo, hi, band_lo, band_hi = _sweep(lo, hi, bands)
    # A segment reaches no further than its first row's band on the left and its last row's band on the right.
    lo = np.maximum(lo, segments.position[segment] + band_lo)
    hi = np.minimum(hi, segments.last[segment] + band_hi + 1)
    # From here on arrays may have documents x ranges entries; int32 halves the memory traffic.
    lo, hi, band_lo, band_hi = (np.clip(x, -UNBOUNDED, UNBOUNDED).astype(np.int32) for x in (lo, hi, band_lo, band_hi))
    segments = segments.narrow()
    which, runs = _intersect(columns.narrow(), lo, hi)
    spans = _Spans(segment[which], runs, band_lo[which], band_hi[which])

    # Distances between columns and rows of a span run from `near` to `far` in steps of `stride`. Drop spans none of
    # whose distances lie in the band: `reached` is the first distance that is at least the band's lower limit.
    near = runs.position - segments.last[spans.segment]
    far = runs.last - segments.position[spans.segment]
    reached = np.maximum(near, spans.lo)
    if _all_same(segments.step) and _all_same(columns.step):
        stride = np.gcd(segments.step[:1], columns.step[:1].astype(np.int32))
    else:
        stride = np.gcd(segments.step[spans.segment], runs.step)
    reached += (near - reached) % stride
    spans = spans.take((runs.rows > 0) & (reached <= np.minimum(far, spans.hi)))
    if len(terms) > 1 or (np.diff(columns.row) < 0).any():
        spans = spans.in_order()
    spans = spans.merge(continued=True)

    # A limit that no pair of the span can exceed is dropped, so that kernels skip the comparison.
    near = spans.runs.position - segments.last[spans.segment]
    far = spans.runs.last - segments.position[spans.segment]
    spans.lo[spans.lo <= near] = -UNBOUNDED
    spans.hi[spans.hi >= far] = UNBOUNDED
    if not exact:
        spans = spans.merge(continued=False)
    runs, band_lo, band_hi = spans.runs, spans.lo, spans.hi
    if by_key:
        band_lo, band_hi = -band_hi, -band_lo
    table = Table(
        _stack(segments.row * 0, segments.row, segments.rows, segments.position, segments.step),
        _indptr(np.bincount(spans.segment, minlength=len(segments.row))),
        _stack(runs.row, runs.rows, runs.position, runs.step, band_lo, band_hi),
    )
    return table if exact else _fuse_segments(table)


def _sweep(lo: Ints, hi: Ints, bands: list[tuple[int, int]]) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Turn the terms' overlapping intervals into disjoint (segment, lo, hi, band_lo, band_hi).

    Between two neighbouring end points the set of active terms is constant. The union of their bands is one band, or a
    few disjoint ones, so no pair is in two tiles.
    """
    distinct = {band: n for n, band in enumerate(dict.fromkeys(bands))}
    number = np.array([distinct[band] for band in bands], np.int64)
    band_lo, band_hi = np.array(list(distinct), np.int64).reshape(-1, 2).T
    # Intervals of terms with the same band are merged first, so that only different bands overlap in a segment.
    segment, term = np.nonzero(lo < hi)
    key, lo, hi = merge_intervals(segment * len(distinct) + number[term], lo[segment, term], hi[segment, term])
    segment, band = np.divmod(key, max(1, len(distinct)))
    counts = np.bincount(segment)
    if counts.max(initial=0) <= 1:
        return segment, lo, hi, band_lo[band], band_hi[band]
    found = []
    first = np.cumsum(counts) - counts
    for width in np.unique(counts[counts > 0]).tolist():
        owners = np.flatnonzero(counts == width)
        size = max(1, SWEEP_CELLS // (2 * width * width))
        for begin in range(0, len(owners), size):
            some = owners[begin : begin + size]
            own = first[some, None] + np.arange(width)
            piece, *columns = _sweep_segments(lo[own], hi[own], band_lo[band[own]], band_hi[band[own]])
            found.append(np.stack([some[piece], *columns]))
    segment, lo, hi, lower, upper = np.concatenate(found, axis=1)
    return segment, lo, hi, lower, upper


def _sweep_segments(lo: Ints, hi: Ints, band_lo: Ints, band_hi: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Turn the intervals of segments, [segments, intervals], into disjoint ones, each with a band."""
    points = np.sort(np.concatenate([lo, hi], axis=1), axis=1)
    left, right = points[:, :-1], points[:, 1:]
    active = (lo[:, None, :] <= left[:, :, None]) & (right[:, :, None] <= hi[:, None, :])
    active &= (left < right)[:, :, None]
    segment, piece = np.nonzero(active.any(axis=2))
    active = active[segment, piece]
    # Each piece gets the bands of its active intervals, by their lower limits; those of others are empty and come last.
    empty = 4 * UNBOUNDED
    lower, upper = np.where(active, band_lo[segment], empty), np.where(active, band_hi[segment], -empty)
    order = np.argsort(lower, axis=1, kind="stable")
    lower, upper = np.take_along_axis(lower, order, axis=1), np.take_along_axis(upper, order, axis=1)
    reach = np.maximum.accumulate(upper, axis=1)
    # a band begins where none of those before reaches it or touches it
    begins = lower < empty
    begins[:, 1:] &= lower[:, 1:] > reach[:, :-1] + 1
    ends = np.ones_like(begins)
    ends[:, :-1] = begins[:, 1:] | (lower[:, 1:] == empty)
    ends &= lower < empty
    owner, _ = np.nonzero(begins)
    return segment[owner], left[segment, piece][owner], right[segment, piece][owner], lower[begins], reach[ends]


def _intersect(columns: Runs, lo: Ints, hi: Ints) -> tuple[Ints, Runs]:
    """Return (interval index, rows) for each run and interval [lo, hi) that may overlap; some results are empty."""
    first = np.searchsorted(np.maximum.accumulate(columns.last), lo, "left")
    count = np.searchsorted(columns.position, hi, "left") - first
    interval, nth = expand(np.maximum(count, 0))
    runs = columns.take(first[interval] + nth)
    begin = np.maximum(row_at(runs, lo[interval]), 0)
    end = np.minimum(row_at(runs, hi[interval]), runs.rows)
    return interval, runs.part(begin, end)


def _fuse_segments(table: Table) -> Table:
    """Merge neighbouring segments that see the same spans, all of them fully."""
    segments, spans, indptr, counts = table.segments, table.spans, table.indptr, np.diff(table.indptr)
    if not len(spans):
        first = np.zeros((len(segments), 2), np.int32)
    else:
        first = spans[np.minimum(indptr[:-1], len(spans) - 1), :2]
    alike = (counts[1:] == counts[:-1]) & ((first[1:] == first[:-1]).all(axis=1) | (counts[1:] == 0))
    pair = np.flatnonzero(alike & (segments[1:, 1] == segments[:-1, 1] + segments[:-1, 2]))
    owner, nth = expand(counts[pair])
    mine, theirs = spans[indptr[pair][owner] + nth], spans[indptr[pair + 1][owner] + nth]
    differs = (mine[:, :2] != theirs[:, :2]).any(axis=1)
    for side in (mine, theirs):
        differs |= (side[:, 4] != -UNBOUNDED) | (side[:, 5] != UNBOUNDED)
    joined = np.zeros(len(segments), np.bool_)
    joined[pair + 1] = np.bincount(owner, differs, minlength=len(pair)) == 0
    if not joined.any():
        return table
    heads = np.flatnonzero(~joined)
    kept = segments[heads]
    kept[:, 2] = np.add.reduceat(segments[:, 2], heads)
    return Table(kept, _indptr(counts[heads]), table.spans[np.repeat(~joined, counts)])


def _all_same(values: Ints) -> bool:
    return len(values) > 0 and bool((values == values[0]).all())


def _indptr(counts: Ints) -> Int32:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _stack(*columns: Ints) -> Int32:
    out = np.empty((len(columns[0]), len(columns)), np.int32)
    for n, column in enumerate(columns):
        out[:, n] = column
    return out
