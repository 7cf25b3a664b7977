"""Split-KV for the tail wave: split the few tiles left after all full waves over all SMs, and combine the results.

4,096 equal tiles on 132 SMs are 31 waves and 4 tiles, and those 4 take as long as a wave of 132. Split, they keep all
SMs busy. A split of a forward has some of the keys: splits are the last work items of the same persistent CTAs, have
float32 results of their own, and `combine` merges them. A split of a backward has some of the queries, and adds to the
same dK and dV.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from meshflash.core.lengths import UNBOUNDED
from meshflash.kernels.contract import Outputs
from meshflash.kernels.launches import Launcher
from meshflash.kernels.triton.block_tables import TileTable, to_device
from meshflash.kernels.triton.common import INF

#: Costs of splitting beside the blocks themselves, in the time of one block: for each split that an SM runs; for the
#: extra kernel of a forward; for those of a backward; and for the traffic of each split.
SPLIT_COST, COMBINE_COST, BACKWARD_COST, TRAFFIC_COST = 3, 8, 20, 0.025
#: The most splits of a tile.
MAX_SPLITS = 64
#: Rows that a CTA of `combine` merges, and splits that it loads at a time.
COMBINE_ROWS, SPLITS_PER_STEP = 4, 8
#: Rows of sums that a CTA of `finalize` converts to gradients.
FINALIZE_ROWS = 16


@dataclass(frozen=True, eq=False)
class TailWave:
    """The tiles of the tail wave, each split `num_splits` times; `split_tail_wave` makes it.

    All are tiles of the last head, or of the last group of heads. `tables` has the splits, behind all tiles or by
    themselves; by themselves their rows count from `first_row`, the first of `num_rows`. `tile_rows` has the batch
    row, first row and number of rows of each tile.
    """

    num_tiles: int
    num_splits: int
    first_row: int
    num_rows: int
    tile_rows: Tensor
    tables: TileTable

    def slice_rows(self, x_BTHD: Tensor) -> Tensor:
        """Return the rows of the tail wave's tiles in the last head."""
        return x_BTHD[:, self.first_row : self.first_row + self.num_rows, -1:]


_cache: WeakKeyDictionary[TileTable, dict[tuple[int, int, int, int, bool], TailWave | None]] = WeakKeyDictionary()


def split_tail_wave(
    tables: TileTable, heads: int, num_sms: int, size: int, group: int = 1, appended: bool = False
) -> TailWave | None:
    """Return the tail wave of a launch, split; None where it is full, spans several heads, or splitting gains nothing.

    Args:
        tables: The tiles of the launch, which CTAs take in order, one group of heads after another.
        heads: The number of groups of heads.
        num_sms: The number of CTAs that run at a time.
        size: The number of rows of a block of the other side.
        group: The number of heads that a CTA loops over.
        appended: Whether the splits follow the tiles in one table (forward), or have a table of their own (backward).
    """
    cached = _cache.setdefault(tables, {})
    key = (heads, num_sms, size, group, appended)
    if key not in cached:
        if tables.tiles.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # reading the tables would synchronize, which a graph capture forbids
        cached[key] = _split(tables, *key)
    return cached[key]


def _split(tables: TileTable, heads: int, num_sms: int, size: int, group: int, appended: bool) -> TailWave | None:
    waves, num_tail_tiles = divmod(len(tables) * heads, num_sms)
    plain = tables.single_run and tables.exact_begin and not (tables.lower or tables.upper or tables.clipped)
    # tiles of different work fill the tail wave by themselves
    if not plain or not tables.uniform or not waves or not 0 < num_tail_tiles <= len(tables) or tables.tiles.is_meta:
        return None
    num_blocks = int(tables.mean_blocks)
    # splits of a forward that need more than one wave were slower on an H200: docs/dev/kernels.md
    costs = (COMBINE_COST, num_sms // num_tail_tiles) if appended else (BACKWARD_COST, MAX_SPLITS)
    num_splits = _best_num_splits(num_tail_tiles, num_blocks, group, num_sms, *costs)
    if num_splits == 1:
        return None
    as_numpy = [x.cpu().numpy().astype(np.int64) for x in (tables.tiles, tables.spans)]
    tiles, runs = (x[-num_tail_tiles:] for x in as_numpy)
    begin = 0 if appended else int(tiles[:, 1].min())
    rows = int((tiles[:, 1] + tiles[:, 2]).max()) - begin
    made = [[as_numpy[0]], [as_numpy[1]]] if appended else [[], []]
    firsts = np.arange(num_splits + 1) * num_blocks // num_splits
    for first, last in pairwise(firsts):
        own, span = tiles.copy(), runs.copy()
        own[:, 1] -= begin
        own[:, 6] = last - first
        span[:, 0] += first * size
        span[:, 1] = last - first
        span[:, 2] = np.minimum(span[:, 2], span[:, 0] + (last - first) * size)
        span[:, 3:] = -UNBOUNDED, UNBOUNDED
        made[0].append(own)
        made[1].append(span)
    table, spans = map(np.concatenate, made)
    table[:, 5] = np.arange(len(table))
    device = tables.tiles.device
    split_tiles, split_runs, tile_rows = (to_device(x, device) for x in (table, spans, tiles[:, :3]))
    split_tables = replace(tables, tiles=split_tiles, spans=split_runs, mean_blocks=num_blocks / num_splits)
    return TailWave(num_tail_tiles, num_splits, begin, rows, tile_rows, split_tables)


def _best_num_splits(num_tail_tiles: int, num_blocks: int, group: int, num_sms: int, fixed_cost: int, most: int) -> int:
    """Return into how many splits, at most `most`, to cut each of the tiles left; 1 where splitting gains nothing."""

    def predict_blocks(num_splits: int) -> float:
        """Predict the time of the tail wave, in that of one block."""
        waves = -(-num_tail_tiles * num_splits // num_sms)
        extra = fixed_cost + TRAFFIC_COST * num_tail_tiles * num_splits if num_splits > 1 else 0
        return waves * (-(-num_blocks // num_splits) * group + SPLIT_COST) + extra

    return min(range(1, min(num_blocks, most, MAX_SPLITS) + 1), key=predict_blocks)


@triton.jit(do_not_specialize=["num_splits"])
def combine(
    PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, CARRY, CARRY_LSE, TILE_ROWS, num_splits,
    o_b, o_t, l_b, l_t, c_b, c_t, cl_b, cl_t,
    TILE_SIZE: tl.constexpr, ROWS: tl.constexpr, SPLITS_PER_STEP: tl.constexpr, D: tl.constexpr,
    HAS_CARRY: tl.constexpr,
):  # fmt: skip
    """Merge the splits of some rows of a tile, in their order, and the carry, by their LSE, into OUT and LSE.

    A split has TILE_SIZE rows; the n-th splits of all tiles lie one after another. OUT, LSE and the carry begin at the
    last head. Two passes: the maximum of all LSEs first, then the weighted sum.
    """
    tile = TILE_ROWS + tl.program_id(0) * 3
    batch = tl.load(tile).to(tl.int64)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_range = m < tl.load(tile + 2)
    t = (tl.load(tile + 1) + m).to(tl.int64)
    d = tl.arange(0, D)
    row_max = tl.full((ROWS,), -INF, dtype=tl.float32)
    if HAS_CARRY:
        carry_lse = tl.load(CARRY_LSE + batch * cl_b + t * cl_t, mask=in_range, other=-INF)
        row_max = tl.maximum(row_max, carry_lse)
    for first_split in range(0, num_splits, SPLITS_PER_STEP):
        split = first_split + tl.arange(0, SPLITS_PER_STEP)
        at = (split * tl.num_programs(0) + tl.program_id(0))[:, None] * TILE_SIZE + m[None, :]
        loaded = (split < num_splits)[:, None] & in_range[None, :]
        row_max = tl.maximum(row_max, tl.max(tl.load(PARTIAL_LSE + at, mask=loaded, other=-INF), axis=0))
    reference = tl.where(row_max == -INF, 0.0, row_max)  # a row that sees nothing: no -inf - -inf
    row_sum = tl.zeros((ROWS,), dtype=tl.float32)
    out = tl.zeros((ROWS, D), dtype=tl.float32)
    if HAS_CARRY:
        row_sum += tl.exp(carry_lse - reference)
        old = tl.load(CARRY + batch * c_b + t[:, None] * c_t + d[None, :], mask=in_range[:, None], other=0.0)
        out += old * row_sum[:, None]
    for first_split in range(0, num_splits, SPLITS_PER_STEP):
        split = first_split + tl.arange(0, SPLITS_PER_STEP)
        at = (split * tl.num_programs(0) + tl.program_id(0))[:, None] * TILE_SIZE + m[None, :]
        loaded = (split < num_splits)[:, None] & in_range[None, :]
        weight = tl.exp(tl.load(PARTIAL_LSE + at, mask=loaded, other=-INF) - reference[None, :])
        row_sum += tl.sum(weight, axis=0)
        x = tl.load(PARTIAL_OUT + at[:, :, None] * D + d, mask=loaded[:, :, None], other=0.0)
        out += tl.sum(x * weight[:, :, None], axis=0)
    empty = row_sum == 0.0
    out = out / tl.where(empty, 1.0, row_sum)[:, None]
    lse = tl.where(empty, -INF, reference + tl.log(tl.where(empty, 1.0, row_sum)))
    into = OUT + batch * o_b + t[:, None] * o_t + d[None, :]
    tl.store(into, out.to(OUT.dtype.element_ty), mask=in_range[:, None])
    tl.store(LSE + batch * l_b + t * l_t, lse, mask=in_range)


def combine_splits(
    launcher: Launcher, tail: TailWave, partial: Outputs, outputs: Outputs, carry: Outputs | None
) -> None:
    """Write the results of the tail wave's tiles: those of their splits, merged with the carry."""
    given = [(x_BTHD[:, :, -1], lse_BHT[:, -1]) for x_BTHD, lse_BHT in (outputs, carry or outputs)]
    block, dim = partial[0].shape[-2:]
    launcher.keep(tail.tile_rows)
    launcher.launch(
        combine,
        (tail.num_tiles, -(-block // COMBINE_ROWS)),
        *(*partial, *given[0], *given[1], tail.tile_rows, tail.num_splits),
        *(stride for x_BTD, lse_BT in given for stride in (*x_BTD.stride()[:2], *lse_BT.stride())),
        TILE_SIZE=block,
        ROWS=COMBINE_ROWS,
        SPLITS_PER_STEP=SPLITS_PER_STEP,
        D=dim,
        HAS_CARRY=carry is not None,
    )


@triton.jit(do_not_specialize=["first_row"])
def finalize(SUMS, INTO, TILE_ROWS, first_row, s_b, s_t, i_b, i_t, ROWS: tl.constexpr, D: tl.constexpr):
    """Convert some rows of a tile from float32 sums to gradients; INTO begins at the last head, SUMS at `first_row`."""
    tile = TILE_ROWS + tl.program_id(0) * 3
    batch = tl.load(tile).to(tl.int64)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_range = (m < tl.load(tile + 2))[:, None]
    row = (tl.load(tile + 1) + m).to(tl.int64)[:, None]
    d = tl.arange(0, D)[None, :]
    x = tl.load(SUMS + batch * s_b + (row - first_row) * s_t + d, mask=in_range, other=0.0)
    tl.store(INTO + batch * i_b + row * i_t + d, x.to(INTO.dtype.element_ty), mask=in_range)


def finalize_splits(
    launcher: Launcher, tail: TailWave, sums: Iterable[Tensor], into: Iterable[Tensor], block: int
) -> None:
    """Write the gradients of the tail wave's tiles, of at most `block` rows, from the sums of their splits."""
    for x_BTHD, y_BTHD in zip(sums, into, strict=True):
        x_BTD, y_BTD = x_BTHD[:, :, 0], y_BTHD[:, :, -1]
        launcher.keep(tail.tile_rows)
        launcher.launch(
            finalize,
            (tail.num_tiles, -(-block // FINALIZE_ROWS)),
            *(x_BTD, y_BTD, tail.tile_rows, tail.first_row, *x_BTD.stride()[:2], *y_BTD.stride()[:2]),
            ROWS=FINALIZE_ROWS,
            D=y_BTD.shape[-1],
        )
