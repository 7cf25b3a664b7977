"""A product of several ranks: who has what of it, and gets what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshflash.gemm.distributed.tiles import split
from meshflash.gemm.plan import PRECISIONS, Product
from meshflash.kernels.contract import HALF

#: What a product of several ranks is, by what each rank has of A and B, and gets of C = A B.
COLLECTIVES = {
    "all_scatter": "A, and columns of B; all of C",
    "all_reduce": "columns of A, and rows of B; all of C",
    "ag_gemm": "rows of A, and B; all rows of C",
    "gemm_rs": "columns of A, and rows of B; rows of C",
}


@dataclass(frozen=True)
class FusedProduct:
    """What all ranks agree on: the sizes of the whole product, who has how much of it, and dtypes.

    `sizes` are columns of B of each rank (all_scatter), rows of A (ag_gemm) or rows of C (gemm_rs). An all_reduce has
    none: parts of K may be of any sizes.
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
    ) -> FusedProduct:
        """With what was left out: even parts, results as the operands are, sums on their way in float32."""
        for word, value, known in (("collective", collective, COLLECTIVES), ("precision", precision, PRECISIONS)):
            if value not in known:
                raise ValueError(f"{word} {value!r}: expected one of {', '.join(known)}")
        if min(m, n, k) < 0:
            raise ValueError(f"m={m}, n={n}, k={k}: expected sizes >= 0 of the whole product")
        for word, given in (("dtype", dtype), ("out_dtype", out_dtype), ("reduce_dtype", reduce_dtype)):
            if given is not None and (not given.is_floating_point or given.itemsize == 1):
                raise ValueError(f"{word}={given}: expected torch.float32, torch.bfloat16 or torch.float16")
        total = {"all_scatter": n, "ag_gemm": m, "gemm_rs": m}.get(collective)
        if total is None:
            if sizes is not None:
                raise ValueError("sizes are not for all_reduce: each rank's part of K may be of any size")
            parts: tuple[int, ...] = ()
        else:
            parts = split(total, world) if sizes is None else tuple(sizes)
            if len(parts) != world or sum(parts) != total or min(parts) < 0:
                raise ValueError(f"sizes={parts}: expected {world} numbers >= 0 with the sum {total}")
        widest = torch.promote_types(dtype, torch.float32)
        return FusedProduct(
            *(collective, m, n, k, world, dtype, out_dtype or dtype, reduce_dtype or widest, parts, precision)
        )

    @property
    def firsts(self) -> tuple[int, ...]:
        """Where each rank's part begins, and where the last one ends."""
        return tuple(sum(self.sizes[:rank]) for rank in range(len(self.sizes) + 1))

    @property
    def unsupported_reason(self) -> str | None:
        """Why a heap cannot carry it, or None."""
        known = (torch.float32, *HALF)
        strange = next((x for x in (self.out_dtype, self.reduce_dtype) if x not in known), None)
        return f"the kernels have no {strange}" if strange else None

    def moved_bytes(self, shots: int) -> int:
        """What a rank reads and writes beside the product, where it scatters or adds up: at most, of all ranks."""
        most, world = max(self.sizes, default=0), self.world
        if self.collective == "all_scatter":
            return self.m * most * world * self.out_dtype.itemsize
        if self.collective == "ag_gemm":
            return most * self.k * (world + 1) * self.dtype.itemsize
        rows = most if self.collective == "gemm_rs" else -(-self.m // world) if shots == 2 else self.m
        copies = world if shots == 2 else 1
        return rows * self.n * (world * self.reduce_dtype.itemsize + copies * self.out_dtype.itemsize)

    def part(self, device: torch.device) -> Product:
        """The product of one rank, as plans of products take it: the largest, with rows in line as sizes have them."""
        most, unit = max(self.sizes, default=0), 16 // self.dtype.itemsize
        n = most if self.collective == "all_scatter" else self.n
        k = self.k if self.collective in ("all_scatter", "ag_gemm") else -(-self.k // self.world)
        lined = n % unit == 0 and k % unit == 0
        return Product(self.m, n, k, self.dtype, device, "nn", self.precision, lined)
