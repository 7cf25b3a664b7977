"""Attention backward in Gluon for Hopper: one warp copies, two groups of warps compute 64 of a program's 128 keys each.

Scores are computed with keys as rows, so that weights and their gradients go from registers into dV and dK. dS also
goes to shared memory, where both groups read all of it: each multiplies half of dQ over all 128 keys, where it can a
block later, so that neither waits for the other, and adds it to float32 sums in global memory, by copies that add. The
order of those sums changes from run to run, and so does that of dK and dV where several programs add to them.
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

from meshflash.kernels.hopper.common import (
    INF,
    MEETING,
    add_block,
    along,
    arrive,
    barriers,
    before_group,
    block_of,
    clear_turns,
    copy_block,
    exponentials,
    halves,
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
          GROUP: gl.constexpr, SHARE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
          STAGES: gl.constexpr, SINGLE: gl.constexpr, WHOLE: gl.constexpr, CLIPPED: gl.constexpr,
          SHIFTED: gl.constexpr, ROTATE: gl.constexpr, AHEAD: gl.constexpr):  # fmt: skip
    """The warp that copies: keys and values once, then queries, dout, lse and delta block by block.

    Copies of lse and delta begin at multiples of 16 bytes. SHIFTED lines are there four times, each a row further.
    """
    batch, row, rows, _, _, first_run, turns = tile_of(TILES, gl.program_id(0), SINGLE)
    first_head = gl.program_id(1) * GROUP
    key_head = gl.program_id(1) // SHARE
    start = row + rows - BLOCK_N
    mbarrier.expect(kv_full.index(0), 2 * BLOCK_N * D * 2)
    for w in gl.static_range(2):
        copy_block(k, [batch, key_head, start + w * (BLOCK_N // 2), 0], kv_full.index(0), k_room.index(w))
        copy_block(v, [batch, key_head, start + w * (BLOCK_N // 2), 0], kv_full.index(0), v_room.index(w))
    block = 0
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
def _tell_stored(used, WHICH: gl.constexpr):
    """That a group has stored its dS of a block, and is done with those of the block before."""
    arrive(MEETING + (used & 1) * 2 + 1 - WHICH)


@gluon.jit
def _wait_until_stored(used, WHICH: gl.constexpr):
    """Until the other group has told so. Barriers are of blocks by turns, as a group may be one block ahead."""
    meet(MEETING + (used & 1) * 2 + WHICH)


@gluon.jit
def _rooms_of(used, ds_room):
    """Where the dS of both groups lie: rooms are of blocks by turns."""
    return ds_room.index((used & 1) * 2), ds_room.index((used & 1) * 2 + 1)


@gluon.jit
def _multiply_dq(first, second, k_first, k_second, WHICH: gl.constexpr, BLOCK_M: gl.constexpr):
    """Start half of a block's dQ, of which both groups have stored their dS."""
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    if BLOCK_M == 128:  # dQ is halved by rows, else by columns; each half is 64 x 64
        first = first.slice(WHICH * 64, 64, dim=1)
        second = second.slice(WHICH * 64, 64, dim=1)
    zero = gl.zeros([64, 64], gl.float32, DQ)
    moving = warpgroup_mma(first.permute((1, 0)), k_first, zero, use_acc=False, is_async=True)
    return warpgroup_mma(second.permute((1, 0)), k_second, moving, is_async=True)


@gluon.jit
def _store_part(part, room, scale, TILED: gl.constexpr):
    """Half of a block's dQ, to where it is added from."""
    if TILED:  # in the order of registers: stores of 16 bytes, and 16 KiB in one piece
        ordered = gl.reshape(part, [4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
        room.store(gl.reshape(ordered, [16, 256]))
    else:
        room.reshape([64, 64]).store(part * scale)


@gluon.jit
def _place_of(batch, head, heads, block, tiles_of_row, BLOCK_M: gl.constexpr, TILED: gl.constexpr):
    """Where the dQ of a block is added: the number of its tile, or its head and first row."""
    if TILED:
        at = (batch * heads + head) * tiles_of_row + block // BLOCK_M, head
    else:
        at = block, head
    return at


@gluon.jit
def _add_dq(dq, room, at, batch, WHICH: gl.constexpr, BLOCK_M: gl.constexpr, TILED: gl.constexpr):
    """Add half of a block's dQ to the sums, at the block's place."""
    place, head = at
    if TILED:
        add_block(dq, [(place * 2 + WHICH) * 16, 0], room)
    elif BLOCK_M == 128:
        add_block(dq, [batch, head, place + WHICH * 64, 0], room)
    else:
        add_block(dq, [batch, head, place, WHICH * 64], room)


@gluon.jit
def _add_rows(x, sums, room, batch, head, row):
    """Add 64 rows of dK or dV to their sums, half of 128 columns at a time, by way of the room that dQ leaves from."""
    first, second = halves(x, 64, 128)
    _add_columns(first, sums, room, batch, head, row, 0)
    _add_columns(second, sums, room, batch, head, row, 64)


@gluon.jit
def _add_columns(x, sums, room, batch, head, row, column):
    tma.store_wait(pendings=0)  # what was there has left; all threads are told
    room.reshape([64, 64]).store(x)
    fence_async_shared()
    add_block(sums, [batch, head, row, column], room)


@gluon.jit
def _block(dk, dv, s, at, used, head, fresh, block, limit, least, most, dq, rooms, gates, keys, numbers,
           WHICH: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
           WHOLE: gl.constexpr, CLIPPED: gl.constexpr, LOWER: gl.constexpr, UPPER: gl.constexpr, SOFTCAP: gl.constexpr,
           EDGE: gl.constexpr, QUERIES: gl.constexpr, TILED: gl.constexpr, AHEAD: gl.constexpr,
           APART: gl.constexpr):  # fmt: skip
    """One block of queries: its part of dK and dV, which are added to, and half of its dQ.

    APART, groups do not meet at each block: dQ is that of the block before, for the place `at`, of which the other
    group has stored its share already, and one group multiplies while the other computes weights.
    """
    q_room, dout_room, lse_room, delta_room, ds_room, dq_own = rooms
    q_full, q_empty, dout_full, dout_empty = gates
    k, v, k_first, k_second, n, positions, lowest, highest, missing = keys
    batch, heads, tiles_of_row, scale, scale2, inner_scale = numbers
    DTYPE: gl.constexpr = q_room.dtype
    # lse and delta of a block take BLOCK_M / 4 registers: of a large one they are read when they are used
    LATE: gl.constexpr = BLOCK_M == 128
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DKV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, DKV, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S)
    zero = gl.zeros([ROWS, BLOCK_M], gl.float32, S)
    stage = used % STAGES
    phase = (used // STAGES) & 1
    q = q_room.index(stage).reshape([BLOCK_M, D])
    dout = dout_room.index(stage).reshape([BLOCK_M, D])
    if QUERIES and not APART:  # found here, not between products
        ds_first, ds_second = _rooms_of(used, ds_room)
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
    scores = s * scale2 - lse[None, :]
    # the barrier is open, and waited at because that ends a basic block; under a mask it would spill
    if LATE and not (LOWER or UPPER or CLIPPED):
        p = exponentials(scores, dout_full.index(stage), phase, ROWS, BLOCK_M)
    else:
        p = gl.exp2(scores)
    if not LATE:
        delta = delta_room.index(stage).reshape([BLOCK_M]).load(COLUMNS)
    dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
    weights = gl.convert_layout(p.to(DTYPE), A)
    if LATE:
        delta = delta_room.index(stage).reshape([BLOCK_M]).load(COLUMNS)
    if not APART:
        dv_moving = warpgroup_mma(weights, dout, dv, is_async=True)
    ds = p * (dp - delta[None, :])
    if SOFTCAP:
        ds = ds * uncapped(p, lse[None, :], scale2)
    ds = ds.to(DTYPE)
    if QUERIES:
        if APART:  # the other group has stored the block before, and is done with what lies here
            here = _place_of(batch, head, heads, block, tiles_of_row, BLOCK_M, TILED)
            _wait_until_stored(used - 1, WHICH)
            ds_room.index((used & 1) * 2 + WHICH).store(ds)
        elif WHICH == 0:
            ds_first.store(ds)
        else:
            ds_second.store(ds)
    ds_weights = gl.convert_layout(ds, A)
    if APART:  # exponentials, dS and what is packed are scheduled as one then, in each other's shadow
        dv_moving = warpgroup_mma(weights, dout, dv, is_async=True)
    if QUERIES:
        if APART:
            ds_first, ds_second = _rooms_of(used - 1, ds_room)
        else:
            fence_async_shared()
            meet(MEETING)  # once is enough: a group is one block ahead at most, and writes the other room
        dq_moving = _multiply_dq(ds_first, ds_second, k_first, k_second, WHICH, BLOCK_M)
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
        _store_part(part, dq_own, scale, TILED)
        fence_async_shared()
        if APART:
            _add_dq(dq, dq_own, at, batch, WHICH, BLOCK_M, TILED)
            _tell_stored(used, WHICH)
            at = here
        else:
            here = _place_of(batch, head, heads, block, tiles_of_row, BLOCK_M, TILED)
            _add_dq(dq, dq_own, here, batch, WHICH, BLOCK_M, TILED)
    if AHEAD:
        dk, ds_weights = warpgroup_mma_wait(num_outstanding=1, deps=(dk_moving, ds_weights))
        mbarrier.arrive(q_empty.index(stage), count=1)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s_moving,))
    else:
        dk, ds_weights = warpgroup_mma_wait(num_outstanding=0, deps=(dk_moving, ds_weights))
        mbarrier.arrive(q_empty.index(stage), count=1)
    return dk, dv, s, at


@gluon.jit
def _compute(dq, dk_sums, dv_sums, DK, DV, q_room, k_room, v_room, dout_room, lse_room, delta_room, ds_room, dq_room,
             kv_full, q_full, q_empty, dout_full, dout_empty, TILES, RUNS, heads, tiles_of_row, scale, scale2,
             inner_scale, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
             WHICH: gl.constexpr, GROUP: gl.constexpr, SHARE: gl.constexpr, BLOCK_M: gl.constexpr,
             BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SINGLE: gl.constexpr, WHOLE: gl.constexpr,
             CLIPPED: gl.constexpr, PEELED: gl.constexpr, LOWER: gl.constexpr, UPPER: gl.constexpr,
             SOFTCAP: gl.constexpr, EDGE: gl.constexpr, ADD: gl.constexpr, ADD_BLOCKS: gl.constexpr,
             QUERIES: gl.constexpr, TILED: gl.constexpr, ROTATE: gl.constexpr, AHEAD: gl.constexpr):  # fmt: skip
    """A group of warps that computes: 64 keys, and half of dQ."""
    ROWS: gl.constexpr = BLOCK_N // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DKV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    batch, row, rows, first, step, first_run, turns = tile_of(TILES, gl.program_id(0), SINGLE)
    first_head = gl.program_id(1) * GROUP
    key_head = gl.program_id(1) // SHARE
    missing = 0
    if EDGE:
        missing = BLOCK_N - rows
    k = k_room.index(WHICH).reshape([ROWS, D])
    v = v_room.index(WHICH).reshape([ROWS, D])
    k_first = k_room.index(0).reshape([ROWS, D])
    k_second = k_room.index(1).reshape([ROWS, D])
    if BLOCK_M == 64:
        k_first = k_first.slice(WHICH * 64, 64, dim=1)
        k_second = k_second.slice(WHICH * 64, 64, dim=1)
    dk = gl.zeros([ROWS, D], gl.float32, DKV)
    dv = gl.zeros([ROWS, D], gl.float32, DKV)
    zero = gl.zeros([ROWS, BLOCK_M], gl.float32, S)
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
    run = first_run
    begin, blocks, limit, least, most = run_of(RUNS, run)
    head, left, ends = before_group(first_head, blocks, turns, GROUP, SINGLE, ROTATE)
    rooms = (q_room, dout_room, lse_room, delta_room, ds_room, dq_room.index(WHICH))
    gates = (q_full, q_empty, dout_full, dout_empty)
    keys = (k, v, k_first, k_second, n, positions, lowest, highest, missing)
    numbers = (batch, heads, tiles_of_row, scale, scale2, inner_scale)
    # at dim 128 that takes registers: faster where blocks that a mask cuts have a loop of their own, else slower
    APART: gl.constexpr = BLOCK_M == 128 or (PEELED and not SOFTCAP)
    at = batch, key_head  # of no meaning but where groups go APART
    if QUERIES and APART:  # before the first block comes one without gradients; its dQ is added to a block of the run
        _, lowest_block = block_of(begin, 0, limit, BLOCK_M, WHOLE, CLIPPED)
        at = _place_of(batch, first_head, heads, lowest_block, tiles_of_row, BLOCK_M, TILED)
        ds_room.index(2 + WHICH).store(gl.zeros([ROWS, BLOCK_M], q_room.dtype, S))
        fence_async_shared()
        _tell_stored(-1, WHICH)
    if PEELED:  # two loops: the one that has most of the blocks has no branch for a mask
        clear = clear_turns(rows, begin, turns, least, BLOCK_M, BLOCK_N)
        for nth in range(GROUP):
            head = first_head + nth
            for turn in range(clear):
                block = begin + (turns - 1 - turn) * BLOCK_M
                used = nth * turns + turn
                dk, dv, s, at = _block(
                    dk, dv, s, at, used, head, block, block, limit, least, most, dq, rooms, gates, keys, numbers,
                    WHICH, BLOCK_M, ROWS, D, STAGES, WHOLE, CLIPPED, False, False, SOFTCAP, False, QUERIES, TILED,
                    AHEAD, APART
                )  # fmt: skip
            for turn in range(clear, turns):
                block = begin + (turns - 1 - turn) * BLOCK_M
                used = nth * turns + turn
                dk, dv, s, at = _block(
                    dk, dv, s, at, used, head, block, block, limit, least, most, dq, rooms, gates, keys, numbers,
                    WHICH, BLOCK_M, ROWS, D, STAGES, WHOLE, CLIPPED, LOWER, UPPER, SOFTCAP, EDGE, QUERIES, TILED, AHEAD,
                    APART
                )  # fmt: skip
    else:
        for used in range(turns * GROUP):
            head, ends, run, left, begin, blocks, limit, least, most, fresh, block = next_in_group(
                used, head, ends, run, left, begin, blocks, limit, least, most, RUNS, first_head, first_run, turns,
                BLOCK_M, GROUP, SINGLE, WHOLE, CLIPPED, ROTATE
            )  # fmt: skip
            dk, dv, s, at = _block(
                dk, dv, s, at, used, head, fresh, block, limit, least, most, dq, rooms, gates, keys, numbers,
                WHICH, BLOCK_M, ROWS, D, STAGES, WHOLE, CLIPPED, LOWER, UPPER, SOFTCAP, EDGE, QUERIES, TILED, AHEAD,
                APART
            )  # fmt: skip
    if QUERIES and APART:  # of the last block
        _wait_until_stored(turns * GROUP - 1, WHICH)
        ds_first, ds_second = _rooms_of(turns * GROUP - 1, ds_room)
        moving = _multiply_dq(ds_first, ds_second, k_first, k_second, WHICH, BLOCK_M)
        tma.store_wait(pendings=0)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(moving,))
        _store_part(part, dq_room.index(WHICH), scale, TILED)
        fence_async_shared()
        _add_dq(dq, dq_room.index(WHICH), at, batch, WHICH, BLOCK_M, TILED)
    dk = dk * scale
    if ADD_BLOCKS:
        room = dq_room._reinterpret(gl.float32, [2, 1, 1, 64, 64], dk_sums.layout).index(WHICH)
        _add_rows(dk, dk_sums, room, batch, key_head, row + WHICH * ROWS)
        _add_rows(dv, dv_sums, room, batch, key_head, row + WHICH * ROWS)
    else:
        ALONG: gl.constexpr = along(D)
        n_out = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ALONG))
        columns = gl.arange(0, D, layout=gl.SliceLayout(0, ALONG))
        line = (row + n_out - missing).to(gl.int64)[:, None]
        there = (n_out >= missing)[:, None]
        b = batch.to(gl.int64)
        h = key_head.to(gl.int64)
        dk_at = DK + b * dk_b + h * dk_h + line * dk_t + columns[None, :]
        dv_at = DV + b * dv_b + h * dv_h + line * dv_t + columns[None, :]
        if ADD:  # nobody waits for what was there
            gl.atomic_add(dk_at, gl.convert_layout(dk, ALONG), mask=there, sem="relaxed")
            gl.atomic_add(dv_at, gl.convert_layout(dv, ALONG), mask=there, sem="relaxed")
        else:
            gl.store(dk_at, gl.convert_layout(dk.to(DK.dtype.element_ty), ALONG), mask=there)
            gl.store(dv_at, gl.convert_layout(dv.to(DV.dtype.element_ty), ALONG), mask=there)
    if QUERIES:
        tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["work", "heads", "tiles_of_row"])
def backward(q, k, v, dout, lse, delta, dq, dk_sums, dv_sums, DK, DV, TILES, RUNS, work, heads, tiles_of_row, scale,
             scale2, inner_scale, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h,
             GROUP: gl.constexpr, SHARE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
             STAGES: gl.constexpr, SINGLE: gl.constexpr, WHOLE: gl.constexpr, CLIPPED: gl.constexpr,
             PEELED: gl.constexpr, LOWER: gl.constexpr, UPPER: gl.constexpr, SOFTCAP: gl.constexpr, EDGE: gl.constexpr,
             ADD: gl.constexpr, ADD_BLOCKS: gl.constexpr, QUERIES: gl.constexpr, TILED: gl.constexpr,
             SHIFTED: gl.constexpr, ROTATE: gl.constexpr, AHEAD: gl.constexpr, COMPUTE_REGISTERS: gl.constexpr,
             COPY_REGISTERS: gl.constexpr):  # fmt: skip
    """(dK, dV) of one block of keys from a GROUP of heads, and with QUERIES its part of dQ, which is added.

    Of all blocks, one GROUP of heads after another, it does the first `work`. Where several programs SHARE a key head,
    they ADD to the same sums: number by number, or with ADD_BLOCKS by the descriptors `dk_sums` and `dv_sums`.
    `scale2` is of scores in base 2; with SOFTCAP that of the cap, and `inner_scale` the one inside of it. Where a
    segment of keys ends within a block, the block begins earlier, even before the first row: keys before its own are
    not weighed. PEELED, blocks of queries that a band cuts come last, and are met in a loop of their own. TILED sums of
    dQ are not scaled, and lie as `gather_dq` reads them.
    """
    gl.static_assert(SHARE == 1 or (GROUP == 1 and ADD), "programs that share keys have a head each, and add")
    gl.static_assert(not ADD_BLOCKS or (D == 128 and ADD and QUERIES and not EDGE), "of all keys, by the room of dQ")
    gl.static_assert(not (PEELED and ROTATE), "the loops of a peeled run begin at its last block, as copies must")
    if gl.program_id(1) * gl.num_programs(0) + gl.program_id(0) >= work:
        return
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
        if ADD_BLOCKS:  # first as dK and dV leave from it, for such a room lies at a multiple of more bytes
            dq_room = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 64, 64], dk_sums.layout)
            if TILED:
                dq_room = dq_room._reinterpret(gl.float32, [2, 16, 256], dq.layout)
        elif TILED:
            dq_room = gl.allocate_shared_memory(gl.float32, [2, 16, 256], dq.layout)
        else:
            dq_room = gl.allocate_shared_memory(gl.float32, [2, 1, 1, 64, 64], dq.layout)
    kv_full = barriers(1, 1)
    q_full, q_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    dout_full, dout_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize([
        (_compute, (dq, dk_sums, dv_sums, DK, DV, q_room, k_room, v_room, dout_room, lse_room, delta_room, ds_room,
                    dq_room, kv_full, q_full, q_empty, dout_full, dout_empty, TILES, RUNS, heads, tiles_of_row, scale,
                    scale2, inner_scale, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, FIRST, GROUP, SHARE, BLOCK_M, BLOCK_N,
                    D, STAGES, SINGLE, WHOLE, CLIPPED, PEELED, LOWER, UPPER, SOFTCAP, EDGE, ADD, ADD_BLOCKS, QUERIES,
                    TILED, ROTATE, AHEAD)),
        (_compute, (dq, dk_sums, dv_sums, DK, DV, q_room, k_room, v_room, dout_room, lse_room, delta_room, ds_room,
                    dq_room, kv_full, q_full, q_empty, dout_full, dout_empty, TILES, RUNS, heads, tiles_of_row, scale,
                    scale2, inner_scale, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, SECOND, GROUP, SHARE, BLOCK_M, BLOCK_N,
                    D, STAGES, SINGLE, WHOLE, CLIPPED, PEELED, LOWER, UPPER, SOFTCAP, EDGE, ADD, ADD_BLOCKS, QUERIES,
                    TILED, ROTATE, AHEAD)),
        (_copy, (q, k, v, dout, lse, delta, q_room, k_room, v_room, dout_room, lse_room, delta_room, kv_full, q_full,
                 q_empty, dout_full, dout_empty, TILES, RUNS, heads, GROUP, SHARE, BLOCK_M, BLOCK_N, D, STAGES, SINGLE,
                 WHOLE, CLIPPED, SHIFTED, ROTATE, AHEAD)),
    ], [4, 1], [COMPUTE_REGISTERS, COPY_REGISTERS])  # fmt: skip
