"""Small Triton kernels around the Hopper backward: lse and delta as TMA loads them before, dQ in rows after it."""

from __future__ import annotations

import triton
import triton.language as tl

from meshflash.kernels.triton.common import INF, LOG2E

#: Query rows that one CTA of `bwd_preprocess` copies, and of `bwd_preprocess_out`, which loads whole rows.
PREPROCESS_ROWS, PREPROCESS_OUT_ROWS = 1024, 32


@triton.jit(do_not_specialize=["tokens", "padded_tokens"])
def bwd_preprocess(LSE, DELTA, LSE_ROWS, DELTA_ROWS, tokens, padded_tokens, heads, l_b, l_h, l_t, d_b, d_h, d_t,
                   ROWS: tl.constexpr, SHIFTS: tl.constexpr):  # fmt: skip
    """Copy lse, in base 2, and delta to contiguous lines of `padded_tokens` numbers, one for each batch row and head.

    Rows that see nothing get an lse of +inf, so that P = exp2(s - lse) is 0 there. Each line exists SHIFTS times, the
    n-th one shifted by n elements: TMA loads begin at multiples of 16 bytes, but blocks of queries may begin anywhere.
    """
    line = tl.program_id(0)
    b = (line // heads).to(tl.int64)
    h = (line % heads).to(tl.int64)
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_range = t < tokens
    lse = tl.load(LSE + b * l_b + h * l_h + t.to(tl.int64) * l_t, mask=in_range, other=-INF)
    delta = tl.load(DELTA + b * d_b + h * d_h + t.to(tl.int64) * d_t, mask=in_range, other=0.0)
    _store_lines(LSE_ROWS, DELTA_ROWS, line, t, lse, delta, padded_tokens, SHIFTS)


@triton.jit(do_not_specialize=["tokens", "padded_tokens", "sum_rows"])
def bwd_preprocess_out(LSE, OUT, DOUT, LSE_ROWS, DELTA_ROWS, SUMS, tokens, padded_tokens, sum_rows, heads, l_b, l_h,
                       l_t, o_b, o_t, o_h, do_b, do_t, do_h, ROWS: tl.constexpr, SHIFTS: tl.constexpr, D: tl.constexpr,
                       ZERO_SUMS: tl.constexpr):  # fmt: skip
    """Do the same as `bwd_preprocess`, with delta = sum(dout * out) computed here, which saves a kernel.

    With ZERO_SUMS it also fills the sums of dQ with zeros, `sum_rows` rows for each batch row and head.
    """
    line = tl.program_id(0)
    b = (line // heads).to(tl.int64)
    h = (line % heads).to(tl.int64)
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_range = t < tokens
    row = t.to(tl.int64)[:, None]
    d = tl.arange(0, D)[None, :]
    lse = tl.load(LSE + b * l_b + h * l_h + t.to(tl.int64) * l_t, mask=in_range, other=-INF)
    out = tl.load(OUT + b * o_b + h * o_h + row * o_t + d, mask=in_range[:, None], other=0.0).to(tl.float32)
    dout = tl.load(DOUT + b * do_b + h * do_h + row * do_t + d, mask=in_range[:, None], other=0.0).to(tl.float32)
    _store_lines(LSE_ROWS, DELTA_ROWS, line, t, lse, tl.sum(dout * out, 1), padded_tokens, SHIFTS)
    if ZERO_SUMS:  # tiles have their rows in another order, but zeros are the same in any
        into = SUMS + (line.to(tl.int64) * sum_rows + row) * D + d
        tl.store(into, tl.zeros([ROWS, D], tl.float32), mask=(t < sum_rows)[:, None])


@triton.jit
def _store_lines(LSE_ROWS, DELTA_ROWS, line, t, lse, delta, padded_tokens, SHIFTS: tl.constexpr):
    """Store lse, in base 2, and delta of some rows to each of the SHIFTS lines."""
    lse = tl.where(lse == -INF, INF, lse * LOG2E)
    for shift in tl.static_range(SHIFTS):
        into = (line.to(tl.int64) * SHIFTS + shift) * padded_tokens + t - shift
        in_line = (t >= shift) & (t - shift < padded_tokens)
        tl.store(LSE_ROWS + into, lse, mask=in_line)
        tl.store(DELTA_ROWS + into, delta, mask=in_line)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def gather_dq(SUMS, DQ, tokens, tiles, heads, scale, q_b, q_t, q_h, BLOCK_M: tl.constexpr, D: tl.constexpr,
              ACCUMULATE: tl.constexpr):  # fmt: skip
    """Scale the float32 sums of dQ of one block and head, and write them in rows, or add them to DQ.

    The sums lie in the order of the registers that `backward` stored them from.
    """
    block = tl.program_id(0).to(tl.int64)
    line = block // tiles
    b = line // heads
    h = line % heads
    x = tl.load(SUMS + block * (BLOCK_M * D) + tl.arange(0, BLOCK_M * D))
    x = tl.reshape(x, [2, 8, 4, 8, 4, 2, 2])
    # axes: half of the tile, and of its 64 rows r and 64 columns c: c / 8, r / 16, r % 8, c / 2 % 4, r / 8 % 2, c % 2
    if BLOCK_M == 64:  # warpgroups split the tile by columns
        x = tl.permute(x, (2, 5, 3, 0, 1, 4, 6))
    else:
        x = tl.permute(x, (0, 2, 5, 3, 1, 4, 6))
    x = tl.reshape(x, [BLOCK_M, D])
    m = tl.arange(0, BLOCK_M)[:, None]
    c = tl.arange(0, D)[None, :]
    t = block % tiles * BLOCK_M + m
    into = DQ + b * q_b + h * q_h + t * q_t + c
    x = x * scale
    if ACCUMULATE:
        x += tl.load(into, mask=t < tokens, other=0.0)
    tl.store(into, x.to(DQ.dtype.element_ty), mask=t < tokens)
