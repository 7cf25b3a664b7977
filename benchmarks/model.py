"""Flash against standard attention inside a model: a training step of a GPT over growing lengths, interleaved.

Both train the same model from the same weights, and their losses are compared before anything is timed. Standard
attention that runs out of memory is shown as that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.protocol import Rows, one_table
from benchmarks.training import Trainer, Training, check_losses, of_row
from benchmarks.weights import held_bytes
from meshflash.bench import plots
from meshflash.bench.candidates import STANDARD, STANDARD_MATRICES, Attention, candidate
from meshflash.bench.cases import Case, on_cpu
from meshflash.bench.columns import NO_MEMORY, Column, mebibytes, milliseconds, optional
from meshflash.bench.measure import Say, both
from meshflash.bench.tables import KERNEL
from meshflash.bench.timing import interleaved, watched
from meshflash.kernels import registry
from meshflash.parallel import MeshAttention, init_mesh
from meshflash.runtime.devices import take_device
from meshflash.runtime.oom import attempt, free_bytes

SMALL = Training(layers=2, dim=256, heads=4, vocabulary=1024, tokens=256, batch=1)
LARGE = Training(layers=4, dim=1024, heads=16, vocabulary=8192, tokens=1024, batch=1)
AUTO = "auto"
#: Steps after which losses are compared: the first loss checks the forward, later ones gradients too.
CHECKED_STEPS = 3


@dataclass(frozen=True)
class ModelRow:
    """One attention at one length. A figure is None if memory ran out for it, or for the standard attention it needs.

    `ms` is forward, backward and AdamW. `peak_bytes` includes weights and the optimizer's state. `saved` is the
    fraction of the peak with standard attention that this one does not need. `loss` is that of step 3.
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
    """Return the lengths for a device: 256 to 2,048 on a CPU, 1,024 to 32,768 on a GPU."""
    return [256 * 2**n for n in range(4)] if on_cpu(device) else [1024 * 2**n for n in range(6)]


def run(case: Training, rounds: int, say: Say = lambda _: None) -> list[ModelRow]:
    """Return the rows of one length; RuntimeError if losses differ."""
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
    """Standard attention as a drop-in for ours. Autocast, which would widen its scores, is off here as in ours."""

    def __init__(self, function: Attention) -> None:
        super().__init__()
        self.function = function

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            return self.function(q, k, v)


def _standard(case: Training) -> MeshAttention:
    """Return standard attention; on a CPU raise OutOfMemoryError before it takes all memory.

    Every layer keeps its scores for the backward.
    """
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
    """Return a training step with this attention in every block."""

    def step() -> Tensor:
        for block in trainer.gpt.layers:
            block.self_attn.attend = module
        return trainer.step()

    return step


def _loss(trainer: Trainer, step: Callable[[], Tensor]) -> float:
    """Return the loss after some steps from the initial weights."""
    trainer.restart()
    return [float(step()) for _ in range(CHECKED_STEPS)][-1]


def _peak(trainer: Trainer, step: Callable[[], Tensor], device: torch.device) -> int | None:
    """Return the peak of a step, with weights and the optimizer's state; None if memory runs out."""
    found = attempt(lambda: watched(step, device))
    return None if found is None else held_bytes(trainer.gpt, trainer.optimizer).total + found.peak_bytes


def _saved(peak: int | None, base: int | None) -> float | None:
    return None if peak is None or base is None else 1 - peak / base


COLUMNS = (
    Column("tokens", lambda row: f"{row['tokens']:,}", once=True),
    KERNEL,
    Column("step\n(ms)", lambda row: milliseconds(row["ms"])),
    Column("speedup", optional("speedup", "{:.2f}x")),
    Column("peak\n(MiB)", lambda row: mebibytes(row["peak_bytes"], "")),
    Column("memory\nsaved", optional("saved", "{:.0%}")),
    Column("loss", optional("loss", "{:.5f}")),
)


def title(rows: Rows) -> str:
    """Return what was trained, in words."""
    case = of_row(rows[0])
    return f"a training step with standard attention and ours, batch {case.batch}\n{case.words}"


def plot(rows: Rows, head: str, path: Path) -> None:
    """Draw bars of time and of peak memory of each attention, a group for each length."""
    panels = {"time of a step (ms)": ("ms", 1.0), "peak memory (MiB)": ("peak_bytes", 2.0**20)}
    fit = [row for row in rows if row["ms"] is not None and row["peak_bytes"] is not None]
    head += "" if len(fit) == len(rows) else f"; no bar: {NO_MEMORY}"
    plots.bars(fit, "kernel", lambda row: f"{row['tokens']:,}\ntokens", panels, head, path)


BENCHMARK = one_table(
    "model",
    {"kernel", "saved", "loss"},
    COLUMNS,
    title,
    section="tokens",
    caption="peak: of a step, weights and AdamW's state included",
    draw=plot,
)
