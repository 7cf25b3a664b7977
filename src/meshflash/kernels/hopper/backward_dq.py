"""dQ in Gluon for Hopper, without sums in global memory: the second pass of a backward that gives the same bits twice.

One warp copies, two groups of warps compute 64 queries each. Scores of the next block start beside the product of this
block's dS, which goes from registers, with its keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from meshflash.kernels.hopper.common import (
    INF,
    LOG2E,
    along,
    barriers,
    copy_block,
    copy_keys,
    next_block,
    run_of,
    tanh,
    tile_of,
    uncapped,
    visible_by_sides,
)


@gluon.jit
def _copy(q, k, v, dout, q_room, k_room, v_room, dout_room, q_full, k_full, k_empty, v_full, v_empty, TILES, RUNS,
          GROUP: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
          SINGLE: gl.constexpr, WHOLE: gl.constexpr):  # fmt: skip
    """The warp that copies: queries and dout once, then keys and values block by block."""
    batch, row, _, _, _, run, turns = tile_of(TILES, gl.program_id(0), SINGLE)
    head = gl.program_id(1)
    key_head = head // GROUP
    begin, blocks, limit, least, most = run_of(RUNS, run)
    mbarrier.expect(q_full.index(0), 4 * ROWS * D * 2)
    for w in gl.static_range(2):
        copy_block(q, [batch, head, row + w * ROWS, 0], q_full.index(0), q_room.index(w))
        copy_block(dout, [batch, head, row + w * ROWS, 0], q_full.index(0), dout_room.index(w))
    left = 0
    block = 0
    for turn in range(turns):
        run, left, begin, blocks, limit, least, most, _fresh, block = next_block(
            turn, run, left, begin, blocks, limit, least, most, RUNS, BLOCK_N, SINGLE, WHOLE
        )
        copy_keys(
            k, v, k_room, v_room, k_full, k_empty, v_full, v_empty, batch, key_head, block, turn, BLOCK_N, D, STAGES
        )
    # scores of one block too many are started, and need something to read
    stage = turns % STAGES
    mbarrier.wait(k_empty.index(stage), ((turns // STAGES) & 1) ^ 1)
    mbarrier.expect(k_full.index(stage), BLOCK_N * D * 2)
    copy_block(k, [batch, key_head, block, 0], k_full.index(stage), k_room.index(stage))


@gluon.jit
def _compute(LSE, DELTA, DQ, q_room, k_room, v_room, dout_room, q_full, k_full, k_empty, v_full, v_empty, TILES, RUNS,
             scale, scale2, inner_scale, l_b, l_h, l_t, d_b, d_h, d_t, dq_b, dq_t, dq_h,
             WHICH: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
             SINGLE: gl.constexpr, WHOLE: gl.constexpr, LOWER: gl.constexpr, UPPER: gl.constexpr,
             SOFTCAP: gl.constexpr, ADD: gl.constexpr):  # fmt: skip
    """A group of warps that computes: 64 queries."""
    DTYPE: gl.constexpr = q_room.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    batch, row, rows, first, step, run, turns = tile_of(TILES, gl.program_id(0), SINGLE)
    b = batch.to(gl.int64)
    h = gl.program_id(1).to(gl.int64)
    begin, blocks, limit, least, most = run_of(RUNS, run)
    m = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
    at = (row + m).to(gl.int64)
    lse = gl.load(LSE + b * l_b + h * l_h + at * l_t, mask=m < rows, other=-INF)
    lse = gl.where(lse == -INF, INF, lse * LOG2E)  # rows that see nothing, or are not there, weigh nothing
    delta = gl.load(DELTA + b * d_b + h * d_h + at * d_t, mask=m < rows, other=0.0)
    lowest = first + step * (WHICH * ROWS)
    highest = lowest + step * (ROWS - 1)
    positions = first + step * m
    q = q_room.index(WHICH).reshape([ROWS, D])
    dout = dout_room.index(WHICH).reshape([ROWS, D])
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    dq = gl.zeros([ROWS, D], gl.float32, OUT)
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(q, k_room.index(0).reshape([BLOCK_N, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    left = 0
    for turn in range(turns):
        run, left, begin, blocks, limit, least, most, fresh, block = next_block(
            turn, run, left, begin, blocks, limit, least, most, RUNS, BLOCK_N, SINGLE, WHOLE
        )
        stage = turn % STAGES
        mbarrier.wait(v_full.index(stage), (turn // STAGES) & 1)
        v = v_room.index(stage).reshape([BLOCK_N, D])
        dp = warpgroup_mma(dout, v.permute((1, 0)), zero, use_acc=False, is_async=True)
        if SOFTCAP:
            s = tanh(s * inner_scale)
        if LOWER or UPPER:
            s = visible_by_sides(
                s, positions, lowest, highest, fresh, block, least, most, ROWS, BLOCK_N, LOWER, UPPER, WHOLE, S
            )
        p = gl.exp2(s * scale2 - lse[:, None])
        dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
        mbarrier.arrive(v_empty.index(stage), count=1)
        ds = p * (dp - delta[:, None])
        if SOFTCAP:
            ds = ds * uncapped(p, lse[:, None], scale2)
        ds = gl.convert_layout(ds.to(DTYPE), A)
        moving = warpgroup_mma(ds, k_room.index(stage).reshape([BLOCK_N, D]), dq, is_async=True)
        following = (turn + 1) % STAGES
        mbarrier.wait(k_full.index(following), ((turn + 1) // STAGES) & 1)
        k = k_room.index(following).reshape([BLOCK_N, D])
        s_moving = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        dq, ds = warpgroup_mma_wait(num_outstanding=1, deps=(moving, ds))
        mbarrier.arrive(k_empty.index(stage), count=1)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s_moving,))
    ALONG: gl.constexpr = along(D)
    rows_out = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ALONG))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, ALONG))
    there = (rows_out < rows)[:, None]
    into = DQ + b * dq_b + h * dq_h + (row + rows_out).to(gl.int64)[:, None] * dq_t + columns[None, :]
    dq = dq * scale
    if ADD:
        dq = gl.convert_layout(dq, ALONG) + gl.load(into, mask=there, other=0.0)
        gl.store(into, dq.to(DQ.dtype.element_ty), mask=there)
    else:
        gl.store(into, gl.convert_layout(dq.to(DQ.dtype.element_ty), ALONG), mask=there)


@gluon.jit
def queries(q, k, v, dout, LSE, DELTA, DQ, TILES, RUNS, scale, scale2, inner_scale, l_b, l_h, l_t, d_b, d_h, d_t,
            dq_b, dq_t, dq_h,
            GROUP: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
            SINGLE: gl.constexpr, WHOLE: gl.constexpr, LOWER: gl.constexpr, UPPER: gl.constexpr, SOFTCAP: gl.constexpr,
            ADD: gl.constexpr, COMPUTE_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr):  # fmt: skip
    """DQ of one tile of queries and one head. `scale2` is of scores in base 2, `inner_scale` as in `backward`."""
    DTYPE: gl.constexpr = q.dtype
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    q_room = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, D], q.layout)
    dout_room = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, D], dout.layout)
    k_room = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, D], k.layout)
    v_room = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_N, D], v.layout)
    q_full = barriers(1, 1)
    k_full, k_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    v_full, v_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize([
        (_compute, (LSE, DELTA, DQ, q_room, k_room, v_room, dout_room, q_full, k_full, k_empty, v_full, v_empty,
                    TILES, RUNS, scale, scale2, inner_scale, l_b, l_h, l_t, d_b, d_h, d_t, dq_b, dq_t, dq_h, FIRST,
                    ROWS, BLOCK_N, D, STAGES, SINGLE, WHOLE, LOWER, UPPER, SOFTCAP, ADD)),
        (_compute, (LSE, DELTA, DQ, q_room, k_room, v_room, dout_room, q_full, k_full, k_empty, v_full, v_empty,
                    TILES, RUNS, scale, scale2, inner_scale, l_b, l_h, l_t, d_b, d_h, d_t, dq_b, dq_t, dq_h, SECOND,
                    ROWS, BLOCK_N, D, STAGES, SINGLE, WHOLE, LOWER, UPPER, SOFTCAP, ADD)),
        (_copy, (q, k, v, dout, q_room, k_room, v_room, dout_room, q_full, k_full, k_empty, v_full, v_empty, TILES,
                 RUNS, GROUP, ROWS, BLOCK_N, D, STAGES, SINGLE, WHOLE)),
    ], [4, 1], [COMPUTE_REGISTERS, COPY_REGISTERS])  # fmt: skip
