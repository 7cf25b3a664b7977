"""Device functions that the portable Triton kernels share: matrix multiplies, tiles and spans, masks, dropout.

They run compiled on NVIDIA and AMD GPUs, and interpreted on CPUs. Integer division truncates, so it is only used on
numbers >= 0. The interpreter multiplies the bit patterns of bfloat16, so it gets float32 operands.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

#: Whether kernels are interpreted. Triton decides that when it decorates a kernel, so this is read at import as well.
INTERPRETED = bool(knobs.runtime.interpret)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return a @ b, plus `acc` unless it is None."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def tanh(x):
    """Compute tanh by exp2, which every backend has; near 0, where that cancels, by its Taylor series."""
    e = tl.math.exp2(tl.abs(x) * (-2.0 * LOG2E))
    t = (1.0 - e) / (1.0 + e)
    y = x * x
    near = x * (1.0 - y * (1.0 / 3.0 - y * (2.0 / 15.0 - y * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.1, near, tl.where(x < 0, -t, t))


@triton.jit
def load_tile(TILES):
    """Load the tile of this CTA: batch row, first row, rows, first and last position, position step, and its spans."""
    tile = TILES + tl.program_id(0) * 7
    rows = tl.load(tile + 2)
    first = tl.load(tile + 3)
    step = tl.load(tile + 4)
    last = first + step * (rows - 1)
    return tl.load(tile), tl.load(tile + 1).to(tl.int64), rows, first, last, step, tl.load(tile + 5), tl.load(tile + 6)


@triton.jit
def load_span(SPANS, number):
    """Load a span: first row, rows, first position, position step, and the limits of its band."""
    at = SPANS + number * 6
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit
def visible_rows(first, last, position, step, rows, lo, hi):
    """Return the range of a span's rows that at least one row of a tile sees.

    The tile lies at positions `first` to `last`, row n of the span at `position + step * n`. A tile row sees a span row
    where the span row's position minus its own lies between lo and hi.
    """
    begin = tl.minimum(tl.maximum(first + lo - position + step - 1, 0) // step, rows)
    end = tl.maximum(tl.minimum(tl.maximum(last + hi - position + step, 0) // step, rows), begin)
    return begin, end


@triton.jit
def split_span(first, last, position, step, rows, lo, hi, BLOCK: tl.constexpr):
    """Return (begin, inner, outer, end): rows `begin` to `end` are visible, `inner` to `outer` in unmasked blocks."""
    begin, end = visible_rows(first, last, position, step, rows, lo, hi)
    inside_begin = tl.minimum(tl.maximum(tl.maximum(last + lo - position + step - 1, 0) // step, begin), end)
    inside_end = tl.minimum(tl.maximum(first + hi - position + step, 0) // step, end)
    inner = begin + (inside_begin - begin + BLOCK - 1) // BLOCK * BLOCK
    outer = inner + tl.maximum(inside_end - inner, 0) // BLOCK * BLOCK
    inner = tl.minimum(inner, end)
    outer = tl.maximum(tl.minimum(outer, end), inner)
    return begin, inner, outer, end


@triton.jit
def load_rows(
    X, x_t, n0, rows_left, ROWS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Load ROWS rows from n0 on, columns FIRST to FIRST + WIDTH; with MASKED, rows past `rows_left` are 0."""
    r = tl.arange(0, ROWS)
    c = FIRST + tl.arange(0, WIDTH)
    at = X + tl.cast(n0, tl.int64) * x_t + (r[:, None] * x_t + c[None, :])
    if MASKED and FIRST + WIDTH > D:
        return tl.load(at, mask=(r[:, None] < rows_left) & (c[None, :] < D), other=0.0)
    if MASKED:
        return tl.load(at, mask=r[:, None] < rows_left, other=0.0)
    if FIRST + WIDTH > D:
        return tl.load(at, mask=c[None, :] < D, other=0.0)
    return tl.load(at)


@triton.jit
def store_rows(
    X, x_t, rows_left, values, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Store `rows_left` rows, or add them to what is there; rows past that are not touched."""
    r = tl.arange(0, ROWS)
    c = FIRST + tl.arange(0, WIDTH)
    at = X + (r.to(tl.int64)[:, None] * x_t + c[None, :])
    in_range = (r[:, None] < rows_left) & (c[None, :] < D)
    if ACCUMULATE:
        values += tl.load(at, mask=in_range, other=0.0)
    tl.store(at, values.to(X.dtype.element_ty), mask=in_range)


@triton.jit
def dropout_keep(like, i, j, seed, head, batch, threshold):
    """Return which (query, key) pairs dropout keeps, for positions that broadcast to the shape of `like`."""
    zero = tl.zeros_like(like).to(tl.int32)
    word, _, _, _ = tl.philox(seed, j + zero, i + zero, head, batch)
    return word.to(tl.uint32, bitcast=True) >= threshold
