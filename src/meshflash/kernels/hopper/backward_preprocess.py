"""What stands around the backward in Gluon: numbers of rows as it copies them, and dQ as others know it."""

from __future__ import annotations

import triton
import triton.language as tl

from meshflash.kernels.triton.common import INF, LOG2E

#: Rows of a block of `lines`.
LINE = 1024


@triton.jit(do_not_specialize=["tokens", "room"])
def lines(LSE, DELTA, LSE_LINES, DELTA_LINES, tokens, room, heads, l_b, l_h, l_t, d_b, d_h, d_t, LINE: tl.constexpr,
          SHIFTS: tl.constexpr):  # fmt: skip
    """LSE in base 2, +inf for rows that see nothing, and delta: lines of `room` numbers by batch row and head.

    Each line is there so many times, and begins one row further every time.
    """
    line = tl.program_id(0)
    b = (line // heads).to(tl.int64)
    h = (line % heads).to(tl.int64)
    t = tl.program_id(1) * LINE + tl.arange(0, LINE)
    there = t < tokens
    lse = tl.load(LSE + b * l_b + h * l_h + t.to(tl.int64) * l_t, mask=there, other=-INF)
    delta = tl.load(DELTA + b * d_b + h * d_h + t.to(tl.int64) * d_t, mask=there, other=0.0)
    lse = tl.where(lse == -INF, INF, lse * LOG2E)
    for shift in tl.static_range(SHIFTS):
        into = (line.to(tl.int64) * SHIFTS + shift) * room + t - shift
        fits = (t >= shift) & (t - shift < room)
        tl.store(LSE_LINES + into, lse, mask=fits)
        tl.store(DELTA_LINES + into, delta, mask=fits)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def gather_dq(SUMS, DQ, tokens, tiles, heads, scale, q_b, q_t, q_h, BLOCK_M: tl.constexpr, D: tl.constexpr,
              ADD: tl.constexpr):  # fmt: skip
    """DQ of one block of queries and one head, or what is added to it, from sums in the order of registers."""
    block = tl.program_id(0).to(tl.int64)
    line = block // tiles
    b = line // heads
    h = line % heads
    x = tl.load(SUMS + block * (BLOCK_M * D) + tl.arange(0, BLOCK_M * D))
    x = tl.reshape(x, [2, 8, 4, 8, 4, 2, 2])  # halves, then of 64 rows and columns: c / 8, r / 16, r, c / 2, r / 8, c
    if BLOCK_M == 64:  # halved by columns
        x = tl.permute(x, (2, 5, 3, 0, 1, 4, 6))
    else:
        x = tl.permute(x, (0, 2, 5, 3, 1, 4, 6))
    x = tl.reshape(x, [BLOCK_M, D])
    m = tl.arange(0, BLOCK_M)[:, None]
    c = tl.arange(0, D)[None, :]
    t = block % tiles * BLOCK_M + m
    into = DQ + b * q_b + h * q_h + t * q_t + c
    x = x * scale
    if ADD:
        x += tl.load(into, mask=t < tokens, other=0.0)
    tl.store(into, x.to(DQ.dtype.element_ty), mask=t < tokens)
