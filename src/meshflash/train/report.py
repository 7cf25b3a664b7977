"""The outputs of a run: a progress line on rank 0, metrics as JSON lines, and TensorBoard events if it is installed.

Nothing here imports torch at once, so that a command can show progress while torch is loading.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from meshflash.core.files import check_folder
from meshflash.runtime.log import log

METRICS_FILE = "metrics.jsonl"
EVENTS_FOLDER = "tensorboard"

#: Dense bfloat16 TFLOP/s of devices by a part of their name, for the model FLOPs utilization.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "MI250": 191.5, "MI300": 1307.0, "B200": 2250.0}


class ProgressLine:
    """A line on stderr with the step, the metrics and the remaining time; shown as soon as it is made.

    A terminal shows a live bar. Any other stderr gets a line of text for each change of the metrics.

    Args:
        steps: The last step of the run.
    """

    def __init__(self, steps: int) -> None:
        self._console = Console(stderr=True)
        self._steps, self._step, self._printed, self._closed = steps, 0, "", False
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console)
            self._bar.start()
            self._task = self._bar.add_task("starting", total=steps)
        self._print("starting")

    def update(self, step: int, description: str | None = None) -> None:
        """Show a step; a description replaces the one before.

        Args:
            step: The number of steps done.
            description: The stage of the run, or its metrics.
        """
        self._step = step
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=description)
        elif description is not None:
            self._print(description)

    def say(self, text: str) -> None:
        """Print a line above the progress."""
        self._console.print(text)

    def close(self) -> None:
        """End the line, which shows the last step; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._bar is not None:
            self._bar.stop()
        else:
            self._print("")

    def _print(self, description: str) -> None:
        line = f"{self._step}/{self._steps}" + (f"  {description}" if description else "")
        if self._bar is None and not self._printed.startswith(line):  # the end repeats no line that is there already
            self._console.print(line, soft_wrap=True, highlight=False)
            self._printed = line


class Report:
    """The outputs of a run. `train` makes it; all ranks but the first give neither a folder nor a progress line.

    Args:
        folder: The folder of metrics and events; None writes none.
        start: The step that the run resumes from.
        progress: The progress line; None shows none.
    """

    def __init__(self, folder: Path | None, start: int, progress: ProgressLine | None = None) -> None:
        self.folder, self._progress = folder, progress
        self._events: Any = None
        self._warned = False
        if folder is not None:
            check_folder(folder)
            _end_line(folder / METRICS_FILE)
            self._events = _open_events(folder, start)
        self.advance(start)

    def log_metrics(self, step: int, **values: Any) -> None:
        """Write metrics of a step to all outputs.

        Args:
            step: The step, counted from 1.
            values: The metrics by name; None is a metric that is not known.
        """
        if self.folder is not None:
            path = self.folder / METRICS_FILE
            try:
                with path.open("a") as file:
                    file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")
            except OSError as error:  # do not end the run for its metrics; a save on a full disk raises on all ranks
                if not self._warned:
                    log.warning("%s: %s; the metrics of step %d are lost", path, error.strerror, step)
                self._warned = True
        if self._events is not None:
            for name, value in values.items():
                if value is not None:
                    self._events.add_scalar(name, value, step)
        if self._progress is not None:
            self._progress.update(step, _format_metrics(values))

    def advance(self, step: int) -> None:
        """Show that a step is done."""
        if self._progress is not None:
            self._progress.update(step)

    def say(self, text: str) -> None:
        """Print a line of its own."""
        if self._progress is not None:
            self._progress.say(text)

    def close(self) -> None:
        """End the progress line and flush the events."""
        if self._progress is not None:
            self._progress.close()
        if self._events is not None:
            self._events.close()


def model_flops_utilization(tflops: float, device: str) -> float | None:
    """Return the share of a device's peak that a run reaches (MFU); None for a device with an unknown peak.

    Args:
        tflops: The model TFLOP/s of one device.
        device: The name of the device.

    >>> model_flops_utilization(494.5, "NVIDIA H200")
    0.5
    """
    peak = next((peak for name, peak in PEAK_TFLOPS.items() if name in device), None)
    return None if peak is None else tflops / peak


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run in order of steps; of steps that a restart repeated, the later ones.

    Args:
        folder: The folder of the run.
    """
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for line in (folder / METRICS_FILE).read_text().splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # the truncated last line of a run that was killed
        found[row["step"], "valid" if "valid_loss" in row else "train"] = row
    return [found[key] for key in sorted(found)]


def _format_metrics(values: Mapping[str, Any]) -> str:
    parts = []
    for name, (label, form) in {
        "loss": ("loss", "{:.4f}"),
        "valid_loss": ("valid loss", "{:.4f}"),
        "accuracy": ("accuracy", "{:.1%}"),
        "tokens_per_second": ("tok/s", "{:,.0f}"),
        "mfu": ("MFU", "{:.1%}"),
        "memory": ("mem", "{:.2f} GiB"),
    }.items():
        if values.get(name) is not None:
            parts.append(f"{label} {form.format(values[name])}")
    return "  ".join(parts)


def _end_line(path: Path) -> None:
    """End the line that a killed run left unfinished, so that the next line stands by itself."""
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        with path.open("a") as file:
            file.write("\n")


def _open_events(folder: Path, start: int) -> Any:
    """Return TensorBoard's writer, or None; it hides events behind the step that the run resumes from."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / EVENTS_FOLDER), purge_step=start + 1)
