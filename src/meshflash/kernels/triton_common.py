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
    """By exp2, which every backend has."""
    e = tl.math.exp2(tl.abs(x) * (-2.0 * LOG2E))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def limits(first, last, position, step, rows, lo, hi, BLOCK: tl.constexpr):
    """Which rows of a span a block meets: `begin` to `end`; `inner` to `outer` are whole blocks inside the band.

    The block lies at positions from first to last, row n of the span at `position + step * n`; a row is met
    where its position less one of the block's lies between lo and hi.
    """
    begin = tl.minimum(tl.maximum(first + lo - position + step - 1, 0) // step, rows)
    end = tl.maximum(tl.minimum(tl.maximum(last + hi - position + step, 0) // step, rows), begin)
    whole = tl.minimum(tl.maximum(tl.maximum(last + lo - position + step - 1, 0) // step, begin), end)
    whole_end = tl.minimum(tl.maximum(first + hi - position + step, 0) // step, end)
    inner = begin + (whole - begin + BLOCK - 1) // BLOCK * BLOCK
    outer = inner + tl.maximum(whole_end - inner, 0) // BLOCK * BLOCK
    inner = tl.minimum(inner, end)
    outer = tl.maximum(tl.minimum(outer, end), inner)
    return begin, inner, outer, end


@triton.jit
def kept(like, i, j, seed, head, batch, threshold):
    """Which pairs dropout keeps, for positions that broadcast to the shape of `like`."""
    zero = tl.zeros_like(like).to(tl.int32)
    word, _, _, _ = tl.philox(seed, j + zero, i + zero, head, batch)
    return word.to(tl.uint32, bitcast=True) >= threshold
