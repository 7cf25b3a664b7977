"""DDP on one machine: a step of the same total batch on 1, 2 or more ranks, with speedup and efficiency.

On a CPU each rank has one thread. Ranks that share a GPU get equal parts of it from MPS, the same part for any number
of ranks, so more ranks have more hardware. A single rank on the whole GPU is timed beside them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import distributed as _distributed

from benchmarks.protocol import Benchmark, Rows
from benchmarks.training import Trainer, Training, check_losses, of_row
from meshflash.bench import plots
from meshflash.bench.cases import on_cpu
from meshflash.bench.columns import Column, Row, milliseconds, optional, terminal
from meshflash.bench.columns import markdown as write_markdown
from meshflash.bench.timing import synchronize
from meshflash.kernels import registry
from meshflash.parallel import init_mesh
from meshflash.parallel.mesh import reduce_mesh
from meshflash.runtime.devices import take_device
from meshflash.runtime.mps import mps, variables
from meshflash.runtime.processes import Tell, run_ranks

dist: Any = _distributed  # torch does not declare all that it exports here

#: A step of about a second on one core; and one whose gradients, 67 MB, gloo can sum beside a GPU's backward.
SMALL = Training(layers=4, dim=256, heads=4, vocabulary=1024, tokens=256, batch=4)
LARGE = Training(layers=4, dim=512, heads=8, vocabulary=4096, tokens=4096, batch=32)
#: Steps before the first timed one: DDP rebuilds its buckets after one, and the optimizer allocates its state.
WARM_UP = 2
#: Threads of each rank, on the host.
THREADS = 1
WHOLE_GPU = "single rank, whole GPU"


@dataclass(frozen=True)
class DdpRow:
    """The median step of the slowest rank; `speedup` is over a single rank, `efficiency` the speedup for each rank.

    `gpu_percent` is each rank's part of the GPU if ranks share one, and `vs_whole_gpu` the speed over a single rank
    that has all of it. `loss` is that of the last step, `backend` that of the all-reduce of gradients.
    """

    ranks: int
    gpu_percent: int | None
    case: Training
    ms: float
    speedup: float
    efficiency: float | None
    vs_whole_gpu: float | None
    tokens_per_second: float
    loss: float
    backend: str
    gradient_bytes: int
    forward_ran: str
    backward_ran: str
    threads: int = THREADS


@dataclass(frozen=True)
class _Timed:
    """One rank's milliseconds of each step, the last loss, the backend of gradients, and the attention that ran."""

    ms: list[float]
    loss: float
    backend: str
    forward_ran: str
    backward_ran: str


def run(case: Training, ranks: Sequence[int], rounds: int, share_gpu: bool, listen: Tell | None = None) -> list[DdpRow]:
    """Return a row for each number of ranks, 1 included, and with MPS one for the whole GPU; unequal losses raise."""
    counts = sorted({1, *ranks})
    for number in counts:
        if case.batch % number:
            raise ValueError(f"batch={case.batch}: {number} ranks do not divide it; take a multiple of {number}")
    if share_gpu and on_cpu(case.device):
        raise ValueError("mps: it divides a GPU among ranks; say --device cuda too")
    if share_gpu and counts == [1]:
        raise ValueError("mps: a rank alone has the GPU to itself; give --nproc 2 or more too")
    share = 100 // counts[-1] if share_gpu else None
    runs = [(number, share) for number in counts] + ([(1, 100)] if share_gpu else [])
    with mps() if share_gpu else nullcontext():
        found = {key: _timed(case, *key, rounds, listen) for key in dict.fromkeys(runs)}
    ms = {key: _median([rank.ms for rank in each]) for key, each in found.items()}
    check_losses({_name(*key): each[0].loss for key, each in found.items()}, case.dtype)
    one, whole = ms[1, share], ms.get((1, 100))
    return [
        DdpRow(
            ranks=number,
            gpu_percent=part,
            case=case,
            ms=ms[number, part],
            speedup=one / ms[number, part],
            efficiency=one / ms[number, part] / number if part == share else None,
            vs_whole_gpu=None if whole is None else whole / ms[number, part],
            tokens_per_second=case.batch * case.tokens / ms[number, part] * 1e3,
            loss=each[0].loss,
            backend=each[0].backend,
            gradient_bytes=4 * case.config.num_parameters,
            forward_ran=each[0].forward_ran,
            backward_ran=each[0].backward_ran,
        )
        for (number, part), each in found.items()
    ]


def _median(ranks: list[list[float]]) -> float:
    """Return the median over steps of the slowest rank's milliseconds."""
    return statistics.median(map(max, zip(*ranks, strict=True)))


def _timed(case: Training, ranks: int, share: int | None, rounds: int, listen: Tell | None) -> list[_Timed]:
    # read when a process first uses the device
    part = {} if share in (None, 100) else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)}
    name = _name(ranks, share)
    with variables(**part):
        return run_ranks(ranks, train, case, rounds, name, threads=THREADS, timeout=1800.0, listen=listen)


def train(rank: int, world: int, tell: Tell, case: Training, rounds: int, name: str) -> _Timed:
    """Time the steps of one rank; all ranks begin each step together."""
    say = tell if rank == 0 else lambda _: None
    say(f"{name}: building the model")
    device = take_device(case.device, rank)
    mesh = init_mesh(device=device.type)
    trainer = Trainer(case, mesh, device)
    backend = "" if world == 1 else reduce_mesh(mesh).get_group()._get_backend(torch.device(device.type)).name()
    ms, loss, forward_ran, backward_ran = [], 0.0, "", ""
    for n in range(-WARM_UP, rounds):
        say(f"{name}: warming up" if n < 0 else f"{name}: step {n + 1} of {rounds}")
        synchronize(device)
        dist.barrier()
        begin = time.perf_counter()
        with registry.record_kernels() as ran:
            told = trainer.step()
        synchronize(device)
        ms += [(time.perf_counter() - begin) * 1e3] if n >= 0 else []
        dist.barrier()
        loss, forward_ran, backward_ran = float(told), ran.names("forward"), ran.names("backward")
    return _Timed(ms, loss, backend, forward_ran, backward_ran)


def title(rows: Rows) -> str:
    """Return what was trained, in words."""
    case = of_row(rows[0])
    return f"DDP, {case.batch} x {case.tokens:,} tokens a step\n{case.words}"


def tables(rows: Rows) -> list[Table]:
    """Return numbers of ranks with their speedup and efficiency."""
    return [terminal(title(rows), _columns(rows), rows, caption=caption(rows))]


def markdown(rows: Rows) -> str:
    """Return the table and its caption for a document."""
    return f"{write_markdown(_columns(rows), rows)}\n\n{caption(rows)}."


def caption(rows: Rows) -> str:
    """Return the hardware of each rank, and how gradients are reduced."""
    most, threads = rows[0], rows[0]["threads"]
    words = [f"each rank has {threads} thread{'s' if threads > 1 else ''}"]
    if _shares_gpu(rows):
        words = [
            f"each rank, also a single one, has {most['gpu_percent']}% of the GPU by MPS; the last row has all of it"
        ]
    if backend := next((row["backend"] for row in rows if row["backend"]), ""):
        why = ", through the host, for NCCL refuses ranks that share a GPU" if _shares_gpu(rows) else ""
        words.append(f"gradients, {most['gradient_bytes'] / 1e6:.1f} MB, travel by {backend}{why}")
    words.append("efficiency: speedup / ranks")
    return "; ".join(words)


def plot(rows: Rows, head: str, path: Path) -> None:
    """Draw bars of time and of speedup for each number of ranks."""
    panels = {"time of a step (ms)": ("ms", 1.0), "speedup over a single rank": ("speedup", 1.0)}
    named = [{**row, "name": WHOLE_GPU if row["gpu_percent"] == 100 else "DDP"} for row in rows]
    plots.bars(named, "name", lambda row: _name(row["ranks"], None), panels, head, path)


def _name(ranks: int, share: int | None) -> str:
    return WHOLE_GPU if share == 100 else f"{ranks} rank{'s' if ranks > 1 else ''}"


def _shares_gpu(rows: Rows) -> bool:
    return rows[0]["gpu_percent"] is not None


def _columns(rows: Rows) -> tuple[Column, ...]:
    shares_gpu = _shares_gpu(rows)

    def percent(row: Row) -> str:
        return f"{row['gpu_percent']}%"

    return (
        Column("ranks", "ranks"),
        *((Column("of the\nGPU", percent),) * shares_gpu),
        Column("step\n(ms)", lambda row: milliseconds(row["ms"])),
        Column("speedup", optional("speedup", "{:.2f}x")),
        Column("efficiency", optional("efficiency", "{:.3f}")),
        *((Column("x whole\nGPU", optional("vs_whole_gpu", "{:.3f}")),) * shares_gpu),
        Column("tokens/s", lambda row: f"{row['tokens_per_second']:,.0f}"),
        Column("loss", lambda row: f"{row['loss']:.5f}"),
    )


BENCHMARK = Benchmark(
    name="ddp", keys=frozenset({"ranks", "vs_whole_gpu"}), tables=tables, markdown=markdown, title=title, draw=plot
)
