"""Balance: how much work the pieces of a sequence are under a mask, and which ranks take them.

Work is counted in visible (query, key) pairs, in closed form: nothing here has an entry for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from meshflash.core.lengths import Array
from meshflash.core.mask import Mask
from meshflash.core.runs import expand
from meshflash.core.tiles import worklist

FloatArray = npt.NDArray[np.float64]


def pairs_before(mask: Mask, tokens: int, cuts: Sequence[int]) -> Array:
    """Return the number of visible pairs of all queries before each cut, summed over the mask's batch rows.

    Args:
        mask: The mask between queries and keys.
        tokens: The length of the sequence.
        cuts: Positions from 0 to `tokens`.

    >>> pairs_before(Mask.causal(), 4, [0, 1, 4]).tolist()
    [0, 1, 10]
    """
    mask.check(tokens, tokens, mask.batch_rows or 1)
    whole = (range(tokens),)
    table = worklist(mask, whole, whole, exact_positions=True).by_query
    segments, spans, indptr = (x.astype(np.int64) for x in (table.segments, table.spans, table.indptr))
    batch, first, rows = segments[:, 0], segments[:, 1], segments[:, 2]
    of_span = np.repeat(np.arange(len(table)), np.diff(indptr))
    pairs = _num_pairs(spans, first[of_span], (first + rows)[of_span])
    before = np.concatenate([[0], np.cumsum(pairs)])[indptr]
    ends = np.asarray(cuts, np.int64)
    total = np.zeros(len(ends), np.int64)
    for row in np.unique(batch):
        begin, end = np.searchsorted(batch, [row, row + 1])
        # The segment that a cut lies in counts up to the cut; the segments before it count as a whole.
        segment = begin + np.searchsorted(first[begin:end], ends, "right") - 1
        cut, nth = expand(np.diff(indptr)[segment])
        partial = _num_pairs(spans[indptr[segment[cut]] + nth], first[segment[cut]], ends[cut])
        within = np.concatenate([[0], np.cumsum(partial)])[np.concatenate([[0], np.cumsum(np.diff(indptr)[segment])])]
        total += before[segment] - before[begin] + np.diff(within)
    return total


def _num_pairs(spans: Array, first: Array, end: Array) -> Array:
    """Return the visible pairs of the queries `first .. end` with each span of a table of the whole sequence."""
    keys, start, lo, hi = spans[:, 1], spans[:, 2], spans[:, 4], spans[:, 5]

    def keys_before(offset: Array) -> Array:
        """Return, summed over the queries, how many keys of the span lie before the query's position + offset."""
        return _sum_of_clipped(end + offset - start, keys) - _sum_of_clipped(first + offset - start, keys)

    return keys_before(hi + 1) - keys_before(lo)


def _sum_of_clipped(end: Array, limit: Array) -> Array:
    """Return the sum of `clip(n, 0, limit)` over all n below `end`."""
    end = np.maximum(end, 0)
    rising = np.minimum(end, limit)
    total: Array = rising * (rising - 1) // 2 + limit * (end - rising)
    return total


def deal(weight: FloatArray, world: int, per_rank: int) -> tuple[list[list[int]], float]:
    """Deal pieces, heaviest first, to the least loaded rank that has fewer than `per_rank` of them.

    Return the pieces of each rank, and the largest load of any rank under any mask.

    Args:
        weight: The weight of each piece under each mask, `[masks, pieces]`.
        world: The number of ranks.
        per_rank: The most pieces that a rank may get.
    """
    order = np.argsort(-weight.sum(axis=0), kind="stable").tolist()
    if len(weight) == 1:
        return _deal_by_weight(weight[0].tolist(), order, world, per_rank)
    load = np.zeros((world, len(weight)))
    held: list[list[int]] = [[] for _ in range(world)]
    full = np.zeros(world)  # infinite for a rank that may get no more
    for piece in order:
        rank = int(np.argmin((load + weight[:, piece]).max(axis=1) + full))
        held[rank].append(piece)
        load[rank] += weight[:, piece]
        if len(held[rank]) == per_rank:
            full[rank] = np.inf
    return held, float(load.max())


def _deal_by_weight(weight: list[float], order: list[int], world: int, per_rank: int) -> tuple[list[list[int]], float]:
    """Deal pieces with one weight each, in O(log world) a piece.

    Of the ranks whose load with the piece would be the same number, the first one gets it. So ranks are kept by load.
    """
    held: list[list[int]] = [[] for _ in range(world)]
    ranks = {0.0: list(range(world))}  # a heap of ranks for each load
    loads = [0.0]  # a heap of all loads in `ranks`
    largest = 0.0
    for piece in order:
        added = weight[piece]
        tied = [heappop(loads)]
        while loads and loads[0] + added == tied[0] + added:  # different loads may round to the same sum
            tied.append(heappop(loads))
        load = tied[0] if len(tied) == 1 else min(tied, key=lambda value: ranks[value][0])
        rank = heappop(ranks[load])
        for value in tied:
            if ranks[value]:
                heappush(loads, value)
            else:
                del ranks[value]
        held[rank].append(piece)
        load += added
        if load > largest:
            largest = load
        if len(held[rank]) == per_rank:
            continue
        if load in ranks:
            heappush(ranks[load], rank)
        else:
            ranks[load] = [rank]
            heappush(loads, load)
    return held, largest
