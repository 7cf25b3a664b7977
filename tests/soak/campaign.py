"""Run a case of the soak campaign: prepare it, start the ranks, judge the result.

Each mesh has one training run without a fault: its losses and checkpoint digests are the reference.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshflash.train.checkpoint import CheckpointError, Checkpoints
from meshflash.train.checkpoint_files import DTYPES, TensorFile, complete, folder_name, read_index
from soak.cases import GRACE, SAVE, STEPS, Case, num_ranks
from soak.disk import REASONS, small_disk
from soak.judge import (
    judge_load,
    judge_losses,
    judge_refused_save,
    judge_success,
    judge_survivors,
    seconds_to_end,
)
from soak.ranks import train_config
from soak.zygote import LIMIT_SECONDS, FinishedJob, Zygote

CHECKPOINTS = "checkpoints"
#: Attempts for a case whose fault comes too late; each attempt fires it four times sooner.
ATTEMPTS = 6


@dataclass(frozen=True)
class Outcome:
    """The result of a case: its failures, and the seconds from the fault to the end of the last survivor.

    `Campaign.run` makes it.
    """

    case: str
    wrong: list[str]
    seconds: float | None = None
    details: list[FinishedJob] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Reference:
    """A run without a fault: its checkpoints, its losses by step, and the digests of all tensors by step.

    `Campaign.reference` makes it.
    """

    checkpoints: Path
    losses: dict[int, float]
    digests: dict[int, dict[str, str]]
    checkpoint_bytes: int


class Campaign:
    """A campaign in a folder; the command line and the tests make it.

    Several threads may run cases at the same time, each with its own zygote.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._references: dict[str, Reference] = {}
        self._loaded: dict[int, str] = {}
        self._lock = threading.Lock()

    def run(self, case: Case, zygote: Zygote) -> Outcome:
        """Run one case and judge it, in an empty folder."""
        place = self.folder / case.name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        run: Callable[[Case, Zygote, Path], Outcome] = {
            "sigkill-attention": self._attention,
            "sigstop-attention": self._attention,
            "sigkill-training": self._training,
            "sigstop-training": self._training,
            "kill-save": self._training,
            "damage": self._damage,
            "full-disk": self._full_disk,
        }[case.family]
        return run(case, zygote, place)

    def clean(self, case: Case) -> None:
        """Remove the files of a case."""
        shutil.rmtree(self.folder / case.name, ignore_errors=True)

    def reference(self, mesh: dict[str, int], zygote: Zygote) -> Reference:
        """Return the run without a fault on a mesh; run it once."""
        key = json.dumps(mesh, sort_keys=True)
        with self._lock:
            if key not in self._references:
                self._references[key] = self._run_undisturbed(mesh, zygote)
            return self._references[key]

    def _run_undisturbed(self, mesh: dict[str, int], zygote: Zygote) -> Reference:
        name = "-".join(f"{axis}{size}" for axis, size in mesh.items()) or "single"
        place = self.folder / "undisturbed" / name
        world, run = num_ranks(mesh), place / "run"
        job = zygote.run("train", world, place, timeout=20.0, limit=LIMIT_SECONDS, run=str(run), mesh=mesh, keep=99)
        if wrong := judge_success(job, f"undisturbed run on {name}"):
            raise RuntimeError("; ".join(wrong))
        losses = job.report(0)["losses"]
        folders = complete(run / CHECKPOINTS)
        return Reference(
            run / CHECKPOINTS,
            dict(enumerate(losses, 1)),
            {step: _digests(path) for step, path in folders.items()},
            max(sum(-(-file.stat().st_size // 4096) * 4096 for file in path.iterdir()) for path in folders.values()),
        )

    def _attention(self, case: Case, zygote: Zygote, place: Path) -> Outcome:
        drawn = case.values
        job = zygote.run(
            "attend",
            drawn["world"],
            place,
            timeout=drawn["timeout"],
            limit=drawn["timeout"] + GRACE,
            victims=drawn["victims"],
            fault=drawn["signal"],
            delay=drawn["delay"],
            schedule=drawn["schedule"],
            moment=drawn["moment"],
            call=drawn["call"],
            leave=drawn["shutdown"],
        )
        wrong = judge_survivors(job, drawn["victims"], drawn["timeout"])
        return Outcome(case.name, wrong, seconds_to_end(job, drawn["victims"]), [job])

    def _training(self, case: Case, zygote: Zygote, place: Path) -> Outcome:
        """Train until a fault ends the run, then resume it. In kill-save the fault comes during a save."""
        drawn = case.values
        reference = self.reference(drawn["mesh"], zygote)
        saving = case.family == "kill-save"
        run, delay, file = place / "run", drawn["delay"], drawn.get("file", 0)
        for attempt in range(ATTEMPTS):
            shutil.rmtree(run, ignore_errors=True)
            job = zygote.run(
                "train",
                drawn["world"],
                place / f"fault-{attempt}",
                timeout=drawn["timeout"],
                limit=drawn["timeout"] + GRACE,
                victims=drawn["victims"],
                fault=drawn["signal"],
                delay=delay,
                run=str(run),
                mesh=drawn["mesh"],
                step=drawn["step"],
                file=file,
                saving=saving,
                sync=drawn["sync"],
            )
            survivors = [code for rank, code in enumerate(job.codes) if rank not in drawn["victims"]]
            if 0 not in (survivors or job.codes):
                break
            # The fault came after a survivor had finished: all checkpoints must exist. Retry with an earlier fault.
            if too_late := judge_checkpoints(run / CHECKPOINTS, reference, STEPS):
                return Outcome(case.name, [f"a rank ended with 0, and {text}" for text in too_late], None, [job])
            delay, file = delay / 4, max(1, file // 4) if file else 0
        wrong = judge_survivors(job, drawn["victims"], drawn["timeout"])
        seconds = seconds_to_end(job, drawn["victims"])
        least = drawn["step"] - SAVE if saving else 0
        wrong += judge_checkpoints(run / CHECKPOINTS, reference, least)
        resumed, more = self._resume(case, zygote, place, run, reference)
        return Outcome(case.name, wrong + more, seconds, [job, resumed])

    def _resume(
        self, case: Case, zygote: Zygote, place: Path, run: Path, reference: Reference
    ) -> tuple[FinishedJob, list[str]]:
        """Resume a run that a fault ended, and judge its losses and checkpoints."""
        resumed = zygote.run(
            "train",
            case.values["world"],
            place / "resumed",
            timeout=20.0,
            limit=LIMIT_SECONDS,
            run=str(run),
            mesh=case.values["mesh"],
        )
        wrong = judge_success(resumed, "resumed")
        if not wrong:
            report = resumed.report(0)
            wrong += judge_losses(report["losses"], report["step"], reference.losses)
            wrong += judge_checkpoints(run / CHECKPOINTS, reference, STEPS)
            if report["losses"]:  # a save removes leftovers of earlier runs
                left = [path.name for path in (run / CHECKPOINTS).iterdir() if "." in path.name]
                wrong += [f"resumed: {name} was left behind" for name in left]
        return resumed, wrong

    def _damage(self, case: Case, zygote: Zygote, place: Path) -> Outcome:
        drawn = case.values
        reference = self.reference({"fsdp": 2}, zygote)
        with self._lock:
            if not self._loaded:
                job = self._load(zygote, self.folder / "undisturbed" / "loaded", reference.checkpoints)
                if wrong := judge_success(job, "loading an undamaged checkpoint"):
                    raise RuntimeError("; ".join(wrong))
                self._loaded[STEPS] = job.report(0)["digest"]
        folder = place / CHECKPOINTS / folder_name(STEPS)
        shutil.copytree(reference.checkpoints / folder.name, folder)
        names = damage(folder, drawn)
        job = self._load(zygote, place, folder.parent)
        wrong = judge_load(job.report(0), job.codes[0], self._loaded[STEPS], folder, names)
        return Outcome(case.name, wrong, None, [job])

    def _load(self, zygote: Zygote, place: Path, checkpoints: Path) -> FinishedJob:
        return zygote.run("load", 1, place, timeout=20.0, limit=30.0, checkpoints=str(checkpoints), step=STEPS)

    def _full_disk(self, case: Case, zygote: Zygote, place: Path) -> Outcome:
        drawn = case.values
        reference = self.reference(drawn["mesh"], zygote)
        size = 64 << 20 if drawn["files"] else max(0, int(drawn["checkpoints"] * reference.checkpoint_bytes))
        with small_disk(place / "disk", size, drawn["files"]) as disk:
            run = disk.folder / "run"
            if drawn["checkpoints"] < 0 and not drawn["files"]:
                disk.fill()
            arguments: dict[str, Any] = {"run": str(run), "mesh": drawn["mesh"]}
            if drawn["command_line"]:
                arguments = {"command_arguments": command_arguments(run, drawn["mesh"])}
            job = zygote.run(
                "command" if drawn["command_line"] else "fill_disk",
                drawn["world"],
                place / "full",
                timeout=drawn["timeout"],
                limit=drawn["timeout"] + GRACE,
                max_file_bytes=disk.max_file_bytes,
                **arguments,
            )
            wrong = []
            for rank, code in enumerate(job.codes):
                if code in (None, 0) or code < 0:
                    end = (
                        "hung" if code is None else "did not notice the full disk" if code == 0 else f"ended by {code}"
                    )
                    wrong.append(f"rank {rank} {end}")
                    continue
                report = job.report(rank)
                text = (
                    job.output(rank) + report.get("trace", "") if drawn["command_line"] else report.get("message", "")
                )
                wrong += [f"rank {rank}: {failure}" for failure in judge_refused_save(text, str(run), REASONS)]
            wrong += judge_checkpoints(run / CHECKPOINTS, reference, 0)
            disk.grow()
            resumed, more = self._resume(case, zygote, place, run, reference)
        return Outcome(case.name, wrong + more, None, [job, resumed])


def command_arguments(run: Path, mesh: dict[str, int]) -> list[str]:
    """Return the command line that trains with the configuration of `ranks.train_config`."""
    arguments = ["train", "gpt", "--output", str(run)]
    for axis, size in mesh.items():
        arguments += [f"--{axis}", str(size)]
    config = train_config(mesh)
    for table in ("model", "data", "optimizer", "run"):
        for name in CHANGED[table]:
            arguments += ["--set", f"{table}.{name}={getattr(getattr(config, table), name)}"]
    return arguments


#: The fields in which `ranks.train_config` differs from the preset.
CHANGED = {
    "model": ("dim", "hidden", "heads", "kv_heads", "layers", "vocabulary"),
    "data": ("tokens", "batch", "micro"),
    "optimizer": ("lr", "warmup"),
    "run": ("steps", "log", "evaluate", "compare", "save", "keep"),
}


def judge_checkpoints(folder: Path, reference: Reference, least: int) -> list[str]:
    """Return the failures of a run's checkpoints: each must be bitwise equal to that of the undisturbed run.

    `least` is a step that was on the disk before the fault: its checkpoint, or a later one, must exist.
    """
    wrong = []
    checkpoints = Checkpoints(folder)
    for step in checkpoints.steps():
        try:
            checkpoints.check(step)
        except CheckpointError as error:
            wrong.append(f"a checkpoint is damaged: {error}")
            continue
        found, expected = _digests(complete(folder)[step]), reference.digests[step]
        other = [name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)]
        if other:
            examples = ", ".join(sorted(other)[:3])
            wrong.append(
                f"step {step} passes its checks, and differs from the undisturbed run in {len(other)}: {examples}"
            )
    if (checkpoints.latest() or 0) < least:
        wrong.append(f"step {least} had been saved, and the latest checkpoint is {checkpoints.latest()}")
    return wrong


def damage(folder: Path, drawn: dict[str, Any]) -> list[str]:
    """Damage the files of a checkpoint as the drawn values say; return names, one of which an error must contain."""
    dice = random.Random(drawn["dice"])
    names = sorted(path.name for path in folder.iterdir())
    name = names[int(drawn["file"] * len(names))]
    path = folder / name
    data = bytearray(path.read_bytes())
    place = int(drawn["place"] * len(data))
    other = dice.choice([one for one in names if one != name])
    kind = drawn["kind"]
    if kind == "swap":
        path.write_bytes((folder / other).read_bytes())
        (folder / other).write_bytes(data)
        return [name, other]
    if kind == "remove":
        path.unlink()
        return [name]
    if kind == "flip":
        data[place] ^= 1 << drawn["bit"]
    elif kind == "flips":
        for _ in range(drawn["num_flips"]):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif kind == "truncate":
        del data[place:]
    elif kind == "append":
        data += dice.randbytes(1 + dice.randrange(100))
    elif kind == "duplicate":
        data = bytearray((folder / other).read_bytes())
    elif kind == "zero":
        end = min(len(data), place + 512)
        data[place:end] = bytes(end - place)
    elif kind == "empty":
        data = bytearray()
    else:
        raise ValueError(f"damage {kind!r}: no such kind")
    path.write_bytes(data)
    return [name]


def _digests(folder: Path) -> dict[str, str]:
    """Return digests of a checkpoint's tensors, chunk by chunk, and of its options, whichever rank wrote them."""
    index = read_index(folder)
    found = {name: hashlib.sha256(json.dumps(index[name]).encode()).hexdigest() for name in ("groups", "values")}
    open_files: dict[str, TensorFile] = {}
    try:
        for name, tensor in index["tensors"].items():
            for chunk in tensor["chunks"]:
                file = open_files.setdefault(chunk["file"], TensorFile(folder / chunk["file"]))
                sizes = torch.Size(chunk["sizes"])
                rows = file.rows(name, DTYPES[tensor["dtype"]], sizes, 0, sizes[0] if sizes else 1)
                values = rows.reshape(-1).view(torch.uint8).numpy().tobytes()
                found[f"{name} {chunk['offsets']}"] = hashlib.sha256(values).hexdigest()
    finally:
        for file in open_files.values():
            file.close()
    return found
