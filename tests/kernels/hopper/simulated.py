"""The backward in Gluon as numbers and tensors of a CPU: what surrounds it is the real code.

There is no interpreter for Gluon. Here its own code for blocks is called with plain numbers, copies by descriptors read
zeros beyond a tensor and write nothing there, and results go where pointers and strides lead.
"""

from __future__ import annotations

import inspect
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from meshflash.kernels.hopper import common
from meshflash.kernels.triton.launch import tma_strides

#: Functions of Gluon's that compute with numbers alone.
OF_NUMBERS = ("rotate_block", "block_start", "next_block", "begin_gqa_loop", "next_gqa_block")


def with_numbers(monkeypatch: Any) -> SimpleNamespace:
    """Let the code for blocks take numbers; its own names for them, to which a test may add."""
    names = SimpleNamespace(minimum=min, maximum=max, where=lambda yes, a, b: a if yes else b)
    monkeypatch.setattr(common, "gl", names)
    monkeypatch.setattr(common, "load_run", lambda table, n: tuple(map(int, table[n])))
    for name in OF_NUMBERS:
        function = getattr(common, name)
        monkeypatch.setattr(common, name, getattr(function, "fn", function))
    return names


class Described:
    """A tensor by blocks, as a descriptor has it."""

    def __init__(self, x: Tensor, block: list[int], layout: Any = None) -> None:
        strides = tma_strides(x)
        assert not x.data_ptr() % 16
        assert not any(stride * x.element_size() % 16 for stride in strides[:-1])
        self.x, self.block = x.as_strided(x.shape, strides), block

    def _meet(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What there is of a block, in the tensor and in the block."""
        ends = [(max(0, -a), max(0, min(b, n - a))) for a, b, n in zip(at, self.block, self.x.shape, strict=True)]
        inside = tuple(slice(lo, max(lo, hi)) for lo, hi in ends)
        return tuple(slice(a + part.start, a + part.stop) for a, part in zip(at, inside, strict=True)), inside

    def read(self, *at: int) -> Tensor:
        """A block, with zeros beyond the tensor."""
        block = torch.zeros(self.block, dtype=self.x.dtype)
        there, inside = self._meet(list(at))
        block[inside] = self.x[there]
        return block.reshape(self.block[-2:]).squeeze(0).float()

    def add(self, block: Tensor, *at: int) -> None:
        """Add a block; a copy that adds fails where all of its block lies before the first row."""
        assert all(a > -b for a, b in zip(at, self.block, strict=True))
        there, inside = self._meet(list(at))
        self.x[there] += block.reshape(self.block)[inside]


class Backward:
    """In place of the kernel: `names` has those of its arguments, and what it was started with is kept."""

    def __init__(self, kernel: Any, names: SimpleNamespace) -> None:
        self.arguments, self.names = list(inspect.signature(kernel.fn).parameters), names
        self.started: list[SimpleNamespace] = []

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def start(*arguments: Any, **constants: Any) -> None:
            given = dict(zip(self.arguments, arguments, strict=False)) | constants
            self.started.append(SimpleNamespace(**given))
            for head, tile in list(product(range(grid[1]), range(grid[0])))[: self.started[-1].num_work]:
                vars(self.names)["program_id"] = (tile, head).__getitem__
                _program(self.started[-1], tile, head)

        return start


def _program(c: SimpleNamespace, tile: int, group: int) -> None:
    first_head, key_head = group * c.HEADS_PER_CTA, group // c.CTAS_PER_KV_HEAD
    batch, row, rows, first, step, run, turns = c.TILES[tile].tolist()
    if c.SINGLE_RUN:
        run = tile
    half, missing = c.BLOCK_N // 2, c.BLOCK_N - rows
    assert c.PARTIAL_TILES or not missing
    keys, values = (
        torch.cat([x.read(batch, key_head, row - missing + part * half, 0) for part in range(2)]) for x in (c.k, c.v)
    )
    n = torch.arange(c.BLOCK_N)[:, None]
    positions = first + step * (n - missing)
    dk, dv = torch.zeros(2, c.BLOCK_N, c.D)
    numbers = common.load_run(c.RUNS, run)
    head, left, ends = common.begin_gqa_loop(first_head, numbers[1], turns, c.HEADS_PER_CTA, c.SINGLE_RUN, c.ROTATE)
    state: list[int] = [head, ends, run, left, *numbers]
    for number in range(turns * c.HEADS_PER_CTA):
        *state, fresh, block = common.next_gqa_block(
            *(
                number,
                *state,
                c.RUNS,
                first_head,
                run,
                turns,
                c.BLOCK_M,
                c.HEADS_PER_CTA,
                c.SINGLE_RUN,
                c.EXACT_BEGIN,
                c.CLIPPED,
            ),
            c.ROTATE,
        )
        head, *_, limit, least, most = state
        columns = block + torch.arange(c.BLOCK_M)[None, :]
        seen = n >= missing
        if c.LOWER:
            seen = seen & (columns >= positions + least) & (columns >= (-c.BLOCK_M if c.EXACT_BEGIN else fresh))
        if c.UPPER:
            seen = seen & (columns <= positions + most)
        if c.CLIPPED:
            seen = seen & (columns < limit)
        line, shift = batch * c.heads + head, block % 4
        assert c.SHIFTED_LSE or not shift
        place = (line * 4 + shift if c.SHIFTED_LSE else line), block - shift
        lse, delta = (x.read(*place) for x in (c.lse, c.delta))
        q, dout = (x.read(batch, head, block, 0) for x in (c.q, c.dout))
        p = torch.exp2(torch.where(seen, keys @ q.T, -torch.inf) * c.scale2 - lse)
        ds = p * (values @ dout.T - delta)
        dv += p @ dout
        dk += ds @ q
        if c.COMPUTE_DQ:
            _add_dq(c, ds.T @ keys, batch, head, block)
    if c.TMA_REDUCE_DKDV:
        assert (c.ACCUMULATE, c.COMPUTE_DQ, c.PARTIAL_TILES) == (True, True, False)
        for sums, x in ((c.dk_sums, dk * c.scale), (c.dv_sums, dv)):
            for down, along in product(range(0, c.BLOCK_N, 64), range(0, c.D, 64)):
                sums.add(x[down : down + 64, along : along + 64], batch, key_head, row + down, along)
        return
    columns = torch.arange(c.D)[None, :]
    for into, x, (b, t, h) in ((c.DK, dk * c.scale, (c.dk_b, c.dk_t, c.dk_h)), (c.DV, dv, (c.dv_b, c.dv_t, c.dv_h))):
        memory = torch.empty(0, dtype=into.dtype).set_(into.untyped_storage())
        at = into.storage_offset() + batch * b + key_head * h + (row + n[missing:] - missing) * t + columns
        memory[at] = (memory[at] if c.ACCUMULATE else 0) + x[missing:].to(into.dtype)


def _add_dq(c: SimpleNamespace, dq: Tensor, batch: int, head: int, block: int) -> None:
    """In halves of 64 x 64, as each group of warps adds its own."""
    for n, half in enumerate(dq.split(64, 0 if c.BLOCK_M == 128 else 1)):
        if c.DQ_TILED:
            assert not block % c.BLOCK_M
            tile = (batch * c.heads + head) * c.q_tiles_per_head + block // c.BLOCK_M
            c.dq.add(half.reshape(4, 2, 8, 8, 4, 2).permute(3, 0, 2, 4, 1, 5), (tile * 2 + n) * 16, 0)
        elif c.BLOCK_M == 128:
            c.dq.add(half * c.scale, batch, head, block + n * 64, 0)
        else:
            c.dq.add(half * c.scale, batch, head, block, n * 64)
