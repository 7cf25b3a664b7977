"""Warp-specialized GEMM + all-gather of output columns ("all_scatter") for Hopper, in Gluon.

As in `hopper.py`, one TMA producer warp loads and two consumer warpgroups compute. One more warp sends: it stores every
finished half tile from shared memory into the output matrix of each rank by TMA and raises the ranks' arrival counters,
while the consumers already work on the next tile. Consumers wait only if all output buffers are still being sent.

Split tiles go to the workspace as partial sums; `fused.send_split_tiles` adds and sends them. The plain version of this
kernel is `fused.send` with TO = "matrix".
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from meshflash.gemm.kernels.hopper import cta_work, halves, mainloop, next_segment, producer, store_partial
from meshflash.kernels.hopper.common import barriers
from meshflash.kernels.hopper.gluon_compat import partition_barrier, store_block


@gluon.jit
def _flag_on_all_ranks(flag, BASES, rank, WORLD: gl.constexpr):
    """Return pointers to one flag of ours on every rank, one per lane of a warp, and a mask of ranks that exist.

    Heaps are symmetric: the flag lies at the same offset from each rank's base address.
    """
    peers = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    BYTES: gl.constexpr = flag.dtype.element_ty.primitive_bitwidth // 8
    exists = peers < WORLD
    distance = (gl.load(BASES + peers, mask=exists, other=0) - gl.load(BASES + rank)) // BYTES
    return flag + distance, exists


@gluon.jit
def _wait_stores_visible():
    """Wait until all TMA stores of this warp have reached their ranks.

    `tma.store_wait` only waits until TMA has read shared memory. The fence orders these stores, which go through the
    async proxy, before the flags, which do not: without it a peer could see the flag before the tile.
    """
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1
    )
    partition_barrier()


@gluon.jit
def _globaltimer():
    """Return the time of this GPU in nanoseconds."""
    return gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], gl.int64, False, 1)


@gluon.jit
def _consumer(PARTIALS, smem_a, smem_b, smem_out, full, empty, written, sent, tiles_m, tiles_n, iters_per_tile,
              ctas_per_group, iters_per_group, num_split_tiles, WG_ID: gl.constexpr, HALF_M: gl.constexpr,
              BLOCK_N: gl.constexpr, L2_SWIZZLE: gl.constexpr, PARTIALS_PER_CTA: gl.constexpr, STAGES: gl.constexpr,
              OUT_BUFFERS: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr):  # fmt: skip
    """Run one consumer warpgroup: half the rows of every tile, handed to the sender as left and right columns."""
    num_full_tiles, num_segments, at, end = cta_work(
        tiles_m * tiles_n, iters_per_tile, ctas_per_group, iters_per_group, num_split_tiles, PARTIALS_PER_CTA
    )
    consumed = 0
    stored = 0  # halves handed to the sender so far: buffer and phase follow from it
    for segment in range(num_segments):
        _tile, _row, _column, first, last, at = next_segment(
            segment, num_full_tiles, at, end, iters_per_tile, num_split_tiles, tiles_m, tiles_n, PARTIALS_PER_CTA,
            L2_SWIZZLE,
        )  # fmt: skip
        acc, consumed = mainloop(smem_a, smem_b, full, empty, first, last, consumed, WG_ID, HALF_M, BLOCK_N, STAGES,
                                 A_TRANSPOSED, B_TRANSPOSED)  # fmt: skip
        if last - first < iters_per_tile:
            if PARTIALS_PER_CTA > 0:
                store_partial(acc, PARTIALS, first, WG_ID, PARTIALS_PER_CTA)
        else:
            left, right = halves(acc)
            for side in gl.static_range(2):
                buffer = stored % OUT_BUFFERS * 2 + WG_ID
                # wait until the sender has read what this buffer held before
                mbarrier.wait(sent.index(buffer), ((stored // OUT_BUFFERS) & 1) ^ 1)
                if side == 0:
                    smem_out.index(buffer).store(left.to(smem_out.dtype))
                else:
                    smem_out.index(buffer).store(right.to(smem_out.dtype))
                fence_async_shared()  # TMA reads the buffer through the async proxy
                mbarrier.arrive(written.index(buffer), count=1)
                stored += 1


@gluon.jit
def _sender(outs, BEGUN, ARRIVED, TIMES, BASES, smem_out, written, sent, rank, epoch, tiles_m, tiles_n, iters_per_tile,
            ctas_per_group, iters_per_group, num_split_tiles, HALF_M: gl.constexpr, BLOCK_N: gl.constexpr,
            L2_SWIZZLE: gl.constexpr, PARTIALS_PER_CTA: gl.constexpr, OUT_BUFFERS: gl.constexpr, WORLD: gl.constexpr,
            ARRIVALS: gl.constexpr, TIMED: gl.constexpr):  # fmt: skip
    """Run the sender warp: announce the call as `fused.send` does, then store each full tile to every rank.

    It waits for the consumers and for its own stores, never for another rank.
    """
    # the last CTA to start announces the call: see `fused._announce_start`
    if gl.atomic_add(BEGUN + WORLD, 1) == gl.num_programs(0) - 1:
        gl.store(BEGUN + WORLD, 0)
        flags, exists = _flag_on_all_ranks(BEGUN + rank, BASES, rank, WORLD)
        epochs = gl.full([32], epoch, gl.int32, flags.type.layout)
        gl.atomic_xchg(flags, epochs, mask=exists, sem="release", scope="sys")
    num_full_tiles, num_segments, at, end = cta_work(
        tiles_m * tiles_n, iters_per_tile, ctas_per_group, iters_per_group, num_split_tiles, PARTIALS_PER_CTA
    )
    done = 0  # pairs of halves sent so far, one from each consumer warpgroup
    for segment in range(num_segments):
        tile, row, column, first, last, at = next_segment(
            segment, num_full_tiles, at, end, iters_per_tile, num_split_tiles, tiles_m, tiles_n, PARTIALS_PER_CTA,
            L2_SWIZZLE,
        )  # fmt: skip
        if last - first == iters_per_tile:
            for side in gl.static_range(2):
                buffer = done % OUT_BUFFERS * 2
                for wg in gl.static_range(2):
                    mbarrier.wait(written.index(buffer + wg), (done // OUT_BUFFERS) & 1)
                    m0 = (row * 2 + wg) * HALF_M
                    n0 = column * BLOCK_N + side * (BLOCK_N // 2)
                    for peer in gl.static_range(WORLD):
                        store_block(outs[peer], [m0, n0], smem_out.index(buffer + wg))
                if TIMED and side == 1:
                    gl.store(TIMES + tile * 3, _globaltimer())
                # stores complete in order: WORLD of the first warpgroup, then WORLD of the second
                for wg in gl.static_range(2):
                    tma.store_wait(pendings=(1 - wg) * WORLD)
                    mbarrier.arrive(sent.index(buffer + wg), count=1)
                done += 1
            _wait_stores_visible()
            flags, exists = _flag_on_all_ranks(ARRIVED + rank, BASES, rank, WORLD)
            arrivals = gl.full([32], ARRIVALS, gl.int64, flags.type.layout)
            gl.atomic_add(flags, arrivals, mask=exists, sem="release", scope="sys")
            if TIMED:
                gl.store(TIMES + tile * 3 + 1, _globaltimer())


@gluon.jit(do_not_specialize=["rank", "epoch", "M", "N", "iters_per_tile", "ctas_per_group", "iters_per_group",
                              "num_split_tiles"])  # fmt: skip
def send(a, b, out0, out1, out2, out3, out4, out5, out6, out7, PARTIALS, BEGUN, ARRIVED, TIMES, BASES, rank, epoch, M,
         N, iters_per_tile, ctas_per_group, iters_per_group, num_split_tiles, BLOCK_M: gl.constexpr,
         BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, L2_SWIZZLE: gl.constexpr, PARTIALS_PER_CTA: gl.constexpr,
         STAGES: gl.constexpr, OUT_BUFFERS: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr,
         WORLD: gl.constexpr, ARRIVALS: gl.constexpr, TIMED: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
         PRODUCER_REGISTERS: gl.constexpr):  # fmt: skip
    """Compute A B, store its full tiles to the output matrices of all ranks, and add ARRIVALS to their counters.

    out0 .. out7 describe this rank's columns in the matrices of the ranks, in the order in which they are stored to;
    None fills up the rest. OUT_BUFFERS (1 or 2) shared-memory buffers hold half tiles that wait to be sent. The
    partition is that of `stream_k.gemm`.
    """
    HALF_M: gl.constexpr = BLOCK_M // 2
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    outs = (out0, out1, out2, out3, out4, out5, out6, out7)
    smem_a = gl.allocate_shared_memory(a.dtype, [2 * STAGES, a.block_type.shape[0], a.block_type.shape[1]], a.layout)
    smem_b = gl.allocate_shared_memory(b.dtype, [STAGES, b.block_type.shape[0], b.block_type.shape[1]], b.layout)
    smem_out = gl.allocate_shared_memory(out0.dtype, [2 * OUT_BUFFERS, HALF_M, BLOCK_N // 2], out0.layout)
    full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
    # of each output buffer: a consumer has written it, the sender has read it
    written, sent = barriers(2 * OUT_BUFFERS, 1), barriers(2 * OUT_BUFFERS, 1)
    fence_async_shared()
    gl.warp_specialize([
        (_consumer, (PARTIALS, smem_a, smem_b, smem_out, full, empty, written, sent, tiles_m, tiles_n, iters_per_tile,
                     ctas_per_group, iters_per_group, num_split_tiles, FIRST, HALF_M, BLOCK_N, L2_SWIZZLE,
                     PARTIALS_PER_CTA, STAGES, OUT_BUFFERS, A_TRANSPOSED, B_TRANSPOSED)),
        (_consumer, (PARTIALS, smem_a, smem_b, smem_out, full, empty, written, sent, tiles_m, tiles_n, iters_per_tile,
                     ctas_per_group, iters_per_group, num_split_tiles, SECOND, HALF_M, BLOCK_N, L2_SWIZZLE,
                     PARTIALS_PER_CTA, STAGES, OUT_BUFFERS, A_TRANSPOSED, B_TRANSPOSED)),
        (producer, (a, b, smem_a, smem_b, full, empty, tiles_m, tiles_n, iters_per_tile, ctas_per_group,
                    iters_per_group, num_split_tiles, HALF_M, BLOCK_N, BLOCK_K, L2_SWIZZLE, PARTIALS_PER_CTA, STAGES,
                    A_TRANSPOSED, B_TRANSPOSED)),
        (_sender, (outs, BEGUN, ARRIVED, TIMES, BASES, smem_out, written, sent, rank, epoch, tiles_m, tiles_n,
                   iters_per_tile, ctas_per_group, iters_per_group, num_split_tiles, HALF_M, BLOCK_N, L2_SWIZZLE,
                   PARTIALS_PER_CTA, OUT_BUFFERS, WORLD, ARRIVALS, TIMED)),
    ], [4, 1, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
