"""Tables that the Triton and Gluon kernels walk: the tiles of a worklist, heaviest first, with their spans or runs.

A tile is a block of rows that one CTA computes: queries, or keys in a backward by keys. The other side is the rows that
tiles meet. Tables are cached with the worklist, by device and block size: the layers of a model share one, and a
repeated call copies nothing to the device.
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
from meshflash.core.runs import expand
from meshflash.core.tiles import Table, Worklist

#: Columns of `TileTable.tiles`.
TILE = ("batch", "row", "rows", "position", "step", "first_span", "last_span")

#: Columns of `TileTable.spans` where they are runs, ranges of blocks of the other side: the first row, the number of
#: blocks, the row past the span's last, and the least and greatest distance of a visible row from a tile row.
RUN = ("begin", "blocks", "limit", "least", "most")

#: Rows of a warpgroup. TMA stores them as one block, where every warpgroup of a tile has all of them or none.
WG_ROWS = 64

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TileTable:
    """Tiles of a launch, each with the spans `[first_span, last_span)` of the other side; `make_*` functions build it.

    Where the spans are runs (`RUN`), the last column of a tile is the number of blocks that it loops over.

    Attributes:
        lower, upper: Whether that side of a band binds anywhere.
        partial_tiles: Whether some tile has fewer rows than its size.
        single_run: Whether each tile has one run, of the tile's own index.
        aligned: Whether all blocks of the other side begin at multiples of 4 rows.
        exact_begin: Whether no block of the other side has rows before its own, which would have to be masked. A
            block may begin earlier because its span ends, or because of the grid.
        on_grid: Whether all blocks of the other side begin at multiples of their size.
        clipped: Whether, on the grid, some block has rows outside of its run that no band hides.
        tile_aligned: Whether all tiles have multiples of 64 rows.
        masks_first_only: Whether a band crosses at most the first block that each 64 rows see, walked from the last.
        mean_blocks: The mean number of blocks of the other side that a tile loops over.
        max_blocks: The largest number of them.
        uniform: Whether all tiles loop over the same number of blocks.
    """

    tiles: Tensor
    spans: Tensor
    lower: bool
    upper: bool
    partial_tiles: bool
    single_run: bool = False
    aligned: bool = False
    exact_begin: bool = False
    on_grid: bool = False
    clipped: bool = False
    tile_aligned: bool = False
    masks_first_only: bool = False
    mean_blocks: float = 0.0
    max_blocks: int = 0
    uniform: bool = False

    def __len__(self) -> int:
        return len(self.tiles)

    @property
    def splits_masked_loop(self) -> bool:
        """Whether blocks that a band crosses come after all others of a run, and others need no mask in a full tile."""
        return self.single_run and self.exact_begin and not self.clipped and self.lower and not self.upper


_tables: WeakKeyDictionary[Worklist, dict[Any, Any]] = WeakKeyDictionary()


def make_tile_table(work: Worklist, by_key: bool, size: int, batch: int, device: torch.device) -> TileTable:
    """Return the tiles of a worklist with their spans, as the portable kernels walk them.

    Args:
        work: The worklist.
        by_key: Whether tiles are of keys, and not of queries.
        size: The most rows of a tile.
        batch: The number of batch rows.
        device: Where the table goes.
    """
    kept = _tables.setdefault(work, {})
    key = (by_key, size, batch, device)
    if key not in kept:
        table = work.by_key if by_key else work.by_query
        kept[key] = _tile_table(_cut_tiles(_whole_segments(table), size), table, by_key, size, batch, device)
    return kept[key]


def make_run_tables(
    work: Worklist,
    by_key: bool,
    size: int,
    other: int,
    rest: int,
    batch: int,
    device: torch.device,
    filled: bool = False,
    grid: bool = False,
) -> tuple[TileTable, TileTable]:
    """Return the tiles that loop over full blocks only, with their runs, and a table of the remaining tiles.

    The Gluon kernels serve the first table, the portable ones the second. A run's last block begins earlier where the
    rows of its span end, so nothing outside of the span is read. A span that is shorter than a block, or that has a
    band and another position step than its tile, leaves the tile to the second table. In the first table, positions of
    a tile's rows count from 0, and bands are in rows.

    Args:
        work: The worklist.
        by_key: Whether tiles are of keys, and not of queries.
        size: The most rows of a tile in the first table.
        other: The rows of a block of the other side.
        rest: The most rows of a tile in the second table.
        batch: The number of batch rows.
        device: Where the tables go.
        filled: Whether a tile of fewer than `size` rows is read from earlier rows of its segment; segments that are too
            short for that go to the second table. Otherwise the first tile of a segment is the short one: a short tile
            takes as long per block as a full one, and under a causal mask the first tile has the fewest blocks.
        grid: Whether blocks of the other side begin at multiples of their size, and may reach beyond its last row. Rows
            outside of the span are masked, so a span may have any length; earlier segments fill tiles too.
            Without effect where blocks would read rows of no span, which may hold anything, NaN included.
    """
    kept = _tables.setdefault(work, {})
    key = (by_key, size, other, rest, batch, device, filled, grid)
    if key not in kept:
        table = work.by_key if by_key else work.by_query
        tokens = sum(map(len, work.q_ranges if by_key else work.k_ranges))
        grid = grid and _fills_blocks(table, other, tokens)
        tiles = _cut_tiles(_whole_segments(table), size, short_first=not filled)
        pairs = _overlapping_pairs(tiles, table, by_key)
        served = np.bincount(pairs.tile, minlength=len(tiles)) > 0
        other_step = pairs.step != tiles[pairs.tile, 4]
        short = pairs.rows < (0 if grid else other)
        served[pairs.tile[other_step & pairs.bound | short]] = False
        if filled:
            served &= np.repeat(_can_be_filled(table, size, grid), -(-table.segments[:, 2] // size))
        remaining = _tile_table(_cut_tiles(tiles[~served], rest), table, by_key, rest, batch, device)
        kept[key] = _run_table(tiles, served, pairs, size, other, tokens, grid, batch, device), remaining
    return kept[key]


def _tile_table(tiles: Ints, table: Table, by_key: bool, size: int, batch: int, device: torch.device) -> TileTable:
    pairs = _overlapping_pairs(tiles, table, by_key)
    tiles = _every_batch_row(tiles[_heaviest_first(pairs, len(tiles))], batch)
    lower, upper = bool((table.spans[:, 4] > -UNBOUNDED).any()), bool((table.spans[:, 5] < UNBOUNDED).any())
    partial_tiles = bool((tiles[:, 2] < size).any())
    return TileTable(to_device(tiles, device), to_device(table.spans, device), lower, upper, partial_tiles)


def _run_table(
    tiles: Ints,
    served: npt.NDArray[np.bool_],
    pairs: _Pairs,
    size: int,
    other: int,
    tokens: int,
    grid: bool,
    batch: int,
    device: torch.device,
) -> TileTable:
    pairs = pairs.of(served[pairs.tile])
    order = _heaviest_first(pairs, len(tiles))
    runs = _merged(_runs_of(pairs), tiles)
    rows = tiles[runs.tile, 2]
    least, most = runs.least, runs.most
    start = runs.begin - runs.begin % other if grid else runs.begin
    count = -(-(runs.end - start) // other)
    stop = np.minimum(start + count * other, tokens if grid else runs.limit)
    if grid:  # rows outside of the run that no band hides; for a tile of one row, a band can hide them
        least = np.where(rows == 1, np.maximum(least, runs.begin), least)
        before = (start < runs.begin) & (least < runs.begin)
        after = (runs.limit < stop) & (rows + most > runs.limit)
    else:
        before, after = start + count * other > runs.limit, np.zeros(len(start), np.bool_)
    lower = before | (rows - 1 + least > start)
    upper = most < stop - 1
    exact_begin, clipped = not before.any(), grid and bool((before | after).any())
    num_blocks = np.bincount(runs.tile, count, minlength=len(tiles)).astype(np.int64)
    first = np.searchsorted(runs.tile, np.arange(len(tiles)))
    counted = np.tile([0, 1], (len(tiles), 1))
    mine = np.concatenate([tiles[:, :3], counted, first[:, None], num_blocks[:, None]], axis=1)
    mine = _every_batch_row(mine[order[served[order]]], batch)
    table = np.stack([start if exact_begin else runs.begin, count, runs.limit, least, most], axis=1)
    single_run = len(np.unique(runs.tile)) == len(runs.tile)
    if single_run:  # a run has the index of its tile, so a kernel loads both at once
        table = table[mine[:, 5]]
        mine[:, 5] = np.arange(len(mine))
    return TileTable(
        to_device(mine, device),
        to_device(table, device),
        bool(lower.any()),
        bool(upper.any()),
        partial_tiles=bool((mine[:, 2] < size).any()),
        single_run=single_run,
        aligned=grid or not ((runs.begin | runs.limit) % 4).any(),
        exact_begin=exact_begin,
        on_grid=grid or (exact_begin and not (start % other).any()),
        clipped=clipped,
        tile_aligned=not (mine[:, 2] % WG_ROWS).any(),
        masks_first_only=single_run
        and exact_begin
        and not lower.any()
        and _masks_first_only(rows, start, count, most, other, size),
        mean_blocks=float(mine[:, 6].mean()) if len(mine) else 0.0,
        max_blocks=int(mine[:, 6].max(initial=0)),
        uniform=not np.ptp(mine[:, 6]) if len(mine) else False,
    )


@dataclass(frozen=True)
class _Runs:
    """Ranges of rows of the other side that tiles loop over, in order of the tiles.

    Row t of tile `tile` sees the rows from `begin` to `end` between `t + least` and `t + most`. `limit` is the end of
    the span that they are of.
    """

    tile: Ints
    begin: Ints
    end: Ints
    limit: Ints
    least: Ints
    most: Ints


def _runs_of(pairs: _Pairs) -> _Runs:
    """Return the run of each pair of a tile and a span, with its band in rows."""
    shift = pairs.first - pairs.position
    least = np.where(pairs.lo > -UNBOUNDED, -((-pairs.lo - shift) // pairs.step) + pairs.row, -UNBOUNDED)
    most = np.where(pairs.hi < UNBOUNDED, (pairs.hi + shift) // pairs.step + pairs.row, UNBOUNDED)
    begin, end, limit = (pairs.row + n for n in (pairs.begin, pairs.end, pairs.rows))
    return _Runs(pairs.tile, begin, end, limit, least, most)


def _merged(runs: _Runs, tiles: Ints) -> _Runs:
    """Merge neighbouring runs of a tile where one band describes both: the first's lower and the last's upper side.

    Zigzag shards have such runs: a tile of keys is crossed by the diagonal in one chunk of queries, and all queries of
    the next chunk see it. Kernels are faster where each tile has a single run, and a merged run has no ragged block in
    its middle.
    """
    if not len(runs.tile):
        return runs
    last_row = tiles[runs.tile, 2] - 1
    follows = (runs.tile[1:] == runs.tile[:-1]) & (runs.end[:-1] == runs.begin[1:])
    # what the first run's lower side and the last run's upper side would hide of the other run must be nothing
    follows &= (last_row + runs.least)[:-1] <= runs.begin[1:]
    follows &= runs.most[1:] >= runs.end[:-1] - 1
    # and the other two sides must hide nothing of their own run
    follows &= runs.most[:-1] >= runs.end[:-1] - 1
    follows &= (last_row + runs.least)[1:] <= runs.begin[1:]
    first, last = np.append(True, ~follows), np.append(~follows, True)
    return _Runs(
        runs.tile[first], runs.begin[first], runs.end[last], runs.limit[last], runs.least[first], runs.most[last]
    )


def _masks_first_only(rows: Ints, start: Ints, count: Ints, most: Ints, other: int, size: int) -> bool:
    for lowest in range(0, size, WG_ROWS):
        highest = np.minimum(rows, lowest + WG_ROWS) - 1
        first = np.clip((highest + most - start) // other, 0, count - 1)
        cut = (
            lowest + most < start + first * other - 1
        )  # compare the last row of the block before the first visible one
        if (cut & (first > 0) & (rows > lowest)).any():
            return False
    return True


def _fills_blocks(table: Table, size: int, tokens: int) -> bool:
    """Whether each block of the other side on a grid has rows of spans only, or none: no gap ends within a block."""
    owner, _ = expand(np.diff(table.indptr))
    batches, batch = np.unique(table.segments[owner, 0], return_inverse=True)
    row, rows = table.spans[:, :2].astype(np.int64).T
    width = -(-tokens // size) * size
    ends = np.where(row + rows == tokens, width, row + rows)  # TMA reads zeros beyond the last row
    order = np.argsort(batch * width + row)
    begin = np.append((batch * width + row)[order], len(batches) * width)
    end = np.insert(np.maximum.accumulate((batch * width + ends)[order]), 0, 0)
    return not ((end < begin) & ((begin % size > 0) | (end % size > 0))).any()


def _can_be_filled(table: Table, size: int, grid: bool) -> npt.NDArray[np.bool_]:
    """Return for each segment whether its last tile can be filled up with earlier rows, on a grid of any segment.

    Those segments must be visible, because other rows may hold anything; before the first row, TMA reads zeros. Where
    most rows are in segments shorter than a tile, tiles would be mostly padding: the portable kernel has smaller ones.
    """
    batch, row, rows = table.segments[:, :3].astype(np.int64).T
    alone = rows >= size
    if not grid or 2 * rows[~alone].sum() > rows.sum():
        return alone
    seen = np.diff(table.indptr) > 0
    begins = np.ones(len(row), np.bool_)  # the rows before are not of a visible segment
    begins[1:] = ~seen[:-1] | (batch[1:] != batch[:-1]) | (row[1:] != row[:-1] + rows[:-1])
    first = np.maximum.accumulate(np.where(begins, np.arange(len(row)), 0))
    return alone | (row[first] <= np.maximum(0, row + rows - size))


def _whole_segments(table: Table) -> Ints:
    """The segments of a table as one tile each."""
    return np.column_stack([table.segments, table.indptr[:-1], table.indptr[1:]]).astype(np.int64)


def _cut_tiles(tiles: Ints, size: int, short_first: bool = False) -> Ints:
    """Cut tiles into tiles of at most `size` rows; the short one is the last, or with `short_first` the first."""
    owner, nth = expand(-(-tiles[:, 2] // size))
    mine = tiles[owner]
    ends = (nth + 1) * size - (-mine[:, 2] % size if short_first else 0)
    begin, rows = np.maximum(0, ends - size), np.minimum(ends, mine[:, 2])
    rows -= begin
    columns = (mine[:, 0], mine[:, 1] + begin, rows, mine[:, 3] + mine[:, 4] * begin, *mine[:, 4:].T)
    return np.stack(columns, axis=1).astype(np.int64)


@dataclass(frozen=True)
class _Pairs:
    """Pairs of a tile and a span that it sees, in order of the tiles; rows `begin` to `end` of the span are visible.

    `first` and `last` are positions of the tile. A row of the span is visible to a tile row where its position minus
    the tile row's lies between `lo` and `hi`.
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
        """Whether a side of the band binds; where none does, positions have no effect."""
        return (self.lo > -UNBOUNDED) | (self.hi < UNBOUNDED)

    def of(self, which: npt.NDArray[np.bool_]) -> _Pairs:
        """Return the selected pairs."""
        return _Pairs(*(column[which] for column in vars(self).values()))


def _overlapping_pairs(tiles: Ints, table: Table, by_key: bool) -> _Pairs:
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
    """Return an order of tiles by the rows they loop over, most first, so that the last to start are short."""
    weight = np.bincount(pairs.tile, pairs.end - pairs.begin, minlength=tiles)
    return np.argsort(-weight, kind="stable")


def _every_batch_row(tiles: Ints, batch: int) -> Ints:
    """Repeat tiles that stand for all batch rows, once for each."""
    shared = tiles[:, 0] < 0
    if not shared.any():
        return tiles
    every = np.repeat(tiles[shared], batch, axis=0)
    every[:, 0] = np.tile(np.arange(batch), int(shared.sum()))
    return np.concatenate([every, tiles[~shared]])


def to_device(table: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy a table to a device as int32; the copy is synchronous, so any stream may read it at once."""
    return torch.from_numpy(np.ascontiguousarray(table, dtype=np.int32)).to(device)
