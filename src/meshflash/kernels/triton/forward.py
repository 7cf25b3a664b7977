"""Forward in Triton: one instance for each block of queries and head, over the spans that the block sees.

A span is walked in three parts: blocks that a band crosses are masked, those inside it are not, and are loaded
by tensor descriptors where the GPU has them. What is carried in continues the online softmax: an (out, lse) is
one whose maximum is lse and whose sum is 1. A head dim that is no power of two is two of them, one after the
other, or a wider one with zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshflash.kernels.triton.common import (
    INF,
    LN2,
    LOG2E,
    dot,
    kept,
    limits,
    rows_of,
    span_of,
    store_rows,
    tanh,
    tile_of,
)


@triton.jit
def _keys(
    acc, acc_rest, total, top, q, q_rest, K, V, K_BLOCKS, V_BLOCKS, k_t, v_t, row, b, key_head, begin, end, limit,
    i, position, step, lo, hi, scale, softcap, slope, seed, head, batch, threshold, keep_scale,
    BLOCK_N: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
    MASKED: tl.constexpr, DESCRIPTORS: tl.constexpr, PLAIN: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Continue the softmax over rows from begin to end of a span."""
    for n0 in tl.range(begin, end, BLOCK_N):
        left = limit - n0
        if DESCRIPTORS and not MASKED:
            k = K_BLOCKS.load([b, row + n0, key_head, 0]).reshape([BLOCK_N, D1])
        else:
            k = rows_of(K, k_t, n0, left, BLOCK_N, 0, D1, D, MASKED)
        s = dot(q, tl.trans(k), None, PRECISION, INTERPRETED)
        if D2:
            k_rest = rows_of(K, k_t, n0, left, BLOCK_N, D1, D2, D, MASKED)
            s = dot(q_rest, tl.trans(k_rest), s, PRECISION, INTERPRETED)
        if SOFTCAP:
            s = tanh(s * (scale / softcap)) * (softcap * LOG2E)
        elif not PLAIN:
            s = s * (scale * LOG2E)
        if MASKED or ALIBI or DROPOUT:
            r = tl.arange(0, BLOCK_N)
            j = position + step * (n0 + r)
        if ALIBI:
            s -= (slope * LOG2E) * tl.abs(j[None, :] - i[:, None]).to(tl.float32)
        if MASKED:
            distance = j[None, :] - i[:, None]
            s = tl.where((r[None, :] < left) & (distance >= lo) & (distance <= hi), s, -INF)
        if PLAIN:  # the scale is > 0 and waits for the exponent, where it costs nothing
            new_top = tl.maximum(top, tl.max(s, 1) * (scale * LOG2E))
        else:
            new_top = tl.maximum(top, tl.max(s, 1))
        reference = new_top
        if MASKED:
            reference = tl.where(new_top == -INF, 0.0, new_top)
        if PLAIN:
            p = tl.math.exp2(s * (scale * LOG2E) - reference[:, None])
        else:
            p = tl.math.exp2(s - reference[:, None])
        decay = tl.math.exp2(top - reference)
        total = total * decay + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(kept(p, i[:, None], j[None, :], seed, head, batch, threshold), p * keep_scale, 0.0)
        acc = acc * decay[:, None]
        if DESCRIPTORS and not MASKED:
            v = V_BLOCKS.load([b, row + n0, key_head, 0]).reshape([BLOCK_N, E1])
        else:
            v = rows_of(V, v_t, n0, left, BLOCK_N, 0, E1, E, MASKED)
        p = p.to(v.dtype)
        acc = dot(p, v, acc, PRECISION, INTERPRETED)
        if E2:
            v_rest = rows_of(V, v_t, n0, left, BLOCK_N, E1, E2, E, MASKED)
            acc_rest = dot(p, v_rest, acc_rest * decay[:, None], PRECISION, INTERPRETED)
        top = new_top
    return acc, acc_rest, total, top


@triton.jit(do_not_specialize=["seed", "batch_offset", "head_offset", "threshold"])
def forward(
    Q, K, V, K_BLOCKS, V_BLOCKS, OUT, LSE, CARRY, CARRY_LSE, SINKS, SLOPES, TILES, SPANS,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, l_b, l_h, l_t,
    c_b, c_t, c_h, cl_b, cl_h, cl_t, slopes_b, slopes_h,
    scale, softcap, seed, batch_offset, head_offset, threshold, keep_scale,
    GROUP: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_CARRY: tl.constexpr, HAS_SINKS: tl.constexpr,
    DESCRIPTORS: tl.constexpr, PLAIN: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """(out, lse) of one block of queries and one head."""
    batch, row, rows, first, last, q_step, spans, spans_end = tile_of(TILES)
    head = tl.program_id(1)
    head64 = head.to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    i = first + q_step * m
    there = m < rows
    b = batch.to(tl.int64)
    key_head = head // GROUP
    key_head64 = key_head.to(tl.int64)
    q_rest = 0.0
    acc_rest = 0.0
    q_block = Q + b * q_b + head64 * q_h + row * q_t
    q = rows_of(q_block, q_t, 0, rows, BLOCK_M, 0, D1, D, True)
    if D2:
        q_rest = rows_of(q_block, q_t, 0, rows, BLOCK_M, D1, D2, D, True)
    if HAS_CARRY:
        carried = CARRY + b * c_b + head64 * c_h + row * c_t
        top = tl.load(CARRY_LSE + b * cl_b + head64 * cl_h + (row + m) * cl_t, mask=there, other=-INF) * LOG2E
        total = tl.where(top == -INF, 0.0, 1.0)
        acc = rows_of(carried, c_t, 0, rows, BLOCK_M, 0, E1, E, True)
        if E2:
            acc_rest = rows_of(carried, c_t, 0, rows, BLOCK_M, E1, E2, E, True)
    else:
        top = tl.full([BLOCK_M], -INF, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, E1], tl.float32)
        if E2:
            acc_rest = tl.zeros([BLOCK_M, E2], tl.float32)
    slope = 0.0
    if ALIBI:
        slope = tl.load(SLOPES + b * slopes_b + head64 * slopes_h).to(tl.float32)
    k_all = K + b * k_b + key_head64 * k_h
    v_all = V + b * v_b + key_head64 * v_h
    for span in range(spans, spans_end):
        k_row, span_rows, position, step, lo, hi = span_of(SPANS, span)
        begin, inner, outer, end = limits(first, last, position, step, span_rows, lo, hi, BLOCK_N)
        k_span = k_all + k_row.to(tl.int64) * k_t
        v_span = v_all + k_row.to(tl.int64) * v_t
        acc, acc_rest, total, top = _keys(
            acc, acc_rest, total, top, q, q_rest, k_span, v_span, K_BLOCKS, V_BLOCKS, k_t, v_t,
            k_row, batch, key_head, begin, inner, end, i, position, step, lo, hi,
            scale, softcap, slope, seed, head + head_offset, batch + batch_offset, threshold, keep_scale,
            BLOCK_N, D, D1, D2, E, E1, E2, True, DESCRIPTORS, PLAIN, SOFTCAP, ALIBI, DROPOUT, PRECISION, INTERPRETED,
        )  # fmt: skip
        acc, acc_rest, total, top = _keys(
            acc, acc_rest, total, top, q, q_rest, k_span, v_span, K_BLOCKS, V_BLOCKS, k_t, v_t,
            k_row, batch, key_head, inner, outer, end, i, position, step, lo, hi,
            scale, softcap, slope, seed, head + head_offset, batch + batch_offset, threshold, keep_scale,
            BLOCK_N, D, D1, D2, E, E1, E2, False, DESCRIPTORS, PLAIN, SOFTCAP, ALIBI, DROPOUT, PRECISION, INTERPRETED,
        )  # fmt: skip
        acc, acc_rest, total, top = _keys(
            acc, acc_rest, total, top, q, q_rest, k_span, v_span, K_BLOCKS, V_BLOCKS, k_t, v_t,
            k_row, batch, key_head, outer, end, end, i, position, step, lo, hi,
            scale, softcap, slope, seed, head + head_offset, batch + batch_offset, threshold, keep_scale,
            BLOCK_N, D, D1, D2, E, E1, E2, True, DESCRIPTORS, PLAIN, SOFTCAP, ALIBI, DROPOUT, PRECISION, INTERPRETED,
        )  # fmt: skip
    decay = tl.full([BLOCK_M], 1.0, tl.float32)
    if HAS_SINKS:
        sink = tl.load(SINKS + head).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        reference = tl.where(new_top == -INF, 0.0, new_top)
        decay = tl.math.exp2(top - reference)
        total = total * decay + tl.math.exp2(sink - reference)
        top = new_top
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    weight = decay / total
    lse = tl.where(empty, -INF, (top + tl.math.log2(total)) * LN2)
    out_block = OUT + b * o_b + head64 * o_h + row * o_t
    store_rows(out_block, o_t, rows, acc * weight[:, None], False, BLOCK_M, 0, E1, E)
    if E2:
        store_rows(out_block, o_t, rows, acc_rest * weight[:, None], False, BLOCK_M, E1, E2, E)
    tl.store(LSE + b * l_b + head64 * l_h + (row + m) * l_t, lse, mask=there)
