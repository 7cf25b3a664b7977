"""The product whose tiles go to all ranks, in Gluon for Hopper: `fused_kernels.send` of an all_scatter's epilogue.

As in `gluon_product`, a warp copies and two groups of warps multiply, each half of a tile's rows. One more warp sends:
it stores what they left in shared memory to the matrix of every rank, and tells all when it is there, while they go on.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from meshflash.gemm.gluon_product import copy, halves, place_of, store_block, sum_of
from meshflash.kernels.gluon_common import barriers

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
def _multiply(a_room, b_room, out_room, full, empty, written, read, tiles, steps, WHICH: gl.constexpr,
              HALF_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, ROOMS: gl.constexpr,
              A_TURNED: gl.constexpr, B_TURNED: gl.constexpr):  # fmt: skip
    """A group of warps that multiplies: one half of the rows of each tile, left and right half of its columns."""
    done = 0
    put = 0
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc, done = sum_of(a_room, b_room, full, empty, 0, steps, done, WHICH, HALF_M, BLOCK_N, STAGES, A_TURNED,
                           B_TURNED)  # fmt: skip
        left, right = halves(acc)
        for side in gl.static_range(2):
            at = put % ROOMS * 2 + WHICH
            mbarrier.wait(read.index(at), ((put // ROOMS) & 1) ^ 1)
            if side == 0:
                out_room.index(at).store(left.to(out_room.dtype))
            else:
                out_room.index(at).store(right.to(out_room.dtype))
            fence_async_shared()
            mbarrier.arrive(written.index(at), count=1)
            put += 1


@gluon.jit
def _send(outs, BEGUN, ARRIVED, TIMES, BASES, out_room, written, read, rank, epoch, rows, columns,
          HALF_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, ROOMS: gl.constexpr, WORLD: gl.constexpr,
          TIMED: gl.constexpr):  # fmt: skip
    """The warp that sends. It begins the call as `fused_kernels.send` does, and waits for its own stores alone."""
    if gl.atomic_add(BEGUN + WORLD, 1) == gl.num_programs(0) - 1:
        gl.store(BEGUN + WORLD, 0)
        flags, there = _everywhere(BEGUN + rank, BASES, rank, WORLD)
        epochs = gl.full([32], epoch, gl.int32, flags.type.layout)
        gl.atomic_xchg(flags, epochs, mask=there, sem="release", scope="sys")
    done = 0
    for tile in range(gl.program_id(0), rows * columns, gl.num_programs(0)):
        row, column = place_of(tile, rows, columns, GROUP)
        for side in gl.static_range(2):
            at = done % ROOMS * 2
            for which in gl.static_range(2):
                mbarrier.wait(written.index(at + which), (done // ROOMS) & 1)
                m0 = (row * 2 + which) * HALF_M
                n0 = column * BLOCK_N + side * (BLOCK_N // 2)
                for turn in gl.static_range(WORLD):
                    store_block(outs[turn], [m0, n0], out_room.index(at + which))
            if TIMED and side == 1:
                gl.store(TIMES + tile * 3, _now())
            for which in gl.static_range(2):
                tma.store_wait(pendings=(1 - which) * WORLD)
                mbarrier.arrive(read.index(at + which), count=1)
            done += 1
        _all_there()
        flags, there = _everywhere(ARRIVED + rank, BASES, rank, WORLD)
        ones = gl.full([32], 1, gl.int64, flags.type.layout)
        gl.atomic_add(flags, ones, mask=there, sem="release", scope="sys")
        if TIMED:
            gl.store(TIMES + tile * 3 + 1, _now())


@gluon.jit(do_not_specialize=["rank", "epoch", "M", "N", "steps"])
def send(a, b, out0, out1, out2, out3, out4, out5, out6, out7, BEGUN, ARRIVED, TIMES, BASES, rank, epoch, M, N, steps,
         BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr,
         STAGES: gl.constexpr, ROOMS: gl.constexpr, A_TURNED: gl.constexpr, B_TURNED: gl.constexpr,
         WORLD: gl.constexpr, TIMED: gl.constexpr, COMPUTE_REGISTERS: gl.constexpr,
         COPY_REGISTERS: gl.constexpr):  # fmt: skip
    """Put the tiles of A B to the matrices of all ranks, and count each at all of them.

    Descriptors of the matrices come in the order in which they are stored to, with None for ranks that there are not.
    Halves of a tile's columns take turns in ROOMS of shared memory, 1 or 2.
    """
    HALF_M: gl.constexpr = BLOCK_M // 2
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    NONE: gl.constexpr = 0
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
        (_multiply, (a_room, b_room, out_room, full, empty, written, read, rows * columns, steps, FIRST, HALF_M,
                     BLOCK_N, STAGES, ROOMS, A_TURNED, B_TURNED)),
        (_multiply, (a_room, b_room, out_room, full, empty, written, read, rows * columns, steps, SECOND, HALF_M,
                     BLOCK_N, STAGES, ROOMS, A_TURNED, B_TURNED)),
        (copy, (a, b, a_room, b_room, full, empty, rows, columns, steps, NONE, NONE, NONE, HALF_M, BLOCK_N, BLOCK_K,
                GROUP, NONE, STAGES, A_TURNED, B_TURNED)),
        (_send, (outs, BEGUN, ARRIVED, TIMES, BASES, out_room, written, read, rank, epoch, rows, columns, HALF_M,
                 BLOCK_N, GROUP, ROOMS, WORLD, TIMED)),
    ], [4, 1, 1], [COMPUTE_REGISTERS, COPY_REGISTERS, COPY_REGISTERS])  # fmt: skip
