"""FlexAttention's block masks as slices: each row's intervals of keys, joined over rows that follow one pattern.

A block mask lists the blocks that are seen whole, and those that are seen in part. The `mask_mod` of the latter is
evaluated. From row to row, an end of an interval may stay or move by one: that makes a slice, whose kind says which
ends move. Nothing here imports torch: the tensors of the block mask make the ones that its function is called with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from meshflash.core.lengths import Array
from meshflash.core.slices import KINDS, SliceTable

#: A mask of more slices than this is not a mask of rectangles: tables and programs would take seconds to build.
MAX_SLICES = 4096

Bools = npt.NDArray[np.bool_]
#: The interval of keys of one row, `[begin, end)`.
Interval = tuple[int, int]


def slices_of_blocks(block_mask: Any) -> SliceTable:
    """Return the slices of a block mask; raise ValueError if it is none, differs by head, or needs too many slices.

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
    batches, heads = block_mask.kv_num_blocks.shape[:2]
    if heads != 1:
        raise ValueError(
            f"from_block_mask(block_mask): a mask for each of {heads} heads; masks here are those of all heads, so "
            "call attention once for each group of heads that share one"
        )
    table: list[list[int]] = []
    for batch in range(batches):
        for slice_ in _join_rows(_rows_of(block_mask, batch)):
            table.append([batch if batches > 1 else -1, *slice_])
            if len(table) > MAX_SLICES:
                raise ValueError(f"from_block_mask(block_mask): it takes more than {MAX_SLICES:,} slices")
    return SliceTable(np.array(table, np.int64).reshape(-1, 6), batches if batches > 1 else None)


def _rows_of(block_mask: Any, batch: int) -> Iterator[tuple[int, list[Interval]]]:
    """Yield each query with the intervals of keys that it sees, in order."""
    q_block, k_block = block_mask.BLOCK_SIZE
    q_tokens, k_tokens = block_mask.seq_lengths
    partial, whole = (_lists(block_mask, name, batch) for name in ("", "full_"))
    for block in range(-(-q_tokens // q_block)):
        rows = range(block * q_block, min((block + 1) * q_block, q_tokens))
        seen_whole = {n for n in whole[block] if n * k_block < k_tokens}
        listed = sorted(seen_whole | {n for n in partial[block] if n * k_block < k_tokens})
        # a block that is seen whole is one column, of all its keys
        columns = [
            np.array([[n * k_block, min((n + 1) * k_block, k_tokens)]])
            if n in seen_whole
            else np.arange(n * k_block, min((n + 1) * k_block, k_tokens))[:, None] + np.array([0, 1])
            for n in listed
        ]
        spans = np.concatenate([np.zeros((0, 2), np.int64), *columns])
        is_whole = np.repeat([n in seen_whole for n in listed], list(map(len, columns))).astype(np.bool_)
        seen = np.ones((len(rows), len(spans)), np.bool_)
        if not is_whole.all():
            seen[:, ~is_whole] = _evaluate(block_mask, batch, rows, spans[~is_whole, 0])
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


def _evaluate(block_mask: Any, batch: int, rows: range, keys: Array) -> Bools:
    """Return which of some keys the function of the mask shows to each of some queries."""
    make = block_mask.kv_indices.new_tensor
    shown = block_mask.mask_mod(make(batch), make(0), make(list(rows))[:, None], make(keys.tolist())[None, :])
    return np.broadcast_to(np.asarray(shown.cpu().numpy(), np.bool_), (len(rows), len(keys)))


def _intervals(seen: Bools, spans: Array) -> Iterator[list[Interval]]:
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

    def takes(self, row: int, interval: Interval) -> bool:
        """Add the interval of the next row if it follows the pattern; return whether it does."""
        moves = interval[0] - self.last[0], interval[1] - self.last[1]
        if row != self.last_row + 1 or moves != (self.moves or moves) or not {0, 1}.issuperset(moves):
            return False
        self.last_row, self.last, self.moves = row, interval, moves
        return True

    def slice(self) -> tuple[int, int, int, int, int]:
        """Return it as a slice: the ranges of queries and of keys, and the number of the kind."""
        begin_moves, end_moves = self.moves or (0, 0)
        kind = list(KINDS.values()).index((bool(end_moves), bool(begin_moves)))
        return self.first_row, self.last_row + 1, self.first[0], self.last[1], kind


def _join_rows(rows: Iterator[tuple[int, list[Interval]]]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the slices that the intervals of all rows make."""
    tracks: list[_Track] = []
    for row, intervals in rows:
        kept = []
        if len(tracks) != len(intervals):
            yield from (track.slice() for track in tracks)
            tracks = []
        for n, interval in enumerate(intervals):
            if n < len(tracks) and tracks[n].takes(row, interval):
                kept.append(tracks[n])
                continue
            if n < len(tracks):
                yield tracks[n].slice()
            kept.append(_Track(row, interval))
        tracks = kept
    yield from (track.slice() for track in tracks)
