"""Persistent GEMM in Triton: data-parallel, Stream-K and split-K, with bias and activation in the epilogue.

`partition.py` decides which CTA runs which K iterations; the kernels compile its functions. A CTA that has all
iterations of a tile runs the epilogue itself. A CTA that has only some of them stores a partial tile to the workspace.
`combine` runs after `gemm` on all SMs and adds the partial tiles of each split tile in CTA order. No CTA waits for
another inside a kernel, so CTAs need not be co-resident, and every run gives the same bits. Accumulators are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from meshflash.gemm import partition
from meshflash.kernels.triton import common as triton_common
from meshflash.kernels.triton.common import INTERPRETED

#: Decorator of functions that kernels call. Under the interpreter they stay plain Python: there a call of a jitted
#: function takes milliseconds, and the interpreter rejects functions whose module does not import Triton.
device_function = (lambda function: function) if INTERPRETED else triton.jit
first_iter_of_cta = device_function(partition.first_iter_of_cta)
cta_of_iter = device_function(partition.cta_of_iter)
swizzle_tile = device_function(partition.swizzle_tile)
dot = triton_common.dot.fn if INTERPRETED else triton_common.dot

SQRT_HALF = tl.constexpr(0.7071067811865476)


@device_function
def offsets(first, COUNT: tl.constexpr, INT64_OFFSETS: tl.constexpr):
    """Return COUNT consecutive indices, in int64 where element offsets exceed int32."""
    offsets = first + tl.arange(0, COUNT)
    if INT64_OFFSETS:
        offsets = offsets.to(tl.int64)
    return offsets


@device_function
def iter_type(count, INT64_ITERS: tl.constexpr):
    """Cast to the type that counts K iterations: int64 only where needed, since its divisions are slow on a GPU."""
    if INT64_ITERS:
        count = count.to(tl.int64)
    return count


@device_function
def tile_sum(
    A, B, m0, n0, first, last, M, N, K, a_m, a_k, b_k, b_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    USE_TMA: tl.constexpr, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    INT64_OFFSETS: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Run the main loop of the tile at row m0 and column n0, over K iterations first .. last - 1; float32."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if USE_TMA:
        for k_iter in range(first, last):
            k0 = k_iter * BLOCK_K
            if A_TRANSPOSED:  # noqa: SIM108 - a branch on a constant is pruned when compiled, a ternary is not
                a = A.load([k0, m0]).T
            else:
                a = A.load([m0, k0])
            if B_TRANSPOSED:  # noqa: SIM108
                b = B.load([n0, k0]).T
            else:
                b = B.load([k0, n0])
            acc = dot(a, b, acc, PRECISION, INTERPRETED)
    else:
        m = offsets(m0, BLOCK_M, INT64_OFFSETS)
        n = offsets(n0, BLOCK_N, INT64_OFFSETS)
        a_at = A + m[:, None] * a_m
        b_at = B + n[None, :] * b_n
        for k_iter in range(first, last):
            k = offsets(k_iter * BLOCK_K, BLOCK_K, INT64_OFFSETS)
            a = tl.load(a_at + k[None, :] * a_k, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
            b = tl.load(b_at + k[:, None] * b_k, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
            acc = dot(a, b, acc, PRECISION, INTERPRETED)
    return acc


@device_function
def halves(acc):
    """Split into left and right columns; stored one after the other they need half the shared memory and registers."""
    return tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2)), (0, 2, 1)))


@device_function
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        x = tl.where(x < 0, 0.0, x)  # NaN stays
    if ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.math.erf(x * SQRT_HALF))
    if ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    return x


@device_function
def _epilogue(
    acc, BIAS, OUT, PREACT, o_m, m, n, M, N,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_PREACT: tl.constexpr,
):  # fmt: skip
    """Add the bias, store the pre-activation if STORE_PREACT, apply the activation, store rows m and columns n."""
    there = (m[:, None] < M) & (n[None, :] < N)
    if HAS_BIAS:
        acc += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = m[:, None] * o_m + n[None, :]
    if STORE_PREACT:
        tl.store(PREACT + at, acc.to(PREACT.dtype.element_ty), mask=there)
    tl.store(OUT + at, _activate(acc, ACTIVATION).to(OUT.dtype.element_ty), mask=there)


@device_function
def _epilogue_tma(
    acc, BIAS, OUT_DESC, PREACT_DESC, m0, n0, N,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_PREACT: tl.constexpr,
):  # fmt: skip
    """Run the same epilogue on a block that TMA stores; TMA clips it at the edges of the output."""
    if HAS_BIAS:
        n = n0 + tl.arange(0, acc.shape[1])
        acc += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if STORE_PREACT:
        PREACT_DESC.store([m0, n0], acc.to(PREACT_DESC.dtype))
    OUT_DESC.store([m0, n0], _activate(acc, ACTIVATION).to(OUT_DESC.dtype))


@triton.jit(do_not_specialize=["iters_per_tile", "ctas_per_group", "iters_per_group", "num_split_tiles"])
def gemm(
    A, B, BIAS, OUT, OUT_DESC, PREACT, PREACT_DESC, PARTIALS,
    M, N, K, a_m, a_k, b_k, b_n, o_m, iters_per_tile, ctas_per_group, iters_per_group, num_split_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, L2_SWIZZLE: tl.constexpr,
    PARTIALS_PER_CTA: tl.constexpr, INT64_ITERS: tl.constexpr,
    USE_TMA: tl.constexpr, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, OUT_TMA: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_PREACT: tl.constexpr,
    INT64_OFFSETS: tl.constexpr, PRECISION: tl.constexpr, USE_PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Compute OUT = activation(A B + BIAS) for full tiles, and store partial sums of split tiles to PARTIALS.

    A CTA runs its segments (see `Partition.segments`) one after another. With USE_TMA, A and B are tensor descriptors,
    and a TRANSPOSED operand is described by its transpose. PARTIALS_PER_CTA is 0 where no tile is split. With USE_PDL,
    `combine` is launched by programmatic dependent launch and becomes resident while this kernel still runs.
    """
    if USE_PDL:
        cuda.gdc_launch_dependents()  # at once: `combine` waits for the end of this grid by itself
    cta = tl.program_id(0)
    num_ctas = tl.num_programs(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    # full tiles come first, then this CTA's run [at, end) of the iterations of split tiles
    num_full_tiles = tl.cdiv(tl.maximum(tiles - num_split_tiles - cta, 0), num_ctas)
    num_segments = num_full_tiles
    at = iter_type(cta, INT64_ITERS)
    end = at
    if PARTIALS_PER_CTA > 0:
        at = first_iter_of_cta(iter_type(cta, INT64_ITERS), ctas_per_group, iters_per_group)
        end = first_iter_of_cta(iter_type(cta + 1, INT64_ITERS), ctas_per_group, iters_per_group)
        num_segments += ((end - 1) // iters_per_tile - at // iters_per_tile + 1).to(tl.int32)
    for segment in range(num_segments):
        tile = num_split_tiles + cta + segment * num_ctas
        first = 0
        last = iters_per_tile
        if PARTIALS_PER_CTA > 0:
            # selects instead of a branch: one loop body serves full and split tiles, with one copy of the main loop
            is_split = segment >= num_full_tiles
            tile = tl.where(is_split, (at // iters_per_tile).to(tl.int32), tile)
            first = tl.where(is_split, (at % iters_per_tile).to(tl.int32), 0)
            last = tl.where(is_split, tl.minimum(first + end - at, iters_per_tile).to(tl.int32), iters_per_tile)
            at += tl.where(is_split, last - first, 0)
        row, column = swizzle_tile(tile, tiles_m, tiles_n, L2_SWIZZLE)
        m0 = row * BLOCK_M
        n0 = column * BLOCK_N
        acc = tile_sum(
            A, B, m0, n0, first, last, M, N, K, a_m, a_k, b_k, b_n, BLOCK_M, BLOCK_N, BLOCK_K,
            USE_TMA, A_TRANSPOSED, B_TRANSPOSED, INT64_OFFSETS, PRECISION, INTERPRETED,
        )  # fmt: skip
        is_complete = True
        if PARTIALS_PER_CTA > 0:
            is_complete = last - first == iters_per_tile  # a run may cover a split tile from begin to end
        if is_complete:
            left, right = halves(acc)
            right0 = n0 + BLOCK_N // 2
            if OUT_TMA:
                _epilogue_tma(left, BIAS, OUT_DESC, PREACT_DESC, m0, n0, N, ACTIVATION, HAS_BIAS, STORE_PREACT)
                _epilogue_tma(right, BIAS, OUT_DESC, PREACT_DESC, m0, right0, N, ACTIVATION, HAS_BIAS, STORE_PREACT)
            else:
                rows_m = offsets(m0, BLOCK_M, INT64_OFFSETS)
                n_left = offsets(n0, BLOCK_N // 2, INT64_OFFSETS)
                n_right = offsets(right0, BLOCK_N // 2, INT64_OFFSETS)
                _epilogue(left, BIAS, OUT, PREACT, o_m, rows_m, n_left, M, N, ACTIVATION, HAS_BIAS, STORE_PREACT)
                _epilogue(right, BIAS, OUT, PREACT, o_m, rows_m, n_right, M, N, ACTIVATION, HAS_BIAS, STORE_PREACT)
        else:
            # a CTA can hold two partial tiles: slot 0 is the tile its run ends a predecessor's work on, slot 1 the
            # tile it begins (first == 0); `sum_partials` relies on this order
            slot = cta.to(tl.int64) * PARTIALS_PER_CTA
            if PARTIALS_PER_CTA == 2:
                slot += first == 0
            inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            tl.store(PARTIALS + slot * (BLOCK_M * BLOCK_N) + inside, acc)


@device_function
def _load_two(part, cta, last, STRIDE: tl.constexpr):
    """Load the partial tiles of a CTA and of the next one; zeros past the last CTA."""
    at = part + cta * STRIDE
    # masks are blocks: the interpreter of Triton 3.9 refuses scalar ones
    index = tl.full([1, 1], cta, tl.int32)
    this = tl.load(at, mask=index <= last, other=0.0)
    return this, tl.load(at + STRIDE, mask=index < last, other=0.0)


@device_function
def ctas_of_tile(tile, iters_per_tile, ctas_per_group, iters_per_group, INT64_ITERS: tl.constexpr):
    """Return the first and the last CTA that run K iterations of a tile."""
    begin = iter_type(tile, INT64_ITERS) * iters_per_tile
    first = cta_of_iter(begin, ctas_per_group, iters_per_group)
    return first, cta_of_iter(begin + (iters_per_tile - 1), ctas_per_group, iters_per_group)


@device_function
def sum_partials(
    PARTIALS, row0, first, last,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTIALS_PER_CTA: tl.constexpr, ROWS: tl.constexpr,
    LOADS_IN_FLIGHT: tl.constexpr,
):  # fmt: skip
    """Add ROWS rows of a tile from row0 on, over the partial tiles of CTAs first .. last, in CTA order.

    LOADS_IN_FLIGHT (2, 4 or 8) partial tiles are loaded before they are added, to overlap the latencies of the loads.
    The order of the additions does not depend on it.
    """
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    part = PARTIALS + ((row0 + tl.arange(0, ROWS))[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :])
    # the CTA that begins a tile keeps it in its last slot, every later CTA in its first: see `gemm`
    total = tl.load(part + (first * PARTIALS_PER_CTA + (PARTIALS_PER_CTA - 1)) * SIZE)
    for cta in range(first + 1, last + 1, LOADS_IN_FLIGHT):
        a, b = _load_two(part, cta, last, PARTIALS_PER_CTA * SIZE)
        if LOADS_IN_FLIGHT > 2:
            c, d = _load_two(part, cta + 2, last, PARTIALS_PER_CTA * SIZE)
        if LOADS_IN_FLIGHT > 4:
            e, f = _load_two(part, cta + 4, last, PARTIALS_PER_CTA * SIZE)
            g, h = _load_two(part, cta + 6, last, PARTIALS_PER_CTA * SIZE)
        total = total + a + b
        if LOADS_IN_FLIGHT > 2:
            total = total + c + d
        if LOADS_IN_FLIGHT > 4:
            total = total + e + f + g + h
    return total


@triton.jit(do_not_specialize=["iters_per_tile", "ctas_per_group", "iters_per_group"])
def combine(
    BIAS, OUT, PREACT, PARTIALS, M, N, o_m, iters_per_tile, ctas_per_group, iters_per_group,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, L2_SWIZZLE: tl.constexpr, PARTIALS_PER_CTA: tl.constexpr,
    INT64_ITERS: tl.constexpr, ROWS: tl.constexpr, LOADS_IN_FLIGHT: tl.constexpr, USE_PDL: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_PREACT: tl.constexpr, INT64_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Compute OUT of split tiles from their partial sums; each CTA has ROWS rows of one tile.

    The grid is (split tiles, BLOCK_M / ROWS): every SM takes part, where a reduction by the last CTA of a tile would
    leave most of them idle.
    """
    tile = tl.program_id(0)
    row0 = tl.program_id(1) * ROWS
    first, last = ctas_of_tile(tile, iters_per_tile, ctas_per_group, iters_per_group, INT64_ITERS)
    if USE_PDL:
        # wait for the end of `gemm`, in every CTA: a kernel after this one must also come after `gemm`
        cuda.gdc_wait()
    if first < last:  # a tile that one CTA has completed alone is in OUT already
        total = sum_partials(PARTIALS, row0, first, last, BLOCK_M, BLOCK_N, PARTIALS_PER_CTA, ROWS, LOADS_IN_FLIGHT)
        row, column = swizzle_tile(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), L2_SWIZZLE)
        m = offsets(row * BLOCK_M + row0, ROWS, INT64_OFFSETS)
        n = offsets(column * BLOCK_N, BLOCK_N, INT64_OFFSETS)
        _epilogue(total, BIAS, OUT, PREACT, o_m, m, n, M, N, ACTIVATION, HAS_BIAS, STORE_PREACT)
