"""The product of two matrices in Gluon for Hopper: `stream_k.product`, with a warp of its own that copies.

Two groups of warps multiply, each half of a tile's rows. While they store a tile, blocks of the next one arrive.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from meshflash.gemm import partition
from meshflash.kernels.hopper.common import barriers, copy_block, store_block

begin_of = gluon.jit(partition.begin_of)
place_of = gluon.jit(partition.place_of)

SQRT_HALF = gl.constexpr(0.7071067811865476)


@gluon.jit
def share_of(tiles, steps, crew, slices, shared, SLOTS: gl.constexpr):
    """This program's whole tiles, all of its segments, and the slices of shared tiles from the first to the last."""
    program = gl.program_id(0)
    alone = gl.cdiv(gl.maximum(tiles - shared - program, 0), gl.num_programs(0))
    count = alone
    at = program
    end = program
    if SLOTS > 0:
        at = begin_of(program, crew, slices)
        end = begin_of(program + 1, crew, slices)
        count += (end - 1) // steps - at // steps + 1
    return alone, count, at, end


@gluon.jit
def segment_of(turn, alone, at, end, steps, shared, rows, columns, SLOTS: gl.constexpr, GROUP: gl.constexpr):
    """A segment of this program: its tile, with row and column, slices from first to last; where the next begins."""
    tile = shared + gl.program_id(0) + turn * gl.num_programs(0)
    first = turn * 0
    last = steps
    if SLOTS > 0:
        mine = turn >= alone
        tile = gl.where(mine, at // steps, tile)
        first = gl.where(mine, at % steps, 0)
        last = gl.where(mine, gl.minimum(first + end - at, steps), steps)
        at += gl.where(mine, last - first, 0)
    row, column = place_of(tile, rows, columns, GROUP)
    return tile, row, column, first, last, at


@gluon.jit
def copy(a, b, a_room, b_room, full, empty, rows, columns, steps, crew, slices, shared,
         HALF_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr,
         SLOTS: gl.constexpr, STAGES: gl.constexpr, A_TURNED: gl.constexpr, B_TURNED: gl.constexpr):  # fmt: skip
    """The warp that copies."""
    alone, count, at, end = share_of(rows * columns, steps, crew, slices, shared, SLOTS)
    done = 0
    for turn in range(count):
        _tile, row, column, first, last, at = segment_of(
            turn, alone, at, end, steps, shared, rows, columns, SLOTS, GROUP
        )
        m0 = row * (2 * HALF_M)
        n0 = column * BLOCK_N
        for step in range(first, last):
            k0 = step * BLOCK_K
            stage = done % STAGES
            mbarrier.wait(empty.index(stage), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (2 * HALF_M + BLOCK_N) * BLOCK_K * 2)
            for w in gl.static_range(2):
                if A_TURNED:
                    copy_block(a, [k0, m0 + w * HALF_M], full.index(stage), a_room.index(stage * 2 + w))
                else:
                    copy_block(a, [m0 + w * HALF_M, k0], full.index(stage), a_room.index(stage * 2 + w))
            if B_TURNED:
                copy_block(b, [n0, k0], full.index(stage), b_room.index(stage))
            else:
                copy_block(b, [k0, n0], full.index(stage), b_room.index(stage))
            done += 1


@gluon.jit
def _store(x, BLOCKS, room, m0, n0):
    """Columns of a tile, by way of shared memory."""
    tma.store_wait(pendings=0)  # what was there has left; all threads are told
    room.store(x.to(BLOCKS.dtype))
    fence_async_shared()
    store_block(BLOCKS, [m0, n0], room)


@gluon.jit
def _finish_half(x, BIAS, out, kept, room, m0, n0, N, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr,
                 KEEP: gl.constexpr):  # fmt: skip
    """Bias, activation, and the store of a half of a tile's columns."""
    if HAS_BIAS:
        layout: gl.constexpr = gl.SliceLayout(0, x.type.layout)
        n = n0 + gl.arange(0, x.shape[1], layout=layout)
        x += gl.load(BIAS + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
    if KEEP:
        _store(x, kept, room, m0, n0)
    if ACTIVATION == "relu":
        x = gl.where(x < 0, 0.0, x)  # NaN stays
    if ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + gl.erf(x * SQRT_HALF))
    if ACTIVATION == "silu":
        x = x / (1.0 + gl.exp(-x))
    _store(x, out, room, m0, n0)


@gluon.jit
def halves(x):
    """The left and the right half of a tile's columns."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def _finish(x, BIAS, out, kept, room, m0, n0, N, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr,
            KEEP: gl.constexpr):  # fmt: skip
    """The same of a tile, half after half: so its way through shared memory is narrow."""
    HALF: gl.constexpr = x.shape[1] // 2
    left, right = halves(x)
    _finish_half(left, BIAS, out, kept, room, m0, n0, N, ACTIVATION, HAS_BIAS, KEEP)
    _finish_half(right, BIAS, out, kept, room, m0, n0 + HALF, N, ACTIVATION, HAS_BIAS, KEEP)


@gluon.jit
def sum_of(a_room, b_room, full, empty, first, last, done, WHICH: gl.constexpr, HALF_M: gl.constexpr,
           BLOCK_N: gl.constexpr, STAGES: gl.constexpr, A_TURNED: gl.constexpr, B_TURNED: gl.constexpr):  # fmt: skip
    """One half of the rows of a tile, summed over slices from first to last; and blocks that have come till then."""
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros([HALF_M, BLOCK_N], gl.float32, SUM)
    for step in range(first, last):
        stage = done % STAGES
        mbarrier.wait(full.index(stage), (done // STAGES) & 1)
        a = a_room.index(stage * 2 + WHICH)
        b = b_room.index(stage)
        if A_TURNED:
            a = a.permute((1, 0))
        if B_TURNED:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        # the step before is done with its blocks
        mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), count=1, pred=step > first)
        done += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), count=1)
    return acc, done


@gluon.jit
def store_part(acc, PARTIALS, first, WHICH: gl.constexpr, SLOTS: gl.constexpr):
    """What this program has of a tile from its slice `first` on, for who adds it up."""
    HALF_M: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    slot = gl.program_id(0).to(gl.int64) * SLOTS
    if SLOTS == 2:
        slot += first == 0
    layout: gl.constexpr = acc.type.layout
    m = WHICH * HALF_M + gl.arange(0, HALF_M, layout=gl.SliceLayout(1, layout))
    n = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    gl.store(PARTIALS + slot * (2 * HALF_M * WIDTH) + m[:, None] * WIDTH + n[None, :], acc)


@gluon.jit
def _multiply(BIAS, out, kept, PARTIALS, a_room, b_room, out_room, full, empty, N, rows, columns, steps, crew, slices,
              shared, WHICH: gl.constexpr, HALF_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr,
              SLOTS: gl.constexpr, STAGES: gl.constexpr, A_TURNED: gl.constexpr, B_TURNED: gl.constexpr,
              ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, KEEP: gl.constexpr):  # fmt: skip
    """A group of warps that multiplies: one half of the rows of each tile."""
    alone, count, at, end = share_of(rows * columns, steps, crew, slices, shared, SLOTS)
    done = 0
    for turn in range(count):
        _tile, row, column, first, last, at = segment_of(
            turn, alone, at, end, steps, shared, rows, columns, SLOTS, GROUP
        )
        acc, done = sum_of(a_room, b_room, full, empty, first, last, done, WHICH, HALF_M, BLOCK_N, STAGES, A_TURNED,
                           B_TURNED)  # fmt: skip
        m0 = row * (2 * HALF_M) + WHICH * HALF_M
        n0 = column * BLOCK_N
        if SLOTS > 0:
            if last - first < steps:
                store_part(acc, PARTIALS, first, WHICH, SLOTS)
            else:
                _finish(acc, BIAS, out, kept, out_room.index(WHICH), m0, n0, N, ACTIVATION, HAS_BIAS, KEEP)
        else:
            _finish(acc, BIAS, out, kept, out_room.index(WHICH), m0, n0, N, ACTIVATION, HAS_BIAS, KEEP)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["steps", "crew", "slices", "shared"])
def product(a, b, BIAS, out, kept, PARTIALS, M, N, steps, crew, slices, shared,
            BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr,
            SLOTS: gl.constexpr, STAGES: gl.constexpr, A_TURNED: gl.constexpr, B_TURNED: gl.constexpr,
            ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, KEEP: gl.constexpr, CHAINED: gl.constexpr,
            COMPUTE_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr):  # fmt: skip
    """As `stream_k.product` of operands and results that descriptors describe."""
    HALF_M: gl.constexpr = BLOCK_M // 2
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    if CHAINED:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)
    rows = gl.cdiv(M, BLOCK_M)
    columns = gl.cdiv(N, BLOCK_N)
    a_room = gl.allocate_shared_memory(a.dtype, [2 * STAGES, a.block_type.shape[0], a.block_type.shape[1]], a.layout)
    b_room = gl.allocate_shared_memory(b.dtype, [STAGES, b.block_type.shape[0], b.block_type.shape[1]], b.layout)
    out_room = gl.allocate_shared_memory(out.dtype, [2, HALF_M, BLOCK_N // 2], out.layout)
    full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize([
        (_multiply, (BIAS, out, kept, PARTIALS, a_room, b_room, out_room, full, empty, N, rows, columns, steps, crew,
                     slices, shared, FIRST, HALF_M, BLOCK_N, GROUP, SLOTS, STAGES, A_TURNED, B_TURNED, ACTIVATION,
                     HAS_BIAS, KEEP)),
        (_multiply, (BIAS, out, kept, PARTIALS, a_room, b_room, out_room, full, empty, N, rows, columns, steps, crew,
                     slices, shared, SECOND, HALF_M, BLOCK_N, GROUP, SLOTS, STAGES, A_TURNED, B_TURNED, ACTIVATION,
                     HAS_BIAS, KEEP)),
        (copy, (a, b, a_room, b_room, full, empty, rows, columns, steps, crew, slices, shared, HALF_M, BLOCK_N,
                BLOCK_K, GROUP, SLOTS, STAGES, A_TURNED, B_TURNED)),
    ], [4, 1], [COMPUTE_REGISTERS, COPY_REGISTERS])  # fmt: skip
