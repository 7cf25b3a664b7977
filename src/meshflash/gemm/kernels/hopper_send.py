"""The product whose tiles go to all ranks, in Gluon for Hopper: `fused_kernels.send` of an all_scatter's epilogue.

As in `gluon_product`, a warp copies and two groups of warps multiply, each half of a tile's rows. One more warp sends:
it stores what they left in shared memory to the matrix of every rank, and tells all when it is there, while they go on.
Tiles in parts, as Stream-K has them, go to the workspace; `fused_kernels.send_sums` adds them up and sends them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from meshflash.gemm.kernels.hopper import copy, halves, segment_of, share_of, store_part, sum_of
from meshflash.kernels.hopper.common import barriers, store_block

#: Of all threads of a group; renamed in Triton 3.7.
together = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _everywhere(flag, BASES, rank, WORLD: gl.constexpr):
    """A flag of ours at all ranks, one for each thread of a warp, and which of them there are."""
    peers = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    WIDTH: gl.constexpr = flag.dtype.element_ty.primitive_bitwidth // 8
    there = peers < WORLD
    apart = (gl.load(BASES + peers, mask=there, other=0) - gl.load(BASES + rank)) // WIDTH
    return flag + apart, there


@gluon.jit
def _all_there():
    """Wait until all that this warp stored is at its ranks, where `tma.store_wait` only waits till it was read.

    Stores of blocks go another way to memory than flags: the fence keeps them in order.
    """
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1
    )
    together()


@gluon.jit
def _now():
    """Nanoseconds."""
    return gl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], gl.int64, False, 1)


@gluon.jit
def _multiply(PARTIALS, a_room, b_room, out_room, full, empty, written, read, rows, columns, steps, crew, slices,
              shared, WHICH: gl.constexpr, HALF_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr,
              SLOTS: gl.constexpr, STAGES: gl.constexpr, ROOMS: gl.constexpr, A_TURNED: gl.constexpr,
              B_TURNED: gl.constexpr):  # fmt: skip
    """A group of warps that multiplies: one half of the rows of each tile, left and right half of its columns."""
    alone, count, at, end = share_of(rows * columns, steps, crew, slices, shared, SLOTS)
    done = 0
    put = 0
    for turn in range(count):
        _tile, _row, _column, first, last, at = segment_of(
            turn, alone, at, end, steps, shared, rows, columns, SLOTS, GROUP
        )
        acc, done = sum_of(a_room, b_room, full, empty, first, last, done, WHICH, HALF_M, BLOCK_N, STAGES, A_TURNED,
                           B_TURNED)  # fmt: skip
        if last - first < steps:
            if SLOTS > 0:
                store_part(acc, PARTIALS, first, WHICH, SLOTS)
        else:
            left, right = halves(acc)
            for side in gl.static_range(2):
                room = put % ROOMS * 2 + WHICH
                mbarrier.wait(read.index(room), ((put // ROOMS) & 1) ^ 1)
                if side == 0:
                    out_room.index(room).store(left.to(out_room.dtype))
                else:
                    out_room.index(room).store(right.to(out_room.dtype))
                fence_async_shared()
                mbarrier.arrive(written.index(room), count=1)
                put += 1


@gluon.jit
def _send(outs, BEGUN, ARRIVED, TIMES, BASES, out_room, written, read, rank, epoch, rows, columns, steps, crew, slices,
          shared, HALF_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, SLOTS: gl.constexpr,
          ROOMS: gl.constexpr, WORLD: gl.constexpr, PIECES: gl.constexpr, TIMED: gl.constexpr):  # fmt: skip
    """The warp that sends. It begins the call as `fused_kernels.send` does, and waits for its own stores alone."""
    if gl.atomic_add(BEGUN + WORLD, 1) == gl.num_programs(0) - 1:
        gl.store(BEGUN + WORLD, 0)
        flags, there = _everywhere(BEGUN + rank, BASES, rank, WORLD)
        epochs = gl.full([32], epoch, gl.int32, flags.type.layout)
        gl.atomic_xchg(flags, epochs, mask=there, sem="release", scope="sys")
    alone, count, at, end = share_of(rows * columns, steps, crew, slices, shared, SLOTS)
    done = 0
    for turn in range(count):
        tile, row, column, first, last, at = segment_of(
            turn, alone, at, end, steps, shared, rows, columns, SLOTS, GROUP
        )
        if last - first == steps:
            for side in gl.static_range(2):
                room = done % ROOMS * 2
                for which in gl.static_range(2):
                    mbarrier.wait(written.index(room + which), (done // ROOMS) & 1)
                    m0 = (row * 2 + which) * HALF_M
                    n0 = column * BLOCK_N + side * (BLOCK_N // 2)
                    for peer in gl.static_range(WORLD):
                        store_block(outs[peer], [m0, n0], out_room.index(room + which))
                if TIMED and side == 1:
                    gl.store(TIMES + tile * 3, _now())
                for which in gl.static_range(2):
                    tma.store_wait(pendings=(1 - which) * WORLD)
                    mbarrier.arrive(read.index(room + which), count=1)
                done += 1
            _all_there()
            flags, there = _everywhere(ARRIVED + rank, BASES, rank, WORLD)
            pieces = gl.full([32], PIECES, gl.int64, flags.type.layout)
            gl.atomic_add(flags, pieces, mask=there, sem="release", scope="sys")
            if TIMED:
                gl.store(TIMES + tile * 3 + 1, _now())


@gluon.jit(do_not_specialize=["rank", "epoch", "M", "N", "steps", "crew", "slices", "shared"])
def send(a, b, out0, out1, out2, out3, out4, out5, out6, out7, PARTIALS, BEGUN, ARRIVED, TIMES, BASES, rank, epoch, M,
         N, steps, crew, slices, shared, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
         GROUP: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, ROOMS: gl.constexpr, A_TURNED: gl.constexpr,
         B_TURNED: gl.constexpr, WORLD: gl.constexpr, PIECES: gl.constexpr, TIMED: gl.constexpr,
         COMPUTE_REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr):  # fmt: skip
    """Put the whole tiles of A B to the matrices of all ranks, and count each at all of them as PIECES.

    Descriptors of the matrices come in the order in which they are stored to, with None for ranks that there are not.
    Halves of a tile's columns take turns in ROOMS of shared memory, 1 or 2. Shares are as in `stream_k.product`.
    """
    HALF_M: gl.constexpr = BLOCK_M // 2
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    rows = gl.cdiv(M, BLOCK_M)
    columns = gl.cdiv(N, BLOCK_N)
    outs = (out0, out1, out2, out3, out4, out5, out6, out7)
    a_room = gl.allocate_shared_memory(a.dtype, [2 * STAGES, a.block_type.shape[0], a.block_type.shape[1]], a.layout)
    b_room = gl.allocate_shared_memory(b.dtype, [STAGES, b.block_type.shape[0], b.block_type.shape[1]], b.layout)
    out_room = gl.allocate_shared_memory(out0.dtype, [2 * ROOMS, HALF_M, BLOCK_N // 2], out0.layout)
    full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
    written, read = barriers(2 * ROOMS, 1), barriers(2 * ROOMS, 1)
    fence_async_shared()
    gl.warp_specialize([
        (_multiply, (PARTIALS, a_room, b_room, out_room, full, empty, written, read, rows, columns, steps, crew, slices,
                     shared, FIRST, HALF_M, BLOCK_N, GROUP, SLOTS, STAGES, ROOMS, A_TURNED, B_TURNED)),
        (_multiply, (PARTIALS, a_room, b_room, out_room, full, empty, written, read, rows, columns, steps, crew, slices,
                     shared, SECOND, HALF_M, BLOCK_N, GROUP, SLOTS, STAGES, ROOMS, A_TURNED, B_TURNED)),
        (copy, (a, b, a_room, b_room, full, empty, rows, columns, steps, crew, slices, shared, HALF_M, BLOCK_N,
                BLOCK_K, GROUP, SLOTS, STAGES, A_TURNED, B_TURNED)),
        (_send, (outs, BEGUN, ARRIVED, TIMES, BASES, out_room, written, read, rank, epoch, rows, columns, steps, crew,
                 slices, shared, HALF_M, BLOCK_N, GROUP, SLOTS, ROOMS, WORLD, PIECES, TIMED)),
    ], [4, 1, 1], [COMPUTE_REGISTERS, COPY_REGISTERS, COPY_REGISTERS])  # fmt: skip
