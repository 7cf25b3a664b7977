"""FlexAttention's block masks as slices: each row's intervals of keys, joined over rows that follow one pattern.

A block mask lists its full and its partial blocks; `mask_mod` is evaluated on the partial ones. From row to row, an end
of an interval may stay or move by one: that makes a slice, whose kind says which ends move.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from meshflash.core.lengths import Array, BoolArray
from meshflash.core.slices import DIAGONALS, SliceTable

#: A block mask of more slices than this has no rectangles: tables and programs would take seconds to build.
MAX_SLICES = 4096

#: The interval of keys of one row, `[begin, end)`.
Interval = tuple[int, int]


def slices_of_blocks(block_mask: Any) -> SliceTable:
    """Return the slices of a block mask.

    ValueError if the argument is no block mask, or it has several heads or needs too many slices.

    Args:
        block_mask: A `BlockMask` of torch.nn.attention.flex_attention.
    """
    wanted = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "BLOCK_SIZE", "seq_lengths")
    missing = [name for name in (*wanted, "mask_mod") if not hasattr(block_mask, name)]
    if missing:
        raise ValueError(
            f"from_block_mask(block_mask): expected a BlockMask of FlexAttention, got {type(block_mask).__name__} "
            f"without {missing[0]}"
        )
    shape, (q_tokens, k_tokens) = tuple(block_mask.kv_num_blocks.shape), map(int, block_mask.seq_lengths)
    if len(shape) != 3 or shape[2] * block_mask.BLOCK_SIZE[0] < q_tokens:
        raise ValueError(
            f"from_block_mask(block_mask): kv_num_blocks has the shape {list(shape)}; expected [batch, heads, blocks] "
            f"with all blocks of its {q_tokens} queries"
        )
    batches, heads, _ = shape
    if heads != 1:
        raise ValueError(
            f"from_block_mask(block_mask): a mask for each of {heads} heads; here all heads share a mask, so create it "
            "with H=None, or call attention for each group of heads that share one"
        )
    table: list[list[int]] = []
    for batch in range(batches):
        for slice_ in _join_rows(_rows_of(block_mask, batch)):
            table.append([batch if batches > 1 else -1, *slice_])
            if len(table) > MAX_SLICES:
                raise ValueError(f"from_block_mask(block_mask): the mask takes more than {MAX_SLICES:,} slices")
    rows = batches if batches > 1 else None
    return SliceTable(np.array(table, np.int64).reshape(-1, 6), rows, (q_tokens, k_tokens))


def _rows_of(block_mask: Any, batch: int) -> Iterator[tuple[int, list[Interval]]]:
    """Yield each query with the intervals of keys that it sees, in order."""
    q_block, k_block = block_mask.BLOCK_SIZE
    q_tokens, k_tokens = block_mask.seq_lengths
    partial_blocks, full_blocks = (_lists(block_mask, name, batch) for name in ("", "full_"))
    for block in range(-(-q_tokens // q_block)):
        rows = range(block * q_block, min((block + 1) * q_block, q_tokens))
        full = {n for n in full_blocks[block] if n * k_block < k_tokens}
        listed = sorted(full | {n for n in partial_blocks[block] if n * k_block < k_tokens})
        # a full block is one column, of all its keys
        columns = [
            np.array([[n * k_block, min((n + 1) * k_block, k_tokens)]])
            if n in full
            else np.arange(n * k_block, min((n + 1) * k_block, k_tokens))[:, None] + np.array([0, 1])
            for n in listed
        ]
        spans = np.concatenate([np.zeros((0, 2), np.int64), *columns])
        is_full = np.repeat([n in full for n in listed], list(map(len, columns))).astype(np.bool_)
        seen = np.ones((len(rows), len(spans)), np.bool_)
        if not is_full.all():
            seen[:, ~is_full] = _evaluate(block_mask, batch, rows, spans[~is_full, 0])
        for n, intervals in enumerate(_intervals(seen, spans)):
            yield rows[n], intervals


def _lists(block_mask: Any, prefix: str, batch: int) -> list[list[int]]:
    """Return the blocks of keys that are listed for each block of queries."""
    counts, indices = getattr(block_mask, f"{prefix}kv_num_blocks"), getattr(block_mask, f"{prefix}kv_indices")
    if counts is None:
        return [[] for _ in range(block_mask.kv_num_blocks.shape[2])]
    return [
        row[:count]
        for count, row in zip(counts[batch, 0].cpu().tolist(), indices[batch, 0].cpu().tolist(), strict=True)
    ]


def _evaluate(block_mask: Any, batch: int, rows: range, keys: Array) -> BoolArray:
    """Return which of some keys `mask_mod` shows to each of some queries.

    It is a function of scalars, which FlexAttention evaluates by vmap: sums and indices mean one pair there.
    """
    torch = import_module("torch")  # loaded already, since block masks are torch's; nothing else here needs it
    by_key = torch.vmap(block_mask.mask_mod, in_dims=(None, None, None, 0))
    by_pair = torch.vmap(by_key, in_dims=(None, None, 0, None))
    device = block_mask.kv_indices.device
    numbers = (torch.tensor(x, dtype=torch.int64, device=device) for x in (batch, 0, list(rows), keys.tolist()))
    shown: BoolArray = by_pair(*numbers).cpu().numpy().astype(np.bool_)
    return shown


def _intervals(seen: BoolArray, spans: Array) -> Iterator[list[Interval]]:
    """Yield the intervals of keys of each row; column c of `seen` is the keys `spans[c]`, which may have gaps."""
    touches = spans[1:, 0] == spans[:-1, 1]
    begins, ends = seen.copy(), seen.copy()
    begins[:, 1:] &= ~(seen[:, :-1] & touches)
    ends[:, :-1] &= ~(seen[:, 1:] & touches)
    counts = begins.sum(axis=1)
    first, last = spans[np.nonzero(begins)[1], 0].tolist(), spans[np.nonzero(ends)[1], 1].tolist()
    at = 0
    for count in counts.tolist():
        yield list(zip(first[at : at + count], last[at : at + count], strict=True))
        at += count


class _Track:
    """An interval of consecutive rows, each end of which stays or moves by one key from row to row."""

    def __init__(self, row: int, interval: Interval) -> None:
        self.first_row, self.last_row = row, row
        self.first, self.last = interval, interval
        self.moves: tuple[int, int] | None = None

    def try_extend(self, row: int, interval: Interval) -> bool:
        """Add the interval of the next row if it follows the pattern; return whether it does."""
        moves = interval[0] - self.last[0], interval[1] - self.last[1]
        if row != self.last_row + 1 or moves != (self.moves or moves) or not {0, 1}.issuperset(moves):
            return False
        self.last_row, self.last, self.moves = row, interval, moves
        return True

    def as_slice(self) -> tuple[int, int, int, int, int]:
        """Return it as a slice: the ranges of queries and of keys, and the number of the kind."""
        begin_moves, end_moves = self.moves or (0, 0)
        kind = DIAGONALS.index((bool(end_moves), bool(begin_moves)))
        return self.first_row, self.last_row + 1, self.first[0], self.last[1], kind


def _join_rows(rows: Iterator[tuple[int, list[Interval]]]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the slices that the intervals of all rows make."""
    tracks: list[_Track] = []
    for row, intervals in rows:
        kept = []
        if len(tracks) != len(intervals):
            yield from (track.as_slice() for track in tracks)
            tracks = []
        for n, interval in enumerate(intervals):
            if n < len(tracks) and tracks[n].try_extend(row, interval):
                kept.append(tracks[n])
                continue
            if n < len(tracks):
                yield tracks[n].as_slice()
            kept.append(_Track(row, interval))
        tracks = kept
    yield from (track.as_slice() for track in tracks)
