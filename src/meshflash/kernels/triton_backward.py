"""Backward in Triton, given the global LSE and delta: by keys for dK and dV, by queries for dQ.

`by_keys` can add its share of dQ too, by atomics into float32: five products a pair instead of seven, but
not the same bits twice. `by_queries` gives dQ alone, in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshflash.kernels.triton_common import INF, LOG2E, dot, kept, limits, tanh


@triton.jit
def _pairs(
    s, dp, i, j, lse, delta, seen, scale, softcap, slope, seed, head, batch, threshold, keep_scale,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """(what weighs the values, the gradient of the scores) of a block, from q.k and dout.v."""
    if SOFTCAP:
        t = tanh(s * (scale / softcap))
        s = t * (softcap * LOG2E)
    else:
        s = s * (scale * LOG2E)
    if ALIBI:
        s -= (slope * LOG2E) * tl.abs(j - i).to(tl.float32)
    p = tl.math.exp2(s - lse)
    if MASKED:
        p = tl.where(seen, p, 0.0)
    weight = p
    if DROPOUT:
        keep = kept(p, i, j, seed, head, batch, threshold)
        weight = tl.where(keep, p * keep_scale, 0.0)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    ds = p * (dp - delta)
    if SOFTCAP:
        ds = ds * (1.0 - t * t)
    return weight, ds


@triton.jit
def _queries(
    dk, dv, k, v, Q, DOUT, LSE, DELTA, DQ, q_t, do_t, l_t, de_t, dq_t, begin, end, limit, j, k_there,
    position, step, lo, hi, scale, softcap, slope, seed, head, batch, threshold, keep_scale,
    BLOCK_M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr, ATOMIC: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add the share of query rows from begin to end of a span."""
    d = tl.arange(0, DP)
    e = tl.arange(0, EP)
    for n0 in tl.range(begin, end, BLOCK_M):
        n = n0 + tl.arange(0, BLOCK_M)
        i = position + step * n
        rows = n.to(tl.int64)
        there = n < limit
        q_at = Q + rows[:, None] * q_t + d[None, :]
        do_at = DOUT + rows[:, None] * do_t + e[None, :]
        if MASKED:
            q = tl.load(q_at, mask=there[:, None] & (d[None, :] < D), other=0.0)
            dout = tl.load(do_at, mask=there[:, None] & (e[None, :] < E), other=0.0)
            lse = tl.load(LSE + rows * l_t, mask=there, other=INF) * LOG2E
            delta = tl.load(DELTA + rows * de_t, mask=there, other=0.0)
            distance = j[:, None] - i[None, :]
            seen = (distance >= lo) & (distance <= hi) & there[None, :] & k_there[:, None]
        else:
            q = tl.load(q_at, mask=d[None, :] < D, other=0.0)
            dout = tl.load(do_at, mask=e[None, :] < E, other=0.0)
            lse = tl.load(LSE + rows * l_t) * LOG2E
            delta = tl.load(DELTA + rows * de_t)
            seen = True
        lse = tl.where(lse == -INF, INF, lse)  # rows that see nothing: p = exp2(-inf) = 0
        s = dot(k, tl.trans(q), None, PRECISION, INTERPRETED)
        dp = dot(v, tl.trans(dout), None, PRECISION, INTERPRETED)
        weight, ds = _pairs(
            s, dp, i[None, :], j[:, None], lse[None, :], delta[None, :], seen, scale, softcap, slope,
            seed, head, batch, threshold, keep_scale, MASKED, SOFTCAP, ALIBI, DROPOUT,
        )  # fmt: skip
        dv = dot(weight.to(dout.dtype), dout, dv, PRECISION, INTERPRETED)
        ds = ds.to(q.dtype)
        dk = dot(ds, q, dk, PRECISION, INTERPRETED)
        if ATOMIC:
            dq = dot(tl.trans(ds), k, None, PRECISION, INTERPRETED) * scale
            dq_there = there[:, None] & (d[None, :] < D)
            tl.atomic_add(DQ + rows[:, None] * dq_t + d[None, :], dq, mask=dq_there, sem="relaxed")
    return dk, dv


@triton.jit(do_not_specialize=["seed", "batch_offset", "head_offset", "threshold"])
def by_keys(
    Q, K, V, DOUT, LSE, DELTA, DQ, DK, DV, SLOPES, TILES, SPANS,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, l_b, l_h, l_t, de_b, de_h, de_t,
    dq_b, dq_t, dq_h, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, slopes_b, slopes_h,
    scale, softcap, seed, batch_offset, head_offset, threshold, keep_scale,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    ATOMIC: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """(dK, dV) of one block of keys and one key head; with ATOMIC its share of dQ is added there."""
    tile = TILES + tl.program_id(0) * 7
    key_head = tl.program_id(1)
    batch = tl.load(tile)
    row = tl.load(tile + 1).to(tl.int64)
    rows = tl.load(tile + 2)
    first = tl.load(tile + 3)
    k_step = tl.load(tile + 4)
    m = tl.arange(0, BLOCK_N)
    d = tl.arange(0, DP)
    e = tl.arange(0, EP)
    j = first + k_step * m
    last = first + k_step * (rows - 1)
    there = m < rows
    k_there = there[:, None] & (d[None, :] < D)
    v_there = there[:, None] & (e[None, :] < E)
    b = batch.to(tl.int64)
    k = tl.load(K + b * k_b + key_head * k_h + (row + m)[:, None] * k_t + d[None, :], mask=k_there, other=0.0)
    v = tl.load(V + b * v_b + key_head * v_h + (row + m)[:, None] * v_t + e[None, :], mask=v_there, other=0.0)
    dk = tl.zeros([BLOCK_N, DP], tl.float32)
    dv = tl.zeros([BLOCK_N, EP], tl.float32)
    for g in range(GROUP):
        head = key_head * GROUP + g
        slope = 0.0
        if ALIBI:
            slope = tl.load(SLOPES + b * slopes_b + head * slopes_h).to(tl.float32)
        for span in range(tl.load(tile + 5), tl.load(tile + 6)):
            at = SPANS + span * 6
            q_row = tl.load(at).to(tl.int64)
            position = tl.load(at + 2)
            step = tl.load(at + 3)
            lo = tl.load(at + 4)
            hi = tl.load(at + 5)
            begin, inner, outer, end = limits(first, last, position, step, tl.load(at + 1), -hi, -lo, BLOCK_M)
            if rows < BLOCK_N:  # rows of the block that are not there must be masked throughout
                inner = end
                outer = end
            q_span = Q + b * q_b + head * q_h + q_row * q_t
            do_span = DOUT + b * do_b + head * do_h + q_row * do_t
            l_span = LSE + b * l_b + head * l_h + q_row * l_t
            de_span = DELTA + b * de_b + head * de_h + q_row * de_t
            dq_span = DQ + b * dq_b + head * dq_h + q_row * dq_t
            dk, dv = _queries(
                dk, dv, k, v, q_span, do_span, l_span, de_span, dq_span, q_t, do_t, l_t, de_t, dq_t,
                begin, inner, end, j, there, position, step, lo, hi,
                scale, softcap, slope, seed, head + head_offset, batch + batch_offset, threshold, keep_scale,
                BLOCK_M, D, DP, E, EP, True, SOFTCAP, ALIBI, DROPOUT, ATOMIC, PRECISION, INTERPRETED,
            )  # fmt: skip
            dk, dv = _queries(
                dk, dv, k, v, q_span, do_span, l_span, de_span, dq_span, q_t, do_t, l_t, de_t, dq_t,
                inner, outer, end, j, there, position, step, lo, hi,
                scale, softcap, slope, seed, head + head_offset, batch + batch_offset, threshold, keep_scale,
                BLOCK_M, D, DP, E, EP, False, SOFTCAP, ALIBI, DROPOUT, ATOMIC, PRECISION, INTERPRETED,
            )  # fmt: skip
            dk, dv = _queries(
                dk, dv, k, v, q_span, do_span, l_span, de_span, dq_span, q_t, do_t, l_t, de_t, dq_t,
                outer, end, end, j, there, position, step, lo, hi,
                scale, softcap, slope, seed, head + head_offset, batch + batch_offset, threshold, keep_scale,
                BLOCK_M, D, DP, E, EP, True, SOFTCAP, ALIBI, DROPOUT, ATOMIC, PRECISION, INTERPRETED,
            )  # fmt: skip
    dk = dk * scale
    dk_at = DK + b * dk_b + key_head * dk_h + (row + m)[:, None] * dk_t + d[None, :]
    dv_at = DV + b * dv_b + key_head * dv_h + (row + m)[:, None] * dv_t + e[None, :]
    if ADD:
        dk += tl.load(dk_at, mask=k_there, other=0.0)
        dv += tl.load(dv_at, mask=v_there, other=0.0)
    tl.store(dk_at, dk.to(DK.dtype.element_ty), mask=k_there)
    tl.store(dv_at, dv.to(DV.dtype.element_ty), mask=v_there)


@triton.jit
def _keys(
    dq, q, dout, lse, delta, K, V, k_t, v_t, begin, end, limit, i, position, step, lo, hi,
    scale, softcap, slope, seed, head, batch, threshold, keep_scale,
    BLOCK_N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add the share of key rows from begin to end of a span."""
    d = tl.arange(0, DP)
    e = tl.arange(0, EP)
    for n0 in tl.range(begin, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        j = position + step * n
        rows = n.to(tl.int64)
        there = n < limit
        k = tl.load(K + rows[:, None] * k_t + d[None, :], mask=there[:, None] & (d[None, :] < D), other=0.0)
        v = tl.load(V + rows[:, None] * v_t + e[None, :], mask=there[:, None] & (e[None, :] < E), other=0.0)
        distance = j[None, :] - i[:, None]
        seen = there[None, :] & (distance >= lo) & (distance <= hi)
        s = dot(q, tl.trans(k), None, PRECISION, INTERPRETED)
        dp = dot(dout, tl.trans(v), None, PRECISION, INTERPRETED)
        _, ds = _pairs(
            s, dp, i[:, None], j[None, :], lse[:, None], delta[:, None], seen, scale, softcap, slope,
            seed, head, batch, threshold, keep_scale, MASKED, SOFTCAP, ALIBI, DROPOUT,
        )  # fmt: skip
        dq = dot(ds.to(k.dtype), k, dq, PRECISION, INTERPRETED)
    return dq


@triton.jit(do_not_specialize=["seed", "batch_offset", "head_offset", "threshold"])
def by_queries(
    Q, K, V, DOUT, LSE, DELTA, DQ, SLOPES, TILES, SPANS,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, l_b, l_h, l_t, de_b, de_h, de_t,
    dq_b, dq_t, dq_h, slopes_b, slopes_h,
    scale, softcap, seed, batch_offset, head_offset, threshold, keep_scale,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    ADD: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """DQ of one block of queries and one head."""
    tile = TILES + tl.program_id(0) * 7
    head = tl.program_id(1)
    batch = tl.load(tile)
    row = tl.load(tile + 1).to(tl.int64)
    rows = tl.load(tile + 2)
    first = tl.load(tile + 3)
    q_step = tl.load(tile + 4)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DP)
    e = tl.arange(0, EP)
    i = first + q_step * m
    last = first + q_step * (rows - 1)
    there = m < rows
    q_there = there[:, None] & (d[None, :] < D)
    b = batch.to(tl.int64)
    q = tl.load(Q + b * q_b + head * q_h + (row + m)[:, None] * q_t + d[None, :], mask=q_there, other=0.0)
    do_at = DOUT + b * do_b + head * do_h + (row + m)[:, None] * do_t + e[None, :]
    dout = tl.load(do_at, mask=there[:, None] & (e[None, :] < E), other=0.0)
    lse = tl.load(LSE + b * l_b + head * l_h + (row + m) * l_t, mask=there, other=INF) * LOG2E
    lse = tl.where(lse == -INF, INF, lse)
    delta = tl.load(DELTA + b * de_b + head * de_h + (row + m) * de_t, mask=there, other=0.0)
    slope = 0.0
    if ALIBI:
        slope = tl.load(SLOPES + b * slopes_b + head * slopes_h).to(tl.float32)
    dq = tl.zeros([BLOCK_M, DP], tl.float32)
    k_head = K + b * k_b + (head // GROUP) * k_h
    v_head = V + b * v_b + (head // GROUP) * v_h
    for span in range(tl.load(tile + 5), tl.load(tile + 6)):
        at = SPANS + span * 6
        k_row = tl.load(at).to(tl.int64)
        position = tl.load(at + 2)
        step = tl.load(at + 3)
        lo = tl.load(at + 4)
        hi = tl.load(at + 5)
        begin, inner, outer, end = limits(first, last, position, step, tl.load(at + 1), lo, hi, BLOCK_N)
        k_span = k_head + k_row * k_t
        v_span = v_head + k_row * v_t
        dq = _keys(
            dq, q, dout, lse, delta, k_span, v_span, k_t, v_t, begin, inner, end, i, position, step, lo, hi,
            scale, softcap, slope, seed, head + head_offset, batch + batch_offset, threshold, keep_scale,
            BLOCK_N, D, DP, E, EP, True, SOFTCAP, ALIBI, DROPOUT, PRECISION, INTERPRETED,
        )  # fmt: skip
        dq = _keys(
            dq, q, dout, lse, delta, k_span, v_span, k_t, v_t, inner, outer, end, i, position, step, lo, hi,
            scale, softcap, slope, seed, head + head_offset, batch + batch_offset, threshold, keep_scale,
            BLOCK_N, D, DP, E, EP, False, SOFTCAP, ALIBI, DROPOUT, PRECISION, INTERPRETED,
        )  # fmt: skip
        dq = _keys(
            dq, q, dout, lse, delta, k_span, v_span, k_t, v_t, outer, end, end, i, position, step, lo, hi,
            scale, softcap, slope, seed, head + head_offset, batch + batch_offset, threshold, keep_scale,
            BLOCK_N, D, DP, E, EP, True, SOFTCAP, ALIBI, DROPOUT, PRECISION, INTERPRETED,
        )  # fmt: skip
    dq = dq * scale
    dq_at = DQ + b * dq_b + head * dq_h + (row + m)[:, None] * dq_t + d[None, :]
    if ADD:
        dq += tl.load(dq_at, mask=q_there, other=0.0)
    tl.store(dq_at, dq.to(DQ.dtype.element_ty), mask=q_there)
