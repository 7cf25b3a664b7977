"""What the Triton kernels share: products, limits of a band in rows, dropout's bits.

Runs compiled on NVIDIA and AMD GPUs and interpreted on CPUs. Integer division truncates, so it is only
taken of numbers >= 0; the interpreter multiplies the bit patterns of bfloat16, so it gets float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

#: Whether kernels are interpreted; Triton decides when it reads a kernel, so this is read then too.
INTERPRETED = bool(knobs.runtime.interpret)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """A product, added to what was there."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def tanh(x):
    """By exp2, which every backend has; near 0, where that cancels, by its series."""
    e = tl.math.exp2(tl.abs(x) * (-2.0 * LOG2E))
    t = (1.0 - e) / (1.0 + e)
    y = x * x
    near = x * (1.0 - y * (1.0 / 3.0 - y * (2.0 / 15.0 - y * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.1, near, tl.where(x < 0, -t, t))


@triton.jit
def tile_of(TILES):
    """This instance's block: batch row, first row, rows, first and last position, step, and its spans."""
    tile = TILES + tl.program_id(0) * 7
    rows = tl.load(tile + 2)
    first = tl.load(tile + 3)
    step = tl.load(tile + 4)
    last = first + step * (rows - 1)
    return tl.load(tile), tl.load(tile + 1).to(tl.int64), rows, first, last, step, tl.load(tile + 5), tl.load(tile + 6)


@triton.jit
def span_of(SPANS, number):
    """One span: first row, rows, first position, step, and the band's limits."""
    at = SPANS + number * 6
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit
def met(first, last, position, step, rows, lo, hi):
    """Which rows of a span a block meets.

    The block lies at positions from first to last, row n of the span at `position + step * n`; a row is met
    where its position less one of the block's lies between lo and hi.
    """
    begin = tl.minimum(tl.maximum(first + lo - position + step - 1, 0) // step, rows)
    end = tl.maximum(tl.minimum(tl.maximum(last + hi - position + step, 0) // step, rows), begin)
    return begin, end


@triton.jit
def limits(first, last, position, step, rows, lo, hi, BLOCK: tl.constexpr):
    """The rows that are met, `begin` to `end`; of these `inner` to `outer` are whole blocks inside the band."""
    begin, end = met(first, last, position, step, rows, lo, hi)
    whole = tl.minimum(tl.maximum(tl.maximum(last + lo - position + step - 1, 0) // step, begin), end)
    whole_end = tl.minimum(tl.maximum(first + hi - position + step, 0) // step, end)
    inner = begin + (whole - begin + BLOCK - 1) // BLOCK * BLOCK
    outer = inner + tl.maximum(whole_end - inner, 0) // BLOCK * BLOCK
    inner = tl.minimum(inner, end)
    outer = tl.maximum(tl.minimum(outer, end), inner)
    return begin, inner, outer, end


@triton.jit
def rows_of(
    X, x_t, n0, left, ROWS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """ROWS rows from n0 on, WIDTH of their numbers from FIRST on; with MASKED, those past `left` rows are 0."""
    r = tl.arange(0, ROWS)
    c = FIRST + tl.arange(0, WIDTH)
    at = X + tl.cast(n0, tl.int64) * x_t + (r[:, None] * x_t + c[None, :])
    if MASKED and FIRST + WIDTH > D:
        return tl.load(at, mask=(r[:, None] < left) & (c[None, :] < D), other=0.0)
    if MASKED:
        return tl.load(at, mask=r[:, None] < left, other=0.0)
    if FIRST + WIDTH > D:
        return tl.load(at, mask=c[None, :] < D, other=0.0)
    return tl.load(at)


@triton.jit
def store_rows(
    X, x_t, left, values, ADD: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Store rows from the first on, or add them to what is there; those past `left` are not touched."""
    r = tl.arange(0, ROWS)
    c = FIRST + tl.arange(0, WIDTH)
    at = X + (r.to(tl.int64)[:, None] * x_t + c[None, :])
    there = (r[:, None] < left) & (c[None, :] < D)
    if ADD:
        values += tl.load(at, mask=there, other=0.0)
    tl.store(at, values.to(X.dtype.element_ty), mask=there)


@triton.jit
def kept(like, i, j, seed, head, batch, threshold):
    """Which pairs dropout keeps, for positions that broadcast to the shape of `like`."""
    zero = tl.zeros_like(like).to(tl.int32)
    word, _, _, _ = tl.philox(seed, j + zero, i + zero, head, batch)
    return word.to(tl.uint32, bitcast=True) >= threshold
