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
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as _distributed
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
from meshflash.train.checkpoint_tensors import collect, file_name, plan_write, read_parts, restore, wanted

dist: Any = _distributed  # torch does not declare all that it exports here

__all__ = ["CheckpointError", "Checkpoints"]

#: How long a rank waits for the slowest one's disk.
PATIENCE = timedelta(hours=2)


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
        self._ranks = _Ranks(mesh)
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
        problem: Exception | None = None
        try:
            folder = self._path(step)
            files = read_manifest(folder, step)
            check_files(folder, files, sorted(files)[self._ranks.rank :: self._ranks.world])
        except Exception as error:
            problem = error
        self._agree(problem, step)
        try:
            index = read_index(folder)
            check_sizes(folder, index, files)
            parts = wanted(model, optimizer, index, folder)
        except Exception as error:
            problem = error
        self._agree(problem)
        try:
            read_parts(folder, index["tensors"], files, parts)
        except Exception as error:
            problem = error
        self._agree(problem, step)
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
        outcome = ""
        try:
            reports = self._ranks.exchange(report)
            outcome = _errors([said["error"] for said in reports])
            if rank == 0:
                outcome = outcome or self._finish(step, token, reports, index)
                if outcome:
                    shutil.rmtree(partial, ignore_errors=True)
            outcome = self._ranks.exchange(outcome)[0]
        except Exception as error:  # a rank is gone; what is left is swept by the next save
            outcome = f"ranks do not hear each other any more: {error}"
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

    def _agree(self, problem: Exception | None, step: int | None = None) -> None:
        """Raise on all ranks what failed on any; where a checkpoint is damaged, say which other one is whole."""
        errors = _errors(self._ranks.exchange(_reason(problem)))
        if not errors:
            return
        advice = ""
        if step is not None:
            other = self._ranks.exchange(self._whole_before(step) if self._ranks.rank == 0 else None)[0]
            advice = "; no older checkpoint passes its checks"
            if other is not None:
                advice = f"; step {other} passes its checks: give step={other}, or --from-step {other}"
        raise CheckpointError(errors + advice) from problem

    def _whole_before(self, step: int) -> int | None:
        """The newest older checkpoint that is as it was written."""
        for older in reversed([found for found in self.steps() if found < step]):
            try:
                self.check(older)
            except CheckpointError:
                continue
            return older
        return None


class _Ranks:
    """What ranks tell each other, as JSON, over a group that nothing else uses: it is made with the first word."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._group: Any = None
        self._members: list[int] | None = None
        self.rank, self.world = 0, 1
        if dist.is_available() and dist.is_initialized():
            everyone = list(range(dist.get_world_size()))
            members = everyone if mesh is None else sorted(mesh.mesh.flatten().tolist())
            if dist.get_rank() not in members:
                raise ValueError("mesh: this rank is not in it; only its ranks save and load together")
            self._members = None if members == everyone else members
            self.rank, self.world = members.index(dist.get_rank()), len(members)

    def exchange(self, value: Any) -> list[Any]:
        """What each rank says, in order."""
        if self.world == 1:
            return [value]
        if self._group is None:
            local = self._members is not None
            self._group = dist.new_group(self._members, PATIENCE, "gloo", use_local_synchronization=local)
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(text)], device="cpu"), group=self._group)
        longest = max(int(size) for size in sizes)
        texts = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(self.world)]
        dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - len(text))), group=self._group)
        return [json.loads(bytes(said[: int(size)].numpy())) for said, size in zip(texts, sizes, strict=True)]


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
