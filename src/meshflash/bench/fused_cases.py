"""Cases of fused GEMM + collectives: shapes and shards, how ranks run, their rows, and the check of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from rich.table import Table
from torch import Tensor

from meshflash.bench.cases import on_cpu
from meshflash.bench.columns import Column, Row, terminal
from meshflash.bench.gemm import WORST_ERROR, check_dtype, precision_of, torch_dtype_of
from meshflash.gemm.distributed.plan import BULK, VARIANTS, plan_fused
from meshflash.gemm.distributed.problem import DistributedGemm
from meshflash.gemm.distributed.tiles import collective_name, split
from meshflash.runtime.devices import CPU, count

#: M, N and K by default: on a GPU, and on a CPU, where the kernels are interpreted.
LARGE, SMALL = (8192, 4608, 36864), (48, 96, 64)
#: What a fused GEMM communicates over: a symmetric heap, or a process group (the baseline).
HEAP, GROUP = "heap", "group"
INTERPRETED = "on a CPU the kernels of a heap are interpreted: their times show an order, not a speed"


@dataclass(frozen=True)
class Case:
    """A GEMM + collective over `world` ranks; "tf32" is float32 at that precision. Impossible ones raise ValueError."""

    collective: str
    m: int
    n: int
    k: int
    world: int
    dtype: str = "float32"
    device: str = CPU
    shots: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        plan_fused(self.problem, torch.device(CPU), variant=BULK, shots=self.shots, backend=GROUP)

    @property
    def problem(self) -> DistributedGemm:
        """The distributed GEMM, with operands sharded evenly."""
        sizes = (self.collective, self.m, self.n, self.k, self.world, torch_dtype_of(self.dtype))
        return DistributedGemm.of(*sizes, precision=self.precision)

    @property
    def precision(self) -> str:
        """The precision of float32 GEMMs."""
        return precision_of(self.dtype)

    @property
    def tflop(self) -> float:
        """Floating-point operations of one rank, in units of 1e12; each rank of an ag_gemm multiplies all rows."""
        return 2e-12 * self.m * self.n * self.k / (1 if self.collective == "ag_gemm" else self.world)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return all of A and B, the same each time and on every rank."""
        generator = torch.Generator(device).manual_seed(self.seed)
        shapes = ((self.m, self.k), (self.k, self.n))
        a, b = (torch.randn(x, generator=generator, device=device).to(self.problem.dtype) for x in shapes)
        return a, b

    def operands(self, a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return a rank's shards of A and B, in memory of their own as on a real rank."""
        problem = self.problem
        if self.collective == "all_scatter":
            return a.clone(), b.split(problem.sizes, 1)[rank].contiguous()
        if self.collective == "ag_gemm":
            return a.split(problem.sizes)[rank].contiguous(), b.clone()
        depth = split(self.k, self.world)
        return a.split(depth, 1)[rank].contiguous(), b.split(depth)[rank].contiguous()

    def output(self, c: Tensor, rank: int) -> Tensor:
        """Return the rows of C that a rank gets."""
        return c.split(self.problem.sizes)[rank] if self.collective == "gemm_rs" else c

    def sent_bytes(self, rank: int, shots: int) -> float:
        """Return the bytes that a rank must send, from its shapes; an all_reduce without shots counts as two shots."""
        problem, others = self.problem, self.world - 1
        if self.collective == "all_scatter":
            return others * self.m * problem.sizes[rank] * problem.out_dtype.itemsize
        if self.collective == "ag_gemm":
            return others * problem.sizes[rank] * self.k * problem.dtype.itemsize
        sums = self.m * self.n * problem.reduce_dtype.itemsize
        if self.collective == "gemm_rs":
            return (self.m - problem.sizes[rank]) * self.n * problem.reduce_dtype.itemsize
        if shots == 1:
            return others * sums
        return others / self.world * (sums + self.m * self.n * problem.out_dtype.itemsize)


@dataclass(frozen=True)
class Setup:
    """How a case runs.

    Attributes:
        variant: The variant of the fused GEMM, or "auto".
        rounds: The number of samples; their median counts.
        local: Whether one process emulates all ranks; otherwise each rank is a process.
        mps: Whether processes share a GPU through MPS.
        reference: Whether the GEMM followed by the collective of a process group is timed too.
        timeline: Whether the times of tiles are recorded.
    """

    variant: str = "auto"
    rounds: int = 5
    local: bool = False
    mps: bool = False
    reference: bool = False
    timeline: bool = False


@dataclass(frozen=True)
class RankRow:
    """The figures of one rank; `ms` is that of all ranks where one process emulates them.

    `comm` is HEAP or GROUP, and `backend` the kind of heap or the backend of the group. `ratio` is the time over that
    of the group. `bits` is a digest that tells results apart.
    """

    case: Case
    rank: int
    comm: str
    backend: str
    variant: str
    shots: int
    reason: str
    ms: float
    tflops: float
    gb_s: float
    error: float
    ratio: float | None
    bits: str


@dataclass(frozen=True)
class Results:
    """The rows of ranks, the description of each rank's plan, and on request the times of tiles, by rank."""

    rows: tuple[RankRow, ...]
    plans: dict[int, str]
    times: dict[int, list[list[int]]]


def default_shape(device: str) -> tuple[int, int, int]:
    """Return M, N and K for a device: large on a GPU, small where kernels are interpreted."""
    return SMALL if on_cpu(device) else LARGE


def default_world(device: str) -> int:
    """Return the number of GPUs, at least two."""
    return max(2, 0 if on_cpu(device) else count(torch.device(device).type))


def check_heap(kind: str | None, device: str) -> None:
    """Raise ValueError for a kind of heap that ranks on this device do not have."""
    kinds = ("local", "shared" if on_cpu(device) else "symmetric")
    if kind not in (None, *kinds):
        raise ValueError(f"heap {kind!r}: expected {' or '.join(kinds)} on {device}")


def check_setup(case: Case, setup: Setup) -> None:
    """Raise ValueError for a case or setup that cannot run here."""
    if setup.variant not in ("auto", *VARIANTS):
        raise ValueError(f"variant {setup.variant!r}: expected one of auto, {', '.join(VARIANTS)}")
    if find_spec("triton") is None:
        raise ValueError("fused GEMMs need triton, which is not installed")
    if setup.mps and (setup.local or on_cpu(case.device)):
        raise ValueError("--mps is for processes that share a GPU")
    if setup.reference and setup.local:
        raise ValueError("--reference needs a process group; one process that emulates all ranks has none")
    if on_cpu(case.device):
        from meshflash.kernels.triton.common import INTERPRETED as IS_INTERPRETED

        if not IS_INTERPRETED:
            raise ValueError("on CPUs Triton interprets the kernels: set TRITON_INTERPRET=1 before it is imported")


def merge_results(parts: Sequence[Results]) -> Results:
    """Merge the results of all processes; the rows of the process group follow those of the heap."""
    rows = sorted((row for part in parts for row in part.rows), key=lambda row: (row.comm == GROUP, row.rank))
    times = {rank: x for part in parts for rank, x in part.times.items()}
    return Results(tuple(rows), {rank: x for part in parts for rank, x in part.plans.items()}, times)


def find_failures(rows: Sequence[RankRow]) -> list[str]:
    """Return what is wrong, by rank: errors beyond those that the dtype allows, and bits that differ between ranks.

    Over a heap all ranks get the same bits of a whole C. Rows of C that only one rank has are not compared.
    """
    out = []
    first: dict[str, RankRow] = {}
    for row in rows:
        allowed = WORST_ERROR[row.case.dtype]
        where = f"rank {row.rank}, {row.variant} by {row.backend}"
        if not row.error <= allowed:
            out.append(
                f"{where}: relative error {row.error:.1e} against float64, where {row.case.dtype} allows {allowed:.0e}"
            )
        if row.comm == GROUP or row.case.collective == "gemm_rs":
            continue
        one = first.setdefault(row.comm, row)
        if row.bits != one.bits:
            out.append(f"{where}: other bits than rank {one.rank} has, whose relative error is {one.error:.1e}")
    return out


def title(row: Row) -> str:
    """Return the collective of a row, with the shots of an all_reduce."""
    return collective_name(row["collective"], row["shots"])


def table(rows: list[Row]) -> Table:
    """Return a row for each rank over the heap, and for each rank over the process group if it was timed."""
    has_group = any(row["comm"] == GROUP for row in rows)
    columns = (
        Column("rank", "rank"),
        Column("variant", lambda row: f"{row['variant']}, {row['backend']}", is_text=True),
        Column("ms", lambda row: f"{row['ms']:.4g}"),
        Column("TFLOP/s", lambda row: f"{row['tflops']:.3g}"),
        Column("GB/s", lambda row: f"{row['gb_s']:.3g}"),
        Column("error", lambda row: f"{row['error']:.1e}"),
        *((Column("x group", lambda row: f"{row['ratio']:.3f}"),) * has_group),
    )
    one = rows[0]
    head = f"{title(one)}, {one['m']} x {one['n']} x {one['k']}, {one['dtype']} on {one['device']}"
    caption = "TFLOP/s and GB/s (sent to other ranks) of one rank; error: relative, against float64"
    caption += "; x group: time over that of the process group" if has_group else ""
    return terminal(head, columns, rows, caption=caption)
