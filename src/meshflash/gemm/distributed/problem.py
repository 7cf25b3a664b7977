"""How A, B and C of a distributed GEMM are sharded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshflash.gemm.distributed.tiles import split
from meshflash.gemm.plan import PRECISIONS, GemmProblem
from meshflash.kernels.contract import HALF

#: Collectives by name: the shards of A and B that a rank has; the shard of C = A B that it gets. "all_scatter" is a
#: GEMM followed by an all-gather of output columns: every rank scatters its columns of C to all ranks.
COLLECTIVES = {
    "all_scatter": "A, and columns of B; all of C",
    "all_reduce": "columns of A, and rows of B; all of C",
    "ag_gemm": "rows of A, and B; all rows of C",
    "gemm_rs": "columns of A, and rows of B; rows of C",
}


@dataclass(frozen=True)
class DistributedGemm:
    """A distributed GEMM that all ranks agree on: full sizes, shard sizes and dtypes. `DistributedGemm.of` makes it.

    `sizes` has one number per rank: columns of B (all_scatter), rows of A (ag_gemm) or rows of C (gemm_rs). It is empty
    for all_reduce, whose shards of K may have any size. `reduce_dtype` is the dtype in which partial sums travel.
    """

    collective: str
    m: int
    n: int
    k: int
    world: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    reduce_dtype: torch.dtype
    sizes: tuple[int, ...]
    precision: str = "ieee"

    @staticmethod
    def of(
        collective: str,
        m: int,
        n: int,
        k: int,
        world: int,
        dtype: torch.dtype,
        *,
        sizes: Sequence[int] | None = None,
        out_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        precision: str = "ieee",
    ) -> DistributedGemm:
        """Check the arguments and fill in defaults: even shards, the operands' dtype for C, float32 for partial sums.

        The arguments are those of `FusedGemm`.
        """
        for name, value, known in (("collective", collective, COLLECTIVES), ("precision", precision, PRECISIONS)):
            if value not in known:
                raise ValueError(f"{name} {value!r}: expected one of {', '.join(known)}")
        if min(m, n, k) < 0:
            raise ValueError(f"m={m}, n={n}, k={k}: expected sizes >= 0 of the whole GEMM")
        for name, given in (("dtype", dtype), ("out_dtype", out_dtype), ("reduce_dtype", reduce_dtype)):
            if given is not None and (not given.is_floating_point or given.itemsize == 1):
                raise ValueError(f"{name}={given}: expected torch.float32, torch.bfloat16 or torch.float16")
        total = {"all_scatter": n, "ag_gemm": m, "gemm_rs": m}.get(collective)
        if total is None:
            if sizes is not None:
                raise ValueError("sizes are not for all_reduce: each rank's shard of K may be of any size")
            shards: tuple[int, ...] = ()
        else:
            shards = split(total, world) if sizes is None else tuple(sizes)
            if len(shards) != world or sum(shards) != total or min(shards) < 0:
                raise ValueError(f"sizes={shards}: expected {world} numbers >= 0 with the sum {total}")
        widest = torch.promote_types(dtype, torch.float32)
        return DistributedGemm(
            *(collective, m, n, k, world, dtype, out_dtype or dtype, reduce_dtype or widest, shards, precision)
        )

    @property
    def shard_starts(self) -> tuple[int, ...]:
        """The begin of each rank's shard, and the end of the last one."""
        return tuple(sum(self.sizes[:rank]) for rank in range(len(self.sizes) + 1))

    @property
    def unsupported_reason(self) -> str | None:
        """Why the kernels on a heap cannot compute it, or None if they can."""
        known = (torch.float32, *HALF)
        unknown = next((x for x in (self.out_dtype, self.reduce_dtype) if x not in known), None)
        return f"the kernels have no {unknown}" if unknown else None

    def moved_bytes(self, shots: int) -> int:
        """Return the bytes that a rank reads and writes for the collective, beyond the GEMM; the maximum over ranks."""
        most, world = max(self.sizes, default=0), self.world
        if self.collective == "all_scatter":
            return self.m * most * world * self.out_dtype.itemsize
        if self.collective == "ag_gemm":
            return most * self.k * (world + 1) * self.dtype.itemsize
        rows = most if self.collective == "gemm_rs" else -(-self.m // world) if shots == 2 else self.m
        copies = world if shots == 2 else 1
        return rows * self.n * (world * self.reduce_dtype.itemsize + copies * self.out_dtype.itemsize)

    def local_problem(self, device: torch.device) -> GemmProblem:
        """Return the largest local GEMM of a rank, with operands that are TMA-aligned if their sizes permit it."""
        most, unit = max(self.sizes, default=0), 16 // self.dtype.itemsize
        n = most if self.collective == "all_scatter" else self.n
        k = self.k if self.collective in ("all_scatter", "ag_gemm") else -(-self.k // self.world)
        tma_aligned = n % unit == 0 and k % unit == 0
        return GemmProblem(self.m, n, k, self.dtype, device, "nn", self.precision, tma_aligned)
