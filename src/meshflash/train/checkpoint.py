"""Asynchronous, atomic checkpoints of a model and its optimizer on any mesh.

Each rank copies its shards to host memory and continues. A thread of each rank writes them and reports to the others
over a gloo group of its own; rank 0 renames the checkpoint to its final name once all ranks have written. The file
format is in `checkpoint_files.py`, the content in `checkpoint_tensors.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshflash.train.checkpoint_files import (
    INDEX,
    CheckpointError,
    check_checkpoint,
    check_files,
    check_sizes,
    commit,
    complete,
    folder_name,
    partial_name,
    prune,
    read_index,
    read_manifest,
    sweep,
    sync_folder,
    write_json,
    write_tensors,
)
from meshflash.train.checkpoint_ranks import Ranks
from meshflash.train.checkpoint_tensors import collect, file_name, plan_write, read_parts, restore, wanted

__all__ = ["CheckpointError", "Checkpoints"]


class Checkpoints:
    """The checkpoints of a run, in a folder that all its ranks share; one run at a time may save, any number may load.

    All ranks must call `save`, `load` and `wait` together. Call `wait` before the job ends, or a failed save goes
    unnoticed.

    Args:
        folder: The folder of the checkpoints.
        keep: The number of newest checkpoints that stay.
        mesh: The ranks that save together; all ranks of the job by default.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> model = nn.Linear(2, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> checkpoints = Checkpoints(folder.name)
    >>> checkpoints.save(10, model, optimizer, {"step": 10, "seed": 0}, wait=True)
    >>> checkpoints.latest(), checkpoints.load(model, optimizer)
    (10, {'step': 10, 'seed': 0})
    >>> folder.cleanup()
    """

    def __init__(self, folder: str | Path, *, keep: int = 3, mesh: DeviceMesh | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: expected at least 1, the newest")
        self.folder, self.keep = Path(folder), keep
        self._ranks = Ranks(mesh)
        self._thread: threading.Thread | None = None
        self._failure = ""
        #: The write plan of the last save: (digest of the outline, tensors that this rank writes, index of all).
        self._planned: tuple[str, list[str], dict[str, Any]] = ("", [], {})

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints; their files may be damaged since, see `check`."""
        return list(complete(self.folder))

    def latest(self) -> int | None:
        """Return the step of the latest complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def check(self, step: int) -> None:
        """Raise CheckpointError unless every byte of a checkpoint is intact. A single rank may call it.

        Args:
            step: The step of the checkpoint.
        """
        check_checkpoint(self._path(step), step)

    def state(self, step: int | None = None) -> dict[str, Any]:
        """Return the `state` that was saved beside the weights.

        Args:
            step: The step of the checkpoint; the latest by default.
        """
        step = self.latest() if step is None else step
        if step is None:
            raise CheckpointError(f"{self.folder}: no checkpoint in it; save one, or give the folder that has them")
        return read_index(self._path(step))["state"]

    def wait(self) -> None:
        """Wait until the current save is on disk; raise CheckpointError on all ranks if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure:
            failure, self._failure = self._failure, ""
            raise CheckpointError(failure)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        state: Mapping[str, Any],
        *,
        wait: bool = False,
    ) -> None:
        """Save a checkpoint; return when all tensors are copied to the host, so that the weights may change again.

        It first waits for the previous save and raises its error. A checkpoint of the same step is replaced.

        Args:
            step: The step that names the checkpoint.
            model: The model, plain or of `meshflash.parallel.parallelize`.
            optimizer: The optimizer of its weights, or None. Its state must be numbers, or tensors of the weights'
                shapes.
            state: Further values that JSON can hold; those of rank 0 are saved.
            wait: Whether to return only when the checkpoint is on disk.
        """
        self.wait()
        problem: Exception | None = None
        outline: dict[str, Any] = {}
        try:
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ValueError(f"step={step!r}: expected 0 or more")
            content = collect(model, optimizer)
            outline = {name: part.outline() for name, part in content.parts.items()}
            saved = json.loads(json.dumps({"state": dict(state), "groups": content.groups}))
        except Exception as error:  # reported to all ranks below, so that none hangs
            problem = error
        key = hashlib.sha256(json.dumps(outline).encode()).hexdigest()
        infos = self._ranks.exchange(
            {"step": repr(step), "error": _reason(problem), "known": key == self._planned[0], "token": uuid.uuid4().hex}
        )
        if problem is not None:
            raise problem
        if failed := _join_errors([rank["error"] for rank in infos]):
            raise CheckpointError(f"step {step} was not saved: {failed}")
        if len({rank["step"] for rank in infos}) > 1:
            raise CheckpointError(f"save: ranks are at the steps {', '.join(rank['step'] for rank in infos)}")
        if not all(rank["known"] for rank in infos):  # the layout has changed: plan again
            names, tensors = plan_write(self._ranks.exchange(outline))
            self._planned = key, names[self._ranks.rank], tensors
        _, mine, tensors = self._planned
        copies: dict[str, Tensor] = {}
        try:
            for name in mine:
                local = content.parts[name].local
                copies[name] = local.to("cpu", copy=True, memory_format=torch.contiguous_format)
        except Exception as error:  # out of host memory: the writer thread reports it to the other ranks
            problem = error
        index = saved | {"tensors": tensors}
        self._thread = threading.Thread(
            target=self._write, args=(step, infos[0]["token"], copies, content.values, index, problem)
        )
        self._thread.start()
        if wait:
            self.wait()

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, step: int | None = None
    ) -> dict[str, Any]:
        """Load a model and its optimizer bitwise, on this or another mesh, and return the saved `state`.

        All files are checked and read before anything changes.

        Args:
            model: The model, parallelized as it will be trained; not on the meta device.
            optimizer: The optimizer of its weights; None ignores the saved optimizer state.
            step: The step of the checkpoint; the latest by default.
        """
        self.wait()
        step = self._ranks.exchange(self.latest() if step is None else step)[0]
        if step is None:
            raise CheckpointError(f"{self.folder}: no checkpoint in it; save one, or give the folder that has them")

        def check() -> tuple[Path, dict[str, Any]]:
            folder = self._path(step)
            files = read_manifest(folder, step)
            check_files(folder, files, sorted(files)[self._ranks.rank :: self._ranks.world])
            return folder, files

        def match() -> tuple[dict[str, Any], dict[str, Any]]:
            index = read_index(folder)
            check_sizes(folder, index, files)
            return index, wanted(model, optimizer, index, folder)

        folder, files = self._together(check, step)
        index, parts = self._together(match)
        self._together(lambda: read_parts(folder, index["tensors"], files, parts), step)
        restore(model, optimizer, index, parts)
        return index["state"]

    def _path(self, step: int) -> Path:
        """Return the folder of a checkpoint."""
        found = complete(self.folder)
        if step not in found:
            there = ", ".join(map(str, found)) or "none"
            raise CheckpointError(f"{self.folder / folder_name(step)}: missing; the steps there are: {there}")
        return found[step]

    def _write(
        self,
        step: int,
        token: str,
        copies: dict[str, Tensor],
        values: dict[str, Any],
        index: dict[str, Any],
        problem: Exception | None,
    ) -> None:
        """Write this rank's file in the background; rank 0 completes the checkpoint when all ranks have written."""
        partial, rank = self.folder / partial_name(step, token), self._ranks.rank

        def write() -> dict[str, Any]:
            report: dict[str, Any] = {"files": {}, "values": values, "error": ""}
            try:
                if problem is not None:
                    raise problem
                if rank == 0:  # first, since leftovers may be what fills the disk
                    with contextlib.suppress(OSError):
                        sweep(self.folder, token)
                partial.mkdir(parents=True, exist_ok=True)
                if copies:
                    report["files"][file_name(rank)] = write_tensors(partial / file_name(rank), copies)
                    sync_folder(partial)
            except Exception as error:
                report["error"] = _reason(error)
            copies.clear()
            return report

        def finish() -> str:
            outcome = _join_errors([report["error"] for report in reports])
            if rank == 0:
                outcome = outcome or self._complete(step, token, reports, index)
                if outcome:
                    shutil.rmtree(partial, ignore_errors=True)
            return outcome

        try:
            reports = self._ranks.gather(write)
            outcome = self._ranks.gather(finish)[0]
        except Exception as error:  # a rank is lost; the next save sweeps the partial folder
            outcome = str(error)
        if outcome:
            last = self.latest()
            latest = "there is no checkpoint yet" if last is None else f"step {last} is complete, and the latest"
            self._failure = f"step {step} was not saved in {self.folder}: {outcome}; {latest}"

    def _complete(self, step: int, token: str, reports: list[dict[str, Any]], index: dict[str, Any]) -> str:
        """Write index and manifest and rename the folder, on rank 0; return the error, or an empty text."""
        partial = self.folder / partial_name(step, token)
        try:
            files = {name: digest for report in reports for name, digest in report["files"].items()}
            values = {name: value for report in reports for name, value in report["values"].items()}
            files[INDEX] = write_json(partial / INDEX, index | {"values": values})
            commit(partial, self.folder, step, token, files)
        except Exception as error:
            return f"rank 0: {_reason(error)}"
        with contextlib.suppress(OSError):  # the save is complete; the next one tries again to remove old checkpoints
            prune(self.folder, step, self.keep, token)
        return ""

    def _together(self, work: Callable[[], Any], step: int | None = None) -> Any:
        """Run a stage of a load on all ranks; if it fails on any, all ranks raise the same error.

        With a step the error names an older checkpoint that passes its checks. Without one the files are not at fault.
        """
        results: list[Any] = []
        problems: list[Exception] = []

        def attempt() -> str:
            try:
                results.append(work())
            except Exception as error:
                problems.append(error)
                return _reason(error)
            return ""

        errors = _join_errors(self._ranks.gather(attempt))
        if not errors:
            return results[0]
        advice = ""
        if step is not None:
            other = self._ranks.gather(lambda: self._intact_before(step) if self._ranks.rank == 0 else None)[0]
            advice = "; no older checkpoint passes its checks"
            if other is not None:
                advice = f"; step {other} passes its checks: give step={other}, or --from-step {other}"
        raise CheckpointError(errors + advice) from (problems[0] if problems else None)

    def _intact_before(self, step: int) -> int | None:
        """Return the newest older checkpoint that passes its checks."""
        for older in reversed([found for found in self.steps() if found < step]):
            try:
                self.check(older)
            except CheckpointError:
                continue
            return older
        return None


def _reason(error: Exception | None) -> str:
    if error is None:
        return ""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _join_errors(errors: list[str]) -> str:
    """Return the errors of all ranks as one text; ranks with the same error share it.

    >>> _join_errors(["", "no space", "no space"])
    'rank 1, 2: no space'
    """
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(errors):
        if text:
            ranks.setdefault(text, []).append(str(rank))
    return "; ".join(f"rank {', '.join(numbers)}: {text}" for text, numbers in ranks.items())
