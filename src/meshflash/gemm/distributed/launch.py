"""The kernels of fused products with their tensors: what one rank starts in a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshflash.gemm.distributed.plan import PIECE, RANKS, FusedPlan, lined, sends_by_roles
from meshflash.gemm.distributed.tiles import peer_of
from meshflash.gemm.launch import SUMS_WARPS, extent, in_blocks, in_turns, loads_of, workspace
from meshflash.gemm.plan import in_lines
from meshflash.kernels.hopper.launch import descriptor
from meshflash.runtime.devices import TRITON

#: Warps of programs that only add, and sums that a thread of theirs has at a time.
WARPS, SUMS = 8, 32
#: Warps of programs that move, or add beside those that multiply, and numbers that a thread has at a time: with so few
#: registers several of them fit on a multiprocessor, or one beside a program that multiplies. Half as many where rows
#: are not in line, and each number has an address.
MOVING_WARPS, MOVED = 4, 32
#: Programs that move, and that add, for each multiprocessor: while one waits for memory or a flag, others go on.
MOVING, ADDING = 8, 4
#: Depth of blocks that are loaded by pointers, at most.
DEPTH = 32
#: Of the kernel in Gluon: bytes of shared memory that two halves of a tile may take with the blocks that are
#: multiplied; where they are more, one waits for the other.
SHARED = 226 * 1024
#: Of its threads: of those that multiply, and of those that copy or send, which know a descriptor for each rank.
COMPUTE_REGISTERS, COPY_REGISTERS = 232, 40
#: Of those that add parts up: as many as let all that are on their way at a time have one.
SUM_REGISTERS = 128
#: Numbers that are set to NaN at a time where a rank was lost.
BLOCK = 1024


@dataclass(frozen=True)
class Ends:
    """What the kernels of one rank talk through in one call; where a collective has no such thing, `begun` stands.

    `matrix` and `inbox` are this call's of two. `firsts` are the first rows of sections, `wanted` the counts that a
    call adds to `arrived`, `times` of tiles (computed, sent, received) or None. `columns` are those of `columns_of`.
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
    firsts: Tensor
    wanted: Tensor
    times: Tensor | None = None
    columns: tuple[Any, ...] = ()

    @property
    def clocked(self) -> Tensor:
        """Where kernels write times, or something else that they do not touch."""
        return self.begun if self.times is None else self.times


def send(
    ends: Ends,
    plan: FusedPlan,
    a: Tensor,
    b: Tensor | None,
    into: Tensor,
    *,
    to: str,
    flag: str,
    firsts: Tensor,
    sections: int = 1,
    rows: int | None = None,
    put: str = "all",
    held: bool = False,
) -> None:
    """Put the tiles of a product, or of a matrix that is there, to other ranks."""
    from meshflash.gemm.kernels.fused import send as kernel

    config, product = plan.blocks, plan.product
    programs = plan.programs if b is not None else _hands(plan, a, MOVING)
    as_blocks = None if b is None or not a.numel() or not b.numel() else in_blocks(a, b, config)
    (a_in, a_turned), (b_in, b_turned) = as_blocks or ((a, False), (a if b is None else b, False))
    n, k = (a.shape[1], 0) if b is None else (b.shape[1], a.shape[1])
    with torch.cuda.device_of(a):
        kernel[(programs,)](
            *(a_in, b_in, into, ends.flags if to != "matrix" else ends.arrived, ends.ready, ends.begun, firsts),
            *(ends.clocked, ends.bases, ends.status, ends.rank, ends.epoch, n, k),
            *(*a.stride(), *((0, 0) if b is None else b.stride())),
            *(into.stride(0), plan.rows if rows is None else rows, 0 if to == "matrix" else plan.places),
            WORLD=product.world,
            SECTIONS=sections,
            TO=to,
            PUT=put,
            FLAG=flag,
            PIECES=plan.pieces,
            MULTIPLY=b is not None,
            HELD=held,
            TIMED=ends.times is not None,
            ROWS=_strip(MOVED // (1 if in_lines(a) else 2), MOVING_WARPS, config.block_n, config.block_m),
            DESCRIPTORS=as_blocks is not None,
            A_TURNED=a_turned,
            B_TURNED=b_turned,
            WIDE=any(extent(x) >= 2**31 for x in (a, b) if x is not None),
            **_blocks(plan, a, as_blocks is not None) | ({"num_warps": MOVING_WARPS} if b is None else {}),
        )


def columns_of(plan: FusedPlan, rank: int, matrices: Sequence[Tensor]) -> tuple[Any, ...]:
    """Descriptors of a rank's columns in the matrices of all ranks, in the order in which it stores to them.

    There are none where the plan does not ask for roles, or the kernel in Gluon does not serve it.
    """
    product, config, world = plan.product, plan.blocks, len(matrices)
    if not plan.by_roles or not sends_by_roles(product, matrices[0].device):
        return ()
    first, end = product.firsts[rank : rank + 2]
    whole = end > first and lined(end - first, product.out_dtype) == end - first  # no 16 bytes are another rank's too
    into = [matrices[peer_of(turn, rank, world)][:, first:end] for turn in range(world)]
    if not whole or not all(map(in_lines, into)):
        return ()
    return tuple(descriptor(x, [config.block_m // 2, config.block_n // 2]) for x in into)


def has_roles(ends: Ends, a: Tensor, b: Tensor) -> bool:
    """Whether `send_by_roles` serves these operands."""
    return bool(ends.columns) and all(x.numel() > 0 and (in_lines(x) or in_lines(x.T)) for x in (a, b))


def send_by_roles(ends: Ends, plan: FusedPlan, a: Tensor, b: Tensor, into: Tensor) -> None:
    """Put the tiles of a product into the matrix of every rank, by the kernel in Gluon: as `send`, flag "source"."""
    from meshflash.gemm.kernels.fused import send_sums
    from meshflash.gemm.kernels.hopper_send import send as kernel

    config, world = plan.blocks, len(ends.columns)
    as_blocks = in_blocks(a, b, replace(config, block_m=config.block_m // 2), descriptor)
    assert as_blocks is not None
    (a_in, a_turned), (b_in, b_turned) = as_blocks
    stages = config.stages * (config.block_m + config.block_n) * config.block_k * a.element_size()
    whole = config.block_m * config.block_n * a.element_size()
    split = plan.partition(ends.rank)
    shares = (split.steps, split.crew, split.slices)
    common: dict[str, Any] = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "GROUP": config.group,
        "SLOTS": split.slots,
        "WORLD": world,
        "TIMED": ends.times is not None,
    }
    with torch.cuda.device_of(a), in_turns(split):
        partials = workspace(a.device, split.programs * split.slots * config.block_m * config.block_n)
        kernel[(split.programs,)](
            *(a_in, b_in, *ends.columns, *[None] * (RANKS - world), partials),
            *(ends.begun, ends.arrived, ends.clocked, ends.bases, ends.rank, ends.epoch),
            *(a.shape[0], b.shape[1], *shares, split.shared),
            BLOCK_K=config.block_k,
            STAGES=config.stages,
            ROOMS=2 if stages + whole <= SHARED else 1,
            A_TURNED=a_turned,
            B_TURNED=b_turned,
            PIECES=plan.pieces,
            COMPUTE_REGISTERS=COMPUTE_REGISTERS,
            COPY_REGISTERS=COPY_REGISTERS,
            num_warps=4,
            **common,
        )
        if split.shared:
            send_sums[(split.shared, plan.pieces)](
                *(partials, into, ends.arrived, ends.clocked, ends.bases, ends.rank),
                *(*into.shape, into.stride(0), plan.rows, *shares),
                ROWS=PIECE,
                AT_ONCE=loads_of(split),
                num_warps=SUMS_WARPS,
                maxnreg=SUM_REGISTERS,
                **common,
            )


def receive(ends: Ends, plan: FusedPlan, out: Tensor) -> None:
    """Add up the tiles that this rank has, into its rows of a matrix, or those of all ranks."""
    from meshflash.gemm.kernels.fused import receive as kernel

    config, two = plan.blocks, plan.shots == 2
    # one on each of this rank's multiprocessors: those of ranks that share a GPU are free for products they wait for
    alone = plan.programs // config.per_core
    programs, warps = (_hands(plan, out, ADDING), MOVING_WARPS) if plan.movers else (alone, WARPS)
    with torch.cuda.device_of(out):
        kernel[(programs,)](
            *(ends.inbox, out, ends.flags, ends.arrived, ends.begun, ends.clocked, ends.bases, ends.status),
            *(ends.rank, ends.epoch, out.shape[0], out.shape[1], out.stride(0), plan.rows, plan.places),
            WORLD=plan.product.world,
            STRIDE=plan.product.world if two else 1,
            SPREAD=two,
            TIMED=ends.times is not None,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            GROUP=config.group,
            COLUMNS=_strip(SUMS, warps, config.block_m, config.block_n),
            num_warps=warps,
        )


def gathered(ends: Ends, plan: FusedPlan, b: Tensor, out: Tensor, *, fetch: bool, programs: int) -> None:
    """Multiply the rows of all ranks as they come."""
    from meshflash.gemm.kernels.fused import gathered as kernel

    a = ends.matrix[:, : plan.product.k]
    as_blocks = None if not a.numel() or not b.numel() else in_blocks(a, b, plan.blocks)
    (a_in, a_turned), (b_in, b_turned) = as_blocks or ((a, False), (b, False))
    assert not a_turned
    a_in = a if fetch else a_in
    start = partial(_with_scratch, kernel[(programs,)]) if fetch and as_blocks else kernel[(programs,)]
    with torch.cuda.device_of(b):
        start(
            *(a_in, b_in, out, ends.arrived, ends.begun, ends.firsts, ends.clocked, ends.bases, ends.status),
            *(ends.rank, ends.epoch, b.shape[1], a.shape[1], a.stride(0), *b.stride(), out.stride(0)),
            *(plan.rows, plan.chunks),
            WORLD=plan.product.world,
            FETCH=fetch,
            TIMED=ends.times is not None,
            DESCRIPTORS=as_blocks is not None,
            B_TURNED=b_turned,
            WIDE=any(extent(x) >= 2**31 for x in (a, b, out)),
            **_blocks(plan, b, as_blocks is not None),
        )


def finish(ends: Ends, plan: FusedPlan, programs: int = 1) -> None:
    """Wait for what all ranks put into this call's matrix."""
    from meshflash.gemm.kernels.fused import finish as kernel

    flags = ends.wanted.numel()
    with torch.cuda.device_of(ends.matrix):
        kernel[(programs,)](
            *(ends.matrix, ends.arrived, ends.wanted, ends.begun, ends.status, ends.epoch),
            *(flags, flags // plan.product.world, ends.matrix.numel()),
            WORLD=plan.product.world,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


def _hands(plan: FusedPlan, x: Tensor, each: int) -> int:
    """Programs that move or add, so many for each multiprocessor; those that are interpreted take turns anyway."""
    return (plan.movers or plan.programs) * (1 if x.device.type == "cpu" else each)


def _strip(numbers: int, warps: int, width: int, most: int) -> int:
    """Lines of so many numbers that a program takes at a time, with so many numbers for each thread."""
    return max(1, min(numbers * 32 * warps // width, most))


def _with_scratch(start: Callable[..., Any], *arguments: Any, **constants: Any) -> None:
    """Start a kernel that makes descriptors itself, in memory that Triton asks for; who set an allocator keeps it."""

    def run() -> None:
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=TRITON))
        start(*arguments, **constants)

    import triton

    copy_context().run(run)


def all_begun(ends: Ends, plan: FusedPlan) -> None:
    """Wait until what multiplies runs, on all ranks: programs that wait for it must not take its multiprocessors."""
    from meshflash.gemm.kernels.fused import all_begun as kernel

    with torch.cuda.device_of(ends.begun):
        kernel[(1,)](ends.begun, ends.status, ends.epoch, WORLD=plan.product.world, num_warps=1)


def _blocks(plan: FusedPlan, a: Tensor, by_descriptors: bool) -> dict[str, Any]:
    """What all kernels that multiply are compiled with; pointers of deep blocks would take too many registers."""
    config = plan.blocks
    depth = config.block_k if by_descriptors else min(config.block_k, DEPTH)
    return dict(
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=depth,
        GROUP=config.group,
        PRECISION=plan.product.precision,
        INTERPRETED=a.device.type == "cpu",
        num_warps=config.warps,
        num_stages=config.stages,
    )
