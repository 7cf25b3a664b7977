"""Forward in Triton: one instance for each block of queries and head, over the spans that the block sees.

A span is walked in three parts: blocks that a band crosses are masked, those inside it are not. What is
carried in continues the online softmax: an (out, lse) is one whose maximum is lse and whose sum is 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from meshflash.kernels.triton_common import INF, LN2, LOG2E, dot, kept, limits, tanh


@triton.jit
def _keys(
    acc, total, top, q, K, V, k_t, v_t, begin, end, limit, i, position, step, lo, hi,
    scale, softcap, slope, seed, head, batch, threshold, keep_scale,
    BLOCK_N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Continue the softmax over rows from begin to end of a span."""
    d = tl.arange(0, DP)
    e = tl.arange(0, EP)
    for n0 in tl.range(begin, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        j = position + step * n
        rows = n.to(tl.int64)
        k_at = K + rows[:, None] * k_t + d[None, :]
        v_at = V + rows[:, None] * v_t + e[None, :]
        if MASKED:
            k = tl.load(k_at, mask=(n[:, None] < limit) & (d[None, :] < D), other=0.0)
        elif D == DP:
            k = tl.load(k_at)
        else:
            k = tl.load(k_at, mask=d[None, :] < D, other=0.0)
        s = dot(q, tl.trans(k), None, PRECISION, INTERPRETED)
        if SOFTCAP:
            s = tanh(s * (scale / softcap)) * (softcap * LOG2E)
        else:
            s = s * (scale * LOG2E)
        if ALIBI:
            s -= (slope * LOG2E) * tl.abs(j[None, :] - i[:, None]).to(tl.float32)
        if MASKED:
            distance = j[None, :] - i[:, None]
            s = tl.where((n[None, :] < limit) & (distance >= lo) & (distance <= hi), s, -INF)
        new_top = tl.maximum(top, tl.max(s, 1))
        if MASKED:
            reference = tl.where(new_top == -INF, 0.0, new_top)
        else:
            reference = new_top
        p = tl.math.exp2(s - reference[:, None])
        decay = tl.math.exp2(top - reference)
        total = total * decay + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(kept(p, i[:, None], j[None, :], seed, head, batch, threshold), p * keep_scale, 0.0)
        acc = acc * decay[:, None]
        if MASKED:
            v = tl.load(v_at, mask=(n[:, None] < limit) & (e[None, :] < E), other=0.0)
        elif E == EP:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=e[None, :] < E, other=0.0)
        acc = dot(p.to(v.dtype), v, acc, PRECISION, INTERPRETED)
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=["seed", "batch_offset", "head_offset", "threshold"])
def forward(
    Q, K, V, OUT, LSE, CARRY, CARRY_LSE, SINKS, SLOPES, TILES, SPANS,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, o_b, o_t, o_h, l_b, l_h, l_t,
    c_b, c_t, c_h, cl_b, cl_h, cl_t, slopes_b, slopes_h,
    scale, softcap, seed, batch_offset, head_offset, threshold, keep_scale,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_CARRY: tl.constexpr, HAS_SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """(out, lse) of one block of queries and one head."""
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
    out_there = there[:, None] & (e[None, :] < E)
    b = batch.to(tl.int64)
    q_at = Q + b * q_b + head * q_h + (row + m)[:, None] * q_t + d[None, :]
    q = tl.load(q_at, mask=there[:, None] & (d[None, :] < D), other=0.0)
    if HAS_CARRY:
        carried = CARRY + b * c_b + head * c_h + (row + m)[:, None] * c_t + e[None, :]
        top = tl.load(CARRY_LSE + b * cl_b + head * cl_h + (row + m) * cl_t, mask=there, other=-INF) * LOG2E
        total = tl.where(top == -INF, 0.0, 1.0)
        acc = tl.load(carried, mask=out_there, other=0.0)
    else:
        top = tl.full([BLOCK_M], -INF, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, EP], tl.float32)
    slope = 0.0
    if ALIBI:
        slope = tl.load(SLOPES + b * slopes_b + head * slopes_h).to(tl.float32)
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
        acc, total, top = _keys(
            acc, total, top, q, k_span, v_span, k_t, v_t, begin, inner, end, i, position, step, lo, hi,
            scale, softcap, slope, seed, head + head_offset, batch + batch_offset, threshold, keep_scale,
            BLOCK_N, D, DP, E, EP, True, SOFTCAP, ALIBI, DROPOUT, PRECISION, INTERPRETED,
        )  # fmt: skip
        acc, total, top = _keys(
            acc, total, top, q, k_span, v_span, k_t, v_t, inner, outer, end, i, position, step, lo, hi,
            scale, softcap, slope, seed, head + head_offset, batch + batch_offset, threshold, keep_scale,
            BLOCK_N, D, DP, E, EP, False, SOFTCAP, ALIBI, DROPOUT, PRECISION, INTERPRETED,
        )  # fmt: skip
        acc, total, top = _keys(
            acc, total, top, q, k_span, v_span, k_t, v_t, outer, end, end, i, position, step, lo, hi,
            scale, softcap, slope, seed, head + head_offset, batch + batch_offset, threshold, keep_scale,
            BLOCK_N, D, DP, E, EP, True, SOFTCAP, ALIBI, DROPOUT, PRECISION, INTERPRETED,
        )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(SINKS + head).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        reference = tl.where(new_top == -INF, 0.0, new_top)
        decay = tl.math.exp2(top - reference)
        total = total * decay + tl.math.exp2(sink - reference)
        acc = acc * decay[:, None]
        top = new_top
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    acc = acc / total[:, None]
    lse = tl.where(empty, -INF, (top + tl.math.log2(total)) * LN2)
    out_at = OUT + b * o_b + head * o_h + (row + m)[:, None] * o_t + e[None, :]
    tl.store(out_at, acc.to(OUT.dtype.element_ty), mask=out_there)
    tl.store(LSE + b * l_b + head * l_h + (row + m) * l_t, lse, mask=there)
