"""Checkpoints of a model and its optimizer on any mesh: saved in the background, complete or not there at all.

Ranks copy what they write to the host's memory and go on. A thread of each writes it and tells the others over a group
of their own; the first one gives the checkpoint its name once all have written. What the files are is in
`checkpoint_files.py`, what they hold in `checkpoint_tensors.py`.
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
    """The checkpoints of a run in a folder that all its ranks see; one run at a time saves there, any number may load.

    `save`, `load` and `wait` are called by all ranks alike. Call `wait` before the job ends, to hear of what failed.

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
        """How many of the newest to keep, and which ranks save together; all of the job by default."""
        if keep < 1:
            raise ValueError(f"keep={keep}: expected at least 1, the newest")
        self.folder, self.keep = Path(folder), keep
        self._ranks = Ranks(mesh)
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._planned: tuple[str, list[str], dict[str, Any]] = ("", [], {})

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, whether or not their files are still whole: see `check`."""
        return list(complete(self.folder))

    def latest(self) -> int | None:
        """The last complete checkpoint's step, or None where there is none."""
        return max(self.steps(), default=None)

    def check(self, step: int) -> None:
        """CheckpointError unless every byte of a checkpoint is as it was written. One rank may call it alone."""
        check_checkpoint(self._path(step), step)

    def state(self, step: int | None = None) -> dict[str, Any]:
        """What was saved beside the weights, of the latest checkpoint by default."""
        step = self.latest() if step is None else step
        if step is None:
            raise CheckpointError(f"{self.folder}: no checkpoint in it; save one, or give the folder that has them")
        found: dict[str, Any] = read_index(self._path(step))["state"]
        return found

    def wait(self) -> None:
        """Until what is being saved is on the disk; CheckpointError on all ranks where it did not get there."""
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
        """Save what a run needs to go on; returns when all is copied, and the weights may change again.

        Waits for a save before it, and raises its error. A checkpoint of the same step is replaced.

        Args:
            step: names the checkpoint.
            model: plain, or as `meshflash.parallel.parallelize` lays it on a mesh.
            optimizer: of its weights: any whose state is numbers and tensors of the weights' shapes; or None.
            state: what else there is to remember, of what JSON has; that of the first rank is saved.
            wait: return when it is on the disk.
        """
        self.wait()
        problem: Exception | None = None
        outline: dict[str, Any] = {}
        try:
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ValueError(f"step={step!r}: expected 0 or more")
            content = collect(model, optimizer)
            outline = {name: part.outline() for name, part in content.parts.items()}
            kept = json.loads(json.dumps({"state": dict(state), "groups": content.groups}))
        except Exception as error:  # told to all, so that none waits for this rank
            problem = error
        key = hashlib.sha256(json.dumps(outline).encode()).hexdigest()
        told = self._ranks.exchange(
            {"step": repr(step), "error": _reason(problem), "known": key == self._planned[0], "token": uuid.uuid4().hex}
        )
        if problem is not None:
            raise problem
        if failed := _errors([rank["error"] for rank in told]):
            raise CheckpointError(f"step {step} was not saved: {failed}")
        if len({rank["step"] for rank in told}) > 1:
            raise CheckpointError(f"save: ranks are at the steps {', '.join(rank['step'] for rank in told)}")
        if not all(rank["known"] for rank in told):
            names, tensors = plan_write(self._ranks.exchange(outline))
            self._planned = key, names[self._ranks.rank], tensors
        _, mine, tensors = self._planned
        copies: dict[str, Tensor] = {}
        try:
            for name in mine:
                local = content.parts[name].local
                copies[name] = local.to("cpu", copy=True, memory_format=torch.contiguous_format)
        except Exception as error:  # no memory: others must hear of it where they wait
            problem = error
        index = kept | {"tensors": tensors}
        self._thread = threading.Thread(
            target=self._write, args=(step, told[0]["token"], copies, content.values, index, problem)
        )
        self._thread.start()
        if wait:
            self.wait()

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, step: int | None = None
    ) -> dict[str, Any]:
        """Bring a model and its optimizer to where they were saved, bit by bit, on this mesh or another one.

        All files are checked and read before anything changes. Returns the `state` of that save.

        Args:
            model: laid out as it will be trained; its weights have memory.
            optimizer: of its weights; None leaves the saved one's state where it is.
            step: which checkpoint; the latest by default.
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
        found: dict[str, Any] = index["state"]
        return found

    def _path(self, step: int) -> Path:
        """Where a checkpoint is."""
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
        """In the background: this rank's files, and on the first rank the rest when all have written theirs."""
        partial, rank = self.folder / partial_name(step, token), self._ranks.rank

        def write() -> dict[str, Any]:
            report: dict[str, Any] = {"files": {}, "values": values, "error": ""}
            try:
                if problem is not None:
                    raise problem
                if rank == 0:  # before anything is written: it may be what fills the disk
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
            outcome = _errors([said["error"] for said in reports])
            if rank == 0:
                outcome = outcome or self._finish(step, token, reports, index)
                if outcome:
                    shutil.rmtree(partial, ignore_errors=True)
            return outcome

        try:
            reports = self._ranks.gather(write)
            outcome = self._ranks.gather(finish)[0]
        except Exception as error:  # a rank is gone; what is left is swept by the next save
            outcome = str(error)
        if outcome:
            last = self.latest()
            left = "there is no other yet" if last is None else f"step {last} is complete, and the latest"
            self._failure = f"step {step} was not saved in {self.folder}: {outcome}; {left}"

    def _finish(self, step: int, token: str, reports: list[dict[str, Any]], index: dict[str, Any]) -> str:
        """The first rank's part, when all have written: why it failed, or nothing."""
        partial = self.folder / partial_name(step, token)
        try:
            files = {name: digest for said in reports for name, digest in said["files"].items()}
            values = {name: value for said in reports for name, value in said["values"].items()}
            files[INDEX] = write_json(partial / INDEX, index | {"values": values})
            commit(partial, self.folder, step, token, files)
        except Exception as error:
            return f"rank 0: {_reason(error)}"
        with contextlib.suppress(OSError):  # it is saved; what could not be removed is tried again next time
            prune(self.folder, step, self.keep, token)
        return ""

    def _together(self, work: Callable[[], Any], step: int | None = None) -> Any:
        """Do a part of a load on all ranks. Where it fails on any, all raise: it, and which other checkpoint is whole.

        Without a step the files are not to blame, and no other checkpoint is looked for.
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

        errors = _errors(self._ranks.gather(attempt))
        if not errors:
            return results[0]
        advice = ""
        if step is not None:
            other = self._ranks.gather(lambda: self._whole_before(step) if self._ranks.rank == 0 else None)[0]
            advice = "; no older checkpoint passes its checks"
            if other is not None:
                advice = f"; step {other} passes its checks: give step={other}, or --from-step {other}"
        raise CheckpointError(errors + advice) from (problems[0] if problems else None)

    def _whole_before(self, step: int) -> int | None:
        """The newest older checkpoint that is as it was written."""
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


def _errors(said: list[str]) -> str:
    """What ranks say, the same words once.

    >>> _errors(["", "no space", "no space"])
    'rank 1, 2: no space'
    """
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(said):
        if text:
            ranks.setdefault(text, []).append(str(rank))
    return "; ".join(f"rank {', '.join(numbers)}: {text}" for text, numbers in ranks.items())
