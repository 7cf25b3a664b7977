"""Place whole documents on ranks, so that equal tokens and work need few messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from meshflash.core.balance import FloatArray, deal, pairs_before
from meshflash.core.lengths import Array
from meshflash.core.mask import Mask
from meshflash.core.needs import Needs
from meshflash.core.shards import Shards

#: The most that a part of a document may weigh, tried in this order, where 1 is the load of a rank.
MAX_PARTS = (1.0, 0.7, 0.5, 0.35, 0.25)
#: Neighbouring documents form one part up to this fraction of the largest part.
TOGETHER = 1 / 32
#: The most ranks: the time of dealing grows with ranks times parts, to seconds at a thousand ranks, and placing gained
#: little there.
MAX_RANKS = 128
#: The most ranges of a rank.
MAX_RANGES = 64
#: The most exchanges of pieces between ranks, and how many of the ranks farthest from the mean each tries.
MAX_EXCHANGES, PARTNERS = 100, 4


def place_documents(masks: Sequence[Mask], cuts: Array, world: int, goal: float) -> list[list[range]] | None:
    """Return the sorted ranges of each rank, with equal tokens and nearly equal work; None if no placement has that.

    Documents that are too much for a rank are cut into pairs of pieces, one from each end, as a zigzag layout does.
    Heads of documents then move between ranks until all ranks hold equally many tokens: later tokens of a document
    read only its head from another rank.

    Args:
        masks: The masks; each of them is balanced.
        cuts: The first position of each document, and the end of the last one, ascending.
        world: The number of ranks.
        goal: The largest work of any rank, where 1 is the mean. The first placement that has it is returned; each
            one that is tried cuts more documents than the one before.
    """
    if world > MAX_RANKS:
        return None
    documents = [range(a, b) for a, b in pairwise(cuts.tolist())]
    shares = _shares(masks, cuts, world, documents)
    largest, tokens = shares.max(axis=0), shares[-1]
    if tokens[largest <= 1].sum() < world / 2:  # most tokens are in documents that no rank can hold
        return None
    for most in MAX_PARTS:
        pieces = _parts_of_documents(documents, largest.tolist(), most)
        weight = _shares(masks, cuts, world, [r for part in pieces for r in part])
        weight = np.add.reduceat(weight, np.cumsum([0, *map(len, pieces[:-1])]), axis=1)
        dealt, _ = deal(weight, world, len(pieces))
        _exchange(weight, dealt, goal)
        held = [[r for part in taken for r in pieces[part]] for taken in dealt]
        _level_tokens(held, int(cuts[-1]))
        ranges = [r for taken in held for r in taken]
        rank = np.repeat(np.arange(world), [len(taken) for taken in held])
        shares = _shares(masks, cuts, world, ranges)[:-1]
        load = max(float(np.bincount(rank, share, minlength=world).max()) for share in shares)
        if load <= goal and max(map(len, held)) <= MAX_RANGES:
            return [sorted(taken, key=lambda r: r.start) for taken in held]
    return None


def rows_moved(masks: Sequence[Mask], ranges: Sequence[Sequence[range]]) -> int:
    """Return the most keys that any rank needs from others under any mask.

    Args:
        masks: The masks.
        ranges: The ranges of each rank.
    """
    shards = Shards(tuple(map(tuple, ranges)))
    every = np.arange(len(ranges))
    counts = (Needs(mask, shards, shards).num_needed(every) for mask in masks)
    return max(int((needed - own).max()) for needed, own in counts)


def _shares(masks: Sequence[Mask], cuts: Array, world: int, ranges: Sequence[range]) -> FloatArray:
    """Return the work of ranges under each mask, and in the last row their tokens, where 1 is the mean of a rank."""
    tokens = int(cuts[-1])
    edges = np.array([(r.start, r.stop) for r in ranges], np.int64).reshape(-1)
    order = np.argsort(edges, kind="stable")
    rows = []
    for mask in masks:
        before = np.empty(len(edges), np.int64)
        before[order] = pairs_before(mask, tokens, edges[order].tolist())
        total = int(pairs_before(mask, tokens, [tokens])[0])
        rows.append(np.diff(before.reshape(-1, 2), axis=1)[:, 0] / max(1, total))
    rows.append(np.diff(edges.reshape(-1, 2), axis=1)[:, 0] / max(1, tokens))
    shares: FloatArray = np.stack(rows) * world
    return shares


def _parts_of_documents(documents: list[range], weight: list[float], most: float) -> list[list[range]]:
    """Return the parts to place: neighbouring short documents, a document, or a pair of pieces of a long one."""
    out: list[list[range]] = []
    small = most * TOGETHER
    together = 0.0  # the weight of the last part, if documents may join it
    for document, share in zip(documents, weight, strict=True):
        if out and 0.0 < together + share <= small and out[-1][-1].stop == document.start:
            out[-1] = [range(out[-1][0].start, document.stop)]
            together += share
            continue
        parts = min(int(np.ceil(share / most)) or 1, max(1, len(document) // 2))
        if parts == 1:
            out.append([document])
            together = share if share <= small else most
            continue
        edges = [document.start + len(document) * n // (2 * parts) for n in range(2 * parts + 1)]
        halves = [range(a, b) for a, b in pairwise(edges)]
        out += [[halves[n], halves[-1 - n]] for n in range(parts)]
        together = most
    return out


def _exchange(weight: FloatArray, held: list[list[int]], goal: float) -> None:
    """Even out the loads by moving a piece to another rank, or swapping two, while that lowers their sum of squares.

    Args:
        weight: The weight of each piece under each mask, `[masks, pieces]`.
        held: The pieces of each rank.
        goal: The largest load to be content with, where 1 is the mean.
    """
    nothing = weight.shape[1]  # in place of a piece: nothing moves that way
    weight = np.concatenate([weight, np.zeros((len(weight), 1))], axis=1)
    excess = np.stack([weight[:, taken].sum(axis=1) for taken in held]) - 1.0
    fixed: set[int] = set()  # ranks that no exchange helps
    for _ in range(MAX_EXCHANGES):
        order = np.argsort(-np.abs(excess).max(axis=1)).tolist()
        rank = next((rank for rank in order if rank not in fixed), -1)
        if rank < 0 or excess.max() <= (goal - 1) / 4:
            return
        mine = [*held[rank], nothing]
        best, best_change = None, -1e-9
        for other in order[:PARTNERS]:
            if other == rank:
                continue
            theirs = [*held[other], nothing]
            moved = weight[:, mine][:, :, None] - weight[:, theirs][:, None, :]
            # (a - m)^2 + (b + m)^2 - a^2 - b^2, summed over the masks
            change = (2 * moved * (moved - (excess[rank] - excess[other])[:, None, None])).sum(axis=0)
            n = int(np.argmin(change))
            if change.flat[n] < best_change:
                best, best_change = (other, mine[n // len(theirs)], theirs[n % len(theirs)]), float(change.flat[n])
        if best is None:
            fixed.add(rank)
            continue
        fixed.clear()
        other, given, taken = best
        for piece, source, target in ((given, rank, other), (taken, other, rank)):
            if piece != nothing:
                held[source].remove(piece)
                held[target].append(piece)
                excess[source] -= weight[:, piece]
                excess[target] += weight[:, piece]


def _level_tokens(held: list[list[range]], tokens: int) -> None:
    """Move heads of ranges from ranks with too many tokens to ranks with too few, until numbers differ by at most 1."""
    world = len(held)
    lengths = [sum(map(len, taken)) for taken in held]
    fullest = sorted(range(world), key=lambda rank: -lengths[rank])
    target = {rank: tokens // world + (n < tokens % world) for n, rank in enumerate(fullest)}
    short = [rank for rank in fullest if lengths[rank] < target[rank]]
    for rank in fullest:
        while (surplus := lengths[rank] - target[rank]) > 0:
            into = short[-1]
            longest = max(range(len(held[rank])), key=lambda n: len(held[rank][n]))
            whole = held[rank][longest]
            count = min(surplus, target[into] - lengths[into], len(whole))
            held[into].append(range(whole.start, whole.start + count))
            held[rank][longest : longest + 1] = [range(whole.start + count, whole.stop)] if count < len(whole) else []
            lengths[rank] -= count
            lengths[into] += count
            if lengths[into] == target[into]:
                short.pop()
