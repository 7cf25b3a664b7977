"""Attention backward in Gluon for Hopper: one warp copies, two groups of warps compute 64 of a program's 128 keys each.

Scores are computed with keys as rows, so that weights and their gradients go from registers into dV and dK. dS also
goes to shared memory, where both groups read all of it: each multiplies half of dQ over all 128 keys, and adds it to
float32 sums in global memory, by copies that add. The order of those sums changes from run to run.
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

from meshflash.kernels.gluon_common import (
    INF,
    MEETING,
    add_block,
    along,
    barriers,
    before_group,
    copy_block,
    meet,
    next_in_group,
    run_of,
    tanh,
    tile_of,
    uncapped,
    visible,
)


@gluon.jit
def _copy(q, k, v, dout, lse, delta, q_room, k_room, v_room, dout_room, lse_room, delta_room, kv_full, q_full, q_empty,
          dout_full, dout_empty, TILES, RUNS, heads,
          GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
          SINGLE: gl.constexpr, WHOLE: gl.constexpr, CLIPPED: gl.constexpr, SHIFTED: gl.constexpr, ROTATE: gl.constexpr,
          AHEAD: gl.constexpr):  # fmt: skip
    """The warp that copies: keys and values once, then queries, dout, lse and delta block by block.

    Copies of lse and delta begin at multiples of 16 bytes. SHIFTED lines are there four times, each a row further.
    """
    batch, row, rows, _, _, first_run, turns = tile_of(TILES, gl.program_id(0), SINGLE)
    key_head = gl.program_id(1)
    start = row + rows - BLOCK_N
    mbarrier.expect(kv_full.index(0), 2 * BLOCK_N * D * 2)
    for w in gl.static_range(2):
        copy_block(k, [batch, key_head, start + w * (BLOCK_N // 2), 0], kv_full.index(0), k_room.index(w))
        copy_block(v, [batch, key_head, start + w * (BLOCK_N // 2), 0], kv_full.index(0), v_room.index(w))
    block = 0
    first_head = key_head * GROUP
    run = first_run
    begin, blocks, limit, least, most = run_of(RUNS, run)
    head, left, ends = before_group(first_head, blocks, turns, GROUP, SINGLE, ROTATE)
    copied = 0
    for number in range(turns * GROUP):
        head, ends, run, left, begin, blocks, limit, least, most, _fresh, block = next_in_group(
            number, head, ends, run, left, begin, blocks, limit, least, most, RUNS, first_head, first_run, turns,
            BLOCK_M, GROUP, SINGLE, WHOLE, CLIPPED, ROTATE
        )  # fmt: skip
        stage = copied % STAGES
        phase = ((copied // STAGES) & 1) ^ 1
        mbarrier.wait(q_empty.index(stage), phase)
        mbarrier.expect(q_full.index(stage), BLOCK_M * D * 2 + BLOCK_M * 4)
        copy_block(q, [batch, head, block, 0], q_full.index(stage), q_room.index(stage))
        line = batch * heads + head
        column = block
        if SHIFTED:
            line = line * 4 + block % 4
            column = block - block % 4
        copy_block(lse, [line, column], q_full.index(stage), lse_room.index(stage))
        mbarrier.wait(dout_empty.index(stage), phase)
        mbarrier.expect(dout_full.index(stage), BLOCK_M * D * 2 + BLOCK_M * 4)
        copy_block(dout, [batch, head, block, 0], dout_full.index(stage), dout_room.index(stage))
        copy_block(delta, [line, column], dout_full.index(stage), delta_room.index(stage))
        copied += 1
    if AHEAD:  # scores of one block too many are started, and need something to read
        stage = copied % STAGES
        mbarrier.wait(q_empty.index(stage), ((copied // STAGES) & 1) ^ 1)
        mbarrier.expect(q_full.index(stage), BLOCK_M * D * 2)
        copy_block(q, [batch, first_head, block, 0], q_full.index(stage), q_room.index(stage))


@gluon.jit
def _compute(dq, DK, DV, q_room, k_room, v_room, dout_room, lse_room, delta_room, ds_room, dq_room, kv_full, q_full,
             q_empty, dout_full, dout_empty, TILES, RUNS, heads, tiles_of_row, scale, scale2, inner_scale,
             dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
             WHICH: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
             STAGES: gl.constexpr, SINGLE: gl.constexpr, WHOLE: gl.constexpr, CLIPPED: gl.constexpr,
             LOWER: gl.constexpr, UPPER: gl.constexpr, SOFTCAP: gl.constexpr, EDGE: gl.constexpr, ADD: gl.constexpr,
             QUERIES: gl.constexpr, TILED: gl.constexpr, ROTATE: gl.constexpr, AHEAD: gl.constexpr):  # fmt: skip
    """A group of warps that computes: 64 keys, and half of dQ."""
    DTYPE: gl.constexpr = q_room.dtype
    ROWS: gl.constexpr = BLOCK_N // 2
    BY_ROWS: gl.constexpr = BLOCK_M == 128  # how dQ is halved: by rows, else by columns; each half is 64 x 64
    # lse and delta of a block take BLOCK_M / 4 registers: read when they are used; dV begins after dS, not before it
    LATE: gl.constexpr = BLOCK_M == 128
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DKV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, DKV, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S)
    batch, row, rows, first, step, first_run, turns = tile_of(TILES, gl.program_id(0), SINGLE)
    key_head = gl.program_id(1)
    missing = 0
    if EDGE:
        missing = BLOCK_N - rows
    k = k_room.index(WHICH).reshape([ROWS, D])
    v = v_room.index(WHICH).reshape([ROWS, D])
    k_first = k_room.index(0).reshape([ROWS, D])
    k_second = k_room.index(1).reshape([ROWS, D])
    if not BY_ROWS:
        k_first = k_first.slice(WHICH * 64, 64, dim=1)
        k_second = k_second.slice(WHICH * 64, 64, dim=1)
    dk = gl.zeros([ROWS, D], gl.float32, DKV)
    dv = gl.zeros([ROWS, D], gl.float32, DKV)
    zero = gl.zeros([ROWS, BLOCK_M], gl.float32, S)
    zero_dq = gl.zeros([64, 64], gl.float32, DQ)
    dq_own = dq_room.index(WHICH)
    n = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
    positions = first + step * (n - missing)
    lowest = first + step * (WHICH * ROWS - missing)
    highest = lowest + step * (ROWS - 1)
    mbarrier.wait(kv_full.index(0), 0)
    s = zero
    if AHEAD:
        mbarrier.wait(q_full.index(0), 0)
        s = warpgroup_mma(k, q_room.index(0).reshape([BLOCK_M, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    first_head = key_head * GROUP
    run = first_run
    begin, blocks, limit, least, most = run_of(RUNS, run)
    head, left, ends = before_group(first_head, blocks, turns, GROUP, SINGLE, ROTATE)
    for used in range(turns * GROUP):
        head, ends, run, left, begin, blocks, limit, least, most, fresh, block = next_in_group(
            used, head, ends, run, left, begin, blocks, limit, least, most, RUNS, first_head, first_run, turns,
            BLOCK_M, GROUP, SINGLE, WHOLE, CLIPPED, ROTATE
        )  # fmt: skip
        stage = used % STAGES
        phase = (used // STAGES) & 1
        q = q_room.index(stage).reshape([BLOCK_M, D])
        dout = dout_room.index(stage).reshape([BLOCK_M, D])
        if QUERIES:
            ds_first = ds_room.index((used & 1) * 2)
            ds_second = ds_room.index((used & 1) * 2 + 1)
        if AHEAD:
            mbarrier.wait(dout_full.index(stage), phase)
            dp = warpgroup_mma(v, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
        else:
            mbarrier.wait(q_full.index(stage), phase)
            s_moving = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            if not LATE:  # under the product: asked for behind it, all of a group would wait for it
                lse = lse_room.index(stage).reshape([BLOCK_M]).load(COLUMNS)
            mbarrier.wait(dout_full.index(stage), phase)
            dp = warpgroup_mma(v, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s_moving,))
        if SOFTCAP:
            s = tanh(s * inner_scale)
        s = visible(
            s, positions, lowest, highest, fresh, block, least, most, ROWS, BLOCK_M, LOWER, UPPER, WHOLE, S, limit,
            CLIPPED
        )  # fmt: skip
        if EDGE:  # keys of others, which stand where this program's are missing
            if missing > WHICH * ROWS:
                s = gl.where((n >= missing)[:, None], s, -INF)
        if LATE or AHEAD:
            lse = lse_room.index(stage).reshape([BLOCK_M]).load(COLUMNS)
        p = gl.exp2(s * scale2 - lse[None, :])
        if not LATE:
            delta = delta_room.index(stage).reshape([BLOCK_M]).load(COLUMNS)
        dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
        weights = gl.convert_layout(p.to(DTYPE), A)
        if not LATE:
            dv_moving = warpgroup_mma(weights, dout, dv, is_async=True)
        else:
            delta = delta_room.index(stage).reshape([BLOCK_M]).load(COLUMNS)
        ds = p * (dp - delta[None, :])
        if SOFTCAP:
            ds = ds * uncapped(p, lse[None, :], scale2)
        ds = ds.to(DTYPE)
        if QUERIES:
            if WHICH == 0:
                ds_first.store(ds)
            else:
                ds_second.store(ds)
        ds_weights = gl.convert_layout(ds, A)
        if LATE:  # exponentials, dS and what is packed are scheduled as one then, in each other's shadow
            dv_moving = warpgroup_mma(weights, dout, dv, is_async=True)
        if QUERIES:
            fence_async_shared()
            # two rooms for dS make one barrier enough: a group is one block ahead at most, and writes the other
            meet(MEETING)
            if BY_ROWS:
                a_first = ds_first.slice(WHICH * 64, 64, dim=1).permute((1, 0))
                a_second = ds_second.slice(WHICH * 64, 64, dim=1).permute((1, 0))
            else:
                a_first = ds_first.permute((1, 0))
                a_second = ds_second.permute((1, 0))
            dq_moving = warpgroup_mma(a_first, k_first, zero_dq, use_acc=False, is_async=True)
            dq_moving = warpgroup_mma(a_second, k_second, dq_moving, is_async=True)
        # dV is done before dK begins: with three products in flight ptxas lets none overlap
        dv, weights = warpgroup_mma_wait(num_outstanding=2 if QUERIES else 0, deps=(dv_moving, weights))
        dk_moving = warpgroup_mma(ds_weights, q, dk, is_async=True)
        if QUERIES:
            tma.store_wait(pendings=0)  # the dQ of the block before has left; what follows tells all threads
        mbarrier.arrive(dout_empty.index(stage), count=1)
        if AHEAD:
            following = (used + 1) % STAGES
            mbarrier.wait(q_full.index(following), ((used + 1) // STAGES) & 1)
            s_moving = warpgroup_mma(
                k, q_room.index(following).reshape([BLOCK_M, D]).permute((1, 0)), zero, use_acc=False, is_async=True
            )
        if QUERIES:
            part = warpgroup_mma_wait(num_outstanding=2 if AHEAD else 1, deps=(dq_moving,))
            if TILED:  # in the order of registers: stores of 16 bytes, and 16 KiB in one piece
                ordered = gl.reshape(part, [4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
                dq_own.store(gl.reshape(ordered, [16, 256]))
                fence_async_shared()
                tile = (batch * heads + head) * tiles_of_row + block // BLOCK_M
                add_block(dq, [(tile * 2 + WHICH) * 16, 0], dq_own)
            else:
                dq_own.reshape([64, 64]).store(part * scale)
                fence_async_shared()
                if BY_ROWS:
                    add_block(dq, [batch, head, block + WHICH * 64, 0], dq_own)
                else:
                    add_block(dq, [batch, head, block, WHICH * 64], dq_own)
        if AHEAD:
            dk, ds_weights = warpgroup_mma_wait(num_outstanding=1, deps=(dk_moving, ds_weights))
            mbarrier.arrive(q_empty.index(stage), count=1)
            s = warpgroup_mma_wait(num_outstanding=0, deps=(s_moving,))
        else:
            dk, ds_weights = warpgroup_mma_wait(num_outstanding=0, deps=(dk_moving, ds_weights))
            mbarrier.arrive(q_empty.index(stage), count=1)
    ALONG: gl.constexpr = along(D)
    n_out = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ALONG))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, ALONG))
    at = (row + n_out - missing).to(gl.int64)[:, None]
    there = (n_out >= missing)[:, None]
    b = batch.to(gl.int64)
    h = key_head.to(gl.int64)
    dk_at = DK + b * dk_b + h * dk_h + at * dk_t + columns[None, :]
    dv_at = DV + b * dv_b + h * dv_h + at * dv_t + columns[None, :]
    dk = dk * scale
    if ADD:  # nobody else adds there, and nobody waits for what was there
        gl.atomic_add(dk_at, gl.convert_layout(dk, ALONG), mask=there, sem="relaxed")
        gl.atomic_add(dv_at, gl.convert_layout(dv, ALONG), mask=there, sem="relaxed")
    else:
        gl.store(dk_at, gl.convert_layout(dk.to(DK.dtype.element_ty), ALONG), mask=there)
        gl.store(dv_at, gl.convert_layout(dv.to(DV.dtype.element_ty), ALONG), mask=there)
    if QUERIES:
        tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["heads", "tiles_of_row"])
def backward(q, k, v, dout, lse, delta, dq, DK, DV, TILES, RUNS, heads, tiles_of_row, scale, scale2, inner_scale,
             dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
             GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
             SINGLE: gl.constexpr, WHOLE: gl.constexpr, CLIPPED: gl.constexpr, LOWER: gl.constexpr, UPPER: gl.constexpr,
             SOFTCAP: gl.constexpr, EDGE: gl.constexpr, ADD: gl.constexpr, QUERIES: gl.constexpr, TILED: gl.constexpr,
             SHIFTED: gl.constexpr, ROTATE: gl.constexpr, AHEAD: gl.constexpr, COMPUTE_REGISTERS: gl.constexpr,
             COPY_REGISTERS: gl.constexpr):  # fmt: skip
    """(dK, dV) of one block of keys and one key head, and with QUERIES its part of dQ, which is added.

    `scale2` is of scores in base 2; with SOFTCAP that of the cap, and `inner_scale` the one inside of it. Where a
    segment of keys ends within a block, the block begins earlier, even before the first row: keys before its own are
    not weighed. TILED sums of dQ are not scaled, and lie as `gather_dq` reads them.
    """
    DTYPE: gl.constexpr = q.dtype
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    q_room = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, D], q.layout)
    dout_room = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_M, D], dout.layout)
    k_room = gl.allocate_shared_memory(DTYPE, [2, 1, 1, BLOCK_N // 2, D], k.layout)
    v_room = gl.allocate_shared_memory(DTYPE, [2, 1, 1, BLOCK_N // 2, D], v.layout)
    lse_room = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], lse.layout)
    delta_room = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], delta.layout)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N // 2, BLOCK_M], DTYPE)
    ds_room = q_room  # without QUERIES neither is used
    dq_room = q_room
    if QUERIES:
        ds_room = gl.allocate_shared_memory(DTYPE, [4, BLOCK_N // 2, BLOCK_M], DS)
        if TILED:
            dq_room = gl.allocate_shared_memory(gl.float32, [2, 16, 256], dq.layout)
        else:
            dq_room = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 64, 64], dq.layout)
    kv_full = barriers(1, 1)
    q_full, q_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    dout_full, dout_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize([
        (_compute, (dq, DK, DV, q_room, k_room, v_room, dout_room, lse_room, delta_room, ds_room, dq_room, kv_full,
                    q_full, q_empty, dout_full, dout_empty, TILES, RUNS, heads, tiles_of_row, scale, scale2,
                    inner_scale, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, FIRST, GROUP, BLOCK_M, BLOCK_N, D, STAGES,
                    SINGLE, WHOLE, CLIPPED, LOWER, UPPER, SOFTCAP, EDGE, ADD, QUERIES, TILED, ROTATE, AHEAD)),
        (_compute, (dq, DK, DV, q_room, k_room, v_room, dout_room, lse_room, delta_room, ds_room, dq_room, kv_full,
                    q_full, q_empty, dout_full, dout_empty, TILES, RUNS, heads, tiles_of_row, scale, scale2,
                    inner_scale, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, SECOND, GROUP, BLOCK_M, BLOCK_N, D, STAGES,
                    SINGLE, WHOLE, CLIPPED, LOWER, UPPER, SOFTCAP, EDGE, ADD, QUERIES, TILED, ROTATE, AHEAD)),
        (_copy, (q, k, v, dout, lse, delta, q_room, k_room, v_room, dout_room, lse_room, delta_room, kv_full, q_full,
                 q_empty, dout_full, dout_empty, TILES, RUNS, heads, GROUP, BLOCK_M, BLOCK_N, D, STAGES, SINGLE, WHOLE,
                 CLIPPED, SHIFTED, ROTATE, AHEAD)),
    ], [4, 1], [COMPUTE_REGISTERS, COPY_REGISTERS])  # fmt: skip
