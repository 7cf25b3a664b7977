"""GEMMs on a single device: each mode of `meshflash.gemm` beside torch.mm, interleaved, each checked against float64.

On a GPU `time_configs` also times configurations of our kernel; `calibrate` makes of them the table that mode="auto"
reads. On a CPU our kernel is interpreted: it is checked if interpretation is on, and never timed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.table import Table
from torch import Tensor

from meshflash.bench import plots, record
from meshflash.bench.cases import on_cpu
from meshflash.bench.check import relative_error
from meshflash.bench.columns import NO_MEMORY, Column, Row, optional, terminal
from meshflash.bench.timing import interleaved
from meshflash.gemm import configs, rates
from meshflash.gemm.configs import Config
from meshflash.gemm.launch import Epilogue, run
from meshflash.gemm.plan import KERNELS, MODES, TORCH, GemmProblem, Plan, choose, make_plan
from meshflash.gemm.rates import Rate
from meshflash.kernels.rates import identity
from meshflash.runtime.devices import TRITON
from meshflash.runtime.oom import attempt
from meshflash.runtime.processes import Tell, run_ranks

#: M, N and K: square ones, the two GEMMs of a wide MLP, a ragged one, and one with few rows and a long K.
LARGE = (
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (8192, 4608, 36864),
    (8192, 36864, 4608),
    (4864, 1024, 8256),
    (256, 1024, 28672),
)
SMALL = ((512, 512, 512), (64, 256, 2048))
#: Shapes that a calibration measures besides LARGE.
MORE = ((16384, 4096, 4096), (2048, 2048, 2048), (512, 4096, 4096))
#: The layouts of a forward, and of the two GEMMs of its backward.
LAYOUTS = ("nn", "nt", "tn")
#: Relative errors above these count as wrong; such a result is not timed.
WORST_ERROR = {"float32": 1e-5, "tf32": 1e-3, "bfloat16": 5e-3, "float16": 1e-3}
#: Keys of a row whose values name a case.
CASE = ("m", "n", "k", "dtype", "layout", "device")
#: Seconds after which the process of one GEMM is given up.
TIMEOUT_SECONDS = 1200.0

Say = Callable[[str], None]


def check_dtype(name: str) -> None:
    """Raise ValueError unless `name` is a dtype of GEMMs."""
    if name not in WORST_ERROR:
        raise ValueError(f"dtype {name!r}: expected one of {', '.join(WORST_ERROR)}")


def precision_of(dtype: str) -> str:
    """Return the precision of float32 GEMMs: "tf32" for the dtype of that name, else "ieee"."""
    return "tf32" if dtype == "tf32" else "ieee"


def torch_dtype_of(dtype: str) -> torch.dtype:
    """Return torch's dtype of this name; "tf32" is float32."""
    found: torch.dtype = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    return found


class HasDtype(Protocol):
    """A case with a dtype."""

    @property
    def dtype(self) -> str:
        """The name of the dtype."""
        ...


def check_error(name: str, case: HasDtype, error: float) -> None:
    """Raise RuntimeError if a relative error against float64 is beyond what the dtype of the case allows."""
    if not error <= WORST_ERROR[case.dtype]:
        raise RuntimeError(
            f"{name}: relative error {error:.1e} against float64 at {case}, where {case.dtype} allows "
            f"{WORST_ERROR[case.dtype]:.0e}; it is wrong, so it is not timed"
        )


@dataclass(frozen=True)
class Case:
    """One shape and dtype on one device. An impossible one raises ValueError; "tf32" is float32 at that precision.

    `layout` has a letter for each operand: n for row-major, t for the transpose of a row-major tensor.
    """

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    layout: str = "nn"
    device: str = TRITON

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        if self.layout not in ("nn", "nt", "tn", "tt"):
            raise ValueError(f"layout {self.layout!r}: expected nn, nt, tn or tt")

    @property
    def precision(self) -> str:
        """The precision of float32 GEMMs."""
        return precision_of(self.dtype)

    @property
    def tflop(self) -> float:
        """Floating-point operations, in units of 1e12."""
        return 2e-12 * self.m * self.n * self.k

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return both operands, the same each time."""
        generator = torch.Generator(self.device).manual_seed(0)

        def matrix(rows: int, columns: int, transposed: bool) -> Tensor:
            shape = (columns, rows) if transposed else (rows, columns)
            x = torch.randn(shape, generator=generator, device=self.device).to(torch_dtype_of(self.dtype))
            return x.T if transposed else x

        return matrix(self.m, self.k, self.layout[0] == "t"), matrix(self.k, self.n, self.layout[1] == "t")


@dataclass(frozen=True)
class GemmRow:
    """One plan of one GEMM. `ratio` is its speed over that of torch.mm; figures that were not measured are None.

    `config` holds the fields of our kernel's configuration; it is empty for torch.mm.
    """

    case: Case
    mode: str
    config: tuple[int, ...]
    num_ctas: int
    num_split_tiles: int
    num_tiles: int
    error: float | None
    ms: float | None
    tflops: float | None
    ratio: float | None
    reason: str


def parse_shape(shape: str) -> tuple[int, int, int]:
    """Return M, N and K of a text.

    >>> parse_shape("4864x1024x8256")
    (4864, 1024, 8256)
    """
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", shape)
    if found is None:
        raise ValueError(f"shape {shape!r}: expected MxNxK, as in 4864x1024x8256")
    m, n, k = map(int, found.groups())
    return m, n, k


def default_shapes(device: str, calibrate: bool = False) -> tuple[tuple[int, int, int], ...]:
    """Return the shapes for a device: large ones on a GPU, and more of them to calibrate."""
    return SMALL if on_cpu(device) else (*LARGE, *MORE) if calibrate else LARGE


def default_modes(device: str) -> tuple[str, ...]:
    """Return all modes on a GPU, and torch alone on a CPU."""
    return (TORCH,) if on_cpu(device) else (TORCH, *KERNELS, "auto")


def measure(case: Case, modes: Sequence[str], rounds: int, say: Say = lambda _: None) -> list[GemmRow]:
    """Return a row for torch.mm and for each mode; RuntimeError for a wrong result.

    Args:
        case: The GEMM.
        modes: The modes of `matmul` to time beside torch.mm.
        rounds: The number of rounds, in each of which every mode is timed once.
        say: A function that is called with progress messages.
    """
    for mode in modes:
        if mode not in ("auto", *MODES):
            raise ValueError(f"mode {mode!r}: expected auto or one of {', '.join(MODES)}")
    a, b = case.tensors()
    problem = GemmProblem.of(a, b, case.precision)
    plans = {mode: choose(problem, mode) for mode in dict.fromkeys((TORCH, *modes))}
    return _measure(case, plans, rounds, say, (a, b))


def measure_in_process(case: Case, modes: Sequence[str], rounds: int, say: Say) -> list[GemmRow]:
    """Run `measure` in a process of its own: no GEMM finds memory, caches or tables that another one left."""
    rows: list[GemmRow] = run_ranks(1, _measure_rank, case, modes, rounds, timeout=TIMEOUT_SECONDS, listen=say)[0]
    return rows


def _measure_rank(rank: int, world: int, tell: Tell, case: Case, modes: Sequence[str], rounds: int) -> list[GemmRow]:
    return measure(case, modes, rounds, tell)


def time_configs(case: Case, rounds: int, say: Say = lambda _: None) -> list[GemmRow]:
    """Return a row for torch.mm and for each mode in each candidate configuration; `say` hears of those that fail."""
    a, b = case.tensors()
    problem = GemmProblem.of(a, b, case.precision)
    if problem.unsupported_reason or on_cpu(case.device):
        raise ValueError(
            f"no configurations to time: {problem.unsupported_reason or 'interpreted kernels are not timed'}"
        )
    plans = {TORCH: choose(problem, TORCH)}
    for mode, config in itertools.product(KERNELS, configs.candidates(problem.dtype_name, a.device)):
        plan = make_plan(problem, mode, config, "tried")
        assert plan.partition is not None
        if mode == "data_parallel" or plan.partition.num_split_tiles:  # without split tiles all modes are data-parallel
            plans[f"{mode} {config}"] = plan
    return _measure(case, plans, rounds, say, (a, b), may_fail=True)


def _measure(
    case: Case, plans: dict[str, Plan], rounds: int, say: Say, tensors: tuple[Tensor, Tensor], may_fail: bool = False
) -> list[GemmRow]:
    a, b = tensors
    say("float64")
    expected = a.double() @ b.double()
    errors: dict[str, float] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for name, plan in plans.items():
        say(f"checking {name}")
        call = partial(run, plan, a, b, case.precision, Epilogue(a.dtype))
        try:
            out = attempt(call)
        except Exception as error:  # the compiler fails, or shared memory is too small: not a candidate here
            if not may_fail:
                raise
            say(f"{name} does not run: {error}")
            continue
        if out is None:
            continue
        errors[name] = relative_error(out[0], expected)
        check_error(name, case, errors[name])
        if plan.mode == TORCH or not on_cpu(case.device):
            calls[name] = call
    del expected
    say("timing")
    ms = interleaved(calls, torch.device(case.device), rounds)
    return [
        GemmRow(
            case=case,
            mode=name.partition(" ")[0],
            config=tuple(configs.to_list(plan.config)) if plan.config else (),
            num_ctas=plan.num_ctas,
            num_split_tiles=plan.partition.num_split_tiles if plan.partition else 0,
            num_tiles=plan.partition.num_tiles if plan.partition else 0,
            error=errors.get(name),
            ms=ms.get(name),
            tflops=case.tflop / ms[name] * 1e3 if name in ms else None,
            ratio=ms[TORCH] / ms[name] if name in ms and TORCH in ms else None,
            reason=plan.why if plan.mode == name.partition(" ")[0] else f"{plan.mode}: {plan.why}",
        )
        for name, plan in plans.items()
        if name in errors or not may_fail
    ]


def calibrate(
    device: str,
    shapes: Iterable[tuple[int, int, int]],
    dtypes: Sequence[str] = ("bfloat16",),
    layouts: Sequence[str] = LAYOUTS,
    rounds: int = 5,
    say: Say = print,
) -> tuple[rates.Table, list[GemmRow]]:
    """Return the table that mode="auto" reads, with the best configuration of each mode at each shape; and all rows.

    Args:
        device: The GPU to measure.
        shapes: M, N and K of each GEMM.
        dtypes: The dtypes, by name.
        layouts: The layouts, as in `Case.layout`.
        rounds: The number of rounds, in each of which every configuration is timed once.
        say: A function that is called with progress messages.
    """
    found: list[Rate] = []
    rows: list[GemmRow] = []
    for case in (Case(*shape, dtype, layout, device) for shape in shapes for dtype in dtypes for layout in layouts):
        head = f"{case.m}x{case.n}x{case.k} {case.dtype} {case.layout}"
        own = time_configs(case, rounds, lambda text, head=head: say(f"{head}: {text}"))  # type: ignore[misc]
        rows += own
        for mode in MODES:
            timed = [row for row in own if row.mode == mode and row.tflops is not None]
            if timed:
                best = max(timed, key=lambda row: row.tflops or 0.0)
                sizes = (case.m, case.n, case.k)
                found.append(Rate(mode, case.dtype, case.layout, *sizes, best.tflops or 0.0, best.config))
    about = identity(torch.device(device))
    return rates.Table(*about, tuple(found), record.header("")["versions"]), rows


def _mode(row: Row) -> str:
    ran = row["reason"].partition(":")[0] if row["mode"] == "auto" else ""
    return f"auto ({ran})" if ran else str(row["mode"])


def _milliseconds(row: Row) -> str:
    if row["ms"] is None:
        return "not timed" if row["error"] is not None else NO_MEMORY
    return f"{row['ms']:.3f}"


COLUMNS = (
    Column("kernel", _mode, is_text=True),
    Column("configuration", lambda row: str(Config(*row["config"])) if row["config"] else "", is_text=True),
    Column("ms", _milliseconds),
    Column("TFLOP/s", optional("tflops", "{:.3g}")),
    Column("x mm", optional("ratio", "{:.3f}")),
    Column("error", optional("error", "{:.1e}")),
    Column("split", lambda row: f"{row['num_split_tiles']}/{row['num_tiles']}" if row["num_tiles"] else ""),
)


def tables(rows: list[Row], most: int | None = None) -> list[Table]:
    """Return a table for each GEMM; with `most`, the fastest plans in the order of their times, and torch.mm."""
    found = []
    for (m, n, k, dtype, layout, device), own in _by_case(rows):
        if most is not None:
            own.sort(key=lambda row: (row["ms"] is None, row["ms"]))
            own = [row for place, row in enumerate(own) if place < most or row["mode"] == TORCH]
        head = f"{m} x {n} x {k}, {dtype}, {layout}, on {device}"
        caption = "x mm: speed over torch.mm; split: tiles that several CTAs share, of all"
        found.append(terminal(head, COLUMNS, own, caption=caption))
    return found


def summary(rows: list[Row]) -> list[str]:
    """Return where our kernel loses to torch.mm, and how far mode="auto" is behind the best, in words."""
    lines, behind = [], []
    for (m, n, k, _, layout, _), own in _by_case(rows):
        timed = {row["mode"]: row for row in own if row["ms"] is not None}
        name = f"{m}x{n}x{k} {layout}"
        ratios = {mode: row["ratio"] for mode, row in timed.items() if mode in KERNELS and row["ratio"] is not None}
        lost = [f"{mode} {ratio:.3f}" for mode, ratio in ratios.items() if ratio < 1]
        lines += [f"slower than torch.mm at {name}: {', '.join(lost)}"] if lost else []
        if "auto" in timed:
            behind.append((timed["auto"]["ms"] / min(row["ms"] for row in timed.values()) - 1, name))
    if behind:
        most, name = max(behind)
        lines.append(f"auto is at most {most:.1%} behind the best: at {name}")
    return lines


def plot(rows: list[Row], title: str, path: Path) -> None:
    """Draw bars of TFLOP/s and of the speed over torch.mm, a group for each GEMM."""
    panels = {"TFLOP/s": ("tflops", 1.0), "speedup over torch.mm": ("ratio", 1.0)}
    timed = [row for row in rows if row["ms"] is not None and row["ratio"] is not None]
    plots.bars(timed, "mode", lambda row: f"{row['m']}x{row['n']}\nx{row['k']}\n{row['layout']}", panels, title, path)


def _by_case(rows: list[Row]) -> list[tuple[tuple[Any, ...], list[Row]]]:
    return [(case, list(own)) for case, own in itertools.groupby(rows, key=lambda row: tuple(map(row.get, CASE)))]
