"""Flash against standard attention inside a model: a training step of a GPT over growing lengths, with each in turns.

Both train the same model from the same weights, and their losses are compared before anything is timed. Standard
attention that runs out of memory is shown as that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import training as shared
from benchmarks.training import Trainer, Training, check_losses, in_markdown, of_row
from benchmarks.weights import hold
from meshflash.bench import plots, tables
from meshflash.bench.candidates import STANDARD, STANDARD_MATRICES, Attention, candidate
from meshflash.bench.cases import Case, on_cpu
from meshflash.bench.measure import Say, both
from meshflash.bench.timing import interleaved, watched
from meshflash.kernels import registry
from meshflash.parallel import MeshAttention, init_mesh
from meshflash.runtime.devices import take_device
from meshflash.runtime.oom import attempt, free_bytes

SMALL = Training(layers=2, dim=256, heads=4, vocabulary=1024, tokens=256, batch=1)
LARGE = Training(layers=4, dim=1024, heads=16, vocabulary=8192, tokens=1024, batch=1)
AUTO = "auto"
#: Steps after which losses are compared: the first loss is that of the forward, later ones follow from gradients too.
CHECKED = 3


@dataclass(frozen=True)
class ModelRow:
    """One attention at one length. What has no figure, or nothing to compare with, for want of memory is None.

    `ms` is forward, backward and AdamW; `peak_bytes` are all that a step holds, weights and optimizer included; `saved`
    is the part of the peak with standard attention that this one does without. `loss` is that of step 3.
    """

    kernel: str
    ran: str
    forward_ran: str
    backward_ran: str
    case: Training
    ms: float | None
    speedup: float | None
    peak_bytes: int | None
    saved: float | None
    loss: float | None


def default_lengths(device: str) -> list[int]:
    """256 to 2,048 on a CPU, 1,024 to 32,768 on a GPU."""
    return [256 * 2**n for n in range(4)] if on_cpu(device) else [1024 * 2**n for n in range(6)]


def run(case: Training, rounds: int, say: Say = lambda _: None) -> list[ModelRow]:
    """The rows of one length; RuntimeError where losses differ."""
    device = take_device(case.device, 0)
    say("building the model")
    trainer = Trainer(case, init_mesh(device=device.type), device)
    modules = {STANDARD: attempt(partial(_standard, case)), AUTO: MeshAttention()}
    steps = {name: _with(trainer, module) for name, module in modules.items() if module is not None}
    losses: dict[str, float] = {}
    ran: dict[str, tuple[str, str]] = {}
    for name, step in list(steps.items()):
        say(f"checking {name}")
        with registry.record_kernels() as seen:
            loss = attempt(partial(_loss, trainer, step))
        ran[name] = seen.names("forward") or name, seen.names("backward") or name
        if loss is None:
            del steps[name]
        else:
            losses[name] = loss
    if losses:
        check_losses(losses, case.dtype)
    say("watching memory")
    peaks = {name: _peak(trainer, step, device) for name, step in steps.items()}
    say("timing steps")
    ms = interleaved(steps, device, rounds)
    return [
        ModelRow(
            kernel=name,
            ran=both(*ran.get(name, (name, name))),
            forward_ran=ran.get(name, (name, name))[0],
            backward_ran=ran.get(name, (name, name))[1],
            case=case,
            ms=ms.get(name),
            speedup=ms[STANDARD] / ms[name] if STANDARD in ms and name in ms else None,
            peak_bytes=peaks.get(name),
            saved=_saved(peaks.get(name), peaks.get(STANDARD)),
            loss=losses.get(name),
        )
        for name in modules
    ]


class _Standard(MeshAttention):
    """Standard attention in a model's place for ours. Autocast, which would widen its scores, ends here as in ours."""

    def __init__(self, function: Attention) -> None:
        super().__init__()
        self.function = function

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            return self.function(q, k, v)


def _standard(case: Training) -> MeshAttention:
    """Refused as out of memory on a CPU before it takes all that there is: every layer keeps its scores."""
    sizes = case.config
    assert sizes.head_dim is not None
    shape = Case(case.tokens, case.batch, case.heads, case.heads, sizes.head_dim, "causal", case.dtype, case.device)
    matrices = case.layers - 1 + STANDARD_MATRICES
    needed = matrices * case.batch * case.heads * case.tokens**2 * shape.torch_dtype.itemsize
    free = free_bytes() if on_cpu(case.device) else None
    if free is not None and needed > free:
        raise torch.OutOfMemoryError(f"{STANDARD}: {matrices} matrices of scores are {needed} bytes, {free} are free")
    return _Standard(candidate(shape, STANDARD))


def _with(trainer: Trainer, module: MeshAttention) -> Callable[[], Tensor]:
    """A step with this attention in every block."""

    def step() -> Tensor:
        for block in trainer.gpt.layers:
            block.self_attn.attend = module
        return trainer.step()

    return step


def _loss(trainer: Trainer, step: Callable[[], Tensor]) -> float:
    """The loss after some steps from the same weights."""
    trainer.restart()
    return [float(step()) for _ in range(CHECKED)][-1]


def _peak(trainer: Trainer, step: Callable[[], Tensor], device: torch.device) -> int | None:
    """The most that a step holds: what is there before it, weights and the optimizer's state, and what comes on top."""
    found = attempt(lambda: watched(step, device))
    return None if found is None else hold(trainer.gpt, trainer.optimizer).total + found.peak_bytes


def _saved(peak: int | None, base: int | None) -> float | None:
    return None if peak is None or base is None else 1 - peak / base


def read(path: Path) -> dict[str, Any]:
    """A record of this benchmark."""
    return shared.read(path, {"kernel", "saved", "loss"}, "bench model")


def title(rows: list[dict[str, Any]]) -> str:
    """What was trained."""
    case = of_row(rows[0])
    return f"a training step with standard attention and ours, batch {case.batch}\n{case.words}"


def table(rows: list[dict[str, Any]]) -> Table:
    """Both attentions by length."""
    columns = ("tokens", "kernel", "a step, ms", "speed-up", "peak MiB", "saved", "loss")
    made = tables.blank(title(rows), *columns)
    made.caption, made.caption_justify = "peak: of a step, weights and AdamW's state included", "left"
    for tokens, own in groupby(rows, key=lambda row: row["tokens"]):
        for n, row in enumerate(own):
            made.add_row("" if n else f"{tokens:,}", *_cells(row))
        made.add_section()
    return made


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table for a document."""
    head = ("tokens", "attention", "a step, ms", "speed-up", "peak, MiB", "memory saved", "loss")
    return in_markdown(head, [[f"{row['tokens']:,}", *_cells(row)] for row in rows])


def plot(rows: list[dict[str, Any]], head: str, path: Path) -> None:
    """Bars of milliseconds and of peak memory of each attention, a group for each length."""
    panels = {"milliseconds of a step": ("ms", 1.0), "peak memory, MiB": ("peak_bytes", 2.0**20)}
    fit = [row for row in rows if row["ms"] is not None and row["peak_bytes"] is not None]
    head += "" if len(fit) == len(rows) else f"; no bar: {tables.NO_MEMORY}"
    plots.bars(fit, "kernel", lambda row: f"{row['tokens']:,}\ntokens", panels, head, path)


def _cells(row: dict[str, Any]) -> list[str]:
    """A row of the table, after the length."""
    return [
        tables.kernel_cell(row),
        tables.milliseconds(row["ms"]),
        "" if row["speedup"] is None else f"{row['speedup']:.2f}x",
        tables.mebibytes(row["peak_bytes"], ""),
        "" if row["saved"] is None else f"{row['saved']:.0%}",
        "" if row["loss"] is None else f"{row['loss']:.5f}",
    ]
