"""DDP on one machine: a step of the same total batch on 1, 2 or more ranks, and how much faster more of them are.

On a CPU each rank has one thread. Ranks that share a GPU have equal parts of it by MPS, and a rank alone the same part
as each of the most ranks, so that more ranks have more hardware; one rank on the whole GPU stands beside them.
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

from benchmarks import training as shared
from benchmarks.training import Trainer, Training, check_losses, in_markdown, of_row
from meshflash.bench import plots, tables
from meshflash.bench.cases import on_cpu
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
#: Steps before the first that is timed: DDP arranges its buckets after one, and the optimizer makes its state.
WARM_UP = 2
#: Threads of each rank, on the host.
THREADS = 1
WHOLE = "one rank, whole GPU"


@dataclass(frozen=True)
class DdpRow:
    """The slowest rank's median step, against one rank: `efficiency` is the speed-up for each rank.

    `share` is each rank's part of the GPU in percent, where ranks share one; `of_whole` the speed against one rank that
    has all of it. `loss` is that of the last step, `backend` what gradients travel by.
    """

    ranks: int
    share: int | None
    case: Training
    ms: float
    speedup: float
    efficiency: float | None
    of_whole: float | None
    tokens_per_second: float
    loss: float
    backend: str
    gradient_bytes: int
    forward_ran: str
    backward_ran: str
    threads: int = THREADS


@dataclass(frozen=True)
class _Timed:
    """One rank's milliseconds of each step, the last loss, what gradients travel by, and the attention that ran."""

    ms: list[float]
    loss: float
    backend: str
    forward_ran: str
    backward_ran: str


def run(case: Training, ranks: Sequence[int], rounds: int, share_gpu: bool, listen: Tell | None = None) -> list[DdpRow]:
    """A row for each number of ranks, one among them; and with MPS one for the whole GPU. Losses that differ raise."""
    counts = sorted({1, *ranks})
    for number in counts:
        if case.batch % number:
            raise ValueError(f"batch={case.batch}: {number} ranks do not divide it; take a multiple of {number}")
    if share_gpu and on_cpu(case.device):
        raise ValueError("mps: it divides a GPU among ranks; say --device cuda too")
    if share_gpu and counts == [1]:
        raise ValueError("mps: a rank alone has the GPU to itself; give --nproc 2 or more too")
    share = 100 // counts[-1] if share_gpu else None
    asked = [(number, share) for number in counts] + ([(1, 100)] if share_gpu else [])
    with mps() if share_gpu else nullcontext():
        found = {key: _timed(case, *key, rounds, listen) for key in dict.fromkeys(asked)}
    ms = {key: _median([rank.ms for rank in each]) for key, each in found.items()}
    check_losses({_name(*key): each[0].loss for key, each in found.items()}, case.dtype)
    one, whole = ms[1, share], ms.get((1, 100))
    return [
        DdpRow(
            ranks=number,
            share=part,
            case=case,
            ms=ms[number, part],
            speedup=one / ms[number, part],
            efficiency=one / ms[number, part] / number if part == share else None,
            of_whole=None if whole is None else whole / ms[number, part],
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
    """Of the steps' milliseconds, each that of the slowest rank."""
    return statistics.median(map(max, zip(*ranks, strict=True)))


def _timed(case: Training, ranks: int, share: int | None, rounds: int, listen: Tell | None) -> list[_Timed]:
    # read when a process first uses the device
    part = {} if share in (None, 100) else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)}
    name = _name(ranks, share)
    with variables(**part):
        return run_ranks(ranks, train, case, rounds, name, threads=THREADS, timeout=1800.0, listen=listen)


def train(rank: int, world: int, tell: Tell, case: Training, rounds: int, name: str) -> _Timed:
    """One rank's part: steps that all ranks begin together, and how long each takes this one."""
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


def read(path: Path) -> dict[str, Any]:
    """A record of this benchmark."""
    return shared.read(path, {"ranks", "of_whole"}, "bench ddp")


def title(rows: list[dict[str, Any]]) -> str:
    """What was trained."""
    case = of_row(rows[0])
    return f"DDP, {case.batch} x {case.tokens:,} tokens a step\n{case.words}"


def table(rows: list[dict[str, Any]]) -> Table:
    """Ranks with their speed against one."""
    made = tables.blank(title(rows), *_columns(rows, "ms a step", "x whole"))
    made.caption, made.caption_justify = caption(rows), "left"
    for row in rows:
        made.add_row(*_cells(row, _shared(rows)))
    return made


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table for a document, and what it says of itself."""
    lines = [_cells(row, _shared(rows)) for row in rows]
    return f"{in_markdown(_columns(rows, 'a step, ms', 'x one rank, whole GPU'), lines)}\n\n{caption(rows)}."


def caption(rows: list[dict[str, Any]]) -> str:
    """What each rank has, and how gradients travel."""
    most, threads = rows[0], rows[0]["threads"]
    words = [f"each rank has {threads} thread{'s' if threads > 1 else ''}"]
    if _shared(rows):
        words = [f"each rank, also alone, has {most['share']}% of the GPU by MPS but for the last row, which has all"]
    if backend := next((row["backend"] for row in rows if row["backend"]), ""):
        why = ", through the host, for NCCL refuses ranks that share a GPU" if _shared(rows) else ""
        words.append(f"gradients, {most['gradient_bytes'] / 1e6:.1f} MB, travel by {backend}{why}")
    words.append("efficiency: the speed-up for each rank")
    return "; ".join(words)


def plot(rows: list[dict[str, Any]], head: str, path: Path) -> None:
    """Bars of milliseconds and of speed for each number of ranks."""
    panels = {"milliseconds of a step": ("ms", 1.0), "times one rank's speed": ("speedup", 1.0)}
    named = [{**row, "name": WHOLE if row["share"] == 100 else "DDP"} for row in rows]
    plots.bars(named, "name", lambda row: _name(row["ranks"], None), panels, head, path)


def _name(ranks: int, share: int | None) -> str:
    return WHOLE if share == 100 else f"{ranks} rank{'s' if ranks > 1 else ''}"


def _shared(rows: list[dict[str, Any]]) -> bool:
    """Whether ranks shared a GPU."""
    return rows[0]["share"] is not None


def _columns(rows: list[dict[str, Any]], ms: str, whole: str) -> list[str]:
    gpu = (["of the GPU"], [whole]) if _shared(rows) else ([], [])
    return ["ranks", *gpu[0], ms, "speed-up", "efficiency", *gpu[1], "tokens/s", "loss"]


def _cells(row: dict[str, Any], gpu: bool) -> list[str]:
    return [
        str(row["ranks"]),
        *([f"{row['share']}%"] if gpu else []),
        tables.milliseconds(row["ms"]),
        f"{row['speedup']:.2f}x",
        "" if row["efficiency"] is None else f"{row['efficiency']:.3f}",
        *([f"{row['of_whole']:.3f}"] if gpu else []),
        f"{row['tokens_per_second']:,.0f}",
        f"{row['loss']:.5f}",
    ]
