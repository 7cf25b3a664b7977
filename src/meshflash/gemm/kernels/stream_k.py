"""The product of two matrices in Triton: shares of tiles, a fixed-order sum of them, bias and activation.

Which program has which slices is `partition.py`'s, by the same functions. A program that has a part of a tile writes
its sum to the workspace; `add_up`, which runs after `product` on all multiprocessors, adds the parts of each such tile
in the order of programs. So nobody waits or counts, and every run gives the same bits. Sums are in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from meshflash.gemm import partition
from meshflash.kernels.triton import common as triton_common
from meshflash.kernels.triton.common import INTERPRETED

#: What the kernel calls: compiled with it, but as it is for the interpreter, which takes milliseconds for each call of
#: a jitted function and asks that it know Triton.
inner = (lambda function: function) if INTERPRETED else triton.jit
begin_of = inner(partition.begin_of)
owner_of = inner(partition.owner_of)
place_of = inner(partition.place_of)
dot = triton_common.dot.fn if INTERPRETED else triton_common.dot

SQRT_HALF = tl.constexpr(0.7071067811865476)


@inner
def numbers(first, COUNT: tl.constexpr, WIDE: tl.constexpr):
    """COUNT numbers from the first on, in 64 bits where addresses need that."""
    numbers = first + tl.arange(0, COUNT)
    if WIDE:
        numbers = numbers.to(tl.int64)
    return numbers


@inner
def count_in(number, LONG: tl.constexpr):
    """A number to count slices with: in 64 bits where there are that many, which take a GPU long to divide."""
    if LONG:
        number = number.to(tl.int64)
    return number


@inner
def tile_sum(
    A, B, m0, n0, first, last, M, N, K, a_m, a_k, b_k, b_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr, A_TURNED: tl.constexpr, B_TURNED: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The sum of a tile that begins at row m0 and column n0, over slices of K from the first to before the last."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if DESCRIPTORS:
        for step in range(first, last):
            k0 = step * BLOCK_K
            if A_TURNED:  # noqa: SIM108 - a branch on a constant is pruned when compiled, a ternary is not
                a = A.load([k0, m0]).T
            else:
                a = A.load([m0, k0])
            if B_TURNED:  # noqa: SIM108
                b = B.load([n0, k0]).T
            else:
                b = B.load([k0, n0])
            acc = dot(a, b, acc, PRECISION, INTERPRETED)
    else:
        m = numbers(m0, BLOCK_M, WIDE)
        n = numbers(n0, BLOCK_N, WIDE)
        a_at = A + m[:, None] * a_m
        b_at = B + n[None, :] * b_n
        for step in range(first, last):
            k = numbers(step * BLOCK_K, BLOCK_K, WIDE)
            a = tl.load(a_at + k[None, :] * a_k, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
            b = tl.load(b_at + k[:, None] * b_k, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
            acc = dot(a, b, acc, PRECISION, INTERPRETED)
    return acc


@inner
def halves(acc):
    """The left and the right columns: stored one after the other they take half the shared memory and registers."""
    return tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2)), (0, 2, 1)))


@inner
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        x = tl.where(x < 0, 0.0, x)  # NaN stays
    if ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.math.erf(x * SQRT_HALF))
    if ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    return x


@inner
def _finish(
    acc, BIAS, OUT, KEPT, o_m, m, n, M, N,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Bias, activation, and the store of numbers at rows m and columns n; KEPT gets what the activation gets."""
    there = (m[:, None] < M) & (n[None, :] < N)
    if HAS_BIAS:
        acc += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = m[:, None] * o_m + n[None, :]
    if KEEP:
        tl.store(KEPT + at, acc.to(KEPT.dtype.element_ty), mask=there)
    tl.store(OUT + at, _activated(acc, ACTIVATION).to(OUT.dtype.element_ty), mask=there)


@inner
def _finish_block(
    acc, BIAS, OUT_BLOCKS, KEPT_BLOCKS, m0, n0, N,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """The same for a block that descriptors store."""
    if HAS_BIAS:
        n = n0 + tl.arange(0, acc.shape[1])
        acc += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if KEEP:
        KEPT_BLOCKS.store([m0, n0], acc.to(KEPT_BLOCKS.dtype))
    OUT_BLOCKS.store([m0, n0], _activated(acc, ACTIVATION).to(OUT_BLOCKS.dtype))


@triton.jit(do_not_specialize=["steps", "crew", "slices", "shared"])
def product(
    A, B, BIAS, OUT, OUT_BLOCKS, KEPT, KEPT_BLOCKS, PARTIALS,
    M, N, K, a_m, a_k, b_k, b_n, o_m, steps, crew, slices, shared,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    SLOTS: tl.constexpr, LONG: tl.constexpr,
    DESCRIPTORS: tl.constexpr, A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, OUT_DESCRIBED: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """OUT = activation(A B + BIAS) where a program has a whole tile, and PARTIALS where it has a part of one.

    A program does its segments one after another. A descriptor that is TURNED is that of the transpose. SLOTS is how
    many unfinished tiles a program may have, 0 where all are whole; slices are counted in 64 bits if LONG. CHAINED,
    `add_up` comes to the multiprocessors beside us, and waits there for our end.
    """
    if CHAINED:
        cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    rows = tl.cdiv(M, BLOCK_M)
    columns = tl.cdiv(N, BLOCK_N)
    tiles = rows * columns
    alone = tl.cdiv(tl.maximum(tiles - shared - program, 0), programs)
    count = alone
    at = count_in(program, LONG)
    end = at
    if SLOTS > 0:
        at = begin_of(count_in(program, LONG), crew, slices)
        end = begin_of(count_in(program + 1, LONG), crew, slices)
        count += ((end - 1) // steps - at // steps + 1).to(tl.int32)
    for turn in range(count):
        tile = shared + program + turn * programs
        first = 0
        last = steps
        if SLOTS > 0:
            mine = turn >= alone
            tile = tl.where(mine, (at // steps).to(tl.int32), tile)
            first = tl.where(mine, (at % steps).to(tl.int32), 0)
            last = tl.where(mine, tl.minimum(first + end - at, steps).to(tl.int32), steps)
            at += tl.where(mine, last - first, 0)
        row, column = place_of(tile, rows, columns, GROUP)
        m0 = row * BLOCK_M
        n0 = column * BLOCK_N
        acc = tile_sum(
            A, B, m0, n0, first, last, M, N, K, a_m, a_k, b_k, b_n, BLOCK_M, BLOCK_N, BLOCK_K,
            DESCRIPTORS, A_TURNED, B_TURNED, WIDE, PRECISION, INTERPRETED,
        )  # fmt: skip
        whole = True
        if SLOTS > 0:
            whole = last - first == steps
        if whole:
            left, right = halves(acc)
            right0 = n0 + BLOCK_N // 2
            if OUT_DESCRIBED:
                _finish_block(left, BIAS, OUT_BLOCKS, KEPT_BLOCKS, m0, n0, N, ACTIVATION, HAS_BIAS, KEEP)
                _finish_block(right, BIAS, OUT_BLOCKS, KEPT_BLOCKS, m0, right0, N, ACTIVATION, HAS_BIAS, KEEP)
            else:
                rows_m = numbers(m0, BLOCK_M, WIDE)
                n_left = numbers(n0, BLOCK_N // 2, WIDE)
                n_right = numbers(right0, BLOCK_N // 2, WIDE)
                _finish(left, BIAS, OUT, KEPT, o_m, rows_m, n_left, M, N, ACTIVATION, HAS_BIAS, KEEP)
                _finish(right, BIAS, OUT, KEPT, o_m, rows_m, n_right, M, N, ACTIVATION, HAS_BIAS, KEEP)
        else:
            slot = program.to(tl.int64) * SLOTS
            if SLOTS == 2:
                slot += first == 0
            inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            tl.store(PARTIALS + slot * (BLOCK_M * BLOCK_N) + inside, acc)


@inner
def _two(part, program, last, APART: tl.constexpr):
    """Parts of a program and the next one, or nothing of those past the last."""
    at = part + program * APART
    this = tl.load(at, mask=program <= last, other=0.0)
    return this, tl.load(at + APART, mask=program < last, other=0.0)


@inner
def owners_of(tile, steps, crew, slices, LONG: tl.constexpr):
    """The first and the last program that have a part of a tile."""
    begin = count_in(tile, LONG) * steps
    return owner_of(begin, crew, slices), owner_of(begin + (steps - 1), crew, slices)


@inner
def sum_of_parts(
    PARTIALS, row0, first, last,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """ROWS of a tile from row0 on, from the parts of programs from the first to the last, AT_ONCE (2, 4, 8) at a time.

    It is in the order of programs.
    """
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    part = PARTIALS + ((row0 + tl.arange(0, ROWS))[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :])
    # who begins a tile has it as its last one, the others as their first
    total = tl.load(part + (first * SLOTS + (SLOTS - 1)) * SIZE)
    for program in range(first + 1, last + 1, AT_ONCE):
        a, b = _two(part, program, last, SLOTS * SIZE)
        if AT_ONCE > 2:
            c, d = _two(part, program + 2, last, SLOTS * SIZE)
        if AT_ONCE > 4:
            e, f = _two(part, program + 4, last, SLOTS * SIZE)
            g, h = _two(part, program + 6, last, SLOTS * SIZE)
        total = total + a + b
        if AT_ONCE > 2:
            total = total + c + d
        if AT_ONCE > 4:
            total = total + e + f + g + h
    return total


@triton.jit(do_not_specialize=["steps", "crew", "slices"])
def add_up(
    BIAS, OUT, KEPT, PARTIALS, M, N, o_m, steps, crew, slices,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr,
    LONG: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, CHAINED: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, KEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """OUT of tiles in parts, ROWS of a tile for each program; AT_ONCE parts (2, 4, 8) are on their way at a time."""
    tile = tl.program_id(0)
    row0 = tl.program_id(1) * ROWS
    first, last = owners_of(tile, steps, crew, slices, LONG)
    if CHAINED:
        cuda.gdc_wait()  # in every program: who comes after this kernel comes after `product` too
    if first < last:  # else one program had all of it
        total = sum_of_parts(PARTIALS, row0, first, last, BLOCK_M, BLOCK_N, SLOTS, ROWS, AT_ONCE)
        row, column = place_of(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
        m = numbers(row * BLOCK_M + row0, ROWS, WIDE)
        n = numbers(column * BLOCK_N, BLOCK_N, WIDE)
        _finish(total, BIAS, OUT, KEPT, o_m, m, n, M, N, ACTIVATION, HAS_BIAS, KEEP)
