"""Visible pairs for the verifier: from the mask's definition, and from the tile tables, which must agree."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from meshflash.core.lengths import UNBOUNDED
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import Ranges
from meshflash.core.tiles import Table, worklist

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int16]


#: Up to this many pairs, all of them are computed once and kept.
MAX_KEPT_PAIRS = 1 << 24


class Visibility:
    """The visible pairs of a problem, from `Mask.visible` alone.

    Positions that no rank holds see nothing and are not seen.
    """

    def __init__(self, problem: Problem) -> None:
        self.mask = problem.mask
        self._held = []
        for side, ranks in (("queries", problem.q), ("keys", problem.k)):
            ranges = [r for held in ranks for r in held if len(r)]
            count = np.zeros(max((max(r[0], r[-1]) + 1 for r in ranges), default=0), np.uint8)
            for r in ranges:
                count[index(r)] += 1
            if count.max(initial=0) > 1:
                raise ValueError(f"the ranks of the problem hold a position of the {side} twice")
            self._held.append(count.astype(np.bool_))
        self.q_tokens, self.k_tokens = map(len, self._held)
        self.batch = self.mask.batch_rows or 1
        self._all: Bools | None = None
        if self.batch * self.q_tokens * self.k_tokens <= MAX_KEPT_PAIRS:
            everything = _visible(self.mask, np.arange(self.q_tokens), np.arange(self.k_tokens))
            self._all = everything & self._held[0][:, None] & self._held[1]

    def pairs(self, q: Ints, k: Ints) -> Bools:
        """Return the visible pairs of some queries and keys, [batch, queries, keys].

        Args:
            q: The positions of the queries.
            k: The positions of the keys.
        """
        if self._all is not None:
            return self._all[:, q[:, None], k]
        return _visible(self.mask, q, k) & self._held[0][q][:, None] & self._held[1][k]

    def of_queries(self, q: Ints) -> Bools:
        """Return the visible pairs of some queries and all keys, [batch, queries, keys]."""
        return self._all[:, q] if self._all is not None else self.pairs(q, np.arange(self.k_tokens))

    def of_keys(self, k: Ints) -> Bools:
        """Return the visible pairs of some keys and all queries, [batch, keys, queries]."""
        found = self._all[:, :, k] if self._all is not None else self.pairs(np.arange(self.q_tokens), k)
        return found.transpose(0, 2, 1)


def index(positions: range) -> slice:
    """Return the slice of an array over all positions that a range takes; in increasing order."""
    ordered = positions if positions.step > 0 else positions[::-1]
    return slice(ordered.start, ordered.stop, ordered.step)


@lru_cache(maxsize=8192)
def expand(ranges: Ranges) -> Ints:
    """Return the positions of some ranges, concatenated; cached and read-only."""
    out = np.concatenate([np.zeros(0, np.int64), *(np.arange(r.start, r.stop, r.step) for r in ranges)])
    out.flags.writeable = False
    return out


@lru_cache(maxsize=8192)
def distinct(ranges: Ranges) -> bool:
    """Whether no position occurs twice."""
    positions = expand(ranges)
    return len(np.unique(positions)) == len(positions)


def _visible(mask: Mask, i: Ints, j: Ints) -> Bools:
    """Return [batch, queries, keys] from the mask's definition."""
    shown = [mask.visible(i[:, None], j[None, :], batch) for batch in range(mask.batch_rows or 1)]
    return np.stack([np.broadcast_to(row, (len(i), len(j))) for row in shown]).astype(np.bool_)


@lru_cache(maxsize=8192)
def table_pairs(mask: Mask, q_positions: Ranges, k_positions: Ranges, by_key: bool) -> Counts:
    """Return how often a tile table holds each pair, [batch, q rows, k rows].

    Args:
        mask: The mask between queries and keys.
        q_positions: The positions of the query rows.
        k_positions: The positions of the key rows.
        by_key: Whether to read the table of the backward (`by_key`) instead of `by_query`.
    """
    work = worklist(mask, q_positions, k_positions)
    sizes = [sum(map(len, ranges)) for ranges in (q_positions, k_positions)]
    out = np.zeros((mask.batch_rows or 1, *sizes), np.int16)
    for batch, q, k, shown in _tiles(work.by_key if by_key else work.by_query, by_key):
        out[slice(None) if batch < 0 else batch, q, k] += shown
    return out


def _tiles(table: Table, by_key: bool) -> Iterator[tuple[int, slice, slice, Bools]]:
    """Yield (batch row or -1 for all, query rows, key rows, visible pairs) for each tile of a table."""
    for s, (batch, row, rows, position, step) in enumerate(table.segments.tolist()):
        mine = position + step * np.arange(rows)
        for first, n, start, stride, lo, hi in table.spans[table.indptr[s] : table.indptr[s + 1]].tolist():
            other = start + stride * np.arange(n)
            i, j = (other[:, None], mine[None, :]) if by_key else (mine[:, None], other[None, :])
            bounded = lo > -UNBOUNDED or hi < UNBOUNDED
            shown = (
                (lo <= j - i) & (j - i <= hi) if bounded else np.ones(np.broadcast_shapes(i.shape, j.shape), np.bool_)
            )
            own, others = slice(row, row + rows), slice(first, first + n)
            yield (batch, others, own, shown) if by_key else (batch, own, others, shown)
