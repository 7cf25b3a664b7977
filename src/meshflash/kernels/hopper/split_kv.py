"""The last round of a call in Gluon, where few tiles are left: each is split, and joined again.

4,096 equal tiles on 132 multiprocessors are 31 rounds and 4 tiles, which take as long as a round of 132. Instead all
multiprocessors take a part of these 4. Parts of a forward have some of the keys, and are the last pieces of work of the
same programs: each has float32 results of its own, which are joined. Parts of a backward have some of the queries, and
add to the same dK and dV.
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
from meshflash.kernels.triton.block_tables import Blocks, on_device
from meshflash.kernels.triton.common import INF

#: What parts take beside their blocks, in blocks: each by itself; further kernels, one of a forward and some of a
#: backward; and what each reads and writes.
EACH, JOINING, FURTHER, TRAFFIC = 3, 8, 20, 0.025
#: Parts of a tile, at most.
MOST_PARTS = 64
#: Rows that a program joins, and parts that are on their way at a time.
JOINED, AT_ONCE = 4, 8
#: Rows of sums that a program writes as gradients.
SETTLED = 16


@dataclass(frozen=True, eq=False)
class Last:
    """Tiles of the last head, or group of heads, that come after all full rounds, each in so many parts.

    `blocks` are tables of the parts, behind those of all tiles or by themselves; by themselves their rows count from
    `begin`, the first of `rows` in a row. `items` are the batch row, first row and rows of each tile.
    """

    tiles: int
    parts: int
    begin: int
    rows: int
    items: Tensor
    blocks: Blocks

    def rows_of(self, x_BTHD: Tensor) -> Tensor:
        """The rows of the last head."""
        return x_BTHD[:, self.begin : self.begin + self.rows, -1:]


_kept: WeakKeyDictionary[Blocks, dict[tuple[int, int, int, int, bool], Last | None]] = WeakKeyDictionary()


def last_round(
    tables: Blocks, heads: int, processors: int, size: int, group: int = 1, appended: bool = False
) -> Last | None:
    """What is left after full rounds, in parts; None where that is nothing, or too much, or not worth it.

    Programs take the tiles of `tables`, one `group` of heads after another; `heads` counts the groups. Blocks of the
    other side have `size` rows, and are met once for each head of a group. Parts are `appended` to the tiles, or have
    tables of their own.
    """
    kept = _kept.setdefault(tables, {})
    key = (heads, processors, size, group, appended)
    if key not in kept:
        if tables.tiles.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # tables cannot be read then
        kept[key] = _last(tables, *key)
    return kept[key]


def _last(tables: Blocks, heads: int, processors: int, size: int, group: int, appended: bool) -> Last | None:
    rounds, left = divmod(len(tables) * heads, processors)
    plain = tables.single and tables.whole and not (tables.lower or tables.upper or tables.clipped)
    # tiles that differ fill the last round by themselves
    if not plain or not tables.alike or not rounds or not 0 < left <= len(tables) or tables.tiles.is_meta:
        return None
    turns = int(tables.meets)
    # parts of a forward in several rounds did not pay
    costs = (JOINING, processors // left) if appended else (FURTHER, MOST_PARTS)
    parts = _best_parts(left, turns, group, processors, *costs)
    if parts == 1:
        return None
    walked = [x.cpu().numpy().astype(np.int64) for x in (tables.tiles, tables.spans)]
    tiles, runs = (x[-left:] for x in walked)
    begin = 0 if appended else int(tiles[:, 1].min())
    rows = int((tiles[:, 1] + tiles[:, 2]).max()) - begin
    made = [[walked[0]], [walked[1]]] if appended else [[], []]
    firsts = np.arange(parts + 1) * turns // parts
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
    walks, runs_of, items = (on_device(x, tables.tiles.device) for x in (table, spans, tiles[:, :3]))
    return Last(left, parts, begin, rows, items, replace(tables, tiles=walks, spans=runs_of, meets=turns / parts))


def _best_parts(left: int, turns: int, group: int, processors: int, further: int, most: int) -> int:
    """Into how many parts, `most` at the most, tiles that are left are split to be done first; 1 where none gains."""

    def blocks(parts: int) -> float:
        rounds = -(-left * parts // processors)
        more = further + TRAFFIC * left * parts if parts > 1 else 0
        return rounds * (-(-turns // parts) * group + EACH) + more

    return min(range(1, min(turns, most, MOST_PARTS) + 1), key=blocks)


@triton.jit(do_not_specialize=["parts"])
def join(
    PART, PART_LSE, OUT, LSE, CARRY, CARRY_LSE, ITEMS, parts, o_b, o_t, l_b, l_t, c_b, c_t, cl_b, cl_t,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, D: tl.constexpr, HAS_CARRY: tl.constexpr,
):  # fmt: skip
    """OUT and LSE of some rows of a tile from its parts, in their order, and what is carried.

    Parts have BLOCK rows, those of all tiles one after another. Others begin at the last head.
    """
    item = ITEMS + tl.program_id(0) * 3
    batch = tl.load(item).to(tl.int64)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = m < tl.load(item + 2)
    t = (tl.load(item + 1) + m).to(tl.int64)
    d = tl.arange(0, D)
    top = tl.full((ROWS,), -INF, dtype=tl.float32)
    if HAS_CARRY:
        carried = tl.load(CARRY_LSE + batch * cl_b + t * cl_t, mask=there, other=-INF)
        top = tl.maximum(top, carried)
    for first in range(0, parts, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        at = (part * tl.num_programs(0) + tl.program_id(0))[:, None] * BLOCK + m[None, :]
        seen = (part < parts)[:, None] & there[None, :]
        top = tl.maximum(top, tl.max(tl.load(PART_LSE + at, mask=seen, other=-INF), axis=0))
    reference = tl.where(top == -INF, 0.0, top)  # a row that sees nothing weighs nothing
    total = tl.zeros((ROWS,), dtype=tl.float32)
    out = tl.zeros((ROWS, D), dtype=tl.float32)
    if HAS_CARRY:
        total += tl.exp(carried - reference)
        old = tl.load(CARRY + batch * c_b + t[:, None] * c_t + d[None, :], mask=there[:, None], other=0.0)
        out += old * total[:, None]
    for first in range(0, parts, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        at = (part * tl.num_programs(0) + tl.program_id(0))[:, None] * BLOCK + m[None, :]
        seen = (part < parts)[:, None] & there[None, :]
        weight = tl.exp(tl.load(PART_LSE + at, mask=seen, other=-INF) - reference[None, :])
        total += tl.sum(weight, axis=0)
        x = tl.load(PART + at[:, :, None] * D + d, mask=seen[:, :, None], other=0.0)
        out += tl.sum(x * weight[:, :, None], axis=0)
    empty = total == 0.0
    out = out / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, -INF, reference + tl.log(tl.where(empty, 1.0, total)))
    into = OUT + batch * o_b + t[:, None] * o_t + d[None, :]
    tl.store(into, out.to(OUT.dtype.element_ty), mask=there[:, None])
    tl.store(LSE + batch * l_b + t * l_t, lse, mask=there)


def join_parts(last: Last, part: Outputs, outputs: Outputs, carry: Outputs | None) -> None:
    """Write the results of the tiles from those of their parts, and from what is carried."""
    given = [(x_BTHD[:, :, -1], lse_BHT[:, -1]) for x_BTHD, lse_BHT in (outputs, carry or outputs)]
    block, dim = part[0].shape[-2:]
    join[(last.tiles, -(-block // JOINED))](
        *(*part, *given[0], *given[1], last.items, last.parts),
        *(stride for x_BTD, lse_BT in given for stride in (*x_BTD.stride()[:2], *lse_BT.stride())),
        BLOCK=block,
        ROWS=JOINED,
        AT_ONCE=AT_ONCE,
        D=dim,
        HAS_CARRY=carry is not None,
    )


@triton.jit(do_not_specialize=["begin"])
def settle(SUMS, INTO, ITEMS, begin, s_b, s_t, i_b, i_t, ROWS: tl.constexpr, D: tl.constexpr):
    """Some rows of a tile from sums of its parts; INTO begins at the last head, SUMS at a row."""
    item = ITEMS + tl.program_id(0) * 3
    batch = tl.load(item).to(tl.int64)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = (m < tl.load(item + 2))[:, None]
    row = (tl.load(item + 1) + m).to(tl.int64)[:, None]
    d = tl.arange(0, D)[None, :]
    x = tl.load(SUMS + batch * s_b + (row - begin) * s_t + d, mask=there, other=0.0)
    tl.store(INTO + batch * i_b + row * i_t + d, x.to(INTO.dtype.element_ty), mask=there)


def settle_parts(last: Last, sums: Iterable[Tensor], into: Iterable[Tensor], block: int) -> None:
    """Write the gradients of the tiles, of at most `block` rows, from what their parts have added up."""
    for x_BTHD, y_BTHD in zip(sums, into, strict=True):
        x_BTD, y_BTD = x_BTHD[:, :, 0], y_BTHD[:, :, -1]
        settle[(last.tiles, -(-block // SETTLED))](
            *(x_BTD, y_BTD, last.items, last.begin, *x_BTD.stride()[:2], *y_BTD.stride()[:2]),
            ROWS=SETTLED,
            D=y_BTD.shape[-1],
        )
