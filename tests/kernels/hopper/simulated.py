"""Simulate the Hopper backward on a CPU: the kernel is replaced, the launch code around it is the real one.

Gluon has no interpreter. The simulation calls the kernel's own scalar functions, which choose blocks, with Python ints.
Simulated TMA descriptors read zeros and write nothing beyond a tensor. Results are stored through the launch's pointers
and strides.
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

#: Device functions of `common` that compute with scalars only, so that they also run on Python ints.
SCALAR_FUNCTIONS = ("rotate_block", "block_start", "next_block", "begin_gqa_loop", "next_gqa_block")


def patch_scalar_functions(monkeypatch: Any) -> SimpleNamespace:
    """Make the scalar functions of `common` callable with ints; return their `gl` namespace, which tests may extend."""
    names = SimpleNamespace(minimum=min, maximum=max, where=lambda yes, a, b: a if yes else b)
    monkeypatch.setattr(common, "gl", names)
    monkeypatch.setattr(common, "load_run", lambda table, n: tuple(map(int, table[n])))
    for name in SCALAR_FUNCTIONS:
        function = getattr(common, name)
        monkeypatch.setattr(common, name, getattr(function, "fn", function))
    return names


class SimulatedDescriptor:
    """A TMA descriptor on a CPU tensor: it reads blocks and adds blocks."""

    def __init__(self, x: Tensor, block: list[int], layout: Any = None) -> None:
        strides = tma_strides(x)
        assert not x.data_ptr() % 16
        assert not any(stride * x.element_size() % 16 for stride in strides[:-1])
        self.x, self.block = x.as_strided(x.shape, strides), block

    def _overlap(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the part of a block inside the tensor, as slices of the tensor and as slices of the block."""
        ends = [(max(0, -a), max(0, min(b, n - a))) for a, b, n in zip(at, self.block, self.x.shape, strict=True)]
        inside = tuple(slice(lo, max(lo, hi)) for lo, hi in ends)
        return tuple(slice(a + extent.start, a + extent.stop) for a, extent in zip(at, inside, strict=True)), inside

    def read(self, *at: int) -> Tensor:
        """Return a block, with zeros beyond the tensor."""
        block = torch.zeros(self.block, dtype=self.x.dtype)
        there, inside = self._overlap(list(at))
        block[inside] = self.x[there]
        return block.reshape(self.block[-2:]).squeeze(0).float()

    def add(self, block: Tensor, *at: int) -> None:
        """Add a block; a real TMA reduction fails if the whole block lies before the first row."""
        assert all(a > -b for a, b in zip(at, self.block, strict=True))
        there, inside = self._overlap(list(at))
        self.x[there] += block.reshape(self.block)[inside]


class SimulatedBackward:
    """Stands in for the backward kernel; `launches` keeps the arguments of each launch.

    `gl_names` is the namespace from `patch_scalar_functions`, which gets the `program_id` of each simulated CTA.
    """

    def __init__(self, kernel: Any, gl_names: SimpleNamespace) -> None:
        self.parameters, self.gl_names = list(inspect.signature(kernel.fn).parameters), gl_names
        self.launches: list[SimpleNamespace] = []

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            given = dict(zip(self.parameters, arguments, strict=False)) | constants
            self.launches.append(SimpleNamespace(**given))
            for head, tile in list(product(range(grid[1]), range(grid[0])))[: self.launches[-1].num_work]:
                vars(self.gl_names)["program_id"] = (tile, head).__getitem__
                _run_cta(self.launches[-1], tile, head)

        return launch


def _run_cta(c: SimpleNamespace, tile: int, group: int) -> None:
    """Run one CTA of the backward: a tile of keys against all visible query blocks of its query heads."""
    first_head, kv_head = group * c.HEADS_PER_CTA, group // c.CTAS_PER_KV_HEAD
    batch, row, rows, first, step, run, num_blocks = c.TILES[tile].tolist()
    if c.SINGLE_RUN:
        run = tile
    half, missing = c.BLOCK_N // 2, c.BLOCK_N - rows
    assert c.PARTIAL_TILES or not missing
    keys, values = (
        torch.cat([x.read(batch, kv_head, row - missing + n * half, 0) for n in range(2)]) for x in (c.k, c.v)
    )
    n = torch.arange(c.BLOCK_N)[:, None]
    positions = first + step * (n - missing)
    dk, dv = torch.zeros(2, c.BLOCK_N, c.D)
    run_fields = common.load_run(c.RUNS, run)
    head, left, ends = common.begin_gqa_loop(
        first_head, run_fields[1], num_blocks, c.HEADS_PER_CTA, c.SINGLE_RUN, c.ROTATE
    )
    state: list[int] = [head, ends, run, left, *run_fields]
    for index in range(num_blocks * c.HEADS_PER_CTA):
        *state, first_new, block = common.next_gqa_block(
            *(
                index,
                *state,
                c.RUNS,
                first_head,
                run,
                num_blocks,
                c.BLOCK_M,
                c.HEADS_PER_CTA,
                c.SINGLE_RUN,
                c.EXACT_BEGIN,
                c.CLIPPED,
            ),
            c.ROTATE,
        )
        head, *_, run_end, band_lo, band_hi = state
        columns = block + torch.arange(c.BLOCK_M)[None, :]
        visible = n >= missing
        if c.LOWER:
            first_new_row = -c.BLOCK_M if c.EXACT_BEGIN else first_new
            visible = visible & (columns >= positions + band_lo) & (columns >= first_new_row)
        if c.UPPER:
            visible = visible & (columns <= positions + band_hi)
        if c.CLIPPED:
            visible = visible & (columns < run_end)
        # TMA needs 16-byte aligned addresses, so unaligned blocks read one of four shifted copies of lse and delta
        lse_row, shift = batch * c.heads + head, block % 4
        assert c.SHIFTED_LSE or not shift
        coordinates = (lse_row * 4 + shift if c.SHIFTED_LSE else lse_row), block - shift
        lse, delta = (x.read(*coordinates) for x in (c.lse, c.delta))
        q, dout = (x.read(batch, head, block, 0) for x in (c.q, c.dout))
        p = torch.exp2(torch.where(visible, keys @ q.T, -torch.inf) * c.scale2 - lse)
        ds = p * (values @ dout.T - delta)
        dv += p @ dout
        dk += ds @ q
        if c.COMPUTE_DQ:
            _add_dq(c, ds.T @ keys, batch, head, block)
    if c.TMA_REDUCE_DKDV:
        assert (c.ACCUMULATE, c.COMPUTE_DQ, c.PARTIAL_TILES) == (True, True, False)
        for sums, x in ((c.dk_sums, dk * c.scale), (c.dv_sums, dv)):
            for down, along in product(range(0, c.BLOCK_N, 64), range(0, c.D, 64)):
                sums.add(x[down : down + 64, along : along + 64], batch, kv_head, row + down, along)
        return
    columns = torch.arange(c.D)[None, :]
    for into, x, (b, t, h) in ((c.DK, dk * c.scale, (c.dk_b, c.dk_t, c.dk_h)), (c.DV, dv, (c.dv_b, c.dv_t, c.dv_h))):
        memory = torch.empty(0, dtype=into.dtype).set_(into.untyped_storage())
        at = into.storage_offset() + batch * b + kv_head * h + (row + n[missing:] - missing) * t + columns
        memory[at] = (memory[at] if c.ACCUMULATE else 0) + x[missing:].to(into.dtype)


def _add_dq(c: SimpleNamespace, dq: Tensor, batch: int, head: int, block: int) -> None:
    """Add a block of dQ in two halves, as each consumer warpgroup adds its own."""
    for n, half in enumerate(dq.split(64, 0 if c.BLOCK_M == 128 else 1)):
        if c.DQ_TILED:
            assert not block % c.BLOCK_M
            tile = (batch * c.heads + head) * c.q_tiles_per_head + block // c.BLOCK_M
            c.dq.add(half.reshape(4, 2, 8, 8, 4, 2).permute(3, 0, 2, 4, 1, 5), (tile * 2 + n) * 16, 0)
        elif c.BLOCK_M == 128:
            c.dq.add(half * c.scale, batch, head, block + n * 64, 0)
        else:
            c.dq.add(half * c.scale, batch, head, block, n * 64)
