"""Runs of rows at affine positions as arrays, and the positions that they see: what tiles and problems are built from.

Everything here is numpy over all runs at once, in O(runs + documents) for each term. Which rank holds a run is not
known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from meshflash.core.lengths import UNBOUNDED, BoolArray
from meshflash.core.mask import Mask
from meshflash.core.terms import Term

#: Rows, positions and indices: int64, or int32 after narrowing.
Ints = npt.NDArray[np.signedinteger[Any]]
LOW_BITS = (1 << 32) - 1


@dataclass(frozen=True)
class Runs:
    """Runs of rows at affine positions, one array entry for each run: first row, rows, first position, step."""

    row: Ints
    rows: Ints
    position: Ints
    step: Ints

    @property
    def last(self) -> Ints:
        return self.position + self.step * (self.rows - 1)

    def take(self, index: Ints | BoolArray | slice) -> Runs:
        return Runs(self.row[index], self.rows[index], self.position[index], self.step[index])

    def narrow(self) -> Runs:
        """Return the runs in int32."""
        row, rows, position, step = (x.astype(np.int32) for x in (self.row, self.rows, self.position, self.step))
        return Runs(row, rows, position, step)

    def part(self, begin: Ints, end: Ints) -> Runs:
        """Return rows `begin .. end` of each run, counted within the run."""
        return Runs(self.row + begin, end - begin, self.position + self.step * begin, self.step)

    @staticmethod
    def of(ranges: Sequence[range]) -> Runs:
        rows = np.array([len(r) for r in ranges], dtype=np.int64)
        return Runs(
            np.cumsum(rows) - rows,
            rows,
            np.array([r.start for r in ranges], dtype=np.int64),
            np.array([r.step for r in ranges], dtype=np.int64),
        ).take(rows > 0)


def term_cuts(terms: tuple[Term, ...], batch: int, by_key: bool) -> Ints:
    """Return the positions of the row side at which the interval of a term may change: a segment never crosses one."""
    terms = tuple(term for term in terms if term.is_in(batch))
    sides = np.array([term.keys if by_key else term.queries for term in terms], np.int64).ravel()
    cuts = [sides[(sides > 0) & (sides < UNBOUNDED)]]
    for term in terms:
        for documents in term.documents:
            cuts.append(documents.k_cuts(batch) if by_key else documents.q_cuts(batch))
        if by_key and term.first_in_document < UNBOUNDED:
            k_cuts = term.documents[0].k_cuts(batch)
            cuts.append(np.minimum(k_cuts[:-1] + term.first_in_document, k_cuts[1:]))
    return sorted_distinct(np.concatenate(cuts))


def sorted_distinct(values: Ints) -> Ints:
    """Return the distinct values in order; faster than `np.unique` on values that are nearly sorted."""
    if len(values) < 2 or (values[1:] > values[:-1]).all():
        return values
    values = np.sort(values, kind="stable")
    first = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return values[first]


def split_runs(runs: Runs, cuts: Ints) -> Runs:
    """Cut runs at some positions."""
    first = cuts.searchsorted(runs.position, "right")
    pieces = cuts.searchsorted(runs.last, "right") - first + 1
    if pieces.sum() > runs.rows.sum():
        return _split_rows(runs, cuts)
    run, piece = expand(pieces)
    runs, first, pieces = runs.take(run), first[run], pieces[run]
    padded = np.append(cuts, 0)
    begin = np.where(piece == 0, 0, row_at(runs, padded[first + piece - 1]))
    end = np.where(piece == pieces - 1, runs.rows, row_at(runs, padded[np.minimum(first + piece, len(cuts))]))
    parts = runs.part(begin, end)
    return parts.take(parts.rows > 0)


def _split_rows(runs: Runs, cuts: Ints) -> Runs:
    """Cut runs at some positions, row by row: for runs with a large step, which have fewer rows than cuts."""
    run, row = expand(runs.rows)
    position = runs.position[run] + runs.step[run] * row
    place = cuts.searchsorted(position, "right")
    begins = row == 0
    begins[1:] |= place[1:] != place[:-1]
    heads = np.flatnonzero(begins)
    run = run[heads]
    return Runs(runs.row[run] + row[heads], np.diff(np.append(heads, len(row))), position[heads], runs.step[run])


def term_intervals(terms: tuple[Term, ...], batch: int, position: Ints, by_key: bool) -> tuple[Ints, Ints]:
    """Return lo and hi, [segments, terms]: the column interval of each segment and term, without the band."""
    queries, keys = (
        np.array(x, np.int64).reshape(-1, 2) for x in ([t.queries for t in terms], [t.keys for t in terms])
    )
    own, other = (keys, queries) if by_key else (queries, keys)
    holds = np.array([term.is_in(batch) for term in terms], np.bool_)
    inside = (own[:, 0] <= position[:, None]) & (position[:, None] < own[:, 1]) & holds
    lo = np.where(inside, other[:, 0], 0)
    hi = np.where(inside, other[:, 1], 0)
    for t, term in enumerate(terms):
        for n, documents in enumerate(term.documents):
            q_cuts, k_cuts = documents.q_cuts(batch), documents.k_cuts(batch)
            own_cuts, other_cuts = (k_cuts, q_cuts) if by_key else (q_cuts, k_cuts)
            document = own_cuts.searchsorted(position, "right") - 1
            is_document = document < len(own_cuts) - 1
            document = np.minimum(document, len(own_cuts) - 2)
            if len(own_cuts) < 2:
                hi[:, t] = 0
                continue
            lo[:, t] = np.maximum(lo[:, t], other_cuts[document])
            hi[:, t] = np.minimum(hi[:, t], np.where(is_document, other_cuts[document + 1], 0))
            if n == 0 and term.first_in_document < UNBOUNDED:
                limit = k_cuts[document] + term.first_in_document
                if by_key:
                    hi[:, t] = np.where(position < limit, hi[:, t], 0)
                else:
                    hi[:, t] = np.minimum(hi[:, t], limit)
    return lo, hi


def row_at(runs: Runs, position: Ints) -> Ints:
    """Return the first row at or after a position, counted from the start of the run; may lie outside of the run."""
    if (runs.step == 1).all():  # most layouts; a division takes ten times as long as this check
        return position - runs.position
    return -((runs.position - position) // runs.step)


def expand(counts: Ints) -> tuple[Ints, Ints]:
    """Return (owner, index within the owner) for `counts[owner]` items of each owner."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True)
class View:
    """What some rows see by one term of a mask, in one batch row: `views` makes it.

    A row at position x sees the positions of the other side from `max(lo, x + band_lo)` to `min(hi - 1, x + band_hi)`,
    where lo and hi are those of its segment.
    """

    segments: Runs
    lo: Ints
    hi: Ints
    band_lo: int
    band_hi: int

    def take(self, index: Ints | BoolArray) -> View:
        """Return some of the segments."""
        return View(self.segments.take(index), self.lo[index], self.hi[index], self.band_lo, self.band_hi)

    def part(self, begin: Ints, end: Ints) -> View:
        """Return rows `begin .. end` of each segment, counted within it, without segments that have no rows."""
        part = View(self.segments.part(begin, end), self.lo, self.hi, self.band_lo, self.band_hi)
        some = begin < end
        return part if some.all() else part.take(some)

    def single_rows(self) -> View:
        """Return a segment for each row."""
        segment, row = expand(self.segments.rows)
        return self.take(segment).part(row, row + 1)

    def without_gaps(self, other_step: int = 1) -> View:
        """Return the view with a segment for each row if the band is narrower than a step of positions.

        Then the rows of a segment see an interval without gaps, and those that see a given run form an interval.

        Args:
            other_step: The largest step of positions of the other side.
        """
        step = max(int(self.segments.step.max(initial=1)), other_step)
        return self.single_rows() if self.band_hi - self.band_lo + 1 < step else self

    def limits(self) -> tuple[Ints, Ints]:
        """Return the first and the end of the positions that the rows of each segment see."""
        first, last = self.segments.position, self.segments.last
        return np.maximum(self.lo, first + self.band_lo), np.minimum(self.hi, last + self.band_hi + 1)

    def seeing(self) -> View:
        """Return only the rows that see anything."""
        segments = self.segments
        if ((self.lo <= segments.position + self.band_hi) & (segments.last + self.band_lo < self.hi)).all():
            return self if (self.lo < self.hi).all() else self.take(self.lo < self.hi)
        begin = np.maximum(row_at(segments, self.lo - self.band_hi), 0)
        end = np.minimum(row_at(segments, self.hi - self.band_lo), segments.rows)
        return self.part(begin, np.where(self.lo < self.hi, end, 0))


def view_of(term: Term, batch: int, runs: Runs, by_key: bool, cuts: Ints) -> View:
    """Return what some rows see by one term of a mask.

    Args:
        term: The term.
        batch: The batch row.
        runs: The rows, which are queries.
        by_key: The rows are keys instead, and "see" the queries that see them.
        cuts: The positions at which to cut the runs, sorted: those of `term_cuts`, and any others.
    """
    segments = split_runs(runs, cuts)
    lo, hi = term_intervals((term,), batch, segments.position, by_key)
    band_lo, band_hi = (-term.hi, -term.lo) if by_key else (term.lo, term.hi)
    return View(segments, lo[:, 0], hi[:, 0], band_lo, band_hi)


def views(mask: Mask, runs: Runs, by_key: bool) -> Iterator[View]:
    """Yield what some rows see: a view for each batch row and term.

    Args:
        mask: The mask between queries and keys.
        runs: The rows, which are queries.
        by_key: The rows are keys instead, and "see" the queries that see them.
    """
    for batch in range(mask.batch_rows or 1):
        for term in (term for term in mask.terms if term.is_in(batch)):
            yield view_of(term, batch, runs, by_key, term_cuts((term,), batch, by_key))


def seen(mask: Mask, ranges: Sequence[range], by_key: bool = False) -> list[tuple[int, int]]:
    """Return the positions of keys that some queries see, as sorted disjoint intervals `[lo, hi)`.

    The result covers all batch rows.

    Args:
        mask: The mask between queries and keys.
        ranges: The positions of the queries, or of the keys.
        by_key: Return the positions of queries that see some keys instead.

    >>> seen(Mask.causal() & (Mask.window(2, 0) | Mask.first(1)), [range(8, 12)])
    [(0, 1), (6, 12)]
    """
    limits = [view.without_gaps().limits() for view in views(mask, Runs.of(ranges), by_key)]
    lo, hi = (np.concatenate(side) for side in zip(*limits, strict=True)) if limits else np.zeros((2, 0), np.int64)
    _, lo, hi = merge_intervals(np.zeros_like(lo), lo, hi)
    return list(zip(lo.tolist(), hi.tolist(), strict=True))


def merge_intervals(key: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (key, lo, hi): for each key its intervals `[lo, hi)`, sorted, not empty, not touching.

    Args:
        key: The key of each interval, at least 0; intervals of different keys are kept apart.
        lo: The first number of each interval, at least 0.
        hi: The end of each interval; an interval that ends before it begins is empty.
    """
    some = lo < hi
    # Keys in the upper half of 64 bits, so that one sort and one running maximum serve all keys.
    base = key[some].astype(np.int64) << 32
    begin, end = base + lo[some], base + hi[some]
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    if not len(begin):
        return begin, begin, begin
    apart = begin[1:] > end[:-1]
    begin, end = begin[np.append(True, apart)], end[np.append(apart, True)]
    return begin >> 32, begin & LOW_BITS, end & LOW_BITS
