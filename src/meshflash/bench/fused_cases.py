"""What a fused product over ranks is for a benchmark: the case, how it runs, the rows of ranks, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from meshflash.bench.cases import on_cpu
from meshflash.bench.gemm import WORST_ERROR
from meshflash.gemm.distributed.plan import BULK, VARIANTS, plan_fused
from meshflash.gemm.distributed.problem import DistributedGemm
from meshflash.gemm.distributed.tiles import split
from meshflash.runtime.devices import CPU, count

#: M, N and K unless they are given: on a GPU, and on a CPU, where the kernels are interpreted.
LARGE, SMALL = (8192, 4608, 36864), (48, 96, 64)
#: By what a product was made.
HEAP, GROUP = "heap", "group"


@dataclass(frozen=True)
class Case:
    """A fused product over so many ranks. What cannot be is a ValueError. "tf32" are float32."""

    collective: str
    m: int
    n: int
    k: int
    world: int
    numbers: str = "float32"
    device: str = CPU
    shots: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.numbers not in WORST_ERROR:
            raise ValueError(f"dtype {self.numbers!r}: expected one of {', '.join(WORST_ERROR)}")
        plan_fused(self.product, torch.device(CPU), variant=BULK, shots=self.shots, backend=GROUP)

    @property
    def product(self) -> DistributedGemm:
        """What all ranks agree on, in even parts."""
        dtype = torch.float32 if self.numbers == "tf32" else getattr(torch, self.numbers)
        return DistributedGemm.of(
            *(self.collective, self.m, self.n, self.k, self.world, dtype), precision=self.precision
        )

    @property
    def precision(self) -> str:
        """That of float32."""
        return "tf32" if self.numbers == "tf32" else "ieee"

    @property
    def tflop(self) -> float:
        """Floating-point operations of one rank, in 1e12; an ag_gemm multiplies all rows on every rank."""
        return 2e-12 * self.m * self.n * self.k / (1 if self.collective == "ag_gemm" else self.world)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """All of A and B, the same each time and on every rank."""
        generator = torch.Generator(device).manual_seed(self.seed)
        shapes = ((self.m, self.k), (self.k, self.n))
        a, b = (torch.randn(x, generator=generator, device=device).to(self.product.dtype) for x in shapes)
        return a, b

    def part(self, a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """What a rank has of A and B, in memory of its own, as ranks have."""
        product = self.product
        if self.collective == "all_scatter":
            return a.clone(), b.split(product.sizes, 1)[rank].contiguous()
        if self.collective == "ag_gemm":
            return a.split(product.sizes)[rank].contiguous(), b.clone()
        depth = split(self.k, self.world)
        return a.split(depth, 1)[rank].contiguous(), b.split(depth)[rank].contiguous()

    def share(self, c: Tensor, rank: int) -> Tensor:
        """What a rank gets of C."""
        return c.split(self.product.sizes)[rank] if self.collective == "gemm_rs" else c

    def sent_bytes(self, rank: int, shots: int) -> float:
        """What a rank has to send to the others, counted by its shapes; two shots where it has no number of them."""
        product, others = self.product, self.world - 1
        if self.collective == "all_scatter":
            return others * self.m * product.sizes[rank] * product.out_dtype.itemsize
        if self.collective == "ag_gemm":
            return others * product.sizes[rank] * self.k * product.dtype.itemsize
        sums = self.m * self.n * product.reduce_dtype.itemsize
        if self.collective == "gemm_rs":
            return (self.m - product.sizes[rank]) * self.n * product.reduce_dtype.itemsize
        if shots == 1:
            return others * sums
        return others / self.world * (sums + self.m * self.n * product.out_dtype.itemsize)


@dataclass(frozen=True)
class Setup:
    """How it runs: the variant, rounds, one process for all ranks or one each, and what else is wanted."""

    variant: str = "auto"
    rounds: int = 5
    local: bool = False
    mps: bool = False
    reference: bool = False
    timeline: bool = False


@dataclass(frozen=True)
class RankRow:
    """One rank's part: milliseconds are its own, or those of all ranks where one process plays them.

    `by` is "heap" or "group", `means` the kind of the heap or the backend of the group; `ratio` the time as a multiple
    of the group's; `bits` tells results apart.
    """

    case: Case
    rank: int
    by: str
    means: str
    variant: str
    shots: int
    why: str
    ms: float
    tflops: float
    gb_s: float
    error: float
    ratio: float | None
    bits: str


@dataclass(frozen=True)
class Found:
    """What runs showed: rows of ranks, the words of their plans, and when tiles came, by rank, where that was asked."""

    rows: tuple[RankRow, ...]
    plans: dict[int, str]
    times: dict[int, list[list[int]]]


def default_shape(device: str) -> tuple[int, int, int]:
    """A large one on a GPU."""
    return SMALL if on_cpu(device) else LARGE


def default_world(device: str) -> int:
    """As many ranks as there are GPUs, and at least two."""
    return max(2, 0 if on_cpu(device) else count(torch.device(device).type))


def check_heap(kind: str | None, device: str) -> None:
    """A ValueError for a heap that ranks on such a device do not have."""
    kinds = ("local", "shared" if on_cpu(device) else "symmetric")
    if kind not in (None, *kinds):
        raise ValueError(f"heap {kind!r}: expected {' or '.join(kinds)} on {device}")


def check_setup(case: Case, setup: Setup) -> None:
    """A ValueError for what cannot run here."""
    if setup.variant not in ("auto", *VARIANTS):
        raise ValueError(f"variant {setup.variant!r}: expected one of auto, {', '.join(VARIANTS)}")
    if find_spec("triton") is None:
        raise ValueError("fused products need triton, which is not installed")
    if setup.mps and (setup.local or on_cpu(case.device)):
        raise ValueError("--mps is for processes that share a GPU")
    if setup.reference and setup.local:
        raise ValueError("--reference needs a process group; one process that plays all ranks has none")
    if on_cpu(case.device):
        from meshflash.kernels.triton.common import INTERPRETED

        if not INTERPRETED:
            raise ValueError("on CPUs Triton interprets the kernels: set TRITON_INTERPRET=1 before it is imported")


def joined(parts: Sequence[Found]) -> Found:
    """What all processes found, the rows of the process group behind those of the heap."""
    rows = sorted((row for part in parts for row in part.rows), key=lambda row: (row.by == GROUP, row.rank))
    times = {rank: x for part in parts for rank, x in part.times.items()}
    return Found(tuple(rows), {rank: x for part in parts for rank, x in part.plans.items()}, times)


def failures(rows: Sequence[RankRow]) -> list[str]:
    """What is wrong, by rank: errors beyond what the numbers allow, and bits that differ where they may not.

    All ranks get the same bits of a whole C from a heap. Rows of C that each rank has for itself are not compared.
    """
    out = []
    first: dict[str, RankRow] = {}
    for row in rows:
        allowed = WORST_ERROR[row.case.numbers]
        where = f"rank {row.rank}, {row.variant} by {row.means}"
        if not row.error <= allowed:
            out.append(
                f"{where}: relative error {row.error:.1e} against float64, where {row.case.numbers} allows "
                f"{allowed:.0e}"
            )
        if row.by == GROUP or row.case.collective == "gemm_rs":
            continue
        one = first.setdefault(row.by, row)
        if row.bits != one.bits:
            out.append(f"{where}: other bits than rank {one.rank} has, whose relative error is {one.error:.1e}")
    return out
