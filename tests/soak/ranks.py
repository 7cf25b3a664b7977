"""The tasks of the forked ranks of the soak campaign: repeated attention, training, loading, the command line.

A victim calls `fire` at the moment of its case; the zygote then sends the signal. Each task returns the report of its
rank; the caller reports an error that leaves the task.
"""

from __future__ import annotations

import hashlib
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from meshflash import Mask, attention, init, shutdown
from meshflash.parallel import init_mesh
from meshflash.train import config as configs
from meshflash.train import loop
from meshflash.train.checkpoint import Checkpoints
from meshflash.train.checkpoint_tensors import collect
from soak.cases import SAVE, STEPS
from train.crash import EVENTS

#: The pipe into which a victim writes to request its fault; None on every other rank.
FIRE: int | None = None
#: Seconds for which ranks repeat attention without a fault before they give up.
PATIENCE_SECONDS = 40.0


def fire() -> None:
    """Request the fault. It comes once, at any time from now on."""
    global FIRE
    if FIRE is not None:
        os.write(FIRE, b"!")
        FIRE = None


def attend(timeout: float, folder: Path, schedule: str, moment: str, call: int, leave: bool) -> dict[str, Any]:
    """Repeat attention until a rank is lost; with `leave`, errors pass through `shutdown`."""
    torch.manual_seed(0)
    this_rank = init(timeout=timeout)
    begin = time.monotonic()
    try:
        for number in range(1_000_000):
            due = number == call or (moment == "handshake" and number == 0)
            q, k, v = (torch.randn(1, 48, 4, 16, requires_grad=True) for _ in range(3))
            if due and moment in ("handshake", "forward"):
                fire()
            out = attention(q, k, v, schedule=schedule, mask=Mask.causal())
            if due and moment == "backward":
                fire()
            out.sum().backward()
            if due and moment == "between":
                fire()
                time.sleep(0.02)
            if time.monotonic() - begin > PATIENCE_SECONDS:
                break
    finally:
        if leave:
            shutdown()
    return {"rank": this_rank.rank, "calls": number}


def train_config(mesh: dict[str, int], save: int = SAVE) -> configs.Config:
    """Return the configuration of every training run: a tiny GPT, a few steps."""
    found: configs.Config = configs.change(
        configs.preset("gpt", "tiny"),
        {
            "model": {"dim": 32, "hidden": 48, "heads": 4, "kv_heads": 2, "layers": 1, "vocabulary": 16},
            "mesh": mesh,
            "data": {"tokens": 24, "batch": 4, "micro": 2},
            "optimizer": {"lr": 3e-3, "warmup": 3},
            "run": {"steps": STEPS, "log": 1, "evaluate": 0, "compare": 5, "save": save, "keep": 3},
        },
    )
    return found


def train(
    timeout: float,
    folder: Path,
    run: str,
    mesh: dict[str, int],
    step: int = 0,
    file: int = 0,
    saving: bool = False,
    sync: bool = False,
    keep: int = 3,
) -> dict[str, Any]:
    """Train in a folder, or resume an earlier run in it; report the losses of the steps of this process.

    Args:
        timeout: Seconds for which ranks wait for each other.
        folder: Folder for the reports of this job.
        run: Folder of the run.
        mesh: Sizes of the axes of the mesh.
        step: Step at which the victim fires; 0 means never.
        file: Number of the file operation, counted from the save of `step`, before which the victim fires.
        saving: Whether the victim fires in the save of `step` and not in the step itself.
        sync: Whether each save waits until all files are on the disk.
        keep: Number of checkpoints that stay.
    """
    init(timeout=timeout)
    config = train_config(mesh)
    config = configs.change(config, {"run": {"keep": keep}})
    if step and FIRE is not None:
        if saving:
            _fire_in_save(step, file)
        else:
            _fire_in_step(step)
    if sync:
        _save_synchronously()
    trained = loop.train(config, Path(run), quiet=True)
    shutdown()
    return {"step": trained.step, "losses": trained.losses}


def command(timeout: float, folder: Path, command_arguments: list[str], max_file_bytes: int = 0) -> dict[str, Any]:
    """Run the command line of meshflash; `max_file_bytes` limits each file if no disk could be mounted."""
    from meshflash.cli import app

    _limit_file_size(max_file_bytes)
    sys.argv = ["meshflash", *command_arguments]
    app()
    return {}


def fill_disk(timeout: float, folder: Path, run: str, mesh: dict[str, int], max_file_bytes: int = 0) -> dict[str, Any]:
    """Train on a disk that fills up."""
    _limit_file_size(max_file_bytes)
    return train(timeout, folder, run, mesh)


def load(timeout: float, folder: Path, checkpoints: str, step: int) -> dict[str, Any]:
    """Load a checkpoint; report a digest of all values of the model and the optimizer."""
    torch.set_num_threads(1)
    init()
    config = train_config({})
    model, optimizer = loop.build(config, init_mesh(), torch.device("cpu"))
    before = digest(model, optimizer)
    try:
        state = Checkpoints(checkpoints).load(model, optimizer, step)
    except Exception as error:
        changed = digest(model, optimizer) != before
        return {"error": type(error).__name__, "message": str(error), "changed": changed}
    return {"digest": digest(model, optimizer), "step": state["step"]}


def digest(model: Any, optimizer: Any) -> str:
    """Return one digest of all weights, and of the tensors, values and options of the optimizer."""
    content = collect(model, optimizer)
    found = hashlib.sha256(repr((sorted(content.values.items()), content.groups)).encode())
    for name, part in sorted(content.parts.items()):
        found.update(f"{name} {part.local.dtype} {tuple(part.local.shape)}".encode())
        found.update(part.local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _limit_file_size(max_file_bytes: int) -> None:
    """Limit the size of files that this process writes; 0 means no limit."""
    if max_file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))


def _fire_in_step(step: int) -> None:
    """Fire at the start of a step, counted in this process."""
    accumulate, begun = loop.accumulate, [0]

    def count_and_fire(*arguments: Any, **options: Any) -> Any:
        begun[0] += 1
        if begun[0] == step:
            fire()
        return accumulate(*arguments, **options)

    loop.accumulate = count_and_fire


def _fire_in_save(step: int, file: int) -> None:
    """Fire when the save of a step begins, or before the `file`-th file operation after that."""
    write, num_operations = Checkpoints._write, [-1]

    def write_and_fire(self: Checkpoints, saved: int, *more: Any) -> None:
        if saved == step:
            if file:
                num_operations[0] = 0
            else:
                fire()
        write(self, saved, *more)

    def hook(event: str, arguments: Any) -> None:
        if num_operations[0] < 0 or event not in EVENTS:
            return
        num_operations[0] += 1
        if num_operations[0] == file:
            fire()
            time.sleep(PATIENCE_SECONDS)  # wait, so that the kill comes before the announced operation

    Checkpoints._write = write_and_fire  # type: ignore[method-assign, assignment]
    if file:
        sys.addaudithook(hook)


def _save_synchronously() -> None:
    """Make every save wait until its files are on the disk."""
    save = Checkpoints.save

    def save_and_wait(self: Checkpoints, *arguments: Any, **options: Any) -> None:
        save(self, *arguments, **(options | {"wait": True}))

    Checkpoints.save = save_and_wait  # type: ignore[method-assign]


def interrupted(timeout: float, folder: Path) -> None:
    """Let rank 0 wait in a handshake that no other rank joins, until it is interrupted."""
    this_rank = init(timeout=timeout)
    x = torch.randn(1, 8, 2, 8)
    if this_rank.rank:
        time.sleep(8.0)
        return
    fire()
    attention(x, x, x, schedule="ring")
