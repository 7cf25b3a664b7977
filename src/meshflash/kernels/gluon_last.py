"""The last round of a forward in Gluon, where few tiles are left: each is split by its keys, and joined again.

4,096 equal tiles on 132 multiprocessors are 31 rounds and 4 tiles, which take as long as a round of 132. Instead all
multiprocessors take a part of the keys of these 4. Their queries are copied for each part, so that the kernel finds
parts as further rows of queries, with float32 results of their own, and needs to know nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from meshflash.core.lengths import UNBOUNDED
from meshflash.kernels.triton_common import INF
from meshflash.kernels.triton_tables import Blocks

#: Blocks of keys that a tile has at least: copies, two more kernels and the joining take as long as some of them.
LEAST_TURNS = 96
#: Parts of a tile, at least and at most.
LEAST_PARTS, MOST_PARTS = 4, 64
#: Rows that a program joins, and parts that are on their way at a time.
JOINED, AT_ONCE = 4, 8


@dataclass(frozen=True, eq=False)
class Last:
    """Tiles of the last head that come after all full rounds, each in so many parts.

    `begin` is the first of their rows, of `rows` in a row. `blocks` are tables of the parts, and `items` the batch row
    and row of each tile.
    """

    tiles: int
    parts: int
    begin: int
    rows: int
    items: Tensor
    blocks: Blocks

    def queries(self, q_BTHD: Tensor) -> Tensor:
        """The rows of the last head, once for each part, one after another."""
        mine_BTD = q_BTHD[:, self.begin : self.begin + self.rows, -1]
        return mine_BTD.repeat(1, self.parts, 1)[:, :, None]


_kept: WeakKeyDictionary[Blocks, dict[tuple[int, int, int], Last | None]] = WeakKeyDictionary()


def last_round(tables: Blocks, heads: int, processors: int, size: int) -> Last | None:
    """What is left after full rounds, in parts; None where that is nothing, or too much, or not worth it.

    All tiles of `tables` take as long, one after another for each head, and blocks of the other side have `size` rows.
    """
    kept = _kept.setdefault(tables, {})
    key = (heads, processors, size)
    if key not in kept:
        if tables.tiles.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # tables cannot be read then
        kept[key] = _last(tables, heads, processors, size)
    return kept[key]


def _last(tables: Blocks, heads: int, processors: int, size: int) -> Last | None:
    rounds, left = divmod(len(tables) * heads, processors)
    plain = tables.single and tables.whole and not (tables.lower or tables.upper)
    if not plain or not rounds or not 0 < left <= min(len(tables), processors // LEAST_PARTS):
        return None
    tiles, runs = (x[-left:].cpu().numpy().astype(np.int64) for x in (tables.tiles, tables.spans))
    turns = int(tiles[0, 6])
    parts = min(processors // left, turns, MOST_PARTS)
    if turns < LEAST_TURNS or parts < LEAST_PARTS or (tiles[:, 6] != turns).any():
        return None
    begin = int(tiles[:, 1].min())
    rows = int((tiles[:, 1] + tiles[:, 2]).max()) - begin
    firsts = np.arange(parts + 1) * turns // parts
    made, spans = [], []
    for part, (first, last) in enumerate(pairwise(firsts)):
        own, span = tiles.copy(), runs.copy()
        own[:, 1] += part * rows - begin
        own[:, 6] = last - first
        span[:, 0] += first * size
        span[:, 1] = last - first
        span[:, 2] = span[:, 0] + (last - first) * size
        span[:, 3:] = -UNBOUNDED, UNBOUNDED
        made.append(own)
        spans.append(span)
    table = np.concatenate(made)
    table[:, 5] = np.arange(len(table))

    def on(x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)).to(tables.tiles.device)

    blocks = Blocks(on(table), on(np.concatenate(spans)), False, False, tables.edge, single=True, whole=True)
    return Last(left, parts, begin, rows, on(tiles[:, :3]), blocks)


@triton.jit(do_not_specialize=["parts", "rows", "begin"])
def join(
    PART, PART_LSE, OUT, LSE, ITEMS, parts, rows, begin, p_b, p_t, pl_b, pl_t, o_b, o_t, l_b, l_t,
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """OUT and LSE of some rows of a tile from its parts, in their order; OUT and LSE begin at the last head."""
    item = ITEMS + tl.program_id(0) * 3
    batch = tl.load(item).to(tl.int64)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = m < tl.load(item + 2)
    row = tl.load(item + 1) + m
    d = tl.arange(0, D)
    top = tl.full((ROWS,), -INF, dtype=tl.float32)
    for first in range(0, parts, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        at = part[:, None] * rows + (row - begin)[None, :]
        seen = (part < parts)[:, None] & there[None, :]
        top = tl.maximum(top, tl.max(tl.load(PART_LSE + batch * pl_b + at * pl_t, mask=seen, other=-INF), axis=0))
    reference = tl.where(top == -INF, 0.0, top)  # a row that sees nothing weighs nothing
    total = tl.zeros((ROWS,), dtype=tl.float32)
    out = tl.zeros((ROWS, D), dtype=tl.float32)
    for first in range(0, parts, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        at = part[:, None] * rows + (row - begin)[None, :]
        seen = (part < parts)[:, None] & there[None, :]
        lse = tl.load(PART_LSE + batch * pl_b + at * pl_t, mask=seen, other=-INF)
        weight = tl.exp(lse - reference[None, :])
        total += tl.sum(weight, axis=0)
        x = tl.load(PART + batch * p_b + at[:, :, None] * p_t + d, mask=seen[:, :, None], other=0.0)
        out += tl.sum(x * weight[:, :, None], axis=0)
    empty = total == 0.0
    out = out / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, -INF, reference + tl.log(tl.where(empty, 1.0, total)))
    t = row.to(tl.int64)
    into = OUT + batch * o_b + t[:, None] * o_t + d[None, :]
    tl.store(into, out.to(OUT.dtype.element_ty), mask=there[:, None])
    tl.store(LSE + batch * l_b + t * l_t, lse, mask=there)


def join_parts(last: Last, part: tuple[Tensor, Tensor], out_BTHD: Tensor, lse_BHT: Tensor, block: int) -> None:
    """Write the results of the tiles, of at most `block` rows, from those of their parts."""
    x_BTD, x_lse_BT = part[0][:, :, 0], part[1][:, 0]
    out_BTD, lse_BT = out_BTHD[:, :, -1], lse_BHT[:, -1]
    join[(last.tiles, -(-block // JOINED))](
        *(x_BTD, x_lse_BT, out_BTD, lse_BT, last.items, last.parts, last.rows, last.begin),
        *(*x_BTD.stride()[:2], *x_lse_BT.stride(), *out_BTD.stride()[:2], *lse_BT.stride()),
        ROWS=JOINED,
        AT_ONCE=AT_ONCE,
        D=x_BTD.shape[-1],
    )
