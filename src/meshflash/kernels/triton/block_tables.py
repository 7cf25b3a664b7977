"""Worklists as the tables that Triton kernels walk: blocks of rows, heaviest first, and their spans or runs.

Kept with the worklist, by device and block size: the layers of a model share one, and a repeated call
copies nothing to the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshflash.core.lengths import UNBOUNDED
from meshflash.core.tiles import Table, Worklist, expand

#: Columns of `Blocks.tiles`.
TILE = ("batch", "row", "rows", "position", "step", "first_span", "last_span")

#: Columns of `Blocks.spans` where they are runs: rows of the other side, the first of them, how many blocks, the row
#: past the last one of the span, and how far a visible row may lie from the position of the block's own row.
RUN = ("begin", "blocks", "limit", "least", "most")

#: Rows that a group of warps stores at once, where a block has as many for each that has any.
LEVEL = 64

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of rows, each with the spans `[first_span, last_span)` of the other side.

    Where they are runs (`RUN`), a block has its first run, and instead of the last how many blocks of the other
    side it meets. `lower` and `upper` say whether that side of a band binds anywhere, `edge` whether a block has
    missing rows, `single` whether each has one run, of the block's own number, `aligned` whether all begin at multiples
    of 4 rows. `whole` says that no block of the other side has rows before its own to be masked: one may begin earlier
    because its rows end, or because all begin at multiples of their size, which `even` says. Runs of these are
    `clipped` where some block has rows that are not of its run and that no band hides. `level` says that all blocks
    have multiples of 64 rows, and `once` that of the blocks that each 64 rows see, from the last on, a band cuts the
    first one at most. Runs say how many blocks of the other side one `meets` on average, and whether all meet `alike`.
    """

    tiles: Tensor
    spans: Tensor
    lower: bool
    upper: bool
    edge: bool
    single: bool = False
    aligned: bool = False
    whole: bool = False
    even: bool = False
    clipped: bool = False
    level: bool = False
    once: bool = False
    meets: float = 0.0
    alike: bool = False

    def __len__(self) -> int:
        return len(self.tiles)

    @property
    def peels(self) -> bool:
        """Whether blocks that a band cuts come after all others of a run, and else only missing rows are masked."""
        return self.single and self.whole and not self.clipped and self.lower and not self.upper


_kept: WeakKeyDictionary[Worklist, dict[Any, Any]] = WeakKeyDictionary()


def blocks(work: Worklist, by_key: bool, size: int, batch: int, device: torch.device) -> Blocks:
    """The query rows of a worklist, or its key rows, in blocks of at most `size`, for so many batch rows."""
    kept = _kept.setdefault(work, {})
    key = (by_key, size, batch, device)
    if key not in kept:
        table = work.by_key if by_key else work.by_query
        kept[key] = _blocks(_cut(_whole(table), size), table, by_key, size, batch, device)
    return kept[key]


def runs(
    work: Worklist,
    by_key: bool,
    size: int,
    other: int,
    rest: int,
    batch: int,
    device: torch.device,
    filled: bool = False,
    grid: bool = False,
) -> tuple[Blocks, Blocks]:
    """The blocks that meet the other side in whole blocks of `other` rows, with their runs, and the rest of them.

    The rest is in blocks of at most `rest` rows, as `blocks` has them. Blocks are `filled` where rows before one that
    has fewer than `size` are of the same segment, so that it can be read from there; others are left to the rest.
    Where they are not, a block takes as long however few rows it has: the first one has fewer, which under a causal
    mask meets least.

    A run's last block begins earlier where the rows of its span end, so nothing outside of the span is read; a span
    that is shorter than a block, or that a band cuts and whose positions have another step, leaves its blocks to the
    rest. Positions of the blocks' rows are counted from 0 there, and bands are in rows.

    On a `grid` blocks of the other side begin at multiples of their size instead, and may reach beyond its last row;
    rows outside of the span are there to be masked, so a span may have any length. Blocks are then filled from
    segments before as well. Where rows that no span has, which may hold anything, would be read so, there is no grid.
    """
    kept = _kept.setdefault(work, {})
    key = (by_key, size, other, rest, batch, device, filled, grid)
    if key not in kept:
        table = work.by_key if by_key else work.by_query
        tokens = sum(map(len, work.q_ranges if by_key else work.k_ranges))
        grid = grid and _fills_blocks(table, other, tokens)
        tiles = _cut(_whole(table), size, short_first=not filled)
        pairs = _pairs(tiles, table, by_key)
        served = np.bincount(pairs.tile, minlength=len(tiles)) > 0
        other_step = pairs.step != tiles[pairs.tile, 4]
        short = pairs.rows < (0 if grid else other)
        served[pairs.tile[other_step & pairs.bound | short]] = False
        if filled:
            served &= np.repeat(_can_be_filled(table, size, grid), -(-table.segments[:, 2] // size))
        left = _blocks(_cut(tiles[~served], rest), table, by_key, rest, batch, device)
        kept[key] = _runs(tiles, served, pairs, size, other, tokens, grid, batch, device), left
    return kept[key]


def _blocks(tiles: Ints, table: Table, by_key: bool, size: int, batch: int, device: torch.device) -> Blocks:
    pairs = _pairs(tiles, table, by_key)
    tiles = _every_batch_row(tiles[_heaviest_first(pairs, len(tiles))], batch)
    lower, upper = bool((table.spans[:, 4] > -UNBOUNDED).any()), bool((table.spans[:, 5] < UNBOUNDED).any())
    edge = bool((tiles[:, 2] < size).any())
    return Blocks(on_device(tiles, device), on_device(table.spans, device), lower, upper, edge)


def _runs(
    tiles: Ints,
    served: npt.NDArray[np.bool_],
    pairs: _Pairs,
    size: int,
    other: int,
    tokens: int,
    grid: bool,
    batch: int,
    device: torch.device,
) -> Blocks:
    pairs = pairs.of(served[pairs.tile])
    rows = tiles[pairs.tile, 2]
    begin, end, limit = (pairs.row + n for n in (pairs.begin, pairs.end, pairs.rows))
    shift = pairs.first - pairs.position
    least = np.where(pairs.lo > -UNBOUNDED, -((-pairs.lo - shift) // pairs.step) + pairs.row, -UNBOUNDED)
    most = np.where(pairs.hi < UNBOUNDED, (pairs.hi + shift) // pairs.step + pairs.row, UNBOUNDED)
    start = begin - begin % other if grid else begin
    count = -(-(end - start) // other)
    stop = np.minimum(start + count * other, tokens if grid else limit)
    if grid:  # rows that are not of the run, and that no band hides; for a row alone a band can
        least = np.where(rows == 1, np.maximum(least, begin), least)
        before, after = (start < begin) & (least < begin), (limit < stop) & (rows + most > limit)
    else:
        before, after = start + count * other > limit, np.zeros(len(begin), np.bool_)
    lower = before | (rows - 1 + least > start)
    upper = most < stop - 1
    whole, clipped = not before.any(), grid and bool((before | after).any())
    turns = np.bincount(pairs.tile, count, minlength=len(tiles)).astype(np.int64)
    first = np.searchsorted(pairs.tile, np.arange(len(tiles)))
    counted = np.tile([0, 1], (len(tiles), 1))
    mine = np.concatenate([tiles[:, :3], counted, first[:, None], turns[:, None]], axis=1)
    order = _heaviest_first(pairs, len(tiles))
    mine = _every_batch_row(mine[order[served[order]]], batch)
    table = np.stack([start if whole else begin, count, limit, least, most], axis=1)
    single = len(np.unique(pairs.tile)) == len(pairs.tile)
    if single:  # a run has the number of its block, so that neither waits for the other
        table = table[mine[:, 5]]
        mine[:, 5] = np.arange(len(mine))
    return Blocks(
        on_device(mine, device),
        on_device(table, device),
        bool(lower.any()),
        bool(upper.any()),
        edge=bool((mine[:, 2] < size).any()),
        single=single,
        aligned=grid or not ((begin | limit) % 4).any(),
        whole=whole,
        even=grid or (whole and not (start % other).any()),
        clipped=clipped,
        level=not (mine[:, 2] % LEVEL).any(),
        once=single and whole and not lower.any() and _once(rows, start, count, most, other, size),
        meets=float(mine[:, 6].mean()) if len(mine) else 0.0,
        alike=not np.ptp(mine[:, 6]) if len(mine) else False,
    )


def _once(rows: Ints, start: Ints, count: Ints, most: Ints, other: int, size: int) -> bool:
    for lowest in range(0, size, LEVEL):
        highest = np.minimum(rows, lowest + LEVEL) - 1
        first = np.clip((highest + most - start) // other, 0, count - 1)
        cut = lowest + most < start + first * other - 1  # the last row of the block before the first one that is seen
        if (cut & (first > 0) & (rows > lowest)).any():
            return False
    return True


def _fills_blocks(table: Table, size: int, tokens: int) -> bool:
    """Whether blocks on a grid, of rows of the other side, have rows of spans only, or none: no gap ends within one."""
    owner, _ = expand(np.diff(table.indptr))
    batches, batch = np.unique(table.segments[owner, 0], return_inverse=True)
    row, rows = table.spans[:, :2].astype(np.int64).T
    width = -(-tokens // size) * size
    ends = np.where(row + rows == tokens, width, row + rows)  # beyond the last row there are zeros
    order = np.argsort(batch * width + row)
    begin = np.append((batch * width + row)[order], len(batches) * width)
    end = np.insert(np.maximum.accumulate((batch * width + ends)[order]), 0, 0)
    return not ((end < begin) & ((begin % size > 0) | (end % size > 0))).any()


def _can_be_filled(table: Table, size: int, grid: bool) -> npt.NDArray[np.bool_]:
    """Of each segment whether its last block can be read from earlier rows: its own, or on a grid those of others too.

    These are of segments that are seen, as no one knows what the rest hold; before the first row there are zeros.
    Where most rows are of segments shorter than a block, blocks would be rather empty, and the rest has smaller ones.
    """
    batch, row, rows = table.segments[:, :3].astype(np.int64).T
    alone = rows >= size
    if not grid or 2 * rows[~alone].sum() > rows.sum():
        return alone
    seen = np.diff(table.indptr) > 0
    begins = np.ones(len(row), np.bool_)  # where the rows before are not of a segment that is seen
    begins[1:] = ~seen[:-1] | (batch[1:] != batch[:-1]) | (row[1:] != row[:-1] + rows[:-1])
    first = np.maximum.accumulate(np.where(begins, np.arange(len(row)), 0))
    return alone | (row[first] <= np.maximum(0, row + rows - size))


def _whole(table: Table) -> Ints:
    """The segments of a table, as blocks."""
    return np.column_stack([table.segments, table.indptr[:-1], table.indptr[1:]]).astype(np.int64)


def _cut(tiles: Ints, size: int, short_first: bool = False) -> Ints:
    """Blocks in blocks of at most `size` rows; the one that has fewer is the last, or the first."""
    owner, nth = expand(-(-tiles[:, 2] // size))
    mine = tiles[owner]
    ends = (nth + 1) * size - (-mine[:, 2] % size if short_first else 0)
    begin, rows = np.maximum(0, ends - size), np.minimum(ends, mine[:, 2])
    rows -= begin
    columns = (mine[:, 0], mine[:, 1] + begin, rows, mine[:, 3] + mine[:, 4] * begin, *mine[:, 4:].T)
    return np.stack(columns, axis=1).astype(np.int64)


@dataclass(frozen=True)
class _Pairs:
    """Blocks and spans that meet, in order of the blocks: rows `begin` to `end` of the span's are met.

    `first` and `last` are positions of the block; a row of the span is visible where its position less the block
    row's lies between `lo` and `hi`.
    """

    tile: Ints
    row: Ints
    rows: Ints
    position: Ints
    step: Ints
    lo: Ints
    hi: Ints
    first: Ints
    last: Ints
    begin: Ints
    end: Ints

    @property
    def bound(self) -> npt.NDArray[np.bool_]:
        """Whether a side of the band binds; where none does, positions mean nothing."""
        return (self.lo > -UNBOUNDED) | (self.hi < UNBOUNDED)

    def of(self, which: npt.NDArray[np.bool_]) -> _Pairs:
        """Some of them."""
        return _Pairs(*(column[which] for column in vars(self).values()))


def _pairs(tiles: Ints, table: Table, by_key: bool) -> _Pairs:
    owner, nth = expand(tiles[:, 6] - tiles[:, 5])
    spans, tile = table.spans.astype(np.int64)[tiles[owner, 5] + nth], tiles[owner]
    row, rows, position, step, lo, hi = spans.T
    if by_key:
        lo, hi = -hi, -lo
    first, last = tile[:, 3], tile[:, 3] + tile[:, 4] * (tile[:, 2] - 1)
    begin = np.clip(-((position - first - lo) // step), 0, rows)
    end = np.clip((last + hi - position) // step + 1, 0, rows)
    pairs = _Pairs(owner, row, rows, position, step, lo, hi, first, last, begin, end)
    return pairs.of(begin < end)


def _heaviest_first(pairs: _Pairs, tiles: int) -> Ints:
    """An order of blocks, by the rows of the other side that they meet, so that the last to begin are short."""
    weight = np.bincount(pairs.tile, pairs.end - pairs.begin, minlength=tiles)
    return np.argsort(-weight, kind="stable")


def _every_batch_row(tiles: Ints, batch: int) -> Ints:
    """Blocks that stand for all batch rows, once for each."""
    shared = tiles[:, 0] < 0
    if not shared.any():
        return tiles
    every = np.repeat(tiles[shared], batch, axis=0)
    every[:, 0] = np.tile(np.arange(batch), int(shared.sum()))
    return np.concatenate([every, tiles[~shared]])


def on_device(table: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A table as kernels read it: copied from the host, so that any stream may read it at once."""
    return torch.from_numpy(np.ascontiguousarray(table, dtype=np.int32)).to(device)
