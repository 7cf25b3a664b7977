"""Warp-specialized persistent GEMM for Hopper, in Gluon: the same work as `stream_k.gemm`.

One TMA producer warp fills a ring of shared-memory stages; two consumer warpgroups run wgmma, each on one half of a
tile's rows. While the consumers store a tile, the producer already loads blocks of the next one.

Barriers of stage s: `full[s]` completes when TMA has written A and B of the stage (one arrival, plus the bytes that
`expect` announces); `empty[s]` completes when both consumer warpgroups have finished reading it (two arrivals). Waits
take a phase bit: it flips each time the ring wraps around.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from meshflash.gemm import partition
from meshflash.kernels.hopper.common import barriers
from meshflash.kernels.hopper.gluon_compat import copy_block, store_block

first_iter_of_cta = gluon.jit(partition.first_iter_of_cta)
swizzle_tile = gluon.jit(partition.swizzle_tile)

SQRT_HALF = gl.constexpr(0.7071067811865476)


@gluon.jit
def cta_work(tiles, iters_per_tile, ctas_per_group, iters_per_group, num_split_tiles, PARTIALS_PER_CTA: gl.constexpr):
    """Return the work of this CTA: its full tiles, all its segments, and its run [at, end) of split-tile iterations.

    Producer and consumers call this and `next_segment` independently and walk the same segments in the same order.
    """
    cta = gl.program_id(0)
    num_full_tiles = gl.cdiv(gl.maximum(tiles - num_split_tiles - cta, 0), gl.num_programs(0))
    num_segments = num_full_tiles
    at = cta
    end = cta
    if PARTIALS_PER_CTA > 0:
        at = first_iter_of_cta(cta, ctas_per_group, iters_per_group)
        end = first_iter_of_cta(cta + 1, ctas_per_group, iters_per_group)
        num_segments += (end - 1) // iters_per_tile - at // iters_per_tile + 1
    return num_full_tiles, num_segments, at, end


@gluon.jit
def next_segment(segment, num_full_tiles, at, end, iters_per_tile, num_split_tiles, tiles_m, tiles_n,
                 PARTIALS_PER_CTA: gl.constexpr, L2_SWIZZLE: gl.constexpr):  # fmt: skip
    """Return a segment of this CTA: tile, row, column, K iterations first .. last - 1, and the begin of the next."""
    tile = num_split_tiles + gl.program_id(0) + segment * gl.num_programs(0)
    first = segment * 0
    last = iters_per_tile
    if PARTIALS_PER_CTA > 0:
        is_split = segment >= num_full_tiles
        tile = gl.where(is_split, at // iters_per_tile, tile)
        first = gl.where(is_split, at % iters_per_tile, 0)
        last = gl.where(is_split, gl.minimum(first + end - at, iters_per_tile), iters_per_tile)
        at += gl.where(is_split, last - first, 0)
    row, column = swizzle_tile(tile, tiles_m, tiles_n, L2_SWIZZLE)
    return tile, row, column, first, last, at


@gluon.jit
def producer(a, b, smem_a, smem_b, full, empty, tiles_m, tiles_n, iters_per_tile, ctas_per_group, iters_per_group,
             num_split_tiles, HALF_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
             L2_SWIZZLE: gl.constexpr, PARTIALS_PER_CTA: gl.constexpr, STAGES: gl.constexpr,
             A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr):  # fmt: skip
    """Run the TMA producer warp: load the A and B blocks of every K iteration into the next stage of the ring."""
    num_full_tiles, num_segments, at, end = cta_work(
        tiles_m * tiles_n, iters_per_tile, ctas_per_group, iters_per_group, num_split_tiles, PARTIALS_PER_CTA
    )
    loaded = 0  # K iterations so far, over all tiles: stage and phase follow from it
    for segment in range(num_segments):
        _tile, row, column, first, last, at = next_segment(
            segment, num_full_tiles, at, end, iters_per_tile, num_split_tiles, tiles_m, tiles_n, PARTIALS_PER_CTA,
            L2_SWIZZLE,
        )  # fmt: skip
        m0 = row * (2 * HALF_M)
        n0 = column * BLOCK_N
        for k_iter in range(first, last):
            k0 = k_iter * BLOCK_K
            stage = loaded % STAGES
            # the opposite phase lets the first pass through the ring begin without a release by the consumers
            mbarrier.wait(empty.index(stage), ((loaded // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (2 * HALF_M + BLOCK_N) * BLOCK_K * 2)  # bytes, 2 per element
            # each consumer warpgroup has its own block of A and shares the block of B
            for wg in gl.static_range(2):
                if A_TRANSPOSED:
                    copy_block(a, [k0, m0 + wg * HALF_M], full.index(stage), smem_a.index(stage * 2 + wg))
                else:
                    copy_block(a, [m0 + wg * HALF_M, k0], full.index(stage), smem_a.index(stage * 2 + wg))
            if B_TRANSPOSED:
                copy_block(b, [n0, k0], full.index(stage), smem_b.index(stage))
            else:
                copy_block(b, [k0, n0], full.index(stage), smem_b.index(stage))
            loaded += 1


@gluon.jit
def _store(x, desc, buffer, m0, n0):
    """Store columns of a tile by TMA through this warpgroup's shared-memory buffer."""
    tma.store_wait(pendings=0)  # the previous store has read the buffer; this also synchronizes the warpgroup
    buffer.store(x.to(desc.dtype))
    fence_async_shared()  # make the writes visible to the async proxy, by which TMA reads them
    store_block(desc, [m0, n0], buffer)


@gluon.jit
def _epilogue_half(x, BIAS, out, preact, buffer, m0, n0, N, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr,
                   STORE_PREACT: gl.constexpr):  # fmt: skip
    """Add the bias, apply the activation and store one half of a tile's columns."""
    if HAS_BIAS:
        layout: gl.constexpr = gl.SliceLayout(0, x.type.layout)
        n = n0 + gl.arange(0, x.shape[1], layout=layout)
        x += gl.load(BIAS + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
    if STORE_PREACT:
        _store(x, preact, buffer, m0, n0)
    if ACTIVATION == "relu":
        x = gl.where(x < 0, 0.0, x)  # unlike max(x, 0) this keeps NaN
    if ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + gl.erf(x * SQRT_HALF))
    if ACTIVATION == "silu":
        x = x / (1.0 + gl.exp(-x))
    _store(x, out, buffer, m0, n0)


@gluon.jit
def halves(x):
    """Split a tile into the left and the right half of its columns."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def _epilogue(x, BIAS, out, preact, buffer, m0, n0, N, ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr,
              STORE_PREACT: gl.constexpr):  # fmt: skip
    """Run the epilogue of a tile half after half, so that the shared-memory buffer holds half a tile only."""
    HALF: gl.constexpr = x.shape[1] // 2
    left, right = halves(x)
    _epilogue_half(left, BIAS, out, preact, buffer, m0, n0, N, ACTIVATION, HAS_BIAS, STORE_PREACT)
    _epilogue_half(right, BIAS, out, preact, buffer, m0, n0 + HALF, N, ACTIVATION, HAS_BIAS, STORE_PREACT)


@gluon.jit
def mainloop(smem_a, smem_b, full, empty, first, last, consumed, WG_ID: gl.constexpr, HALF_M: gl.constexpr,
             BLOCK_N: gl.constexpr, STAGES: gl.constexpr, A_TRANSPOSED: gl.constexpr,
             B_TRANSPOSED: gl.constexpr):  # fmt: skip
    """Run K iterations first .. last - 1 of one consumer warpgroup; return the accumulator and the stages consumed."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros([HALF_M, BLOCK_N], gl.float32, LAYOUT)
    for k_iter in range(first, last):
        stage = consumed % STAGES
        mbarrier.wait(full.index(stage), (consumed // STAGES) & 1)
        a = smem_a.index(stage * 2 + WG_ID)
        b = smem_b.index(stage)
        if A_TRANSPOSED:
            a = a.permute((1, 0))
        if B_TRANSPOSED:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a, b, acc, is_async=True)
        # one wgmma stays in flight; the one before it has finished, so its stage goes back to the producer
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(empty.index((consumed + STAGES - 1) % STAGES), count=1, pred=k_iter > first)
        consumed += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index((consumed + STAGES - 1) % STAGES), count=1)  # release the last stage
    return acc, consumed


@gluon.jit
def store_partial(acc, PARTIALS, first, WG_ID: gl.constexpr, PARTIALS_PER_CTA: gl.constexpr):
    """Store this warpgroup's half of a partial tile whose run begins at K iteration `first`; slots as in `stream_k`."""
    HALF_M: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    slot = gl.program_id(0).to(gl.int64) * PARTIALS_PER_CTA
    if PARTIALS_PER_CTA == 2:
        slot += first == 0
    layout: gl.constexpr = acc.type.layout
    m = WG_ID * HALF_M + gl.arange(0, HALF_M, layout=gl.SliceLayout(1, layout))
    n = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    gl.store(PARTIALS + slot * (2 * HALF_M * WIDTH) + m[:, None] * WIDTH + n[None, :], acc)


@gluon.jit
def _consumer(BIAS, out, preact, PARTIALS, smem_a, smem_b, smem_out, full, empty, N, tiles_m, tiles_n, iters_per_tile,
              ctas_per_group, iters_per_group, num_split_tiles, WG_ID: gl.constexpr, HALF_M: gl.constexpr,
              BLOCK_N: gl.constexpr, L2_SWIZZLE: gl.constexpr, PARTIALS_PER_CTA: gl.constexpr, STAGES: gl.constexpr,
              A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr,
              HAS_BIAS: gl.constexpr, STORE_PREACT: gl.constexpr):  # fmt: skip
    """Run one consumer warpgroup: half the rows of every tile, main loop and epilogue."""
    num_full_tiles, num_segments, at, end = cta_work(
        tiles_m * tiles_n, iters_per_tile, ctas_per_group, iters_per_group, num_split_tiles, PARTIALS_PER_CTA
    )
    consumed = 0
    for segment in range(num_segments):
        _tile, row, column, first, last, at = next_segment(
            segment, num_full_tiles, at, end, iters_per_tile, num_split_tiles, tiles_m, tiles_n, PARTIALS_PER_CTA,
            L2_SWIZZLE,
        )  # fmt: skip
        acc, consumed = mainloop(smem_a, smem_b, full, empty, first, last, consumed, WG_ID, HALF_M, BLOCK_N, STAGES,
                                 A_TRANSPOSED, B_TRANSPOSED)  # fmt: skip
        m0 = row * (2 * HALF_M) + WG_ID * HALF_M
        n0 = column * BLOCK_N
        if PARTIALS_PER_CTA > 0:
            if last - first < iters_per_tile:
                store_partial(acc, PARTIALS, first, WG_ID, PARTIALS_PER_CTA)
            else:
                _epilogue(acc, BIAS, out, preact, smem_out.index(WG_ID), m0, n0, N, ACTIVATION, HAS_BIAS, STORE_PREACT)
        else:
            _epilogue(acc, BIAS, out, preact, smem_out.index(WG_ID), m0, n0, N, ACTIVATION, HAS_BIAS, STORE_PREACT)
    tma.store_wait(pendings=0)  # shared memory must outlive the last store


@gluon.jit(do_not_specialize=["iters_per_tile", "ctas_per_group", "iters_per_group", "num_split_tiles"])
def gemm(a, b, BIAS, out, preact, PARTIALS, M, N, iters_per_tile, ctas_per_group, iters_per_group, num_split_tiles,
         BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, L2_SWIZZLE: gl.constexpr,
         PARTIALS_PER_CTA: gl.constexpr, STAGES: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr,
         ACTIVATION: gl.constexpr, HAS_BIAS: gl.constexpr, STORE_PREACT: gl.constexpr, USE_PDL: gl.constexpr,
         CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr):  # fmt: skip
    """Compute what `stream_k.gemm` computes, with operands and results given as TMA descriptors."""
    HALF_M: gl.constexpr = BLOCK_M // 2
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    if USE_PDL:  # Gluon has no function for it
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    smem_a = gl.allocate_shared_memory(a.dtype, [2 * STAGES, a.block_type.shape[0], a.block_type.shape[1]], a.layout)
    smem_b = gl.allocate_shared_memory(b.dtype, [STAGES, b.block_type.shape[0], b.block_type.shape[1]], b.layout)
    smem_out = gl.allocate_shared_memory(out.dtype, [2, HALF_M, BLOCK_N // 2], out.layout)
    full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
    fence_async_shared()  # TMA must see initialized barriers
    # the first entry runs on the launched warps; the lists give warps and registers of the two others
    gl.warp_specialize([
        (_consumer, (BIAS, out, preact, PARTIALS, smem_a, smem_b, smem_out, full, empty, N, tiles_m, tiles_n,
                     iters_per_tile, ctas_per_group, iters_per_group, num_split_tiles, FIRST, HALF_M, BLOCK_N,
                     L2_SWIZZLE, PARTIALS_PER_CTA, STAGES, A_TRANSPOSED, B_TRANSPOSED, ACTIVATION, HAS_BIAS,
                     STORE_PREACT)),
        (_consumer, (BIAS, out, preact, PARTIALS, smem_a, smem_b, smem_out, full, empty, N, tiles_m, tiles_n,
                     iters_per_tile, ctas_per_group, iters_per_group, num_split_tiles, SECOND, HALF_M, BLOCK_N,
                     L2_SWIZZLE, PARTIALS_PER_CTA, STAGES, A_TRANSPOSED, B_TRANSPOSED, ACTIVATION, HAS_BIAS,
                     STORE_PREACT)),
        (producer, (a, b, smem_a, smem_b, full, empty, tiles_m, tiles_n, iters_per_tile, ctas_per_group,
                    iters_per_group, num_split_tiles, HALF_M, BLOCK_N, BLOCK_K, L2_SWIZZLE, PARTIALS_PER_CTA, STAGES,
                    A_TRANSPOSED, B_TRANSPOSED)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
