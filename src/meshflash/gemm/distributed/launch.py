"""Launch the kernels of fused GEMM + collective calls: what one rank starts, with all tensors and constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshflash.gemm.distributed.plan import (
    MAX_DESCRIPTOR_RANKS,
    PIECE_ROWS,
    FusedPlan,
    pad_to_16_bytes,
    supports_warp_specialized_send,
)
from meshflash.gemm.distributed.tiles import peer_of
from meshflash.gemm.launch import (
    COMBINE_WARPS,
    describe_operands,
    loads_in_flight,
    max_offset,
    new_partials,
)
from meshflash.gemm.plan import is_tma_aligned
from meshflash.kernels.hopper.launch import descriptor
from meshflash.kernels.launches import Launcher, Launches, run
from meshflash.runtime.devices import TRITON

#: Warps of a CTA that only reduces, and elements that each of its threads holds.
REDUCE_WARPS, REDUCE_ELEMENTS = 8, 32
#: Warps of a CTA that moves tiles, or reduces beside a GEMM, and elements that each of its threads holds. With this few
#: registers, several such CTAs fit on an SM, or one beside a GEMM CTA. Unaligned rows take half as many elements, since
#: each element then needs an address of its own.
COMM_WARPS, COMM_ELEMENTS = 4, 32
#: CTAs per comm SM that move tiles, and that reduce: while one waits for memory or a flag, others make progress.
MOVE_CTAS_PER_SM, REDUCE_CTAS_PER_SM = 8, 4
#: Largest BLOCK_K of operands that are loaded by pointers instead of TMA: pointers of deeper blocks take too many
#: registers.
POINTER_BLOCK_K = 32
#: Shared memory, in bytes, for operand stages and output buffers of the warp-specialized kernel. Where two output
#: buffers do not fit, it has one, and the consumers wait for the sender between halves of a tile.
SHARED_MEMORY_BYTES = 226 * 1024
#: Registers per thread of the warp-specialized kernel: consumer warpgroups; producer and sender warps. The sender holds
#: one descriptor for each rank, so these get more than the producer of the plain GEMM.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
#: Registers per thread of `send_split_tiles`: enough for all its loads in flight.
SPLIT_TILE_REGISTERS = 128
#: Elements that `wait_all` sets to NaN at a time if a rank was lost.
NAN_BLOCK = 1024


@dataclass(frozen=True)
class CallBuffers:
    """The buffers and flags that the kernels of one rank use in one call; `Exchange` makes it.

    `matrix` and `inbox` are this call's half of the double buffers. `section_starts` holds the first row of each
    section, `expected` what a call adds to each counter of `arrived`. `times` `[tiles, 3]` receives when each tile was
    computed, sent and received, or is None. `peer_columns` are the descriptors of `describe_peer_columns`. A buffer
    that the collective does not have is replaced by `begun`, which the kernels then do not touch. `launches` are the
    recorded launches of earlier calls.
    """

    rank: int
    epoch: int
    bases: Tensor
    status: Tensor
    begun: Tensor
    arrived: Tensor
    flags: Tensor
    ready: Tensor
    inbox: Tensor
    matrix: Tensor
    section_starts: Tensor
    expected: Tensor
    times: Tensor | None = None
    peer_columns: tuple[Any, ...] = ()
    launches: Launches | None = None

    @property
    def times_or_unused(self) -> Tensor:
        """The tensor that kernels write times to, or another one that they do not touch."""
        return self.begun if self.times is None else self.times

    def run(self, name: Any, tensors: Sequence[Tensor], launch: Callable[[Launcher], None]) -> None:
        """Run launch code, or repeat what it launched in an earlier call of the same rank and half of the buffers.

        Args:
            name: What identifies the launch code.
            tensors: The tensors that differ between calls.
            launch: The launch code. The buffers of this object are the same in all calls of a half.
        """

        def launch_with_buffers(launcher: Launcher) -> None:
            launcher.keep(*(x for x in vars(self).values() if isinstance(x, Tensor)))
            launcher.keep(*(column.base for column in self.peer_columns))
            launch(launcher)

        # the shared dim of a reduction may differ between calls, and strides alone do not tell
        name = name, self.rank, self.epoch % 2, self.times is None, *(x.shape for x in tensors)
        run(self.launches, name, tensors, launch_with_buffers, {"epoch": self.epoch})


def send(
    buffers: CallBuffers,
    plan: FusedPlan,
    a: Tensor,
    b: Tensor | None,
    into: Tensor,
    *,
    to: str,
    flag: str,
    section_starts: Tensor,
    sections: int = 1,
    tiles_m: int | None = None,
    put: str = "all",
    wait_ready: bool = False,
) -> None:
    """Launch `fused.send`: store the tiles of a @ b, or without `b` the tiles of `a`, to other ranks."""

    def launch(launcher: Launcher) -> None:
        from meshflash.gemm.kernels.fused import send as kernel

        config, problem = plan.tiling, plan.problem
        num_ctas = plan.num_ctas if b is not None else _num_comm_ctas(plan, a, MOVE_CTAS_PER_SM)
        operands = None if b is None or not a.numel() or not b.numel() else describe_operands(a, b, config)
        (a_in, a_transposed), (b_in, b_transposed) = operands or ((a, False), (a if b is None else b, False))
        n, k = (a.shape[1], 0) if b is None else (b.shape[1], a.shape[1])
        rows = _strip(COMM_ELEMENTS // (1 if is_tma_aligned(a) else 2), COMM_WARPS, config.block_n, config.block_m)
        launcher.keep(section_starts)
        launcher.launch(
            kernel,
            (num_ctas,),
            *(a_in, b_in, into, buffers.flags if to != "matrix" else buffers.arrived, buffers.ready, buffers.begun),
            *(section_starts, buffers.times_or_unused, buffers.bases, buffers.status, buffers.rank, buffers.epoch),
            *(n, k, *a.stride(), *((0, 0) if b is None else b.stride())),
            *(into.stride(0), plan.tiles_m if tiles_m is None else tiles_m, 0 if to == "matrix" else plan.num_slots),
            WORLD=problem.world,
            SECTIONS=sections,
            TO=to,
            PUT=put,
            FLAG=flag,
            ARRIVALS=plan.arrivals_per_tile,
            MULTIPLY=b is not None,
            WAIT_READY=wait_ready,
            TIMED=buffers.times is not None,
            ROWS=rows,
            USE_TMA=operands is not None,
            A_TRANSPOSED=a_transposed,
            B_TRANSPOSED=b_transposed,
            INT64_OFFSETS=any(max_offset(x) >= 2**31 for x in (a, b) if x is not None),
            **_gemm_constants(plan, a, operands is not None) | ({"num_warps": COMM_WARPS} if b is None else {}),
        )

    tensors = (a, into) if b is None else (a, b, into)
    buffers.run(("send", to, flag, put, wait_ready, b is None), tensors, launch)


def describe_peer_columns(plan: FusedPlan, rank: int, matrices: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return TMA descriptors of a rank's columns in the matrices of all ranks, in the order in which it stores to them.

    The result is empty where the plan does not ask for the warp-specialized kernel, or the kernel does not serve it.
    """
    problem, config, world = plan.problem, plan.tiling, len(matrices)
    if not plan.wants_warp_specialized or not supports_warp_specialized_send(problem, matrices[0].device):
        return ()
    first, end = problem.shard_starts[rank : rank + 2]
    # TMA stores 16 bytes at a time: none of them may also belong to another rank's columns
    is_aligned = end > first and pad_to_16_bytes(end - first, problem.out_dtype) == end - first
    columns = [matrices[peer_of(step, rank, world)][:, first:end] for step in range(world)]
    if not is_aligned or not all(map(is_tma_aligned, columns)):
        return ()
    return tuple(descriptor(x, [config.block_m // 2, config.block_n // 2]) for x in columns)


def can_send_warp_specialized(buffers: CallBuffers, a: Tensor, b: Tensor) -> bool:
    """Return whether `send_warp_specialized` serves these operands."""
    return bool(buffers.peer_columns) and all(
        x.numel() > 0 and (is_tma_aligned(x) or is_tma_aligned(x.T)) for x in (a, b)
    )


def send_warp_specialized(buffers: CallBuffers, plan: FusedPlan, a: Tensor, b: Tensor, into: Tensor) -> None:
    """Launch `hopper_all_scatter.send`: store tiles of a @ b to the matrix of every rank, as `send` with flag "source".

    A second kernel reduces and sends split tiles.
    """

    def launch(launcher: Launcher) -> None:
        from meshflash.gemm.kernels.fused import send_split_tiles
        from meshflash.gemm.kernels.hopper_all_scatter import send as kernel

        config, world = plan.tiling, len(buffers.peer_columns)
        # each consumer warpgroup loads its own half of the rows of A
        operands = describe_operands(a, b, replace(config, block_m=config.block_m // 2), descriptor)
        assert operands is not None
        (a_in, a_transposed), (b_in, b_transposed) = operands
        stage_bytes = config.num_stages * (config.block_m + config.block_n) * config.block_k * a.element_size()
        tile_bytes = config.block_m * config.block_n * a.element_size()
        split = plan.partition(buffers.rank)
        shares = (split.iters_per_tile, split.ctas_per_group, split.iters_per_group)
        common: dict[str, Any] = {
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "L2_SWIZZLE": config.l2_swizzle,
            "PARTIALS_PER_CTA": split.partials_per_cta,
            "WORLD": world,
            "TIMED": buffers.times is not None,
        }
        partials = new_partials(launcher, split, config, a)
        launcher.launch(
            kernel,
            (split.num_ctas,),
            *(a_in, b_in, *buffers.peer_columns, *[None] * (MAX_DESCRIPTOR_RANKS - world), partials),
            *(buffers.begun, buffers.arrived, buffers.times_or_unused, buffers.bases, buffers.rank, buffers.epoch),
            *(a.shape[0], b.shape[1], *shares, split.num_split_tiles),
            BLOCK_K=config.block_k,
            STAGES=config.num_stages,
            OUT_BUFFERS=2 if stage_bytes + tile_bytes <= SHARED_MEMORY_BYTES else 1,
            A_TRANSPOSED=a_transposed,
            B_TRANSPOSED=b_transposed,
            ARRIVALS=plan.arrivals_per_tile,
            CONSUMER_REGISTERS=CONSUMER_REGISTERS,
            PRODUCER_REGISTERS=PRODUCER_REGISTERS,
            num_warps=4,
            **common,
        )
        if split.num_split_tiles:
            launcher.launch(
                send_split_tiles,
                (split.num_split_tiles, plan.arrivals_per_tile),
                *(partials, into, buffers.arrived, buffers.times_or_unused, buffers.bases, buffers.rank),
                *(*into.shape, into.stride(0), plan.tiles_m, *shares),
                ROWS=PIECE_ROWS,
                LOADS_IN_FLIGHT=loads_in_flight(split),
                num_warps=COMBINE_WARPS,
                maxnreg=SPLIT_TILE_REGISTERS,
                **common,
            )

    buffers.run("send_warp_specialized", (a, b, into), launch)


def reduce_tiles(buffers: CallBuffers, plan: FusedPlan, out: Tensor) -> None:
    """Launch `fused.reduce_tiles`: reduce this rank's tiles into `out`, or into the matrices of all ranks."""

    def launch(launcher: Launcher) -> None:
        from meshflash.gemm.kernels.fused import reduce_tiles as kernel

        config, two_shots = plan.tiling, plan.shots == 2
        # Cap reducers at one CTA per SM of this rank. Ranks may share a GPU, and the GEMMs of the others, which these
        # CTAs wait for, need SMs to run on.
        one_per_sm = plan.num_ctas // config.ctas_per_sm
        if plan.num_comm_sms:
            num_ctas, warps = _num_comm_ctas(plan, out, REDUCE_CTAS_PER_SM), COMM_WARPS
        else:
            num_ctas, warps = one_per_sm, REDUCE_WARPS
        launcher.launch(
            kernel,
            (num_ctas,),
            *(buffers.inbox, out, buffers.flags, buffers.arrived, buffers.begun, buffers.times_or_unused),
            *(buffers.bases, buffers.status, buffers.rank, buffers.epoch),
            *(out.shape[0], out.shape[1], out.stride(0), plan.tiles_m, plan.num_slots),
            WORLD=plan.problem.world,
            STRIDE=plan.problem.world if two_shots else 1,
            BROADCAST=two_shots,
            TIMED=buffers.times is not None,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            L2_SWIZZLE=config.l2_swizzle,
            COLUMNS=_strip(REDUCE_ELEMENTS, warps, config.block_m, config.block_n),
            num_warps=warps,
        )

    buffers.run("reduce_tiles", (out,), launch)


def gemm_gathered(
    buffers: CallBuffers, plan: FusedPlan, b: Tensor, out: Tensor, *, read_peer: bool, num_ctas: int
) -> None:
    """Launch `fused.gemm_gathered`: compute the rows of all ranks as they arrive."""

    def launch(launcher: Launcher) -> None:
        from meshflash.gemm.kernels.fused import gemm_gathered as kernel

        a = buffers.matrix[:, : plan.problem.k]
        operands = None if not a.numel() or not b.numel() else describe_operands(a, b, plan.tiling)
        (a_in, a_transposed), (b_in, b_transposed) = operands or ((a, False), (b, False))
        assert not a_transposed
        a_in = a if read_peer else a_in
        launch_kernel = partial(_launch_with_scratch, launcher) if read_peer and operands else launcher.launch
        launch_kernel(
            kernel,
            (num_ctas,),
            *(a_in, b_in, out, buffers.arrived, buffers.begun, buffers.section_starts, buffers.times_or_unused),
            *(buffers.bases, buffers.status, buffers.rank, buffers.epoch),
            *(b.shape[1], a.shape[1], a.stride(0), *b.stride(), out.stride(0)),
            *(plan.tiles_m, plan.chunks_per_row),
            WORLD=plan.problem.world,
            READ_PEER=read_peer,
            TIMED=buffers.times is not None,
            USE_TMA=operands is not None,
            B_TRANSPOSED=b_transposed,
            INT64_OFFSETS=any(max_offset(x) >= 2**31 for x in (a, b, out)),
            **_gemm_constants(plan, b, operands is not None),
        )

    buffers.run("gemm_gathered", (b, out), launch)


def wait_all(buffers: CallBuffers, plan: FusedPlan, num_ctas: int = 1) -> None:
    """Launch `fused.wait_all`: wait for everything that all ranks store into this call's matrix."""

    def launch(launcher: Launcher) -> None:
        from meshflash.gemm.kernels.fused import wait_all as kernel

        num_flags = buffers.expected.numel()
        launcher.launch(
            kernel,
            (num_ctas,),
            *(buffers.matrix, buffers.arrived, buffers.expected, buffers.begun, buffers.status, buffers.epoch),
            *(num_flags, num_flags // plan.problem.world, buffers.matrix.numel()),
            WORLD=plan.problem.world,
            BLOCK=NAN_BLOCK,
            num_warps=REDUCE_WARPS,
        )

    buffers.run("wait_all", (buffers.matrix,), launch)


def wait_for_start(buffers: CallBuffers, plan: FusedPlan) -> None:
    """Launch `fused.wait_for_start`: wait until the GEMMs of all ranks are resident.

    Kernels that wait on these GEMMs come after it on the side stream, so that they cannot take their SMs.
    """

    def launch(launcher: Launcher) -> None:
        from meshflash.gemm.kernels.fused import wait_for_start as kernel

        arguments = (buffers.begun, buffers.status, buffers.epoch)
        launcher.launch(kernel, (1,), *arguments, WORLD=plan.problem.world, num_warps=1)

    buffers.run("wait_for_start", (buffers.begun,), launch)


def _num_comm_ctas(plan: FusedPlan, x: Tensor, ctas_per_sm: int) -> int:
    """Return the CTAs that move or reduce; one per SM under the interpreter, which runs them one after another."""
    return (plan.num_comm_sms or plan.num_ctas) * (1 if x.device.type == "cpu" else ctas_per_sm)


def _strip(elements: int, warps: int, width: int, most: int) -> int:
    """Return how many lines of `width` elements a CTA takes at a time, for `elements` elements per thread."""
    return max(1, min(elements * 32 * warps // width, most))


def _launch_with_scratch(launcher: Launcher, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel that makes TMA descriptors itself, in global memory that Triton's allocator must provide.

    The allocator is set in a copy of the context, so that an allocator of the user stays in place.
    """

    def run() -> None:
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=TRITON))
        launcher.launch(*arguments, **constants)

    import triton

    copy_context().run(run)


def _gemm_constants(plan: FusedPlan, a: Tensor, use_tma: bool) -> dict[str, Any]:
    """Return the constants that all kernels with a main loop are compiled with."""
    config = plan.tiling
    block_k = config.block_k if use_tma else min(config.block_k, POINTER_BLOCK_K)
    return dict(
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        L2_SWIZZLE=config.l2_swizzle,
        PRECISION=plan.problem.precision,
        INTERPRETED=a.device.type == "cpu",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
