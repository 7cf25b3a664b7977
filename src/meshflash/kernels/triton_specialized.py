"""Attention in Triton by specialized warps, for Hopper: one group of warps copies, two compute.

The groups wait for each other only where data passes between them, so one is at its exponentials while the other
multiplies; in a kernel whose warps all do the same, the tensor cores wait meanwhile. The compiler makes the groups,
and asks for much: one loop, without branches; what the loop reads comes by descriptors of two dimensions, and the
block that the two groups share by one that is made on the device. So the spans of a block are walked as runs of
whole blocks (`triton_tables.runs`), band and overlap are masked everywhere, and plain scores alone are served. What
the loop carries begins with constants, and where blocks have a SINGLE run its numbers are read but once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshflash.kernels.triton_common import INF, LN2, LOG2E, dot, store_rows, tile_of

#: What a maximum is at least, so that rows that see nothing have no inf - inf.
_LEAST = tl.constexpr(-1e30)


def _coordinates(tensors: str) -> list[str]:
    """Arguments that say where descriptors have batch rows and heads: values that decide nothing in the code."""
    return [f"{x}_{way}" for x in tensors for way in ("rows_b", "rows_h", "columns_b", "columns_h")]


@triton.jit
def _run(RUNS, run):
    """A run: its first row, how many blocks, the row past the last, and how far a visible row may lie."""
    at = RUNS + run * 5
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def _seen(position, fresh, block, least, most, ROWS: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr):
    """Which rows of a block are visible from the block's own, by position; one of the sides is asked for.

    Rows before `fresh` were in the block before.
    """
    r = tl.arange(0, ROWS)[None, :]
    if LOWER:
        seen = r >= (tl.maximum(position + least, fresh) - block)[:, None]
        if UPPER:
            seen &= r <= (position + (most - block))[:, None]
    else:
        seen = r <= (position + (most - block))[:, None]
    return seen


@triton.jit(do_not_specialize=["tokens", *_coordinates("kv")])
def forward(
    Q, K_ROWS, V_ROWS, OUT, LSE, CARRY, CARRY_LSE, SINKS, TILES, RUNS,
    tokens, q_b, q_t, q_h, k_rows_b, k_rows_h, k_columns_b, k_columns_h, v_rows_b, v_rows_h, v_columns_b, v_columns_h,
    o_b, o_t, o_h, l_b, l_h, l_t, c_b, c_t, c_h, cl_b, cl_h, cl_t, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_CARRY: tl.constexpr, HAS_SINKS: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
    SINGLE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """(out, lse) of one block of queries and one head.

    The weights of a block meet its values one turn later, together with the scores of the next: the tensor cores
    then have two products at a time. The turn after the last repeats its scores, which changes nothing.
    """
    batch, row, rows, first, _, q_step, first_run, turns = tile_of(TILES)
    head = tl.program_id(1)
    head64 = head.to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    i = first + q_step * m
    b = batch.to(tl.int64)
    key_head = head // GROUP
    k_row, k_column = batch * k_rows_b + key_head * k_rows_h, batch * k_columns_b + key_head * k_columns_h
    v_row, v_column = batch * v_rows_b + key_head * v_rows_h, batch * v_columns_b + key_head * v_columns_h
    q_block = tl.make_tensor_descriptor(Q + b * q_b + head64 * q_h, [tokens, D], [q_t, 1], [BLOCK_M, D])
    q = q_block.load([row.to(tl.int32), 0])
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    p = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    part = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], -INF, tl.float32)
    before = 0
    ahead = 0
    turn = 0
    begin, blocks, limit, least, most = _run(RUNS, first_run)
    for n in tl.range(0, turns + 1, warp_specialize=True):
        if SINGLE:
            turn = tl.minimum(n, turns - 1)
        else:
            begin, blocks, limit, least, most = _run(RUNS, first_run + ahead)
        fresh = begin + turn * BLOCK_N
        block = tl.minimum(fresh, limit - BLOCK_N)
        k = K_ROWS.load([k_row + block, k_column])
        v = V_ROWS.load([v_row + tl.where(n == 0, block, before), v_column])
        s = dot(q, tl.trans(k), None, "ieee", INTERPRETED)
        acc = dot(p.to(v.dtype), v, acc, "ieee", INTERPRETED)
        total += part
        if LOWER or UPPER:
            s = tl.where(_seen(i, fresh, block, least, most, BLOCK_N, LOWER, UPPER), s, -INF)
        new_top = tl.maximum(top, tl.max(s, 1) * (scale * LOG2E))
        reference = tl.maximum(new_top, _LEAST)
        p = tl.math.exp2(s * (scale * LOG2E) - reference[:, None])
        decay = tl.math.exp2(top - reference)
        acc = acc * decay[:, None]
        total = total * decay
        part = tl.sum(p, 1)
        top = new_top
        before = block
        if not SINGLE:
            more = n + 1 < turns
            over = turn + 1 >= blocks
            ahead = tl.where(more & over, ahead + 1, ahead)
            turn = tl.where(more, tl.where(over, 0, turn + 1), turn)
    batch, row, rows, _, _, _, _, _ = tile_of(TILES)  # again: over the loop they would take registers
    b = batch.to(tl.int64)
    there = m < rows
    if HAS_CARRY:
        carried = tl.load(CARRY_LSE + b * cl_b + head64 * cl_h + (row + m) * cl_t, mask=there, other=-INF) * LOG2E
        c = tl.arange(0, D)
        at = CARRY + b * c_b + head64 * c_h + row * c_t + (m.to(tl.int64)[:, None] * c_t + c[None, :])
        old = tl.load(at, mask=there[:, None], other=0.0)
        reference = tl.maximum(tl.maximum(top, carried), _LEAST)
        decay = tl.math.exp2(top - reference)
        weight = tl.math.exp2(carried - reference)
        acc = acc * decay[:, None] + old * weight[:, None]
        total = total * decay + weight
        top = tl.maximum(top, carried)
    if HAS_SINKS:
        sink = tl.load(SINKS + head).to(tl.float32) * LOG2E
        reference = tl.maximum(tl.maximum(top, sink), _LEAST)
        decay = tl.math.exp2(top - reference)
        acc = acc * decay[:, None]
        total = total * decay + tl.math.exp2(sink - reference)
        top = tl.maximum(top, sink)
    total = tl.maximum(total, 1e-30)  # that of rows that see something is 1 or more
    store_rows(OUT + b * o_b + head64 * o_h + row * o_t, o_t, rows, acc / total[:, None], False, BLOCK_M, 0, D, D)
    lse = (top + tl.math.log2(total)) * LN2
    tl.store(LSE + b * l_b + head64 * l_h + (row + m) * l_t, lse, mask=there)


@triton.jit(do_not_specialize=["tokens", "k_tokens", *_coordinates("qo")])
def by_keys(
    K, V, Q_ROWS, DOUT_ROWS, LSE, DELTA, DK, DV, TILES, RUNS,
    tokens, k_tokens, k_b, k_t, k_h, v_b, v_t, v_h,
    q_rows_b, q_rows_h, q_columns_b, q_columns_h, o_rows_b, o_rows_h, o_columns_b, o_columns_h,
    dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, SINGLE: tl.constexpr, ALIGNED: tl.constexpr, ADD: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """(dK, dV) of one block of keys and one key head.

    LSE and DELTA are descriptors where blocks are ALIGNED. A row that sees nothing has lse = -inf and weights of
    inf, none of which is seen.
    """
    batch, row, rows, first, _, k_step, first_run, turns = tile_of(TILES)
    key_head = tl.program_id(1)
    key_head64 = key_head.to(tl.int64)
    heads = tl.num_programs(1) * GROUP
    m = tl.arange(0, BLOCK_N)
    j = first + k_step * m
    b = batch.to(tl.int64)
    k_block = tl.make_tensor_descriptor(K + b * k_b + key_head64 * k_h, [k_tokens, D], [k_t, 1], [BLOCK_N, D])
    v_block = tl.make_tensor_descriptor(V + b * v_b + key_head64 * v_h, [k_tokens, D], [v_t, 1], [BLOCK_N, D])
    k = k_block.load([row.to(tl.int32), 0])
    v = v_block.load([row.to(tl.int32), 0])
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    ahead = 0
    turn = 0
    done = 0
    group = 0
    begin, blocks, limit, least, most = _run(RUNS, first_run)
    for _n in tl.range(0, turns * GROUP, warp_specialize=True):
        head = key_head * GROUP + group
        if SINGLE:
            turn = done
        else:
            begin, blocks, limit, least, most = _run(RUNS, first_run + ahead)
        fresh = begin + turn * BLOCK_M
        block = tl.minimum(fresh, limit - BLOCK_M)
        q = Q_ROWS.load([batch * q_rows_b + head * q_rows_h + block, batch * q_columns_b + head * q_columns_h])
        if ALIGNED:
            lse = LSE.load([(batch * heads + head) * tokens + block]) * LOG2E
            delta = DELTA.load([(batch * heads + head) * tokens + block])
        else:
            at = (b * heads + head) * tokens + block
            lse = tl.load(LSE + at + tl.arange(0, BLOCK_M)) * LOG2E
            delta = tl.load(DELTA + at + tl.arange(0, BLOCK_M))
        dout = DOUT_ROWS.load([batch * o_rows_b + head * o_rows_h + block, batch * o_columns_b + head * o_columns_h])
        s = dot(k, tl.trans(q), None, "ieee", INTERPRETED)
        dp = dot(v, tl.trans(dout), None, "ieee", INTERPRETED)
        p = tl.math.exp2(s * (scale * LOG2E) - lse[None, :])
        if LOWER or UPPER:
            p = tl.where(_seen(j, fresh, block, least, most, BLOCK_M, LOWER, UPPER), p, 0.0)
        dv = dot(p.to(dout.dtype), dout, dv, "ieee", INTERPRETED)
        ds = p * (dp - delta[None, :])
        dk = dot(ds.to(q.dtype), q, dk, "ieee", INTERPRETED)
        done += 1
        last = done == turns
        if not SINGLE:
            over = turn + 1 >= blocks
            ahead = tl.where(last, 0, tl.where(over, ahead + 1, ahead))
            turn = tl.where(over, 0, turn + 1)
        group = tl.where(last, group + 1, group)
        done = tl.where(last, 0, done)
    store_rows(DK + b * dk_b + key_head64 * dk_h + row * dk_t, dk_t, rows, dk * scale, ADD, BLOCK_N, 0, D, D)
    store_rows(DV + b * dv_b + key_head64 * dv_h + row * dv_t, dv_t, rows, dv, ADD, BLOCK_N, 0, D, D)


@triton.jit(do_not_specialize=["tokens", "numbers", *_coordinates("kv")])
def by_queries(
    Q, DOUT, K_ROWS, V_ROWS, LSE, DELTA, DQ, TILES, RUNS,
    tokens, q_b, q_t, q_h, do_b, do_t, do_h,
    k_rows_b, k_rows_h, k_columns_b, k_columns_h, v_rows_b, v_rows_h, v_columns_b, v_columns_h,
    dq_b, dq_t, dq_h, scale, numbers,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, SINGLE: tl.constexpr, ALIGNED: tl.constexpr, ADD: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """DQ of one block of queries and one head; where blocks are not ALIGNED, LSE and DELTA are `in_blocks`."""
    batch, row, rows, first, _, q_step, first_run, turns = tile_of(TILES)
    head = tl.program_id(1)
    head64 = head.to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    i = first + q_step * m
    b = batch.to(tl.int64)
    key_head = head // GROUP
    q_block = tl.make_tensor_descriptor(Q + b * q_b + head64 * q_h, [tokens, D], [q_t, 1], [BLOCK_M, D])
    do_block = tl.make_tensor_descriptor(DOUT + b * do_b + head64 * do_h, [tokens, D], [do_t, 1], [BLOCK_M, D])
    q = q_block.load([row.to(tl.int32), 0])
    dout = do_block.load([row.to(tl.int32), 0])
    if ALIGNED:
        at = (batch * tl.num_programs(1) + head) * tokens + row.to(tl.int32)
    else:
        at = (tl.program_id(0) * tl.num_programs(1) + head) * BLOCK_M
    lse = tl.make_tensor_descriptor(LSE, [numbers], [1], [BLOCK_M]).load([at]) * LOG2E
    delta = tl.make_tensor_descriptor(DELTA, [numbers], [1], [BLOCK_M]).load([at])
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    k_row, k_column = batch * k_rows_b + key_head * k_rows_h, batch * k_columns_b + key_head * k_columns_h
    v_row, v_column = batch * v_rows_b + key_head * v_rows_h, batch * v_columns_b + key_head * v_columns_h
    ahead = 0
    turn = 0
    begin, blocks, limit, least, most = _run(RUNS, first_run)
    for n in tl.range(0, turns, warp_specialize=True):
        if SINGLE:
            turn = n
        else:
            begin, blocks, limit, least, most = _run(RUNS, first_run + ahead)
        fresh = begin + turn * BLOCK_N
        block = tl.minimum(fresh, limit - BLOCK_N)
        k = K_ROWS.load([k_row + block, k_column])
        v = V_ROWS.load([v_row + block, v_column])
        s = dot(q, tl.trans(k), None, "ieee", INTERPRETED)
        dp = dot(dout, tl.trans(v), None, "ieee", INTERPRETED)
        p = tl.math.exp2(s * (scale * LOG2E) - lse[:, None])
        if LOWER or UPPER:
            p = tl.where(_seen(i, fresh, block, least, most, BLOCK_N, LOWER, UPPER), p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = dot(ds.to(k.dtype), k, dq, "ieee", INTERPRETED)
        if not SINGLE:
            over = turn + 1 >= blocks
            ahead = tl.where(over, ahead + 1, ahead)
            turn = tl.where(over, 0, turn + 1)
    store_rows(DQ + b * dq_b + head64 * dq_h + row * dq_t, dq_t, rows, dq * scale, ADD, BLOCK_M, 0, D, D)


@triton.jit(do_not_specialize=["tokens"])
def in_blocks(LSE, DELTA, LSE_BLOCKS, DELTA_BLOCKS, TILES, tokens, BLOCK_M: tl.constexpr):
    """Rows of lse and delta, block after block: a descriptor of one dimension begins at multiples of 16 bytes."""
    batch, row, rows, _, _, _, _, _ = tile_of(TILES)
    head = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    at = (batch.to(tl.int64) * tl.num_programs(1) + head) * tokens + row + m
    into = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * BLOCK_M + m
    tl.store(LSE_BLOCKS + into, tl.load(LSE + at, mask=m < rows, other=INF))
    tl.store(DELTA_BLOCKS + into, tl.load(DELTA + at, mask=m < rows, other=0.0))
