"""Products of matrices: each mode of `meshflash.gemm` beside torch.mm, in turns, each checked against float64 first.

On a GPU `trials` also times configurations of our kernel, of which `calibrate` makes the table that "auto" goes by.
On a CPU our kernel is interpreted: it is checked where that is on, and never timed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from meshflash.bench import plots, record, tables
from meshflash.bench.cases import on_cpu
from meshflash.bench.check import relative_error
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

#: M, N and K: square, the two products of a wide MLP, a ragged one, and one with few rows and a long sum.
LARGE = (
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (8192, 4608, 36864),
    (8192, 36864, 4608),
    (4864, 1024, 8256),
    (256, 1024, 28672),
)
SMALL = ((512, 512, 512), (64, 256, 2048))
#: What a table has besides.
MORE = ((16384, 4096, 4096), (2048, 2048, 2048), (512, 4096, 4096))
#: The operands as they lie, and as the two products of a backward find them.
LAYOUTS = ("nn", "nt", "tn")
#: No time is shown of what has a relative error above this.
WORST_ERROR = {"float32": 1e-5, "tf32": 1e-3, "bfloat16": 5e-3, "float16": 1e-3}
CELL = ("m", "n", "k", "numbers", "layout", "device")
#: Seconds for one product.
PATIENCE = 1200.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """One shape, in numbers of a kind ("tf32" are float32), on one device. What cannot be is a ValueError.

    `layout` has a t for each operand whose columns are neighbours in memory.
    """

    m: int
    n: int
    k: int
    numbers: str = "bfloat16"
    layout: str = "nn"
    device: str = TRITON

    def __post_init__(self) -> None:
        if self.numbers not in WORST_ERROR:
            raise ValueError(f"dtype {self.numbers!r}: expected one of {', '.join(WORST_ERROR)}")
        if self.layout not in ("nn", "nt", "tn", "tt"):
            raise ValueError(f"layout {self.layout!r}: expected nn, nt, tn or tt")

    @property
    def precision(self) -> str:
        """That of float32."""
        return "tf32" if self.numbers == "tf32" else "ieee"

    @property
    def tflop(self) -> float:
        """Floating-point operations, in 1e12."""
        return 2e-12 * self.m * self.n * self.k

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Both operands, the same each time."""
        generator = torch.Generator(self.device).manual_seed(0)
        dtype = torch.float32 if self.numbers == "tf32" else getattr(torch, self.numbers)

        def matrix(rows: int, columns: int, turned: bool) -> Tensor:
            shape = (columns, rows) if turned else (rows, columns)
            x = torch.randn(shape, generator=generator, device=self.device).to(dtype)
            return x.T if turned else x

        return matrix(self.m, self.k, self.layout[0] == "t"), matrix(self.k, self.n, self.layout[1] == "t")


@dataclass(frozen=True)
class GemmRow:
    """One plan of one product: `ratio` is its speed as a multiple of torch.mm's. What was not timed is None.

    `config` are the numbers of our kernel's configuration, none for torch's own.
    """

    case: Case
    mode: str
    config: tuple[int, ...]
    programs: int
    shared: int
    tiles: int
    error: float | None
    ms: float | None
    tflops: float | None
    ratio: float | None
    why: str


def parse(shape: str) -> tuple[int, int, int]:
    """M, N and K of a text.

    >>> parse("4864x1024x8256")
    (4864, 1024, 8256)
    """
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", shape)
    if found is None:
        raise ValueError(f"shape {shape!r}: expected MxNxK, as in 4864x1024x8256")
    m, n, k = map(int, found.groups())
    return m, n, k


def default_shapes(device: str, calibrate: bool = False) -> tuple[tuple[int, int, int], ...]:
    """Large ones on a GPU, and more for a table."""
    return SMALL if on_cpu(device) else (*LARGE, *MORE) if calibrate else LARGE


def default_modes(device: str) -> tuple[str, ...]:
    """All on a GPU."""
    return (TORCH,) if on_cpu(device) else (TORCH, *KERNELS, "auto")


def measure(case: Case, modes: Sequence[str], rounds: int, say: Say = lambda _: None) -> list[GemmRow]:
    """The rows of each mode, and of torch.mm, which is always there."""
    for mode in modes:
        if mode not in ("auto", *MODES):
            raise ValueError(f"mode {mode!r}: expected auto or one of {', '.join(MODES)}")
    a, b = case.tensors()
    product = GemmProblem.of(a, b, case.precision)
    plans = {mode: choose(product, mode) for mode in dict.fromkeys((TORCH, *modes))}
    return _measure(case, plans, rounds, say, (a, b))


def measure_apart(case: Case, modes: Sequence[str], rounds: int, say: Say) -> list[GemmRow]:
    """The same in a process of its own, so that no product finds what another one left in memory, caches and tables."""
    rows: list[GemmRow] = run_ranks(1, _measure_here, case, modes, rounds, timeout=PATIENCE, listen=say)[0]
    return rows


def _measure_here(rank: int, world: int, tell: Tell, case: Case, modes: Sequence[str], rounds: int) -> list[GemmRow]:
    return measure(case, modes, rounds, tell)


def trials(case: Case, rounds: int, say: Say = lambda _: None) -> list[GemmRow]:
    """The rows of each mode in each configuration that is worth trying, and of torch.mm; those that fail are told."""
    a, b = case.tensors()
    product = GemmProblem.of(a, b, case.precision)
    if product.unsupported_reason or on_cpu(case.device):
        raise ValueError(
            f"no configurations to time: {product.unsupported_reason or 'interpreted kernels are not timed'}"
        )
    plans = {TORCH: choose(product, TORCH)}
    for mode, config in (
        (mode, config) for mode in KERNELS for config in configs.candidates(product.dtype_name, a.device)
    ):
        found = make_plan(product, mode, config, "tried")
        assert found.partition is not None
        if mode == "data_parallel" or found.partition.num_split_tiles:  # others would be the same again
            plans[f"{mode} {config}"] = found
    return _measure(case, plans, rounds, say, (a, b), failing=True)


def _measure(
    case: Case, plans: dict[str, Plan], rounds: int, say: Say, tensors: tuple[Tensor, Tensor], failing: bool = False
) -> list[GemmRow]:
    a, b = tensors
    device = torch.device(case.device)
    say("float64")
    want = a.double() @ b.double()
    errors: dict[str, float] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for name, found in plans.items():
        say(f"checking {name}")
        call = partial(run, found, a, b, case.precision, Epilogue(a.dtype))
        try:
            out = attempt(call)
        except Exception as error:  # a compiler's own, or too much shared memory: it is no candidate here
            if not failing:
                raise
            say(f"{name} does not run: {error}")
            continue
        if out is None:
            continue
        errors[name] = relative_error(out[0], want)
        if not errors[name] <= WORST_ERROR[case.numbers]:
            raise RuntimeError(
                f"{name}: relative error {errors[name]:.1e} against float64 at {case}, where {case.numbers} allows "
                f"{WORST_ERROR[case.numbers]:.0e}; it is wrong, so it is not timed"
            )
        if found.mode == TORCH or not on_cpu(case.device):
            calls[name] = call
    del want
    say("timing")
    ms = interleaved(calls, device, rounds)
    return [
        GemmRow(
            case=case,
            mode=name.partition(" ")[0],
            config=tuple(configs.to_list(found.config)) if found.config else (),
            programs=found.num_ctas,
            shared=found.partition.num_split_tiles if found.partition else 0,
            tiles=found.partition.num_tiles if found.partition else 0,
            error=errors.get(name),
            ms=ms.get(name),
            tflops=case.tflop / ms[name] * 1e3 if name in ms else None,
            ratio=ms[TORCH] / ms[name] if name in ms and TORCH in ms else None,
            why=found.why if found.mode == name.partition(" ")[0] else f"{found.mode}: {found.why}",
        )
        for name, found in plans.items()
        if name in errors or not failing
    ]


def calibrate(
    device: str,
    shapes: Iterable[tuple[int, int, int]],
    numbers: Sequence[str] = ("bfloat16",),
    layouts: Sequence[str] = LAYOUTS,
    rounds: int = 5,
    say: Say = print,
) -> tuple[rates.Table, list[GemmRow]]:
    """The table that "auto" goes by: of each mode its best configuration at each shape; and all rows."""
    found: list[Rate] = []
    rows: list[GemmRow] = []
    for case in (Case(*shape, kind, layout, device) for shape in shapes for kind in numbers for layout in layouts):
        head = f"{case.m}x{case.n}x{case.k} {case.numbers} {case.layout}"
        mine = trials(case, rounds, lambda text, head=head: say(f"{head}: {text}"))  # type: ignore[misc]
        rows += mine
        for mode in MODES:
            timed = [row for row in mine if row.mode == mode and row.tflops is not None]
            if timed:
                best = max(timed, key=lambda row: row.tflops or 0.0)
                sizes = (case.m, case.n, case.k)
                found.append(Rate(mode, case.numbers, case.layout, *sizes, best.tflops or 0.0, best.config))
    about = identity(torch.device(device))
    return rates.Table(*about, tuple(found), record.header("")["versions"]), rows


def table(rows: list[dict[str, Any]], most: int | None = None) -> list[Table]:
    """A table for each product: plans in the order of their times, the first `most` of them and torch.mm."""
    made = []
    for cell, group in itertools.groupby(rows, key=lambda row: tuple(row[key] for key in CELL)):
        own = list(group)
        m, n, k, numbers, layout, device = cell
        one = tables.blank(f"{m} x {n} x {k}, {numbers}, {layout}, on {device}", "kernel")
        one.box, one.pad_edge, one.padding = box.SIMPLE_HEAD, False, (0, 1, 0, 0)
        one.add_column("configuration")
        for name in ("ms", "TFLOP/s", "x mm", "error", "shared"):
            one.add_column(name, justify="right", no_wrap=True)
        one.caption, one.caption_justify = "x mm: speed against torch.mm; shared: tiles in parts, of all", "left"
        if most is not None:
            own.sort(key=lambda row: (row["ms"] is None, row["ms"]))
            own = [row for n, row in enumerate(own) if n < most or row["mode"] == TORCH]
        for row in own:
            ran = row["why"].partition(":")[0] if row["mode"] == "auto" else ""
            config = str(Config(*row["config"])) if row["config"] else ""
            shared = f"{row['shared']}/{row['tiles']}" if row["tiles"] else ""
            one.add_row(f"auto ({ran})" if ran else row["mode"], config, *_figures(row), shared)
        made.append(one)
    return made


def verdict(rows: list[dict[str, Any]]) -> list[str]:
    """Where our kernel loses to torch.mm, and how far "auto" is behind the best, in words."""
    lines, behind = [], []
    for cell, group in itertools.groupby(rows, key=lambda row: tuple(row[key] for key in CELL)):
        timed = {row["mode"]: row for row in group if row["ms"] is not None}
        name = f"{cell[0]}x{cell[1]}x{cell[2]} {cell[4]}"
        beside = {mode: row["ratio"] for mode, row in timed.items() if mode in KERNELS and row["ratio"] is not None}
        lost = [f"{mode} {ratio:.3f}" for mode, ratio in beside.items() if ratio < 1]
        lines += [f"slower than torch.mm at {name}: {', '.join(lost)}"] if lost else []
        if "auto" in timed:
            behind.append((timed["auto"]["ms"] / min(row["ms"] for row in timed.values()) - 1, name))
    if behind:
        most, name = max(behind)
        lines.append(f"auto is at most {most:.1%} behind the best: at {name}")
    return lines


def _figures(row: dict[str, Any]) -> list[str]:
    error = "" if row["error"] is None else f"{row['error']:.1e}"
    if row["ms"] is None:
        return ["not timed" if row["error"] is not None else tables.NO_MEMORY, "", "", error]
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
    return [f"{row['ms']:.3f}", f"{row['tflops']:.3g}", ratio, error]


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Bars of TFLOP/s and of the speed as a multiple of torch.mm's, a group for each product."""
    panels = {"TFLOP/s": ("tflops", 1.0), "times torch.mm": ("ratio", 1.0)}
    timed = [row for row in rows if row["ms"] is not None and row["ratio"] is not None]
    plots.bars(timed, "mode", lambda row: f"{row['m']}x{row['n']}\nx{row['k']}\n{row['layout']}", panels, title, path)
