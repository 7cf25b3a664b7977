"""What a run says of itself: a progress line on rank 0, JSON lines, and TensorBoard's events where it is installed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshflash.core.files import check_folder
from meshflash.runtime.log import log

METRICS_FILE = "metrics.jsonl"
EVENTS_FOLDER = "tensorboard"

#: Dense bfloat16 TFLOP/s of devices by a part of their name, for the share that a run reaches.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "MI250": 191.5, "MI300": 1307.0, "B200": 2250.0}


class Report:
    """Where a run's numbers go; on ranks but the first nowhere."""

    def __init__(self, folder: Path | None, steps: int, start: int, first: bool, quiet: bool = False) -> None:
        self.folder = folder if first else None
        self._events: Any = None
        self._progress: Progress | None = None
        self._warned = False
        if not first:
            return
        if folder is not None:
            check_folder(folder)
            _end_line(folder / METRICS_FILE)
            self._events = _events(folder, start)
        if not quiet:
            self._progress = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                console=Console(stderr=True),
            )  # fmt: skip
            self._progress.start()
            self._task = self._progress.add_task("training", total=steps, completed=start)

    def numbers(self, step: int, **values: Any) -> None:
        """Numbers after a step."""
        if self.folder is not None:
            try:
                with (self.folder / METRICS_FILE).open("a") as file:
                    file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")
            except OSError as error:  # a run is worth more than its numbers, and a save tells all ranks
                if not self._warned:
                    log.warning(
                        "%s: %s; the numbers of step %d are lost", self.folder / METRICS_FILE, error.strerror, step
                    )
                self._warned = True
        if self._events is not None:
            for name, value in values.items():
                if value is not None:  # the share of a peak that is not known
                    self._events.add_scalar(name, value, step)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=_line(values))

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._progress is not None:
            self._progress.console.print(text)

    def close(self) -> None:
        """End the progress line and write what is left."""
        if self._progress is not None:
            self._progress.stop()
        if self._events is not None:
            self._events.close()


def model_flops_utilization(tflops: float, device: str) -> float | None:
    """How much of its device's peak a run reaches; None where the peak is not known.

    >>> share_of_peak(494.5, "NVIDIA H200")
    0.5
    """
    peak = next((peak for name, peak in PEAK_TFLOPS.items() if name in device), None)
    return None if peak is None else tflops / peak


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The numbers of a run, step by step; after a restart the later ones count."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for line in (folder / METRICS_FILE).read_text().splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the last line of a run that was killed
        found[row["step"], "valid" if "valid_loss" in row else "train"] = row
    return [found[key] for key in sorted(found)]


def _line(values: Mapping[str, Any]) -> str:
    words = []
    for name, (label, form) in {
        "loss": ("loss", "{:.4f}"),
        "valid_loss": ("valid", "{:.4f}"),
        "accuracy": ("right", "{:.1%}"),
        "tokens_per_second": ("tok/s", "{:,.0f}"),
        "mfu": ("MFU", "{:.1%}"),
        "memory": ("mem", "{:.2f} GiB"),
    }.items():
        if values.get(name) is not None:
            words.append(f"{label} {form.format(values[name])}")
    return "  ".join(words)


def _end_line(path: Path) -> None:
    """End a line that a run which was killed began, so that the next one stands by itself."""
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        with path.open("a") as file:
            file.write("\n")


def _events(folder: Path, start: int) -> Any:
    """TensorBoard's writer, or None; what a run wrote behind the step that it now goes on from is hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / EVENTS_FOLDER), purge_step=start + 1)
