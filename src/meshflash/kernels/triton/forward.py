"""Portable forward in Triton: one CTA for each tile of queries and head, over the spans of keys that the tile sees.

A span is a range of key rows under one band. It is walked in three parts: masked blocks that the band crosses, unmasked
blocks inside of it, and masked ones again. Unmasked blocks are loaded by TMA where the GPU has it. A carry continues
the online softmax: (out, lse) of earlier keys is a state whose row maximum is lse and whose row sum is 1. A head dim
that is no power of two is computed as two widths (D1, D2), or padded with zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshflash.kernels.triton.common import (
    INF,
    LN2,
    LOG2E,
    dot,
    dropout_keep,
    load_rows,
    load_span,
    load_tile,
    split_span,
    store_rows,
    tanh,
)


@triton.jit
def _attend_keys(
    acc, acc_rest, row_sum, row_max, q, q_rest, K, V, K_DESCRIPTOR, V_DESCRIPTOR, k_t, v_t, row, b, key_head, begin,
    end, limit, i, position, step, lo, hi, scale, softcap, slope, seed, head, batch, threshold, keep_scale,
    BLOCK_N: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr,
    E2: tl.constexpr, MASKED: tl.constexpr, USE_TMA: tl.constexpr, SCALE_IN_EXP: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax over the keys `begin` to `end` of a span, in blocks of BLOCK_N.

    MASKED blocks compare positions with the band and end at `limit`; others lie inside of both.
    """
    for n0 in tl.range(begin, end, BLOCK_N):
        rows_left = limit - n0
        if USE_TMA and not MASKED:
            k = K_DESCRIPTOR.load([b, row + n0, key_head, 0]).reshape([BLOCK_N, D1])
        else:
            k = load_rows(K, k_t, n0, rows_left, BLOCK_N, 0, D1, D, MASKED)
        s = dot(q, tl.trans(k), None, PRECISION, INTERPRETED)
        if D2:  # the second width of a head dim such as 96 = 64 + 32
            k_rest = load_rows(K, k_t, n0, rows_left, BLOCK_N, D1, D2, D, MASKED)
            s = dot(q_rest, tl.trans(k_rest), s, PRECISION, INTERPRETED)
        # Scores are in base 2 from here on: exp2 is one instruction, and exp would multiply by LOG2E each time.
        if SOFTCAP:
            s = tanh(s * (scale / softcap)) * (softcap * LOG2E)
        elif not SCALE_IN_EXP:
            s = s * (scale * LOG2E)
        if MASKED or ALIBI or DROPOUT:
            r = tl.arange(0, BLOCK_N)
            j = position + step * (n0 + r)
        if ALIBI:
            s -= (slope * LOG2E) * tl.abs(j[None, :] - i[:, None]).to(tl.float32)
        if MASKED:
            distance = j[None, :] - i[:, None]
            s = tl.where((r[None, :] < rows_left) & (distance >= lo) & (distance <= hi), s, -INF)
        if SCALE_IN_EXP:  # scale > 0: it is applied inside of exp2, as part of a fused multiply-add
            new_max = tl.maximum(row_max, tl.max(s, 1) * (scale * LOG2E))
        else:
            new_max = tl.maximum(row_max, tl.max(s, 1))
        reference = new_max
        if MASKED:  # a row may see nothing so far: avoid -inf - -inf
            reference = tl.where(new_max == -INF, 0.0, new_max)
        if SCALE_IN_EXP:
            p = tl.math.exp2(s * (scale * LOG2E) - reference[:, None])
        else:
            p = tl.math.exp2(s - reference[:, None])
        alpha = tl.math.exp2(row_max - reference)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        if DROPOUT:  # after the row sum: softmax normalizes by all pairs, and dropout removes some of the result
            p = tl.where(dropout_keep(p, i[:, None], j[None, :], seed, head, batch, threshold), p * keep_scale, 0.0)
        acc = acc * alpha[:, None]
        if USE_TMA and not MASKED:
            v = V_DESCRIPTOR.load([b, row + n0, key_head, 0]).reshape([BLOCK_N, E1])
        else:
            v = load_rows(V, v_t, n0, rows_left, BLOCK_N, 0, E1, E, MASKED)
        p = p.to(v.dtype)
        acc = dot(p, v, acc, PRECISION, INTERPRETED)
        if E2:
            v_rest = load_rows(V, v_t, n0, rows_left, BLOCK_N, E1, E2, E, MASKED)
            acc_rest = dot(p, v_rest, acc_rest * alpha[:, None], PRECISION, INTERPRETED)
        row_max = new_max
    return acc, acc_rest, row_sum, row_max


@triton.jit(do_not_specialize=["seed", "batch_offset", "head_offset", "threshold"])
def forward(
    Q, K, V, K_DESCRIPTOR, V_DESCRIPTOR, OUT, LSE, CARRY, CARRY_LSE, SINKS, SLOPES, TILES, SPANS,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, l_b, l_h, l_t,
    c_b, c_t, c_h, cl_b, cl_h, cl_t, slopes_b, slopes_h,
    scale, softcap, seed, batch_offset, head_offset, threshold, keep_scale,
    GQA_RATIO: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_CARRY: tl.constexpr, HAS_SINKS: tl.constexpr,
    USE_TMA: tl.constexpr, SCALE_IN_EXP: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute (out, lse) of one tile of queries and one head."""
    batch, row, rows, first, last, q_step, spans, spans_end = load_tile(TILES)
    head = tl.program_id(1)
    head64 = head.to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    i = first + q_step * m
    in_range = m < rows
    b = batch.to(tl.int64)
    key_head = head // GQA_RATIO
    key_head64 = key_head.to(tl.int64)
    q_rest = 0.0
    acc_rest = 0.0
    q_block = Q + b * q_b + head64 * q_h + row * q_t
    q = load_rows(q_block, q_t, 0, rows, BLOCK_M, 0, D1, D, True)
    if D2:
        q_rest = load_rows(q_block, q_t, 0, rows, BLOCK_M, D1, D2, D, True)
    if HAS_CARRY:
        carried = CARRY + b * c_b + head64 * c_h + row * c_t
        row_max = tl.load(CARRY_LSE + b * cl_b + head64 * cl_h + (row + m) * cl_t, mask=in_range, other=-INF) * LOG2E
        row_sum = tl.where(row_max == -INF, 0.0, 1.0)
        acc = load_rows(carried, c_t, 0, rows, BLOCK_M, 0, E1, E, True)
        if E2:
            acc_rest = load_rows(carried, c_t, 0, rows, BLOCK_M, E1, E2, E, True)
    else:
        row_max = tl.full([BLOCK_M], -INF, tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, E1], tl.float32)
        if E2:
            acc_rest = tl.zeros([BLOCK_M, E2], tl.float32)
    slope = 0.0
    if ALIBI:
        slope = tl.load(SLOPES + b * slopes_b + head64 * slopes_h).to(tl.float32)
    k_all = K + b * k_b + key_head64 * k_h
    v_all = V + b * v_b + key_head64 * v_h
    for span in range(spans, spans_end):
        k_row, span_rows, position, step, lo, hi = load_span(SPANS, span)
        # begin..inner and outer..end are blocks that a limit of the band crosses; inner..outer need no mask
        begin, inner, outer, end = split_span(first, last, position, step, span_rows, lo, hi, BLOCK_N)
        k_span = k_all + k_row.to(tl.int64) * k_t
        v_span = v_all + k_row.to(tl.int64) * v_t
        acc, acc_rest, row_sum, row_max = _attend_keys(
            acc, acc_rest, row_sum, row_max, q, q_rest, k_span, v_span, K_DESCRIPTOR, V_DESCRIPTOR, k_t, v_t,
            k_row, batch, key_head, begin, inner, end, i, position, step, lo, hi,
            scale, softcap, slope, seed, head + head_offset, batch + batch_offset, threshold, keep_scale,
            BLOCK_N, D, D1, D2, E, E1, E2, True, USE_TMA, SCALE_IN_EXP, SOFTCAP, ALIBI, DROPOUT, PRECISION, INTERPRETED,
        )  # fmt: skip
        acc, acc_rest, row_sum, row_max = _attend_keys(
            acc, acc_rest, row_sum, row_max, q, q_rest, k_span, v_span, K_DESCRIPTOR, V_DESCRIPTOR, k_t, v_t, k_row,
            batch, key_head, inner, outer, end, i, position, step, lo, hi, scale, softcap, slope, seed,
            head + head_offset, batch + batch_offset, threshold, keep_scale, BLOCK_N, D, D1, D2, E, E1, E2, False,
            USE_TMA, SCALE_IN_EXP, SOFTCAP, ALIBI, DROPOUT, PRECISION, INTERPRETED,
        )  # fmt: skip
        acc, acc_rest, row_sum, row_max = _attend_keys(
            acc, acc_rest, row_sum, row_max, q, q_rest, k_span, v_span, K_DESCRIPTOR, V_DESCRIPTOR, k_t, v_t,
            k_row, batch, key_head, outer, end, end, i, position, step, lo, hi,
            scale, softcap, slope, seed, head + head_offset, batch + batch_offset, threshold, keep_scale,
            BLOCK_N, D, D1, D2, E, E1, E2, True, USE_TMA, SCALE_IN_EXP, SOFTCAP, ALIBI, DROPOUT, PRECISION, INTERPRETED,
        )  # fmt: skip
    # The sink is one more score without a value: it changes the row sum, and through it the weight of every row.
    alpha = tl.full([BLOCK_M], 1.0, tl.float32)
    if HAS_SINKS:
        sink = tl.load(SINKS + head).to(tl.float32) * LOG2E
        new_max = tl.maximum(row_max, sink)
        reference = tl.where(new_max == -INF, 0.0, new_max)
        alpha = tl.math.exp2(row_max - reference)
        row_sum = row_sum * alpha + tl.math.exp2(sink - reference)
        row_max = new_max
    # Rows that see no key get out = 0 and LSE = -inf, and never NaN.
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    weight = alpha / row_sum
    lse = tl.where(empty, -INF, (row_max + tl.math.log2(row_sum)) * LN2)
    out_block = OUT + b * o_b + head64 * o_h + row * o_t
    store_rows(out_block, o_t, rows, acc * weight[:, None], False, BLOCK_M, 0, E1, E)
    if E2:
        store_rows(out_block, o_t, rows, acc_rest * weight[:, None], False, BLOCK_M, E1, E2, E)
    tl.store(LSE + b * l_b + head64 * l_h + (row + m) * l_t, lse, mask=in_range)
