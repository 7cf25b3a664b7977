"""Portable backward in Triton, given the LSE and delta of whole rows: `bwd_dkdv` over keys, `bwd_dq` over queries.

`bwd_dkdv` can add its share of dQ too, by atomics into float32 sums: five matrix multiplies a block instead of seven,
but the order of the sums changes from run to run. `bwd_dq` computes dQ alone, in a fixed order. Both walk a span in
full blocks, loaded by TMA where the GPU has it, and a last partial block. Only the sides of a band that bind anywhere
(LOWER, UPPER) are compared. Rows past the end of a tile get a position outside of every band.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshflash.kernels.triton.common import (
    INF,
    LOG2E,
    dot,
    dropout_keep,
    load_rows,
    load_span,
    load_tile,
    store_rows,
    tanh,
    visible_rows,
)

#: A position above the upper limit of every band, for rows past the end of a tile.
_OUT_OF_BAND = tl.constexpr(2**31 - 1)


@triton.jit
def _p_and_ds(
    s, dp, i, j, lse, delta, lo, hi, scale, softcap, slope, seed, head, batch, threshold, keep_scale,
    LOWER: tl.constexpr, UPPER: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Return P, with dropout applied, and dS of a block, from S = q.k and dP = dout.v."""
    if SOFTCAP:
        t = tanh(s * (scale / softcap))
        s = t * (softcap * LOG2E)
    else:
        s = s * (scale * LOG2E)
    if ALIBI:
        s -= (slope * LOG2E) * tl.abs(j - i).to(tl.float32)
    p = tl.math.exp2(s - lse)  # normalized: the LSE is that of the whole row
    # P = 0 hides a pair from dV, and through dS = P (dP - delta) from dQ and dK as well
    if LOWER and UPPER:
        distance = j - i
        p = tl.where((distance >= lo) & (distance <= hi), p, 0.0)
    elif UPPER:
        p = tl.where(j - i <= hi, p, 0.0)
    elif LOWER:
        p = tl.where(j - i >= lo, p, 0.0)
    weight = p  # the factor of V in the forward: P with dropout
    if DROPOUT:  # delta = sum(dout * out) holds the dropout of the forward already
        keep = dropout_keep(p, i, j, seed, head, batch, threshold)
        weight = tl.where(keep, p * keep_scale, 0.0)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - delta)
    if SOFTCAP:
        ds = ds * (1.0 - t * t)  # the derivative of the cap, tanh'
    return weight, ds


@triton.jit
def _add_queries(
    dk, dk_rest, dv, dv_rest, k, k_rest, v, v_rest, Q, DOUT, Q_DESCRIPTOR, DOUT_DESCRIPTOR, DQ_DESCRIPTOR, LSE, DELTA,
    DQ, q_t, do_t, l_t, de_t, dq_t, row, b, h, begin, end, limit, j, position, step, lo, hi, scale, softcap, slope,
    seed, head, batch, threshold, keep_scale, BLOCK_M: tl.constexpr, D: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, MASKED: tl.constexpr, USE_TMA: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    ATOMIC: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add the share of the query rows `begin` to `end` of a span to dK and dV, and with ATOMIC to dQ.

    MASKED blocks end at `limit`; others are full.
    """
    r = tl.arange(0, BLOCK_M)
    for n0 in tl.range(begin, end, BLOCK_M):
        rows_left = limit - n0
        if USE_TMA and not MASKED:
            q = Q_DESCRIPTOR.load([b, row + n0, h, 0]).reshape([BLOCK_M, D1])
        else:
            q = load_rows(Q, q_t, n0, rows_left, BLOCK_M, 0, D1, D, MASKED)
        at = tl.cast(n0, tl.int64)
        if MASKED:  # rows past the end: P = exp2(-inf) = 0
            lse = tl.load(LSE + at * l_t + r * l_t, mask=r < rows_left, other=-INF)
            delta = tl.load(DELTA + at * de_t + r * de_t, mask=r < rows_left, other=0.0)
        else:
            lse = tl.load(LSE + at * l_t + r * l_t)
            delta = tl.load(DELTA + at * de_t + r * de_t)
        lse = tl.where(lse == -INF, INF, lse * LOG2E)  # and so in rows that see nothing
        # S^T has keys as rows, so P^T and dS^T are left operands of dV and dK as they are
        s = dot(k, tl.trans(q), None, PRECISION, INTERPRETED)
        if D2:
            q_rest = load_rows(Q, q_t, n0, rows_left, BLOCK_M, D1, D2, D, MASKED)
            s = dot(k_rest, tl.trans(q_rest), s, PRECISION, INTERPRETED)
        if USE_TMA and not MASKED:
            dout = DOUT_DESCRIPTOR.load([b, row + n0, h, 0]).reshape([BLOCK_M, E1])
        else:
            dout = load_rows(DOUT, do_t, n0, rows_left, BLOCK_M, 0, E1, E, MASKED)
        dp = dot(v, tl.trans(dout), None, PRECISION, INTERPRETED)
        if E2:
            dout_rest = load_rows(DOUT, do_t, n0, rows_left, BLOCK_M, E1, E2, E, MASKED)
            dp = dot(v_rest, tl.trans(dout_rest), dp, PRECISION, INTERPRETED)
        i = position + step * (n0 + r)
        weight, ds = _p_and_ds(
            s, dp, i[None, :], j[:, None], lse[None, :], delta[None, :], lo, hi, scale, softcap, slope,
            seed, head, batch, threshold, keep_scale, LOWER, UPPER, SOFTCAP, ALIBI, DROPOUT,
        )  # fmt: skip
        weight = weight.to(dout.dtype)
        dv = dot(weight, dout, dv, PRECISION, INTERPRETED)
        if E2:
            dv_rest = dot(weight, dout_rest, dv_rest, PRECISION, INTERPRETED)
        ds = ds.to(q.dtype)
        dk = dot(ds, q, dk, PRECISION, INTERPRETED)
        if D2:
            dk_rest = dot(ds, q_rest, dk_rest, PRECISION, INTERPRETED)
        if ATOMIC:
            dq = dot(tl.trans(ds), k, None, PRECISION, INTERPRETED) * scale
            if USE_TMA and not MASKED and not INTERPRETED:
                DQ_DESCRIPTOR.atomic_add([b, row + n0, h, 0], dq.reshape([1, BLOCK_M, 1, D1]))
            else:
                _atomic_add_rows(DQ, dq_t, n0, rows_left, dq, BLOCK_M, 0, D1, D)
            if D2:
                dq = dot(tl.trans(ds), k_rest, None, PRECISION, INTERPRETED) * scale
                _atomic_add_rows(DQ, dq_t, n0, rows_left, dq, BLOCK_M, D1, D2, D)
    return dk, dk_rest, dv, dv_rest


@triton.jit
def _atomic_add_rows(
    X, x_t, n0, rows_left, values, ROWS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr
):
    """Add `rows_left` rows from n0 on by atomics; relaxed, because the launch's end publishes the sums."""
    r = tl.arange(0, ROWS)
    c = FIRST + tl.arange(0, WIDTH)
    at = X + tl.cast(n0, tl.int64) * x_t + (r[:, None] * x_t + c[None, :])
    tl.atomic_add(at, values, mask=(r[:, None] < rows_left) & (c[None, :] < D), sem="relaxed")


@triton.jit(do_not_specialize=["seed", "batch_offset", "head_offset", "threshold"])
def bwd_dkdv(
    Q, K, V, DOUT, LSE, DELTA, Q_DESCRIPTOR, DOUT_DESCRIPTOR, DQ_DESCRIPTOR, DQ, DK, DV, SLOPES, TILES, SPANS,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, l_b, l_h, l_t, de_b, de_h, de_t,
    dq_b, dq_t, dq_h, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, slopes_b, slopes_h,
    scale, softcap, seed, batch_offset, head_offset, threshold, keep_scale,
    GQA_RATIO: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, ATOMIC: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute (dK, dV) of one tile of keys and one KV head; with ATOMIC, add its share of dQ."""
    batch, row, rows, first, last, k_step, spans, spans_end = load_tile(TILES)
    key_head = tl.program_id(1)
    key_head64 = key_head.to(tl.int64)
    m = tl.arange(0, BLOCK_N)
    j = tl.where(m < rows, first + k_step * m, _OUT_OF_BAND)
    b = batch.to(tl.int64)
    k_rest = 0.0
    v_rest = 0.0
    dk_rest = 0.0
    dv_rest = 0.0
    k_block = K + b * k_b + key_head64 * k_h + row * k_t
    v_block = V + b * v_b + key_head64 * v_h + row * v_t
    k = load_rows(k_block, k_t, 0, rows, BLOCK_N, 0, D1, D, True)
    v = load_rows(v_block, v_t, 0, rows, BLOCK_N, 0, E1, E, True)
    dk = tl.zeros([BLOCK_N, D1], tl.float32)
    dv = tl.zeros([BLOCK_N, E1], tl.float32)
    if D2:
        k_rest = load_rows(k_block, k_t, 0, rows, BLOCK_N, D1, D2, D, True)
        dk_rest = tl.zeros([BLOCK_N, D2], tl.float32)
    if E2:
        v_rest = load_rows(v_block, v_t, 0, rows, BLOCK_N, E1, E2, E, True)
        dv_rest = tl.zeros([BLOCK_N, E2], tl.float32)
    # All query heads of a KV head add to the same dK and dV, in registers and in a fixed order.
    for g in range(GQA_RATIO):
        head = key_head * GQA_RATIO + g
        head64 = head.to(tl.int64)
        slope = 0.0
        if ALIBI:
            slope = tl.load(SLOPES + b * slopes_b + head64 * slopes_h).to(tl.float32)
        for span in range(spans, spans_end):
            q_row, span_rows, position, step, lo, hi = load_span(SPANS, span)
            # a band limits j - i, and here the tile holds j: seen from the keys, its limits change places and signs
            begin, end = visible_rows(first, last, position, step, span_rows, -hi, -lo)
            full_end = begin + (end - begin) // BLOCK_M * BLOCK_M
            q_row64 = q_row.to(tl.int64)
            q_span = Q + b * q_b + head64 * q_h + q_row64 * q_t
            do_span = DOUT + b * do_b + head64 * do_h + q_row64 * do_t
            l_span = LSE + b * l_b + head64 * l_h + q_row64 * l_t
            de_span = DELTA + b * de_b + head64 * de_h + q_row64 * de_t
            dq_span = DQ + b * dq_b + head64 * dq_h + q_row64 * dq_t
            dk, dk_rest, dv, dv_rest = _add_queries(
                dk, dk_rest, dv, dv_rest, k, k_rest, v, v_rest, q_span, do_span, Q_DESCRIPTOR, DOUT_DESCRIPTOR,
                DQ_DESCRIPTOR, l_span, de_span, dq_span, q_t, do_t, l_t, de_t, dq_t, q_row, batch, head, begin,
                full_end, end, j, position, step, lo, hi, scale, softcap, slope, seed, head + head_offset,
                batch + batch_offset, threshold, keep_scale, BLOCK_M, D, D1, D2, E, E1, E2, False, USE_TMA, LOWER,
                UPPER, SOFTCAP, ALIBI, DROPOUT, ATOMIC, PRECISION, INTERPRETED,
            )  # fmt: skip
            dk, dk_rest, dv, dv_rest = _add_queries(
                dk, dk_rest, dv, dv_rest, k, k_rest, v, v_rest, q_span, do_span, Q_DESCRIPTOR, DOUT_DESCRIPTOR,
                DQ_DESCRIPTOR, l_span, de_span, dq_span, q_t, do_t, l_t, de_t, dq_t, q_row, batch, head, full_end, end,
                end, j, position, step, lo, hi, scale, softcap, slope, seed, head + head_offset, batch + batch_offset,
                threshold, keep_scale, BLOCK_M, D, D1, D2, E, E1, E2, True, USE_TMA, LOWER, UPPER, SOFTCAP, ALIBI,
                DROPOUT, ATOMIC, PRECISION, INTERPRETED,
            )  # fmt: skip
    dk_block = DK + b * dk_b + key_head64 * dk_h + row * dk_t
    dv_block = DV + b * dv_b + key_head64 * dv_h + row * dv_t
    # dS is the gradient of scale * q.k, so dK and dQ carry the scale; dV does not
    store_rows(dk_block, dk_t, rows, dk * scale, ACCUMULATE, BLOCK_N, 0, D1, D)
    store_rows(dv_block, dv_t, rows, dv, ACCUMULATE, BLOCK_N, 0, E1, E)
    if D2:
        store_rows(dk_block, dk_t, rows, dk_rest * scale, ACCUMULATE, BLOCK_N, D1, D2, D)
    if E2:
        store_rows(dv_block, dv_t, rows, dv_rest, ACCUMULATE, BLOCK_N, E1, E2, E)


@triton.jit
def _add_keys(
    dq, dq_rest, q, q_rest, dout, dout_rest, lse, delta, K, V, K_DESCRIPTOR, V_DESCRIPTOR, k_t, v_t, row, b, h,
    begin, end, limit, i, position, step, lo, hi,
    scale, softcap, slope, seed, head, batch, threshold, keep_scale,
    BLOCK_N: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, MASKED: tl.constexpr, USE_TMA: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add the share of the key rows `begin` to `end` of a span to dQ; MASKED blocks end at `limit`, others are full."""
    r = tl.arange(0, BLOCK_N)
    for n0 in tl.range(begin, end, BLOCK_N):
        rows_left = limit - n0
        if USE_TMA and not MASKED:
            k = K_DESCRIPTOR.load([b, row + n0, h, 0]).reshape([BLOCK_N, D1])
            v = V_DESCRIPTOR.load([b, row + n0, h, 0]).reshape([BLOCK_N, E1])
        else:
            k = load_rows(K, k_t, n0, rows_left, BLOCK_N, 0, D1, D, MASKED)
            v = load_rows(V, v_t, n0, rows_left, BLOCK_N, 0, E1, E, MASKED)
        s = dot(q, tl.trans(k), None, PRECISION, INTERPRETED)
        dp = dot(dout, tl.trans(v), None, PRECISION, INTERPRETED)
        if D2:
            k_rest = load_rows(K, k_t, n0, rows_left, BLOCK_N, D1, D2, D, MASKED)
            s = dot(q_rest, tl.trans(k_rest), s, PRECISION, INTERPRETED)
        if E2:
            v_rest = load_rows(V, v_t, n0, rows_left, BLOCK_N, E1, E2, E, MASKED)
            dp = dot(dout_rest, tl.trans(v_rest), dp, PRECISION, INTERPRETED)
        j = position + step * (n0 + r)
        if MASKED:
            j = tl.where(r < rows_left, j, _OUT_OF_BAND)
        _, ds = _p_and_ds(
            s, dp, i[:, None], j[None, :], lse[:, None], delta[:, None], lo, hi, scale, softcap, slope,
            seed, head, batch, threshold, keep_scale, LOWER, UPPER or MASKED, SOFTCAP, ALIBI, DROPOUT,
        )  # fmt: skip
        ds = ds.to(k.dtype)
        dq = dot(ds, k, dq, PRECISION, INTERPRETED)
        if D2:
            dq_rest = dot(ds, k_rest, dq_rest, PRECISION, INTERPRETED)
    return dq, dq_rest


@triton.jit(do_not_specialize=["seed", "batch_offset", "head_offset", "threshold"])
def bwd_dq(
    Q, K, V, DOUT, LSE, DELTA, K_DESCRIPTOR, V_DESCRIPTOR, DQ, SLOPES, TILES, SPANS,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, l_b, l_h, l_t, de_b, de_h, de_t,
    dq_b, dq_t, dq_h, slopes_b, slopes_h,
    scale, softcap, seed, batch_offset, head_offset, threshold, keep_scale,
    GQA_RATIO: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    E: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute dQ of one tile of queries and one head."""
    batch, row, rows, first, last, q_step, spans, spans_end = load_tile(TILES)
    head = tl.program_id(1)
    head64 = head.to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    i = first + q_step * m
    b = batch.to(tl.int64)
    key_head = head // GQA_RATIO
    key_head64 = key_head.to(tl.int64)
    q_rest = 0.0
    dout_rest = 0.0
    dq_rest = 0.0
    q_block = Q + b * q_b + head64 * q_h + row * q_t
    do_block = DOUT + b * do_b + head64 * do_h + row * do_t
    q = load_rows(q_block, q_t, 0, rows, BLOCK_M, 0, D1, D, True)
    dout = load_rows(do_block, do_t, 0, rows, BLOCK_M, 0, E1, E, True)
    dq = tl.zeros([BLOCK_M, D1], tl.float32)
    if D2:
        q_rest = load_rows(q_block, q_t, 0, rows, BLOCK_M, D1, D2, D, True)
        dq_rest = tl.zeros([BLOCK_M, D2], tl.float32)
    if E2:
        dout_rest = load_rows(do_block, do_t, 0, rows, BLOCK_M, E1, E2, E, True)
    lse = tl.load(LSE + b * l_b + head64 * l_h + (row + m) * l_t, mask=m < rows, other=-INF)
    lse = tl.where(lse == -INF, INF, lse * LOG2E)  # P = exp2(-inf) = 0 in rows that see nothing, or are not there
    delta = tl.load(DELTA + b * de_b + head64 * de_h + (row + m) * de_t, mask=m < rows, other=0.0)
    slope = 0.0
    if ALIBI:
        slope = tl.load(SLOPES + b * slopes_b + head64 * slopes_h).to(tl.float32)
    k_all = K + b * k_b + key_head64 * k_h
    v_all = V + b * v_b + key_head64 * v_h
    for span in range(spans, spans_end):
        k_row, span_rows, position, step, lo, hi = load_span(SPANS, span)
        begin, end = visible_rows(first, last, position, step, span_rows, lo, hi)
        full_end = begin + (end - begin) // BLOCK_N * BLOCK_N
        k_span = k_all + k_row.to(tl.int64) * k_t
        v_span = v_all + k_row.to(tl.int64) * v_t
        dq, dq_rest = _add_keys(
            dq, dq_rest, q, q_rest, dout, dout_rest, lse, delta, k_span, v_span, K_DESCRIPTOR, V_DESCRIPTOR, k_t, v_t,
            k_row, batch, key_head, begin, full_end, end, i, position, step, lo, hi,
            scale, softcap, slope, seed, head + head_offset, batch + batch_offset, threshold, keep_scale,
            BLOCK_N, D, D1, D2, E, E1, E2, False, USE_TMA,
            LOWER, UPPER, SOFTCAP, ALIBI, DROPOUT, PRECISION, INTERPRETED,
        )  # fmt: skip
        dq, dq_rest = _add_keys(
            dq, dq_rest, q, q_rest, dout, dout_rest, lse, delta, k_span, v_span, K_DESCRIPTOR, V_DESCRIPTOR, k_t, v_t,
            k_row, batch, key_head, full_end, end, end, i, position, step, lo, hi,
            scale, softcap, slope, seed, head + head_offset, batch + batch_offset, threshold, keep_scale,
            BLOCK_N, D, D1, D2, E, E1, E2, True, USE_TMA,
            LOWER, UPPER, SOFTCAP, ALIBI, DROPOUT, PRECISION, INTERPRETED,
        )  # fmt: skip
    dq_block = DQ + b * dq_b + head64 * dq_h + row * dq_t
    store_rows(dq_block, dq_t, rows, dq * scale, ACCUMULATE, BLOCK_M, 0, D1, D)
    if D2:
        store_rows(dq_block, dq_t, rows, dq_rest * scale, ACCUMULATE, BLOCK_M, D1, D2, D)
