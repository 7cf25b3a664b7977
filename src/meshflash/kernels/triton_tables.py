"""Worklists as the tables that Triton kernels walk: blocks of rows, heaviest first, and their spans.

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

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of rows, each with the spans `[first_span, last_span)` of the other side.

    `lower` and `upper` say whether that side of a band binds anywhere, `edge` whether a block has missing rows.
    """

    tiles: Tensor
    spans: Tensor
    lower: bool
    upper: bool
    edge: bool

    def __len__(self) -> int:
        return len(self.tiles)


_kept: WeakKeyDictionary[Worklist, dict[Any, Blocks]] = WeakKeyDictionary()


def blocks(work: Worklist, by_key: bool, size: int, batch: int, device: torch.device) -> Blocks:
    """The query rows of a worklist, or its key rows, in blocks of at most `size`, for so many batch rows."""
    kept = _kept.setdefault(work, {})
    key = (by_key, size, batch, device)
    if key not in kept:
        table = work.by_key if by_key else work.by_query
        tiles = _every_batch_row(_heaviest_first(_cut(table, size), table, by_key), batch)
        lower, upper = bool((table.spans[:, 4] > -UNBOUNDED).any()), bool((table.spans[:, 5] < UNBOUNDED).any())
        edge = bool((tiles[:, 2] < size).any())
        kept[key] = Blocks(_on(tiles, device), _on(table.spans, device), lower, upper, edge)
    return kept[key]


def _cut(table: Table, size: int) -> Ints:
    """The segments of a table in blocks."""
    segments = table.segments.astype(np.int64)
    owner, nth = expand(-(-segments[:, 2] // size))
    begin, mine = nth * size, segments[owner]
    columns = (
        mine[:, 0],
        mine[:, 1] + begin,
        np.minimum(size, mine[:, 2] - begin),
        mine[:, 3] + mine[:, 4] * begin,
        mine[:, 4],
        table.indptr[owner],
        table.indptr[owner + 1],
    )
    return np.stack(columns, axis=1).astype(np.int64)


def _heaviest_first(tiles: Ints, table: Table, by_key: bool) -> Ints:
    """By the rows of the other side that a block meets, so that the last to begin are short."""
    owner, nth = expand(tiles[:, 6] - tiles[:, 5])
    spans, tile = table.spans.astype(np.int64)[tiles[owner, 5] + nth], tiles[owner]
    _, rows, position, step, lo, hi = spans.T
    if by_key:
        lo, hi = -hi, -lo
    first, last = tile[:, 3], tile[:, 3] + tile[:, 4] * (tile[:, 2] - 1)
    begin = np.clip(-((position - first - lo) // step), 0, rows)
    end = np.clip((last + hi - position) // step + 1, 0, rows)
    weight = np.bincount(owner, np.maximum(end - begin, 0), minlength=len(tiles))
    return tiles[np.argsort(-weight, kind="stable")]


def _every_batch_row(tiles: Ints, batch: int) -> Ints:
    """Blocks that stand for all batch rows, once for each."""
    shared = tiles[:, 0] < 0
    if not shared.any():
        return tiles
    every = np.repeat(tiles[shared], batch, axis=0)
    every[:, 0] = np.tile(np.arange(batch), int(shared.sum()))
    return np.concatenate([every, tiles[~shared]])


def _on(table: npt.NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(table, dtype=np.int32)).to(device)
