"""The tasks of the forked ranks of the soak campaign: endless attention, training, loading, the command line.

A rank that is a victim calls `fire` where its case says so; the signal comes from outside. Each task returns what the
rank reports; an error that leaves the task is reported by the caller.
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

#: The pipe into which a victim writes; None on every other rank.
FIRE: int | None = None
#: Seconds that ranks repeat attention without a fault before they give up.
PATIENCE = 40.0


def fire() -> None:
    """Request the fault. It may come at any time from now on, and comes once."""
    global FIRE
    if FIRE is not None:
        os.write(FIRE, b"!")
        FIRE = None


def attend(timeout: float, folder: Path, schedule: str, moment: str, call: int, leave: bool) -> dict[str, Any]:
    """Repeat attention until a rank is lost; `leave` says whether errors pass through `shutdown`."""
    torch.manual_seed(0)
    here = init(timeout=timeout)
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
            if time.monotonic() - begin > PATIENCE:
                break
    finally:
        if leave:
            shutdown()
    return {"rank": here.rank, "calls": number}


def train_config(mesh: dict[str, int], save: int = SAVE) -> configs.Config:
    """Return the configuration of every training run here: a tiny GPT, a few steps."""
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
    """Train in a folder, from where an earlier run was. Report the losses of the steps that this one did.

    Args:
        timeout: of ranks that wait for each other.
        folder: of this job's reports.
        run: is the folder of the run.
        mesh: holds the sizes of its axes.
        step: is when the victim fires; 0 is never.
        file: lets it fire before the n-th time that it touches a file, from the save of that step on.
        saving: lets it fire when the save of that step begins to write.
        sync: has each save return when all is on the disk.
        keep: is how many checkpoints stay.
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


def command(timeout: float, folder: Path, words: list[str], most_bytes: int = 0) -> dict[str, Any]:
    """Run the command line of meshflash; `most_bytes` caps the size of each file where no disk can be mounted."""
    from meshflash.cli import app

    _cap_files(most_bytes)
    sys.argv = ["meshflash", *words]
    app()
    return {}


def fill_disk(timeout: float, folder: Path, run: str, mesh: dict[str, int], most_bytes: int = 0) -> dict[str, Any]:
    """Train on a disk that fills up."""
    _cap_files(most_bytes)
    return train(timeout, folder, run, mesh)


def load(timeout: float, folder: Path, checkpoints: str, step: int) -> dict[str, Any]:
    """Load a checkpoint, and report a digest of every value that the model and the optimizer then have."""
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
    """Return one digest of all weights, of the optimizer's tensors, values and options."""
    content = collect(model, optimizer)
    found = hashlib.sha256(repr((sorted(content.values.items()), content.groups)).encode())
    for name, part in sorted(content.parts.items()):
        found.update(f"{name} {part.local.dtype} {tuple(part.local.shape)}".encode())
        found.update(part.local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _cap_files(most_bytes: int) -> None:
    if most_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))


def _fire_in_step(step: int) -> None:
    """Fire when the n-th step of this process begins."""
    accumulate, begun = loop.accumulate, [0]

    def counted(*arguments: Any, **options: Any) -> Any:
        begun[0] += 1
        if begun[0] == step:
            fire()
        return accumulate(*arguments, **options)

    loop.accumulate = counted


def _fire_in_save(step: int, file: int) -> None:
    """Fire when the save of a step begins, or before the n-th time from then on that this process touches a file."""
    write, touched = Checkpoints._write, [-1]

    def begun(self: Checkpoints, saved: int, *more: Any) -> None:
        if saved == step:
            if file:
                touched[0] = 0
            else:
                fire()
        write(self, saved, *more)

    def hook(event: str, arguments: Any) -> None:
        if touched[0] < 0 or event not in EVENTS:
            return
        touched[0] += 1
        if touched[0] == file:
            fire()
            time.sleep(PATIENCE)  # let the kill come before the announced operation

    Checkpoints._write = begun  # type: ignore[method-assign, assignment]
    if file:
        sys.addaudithook(hook)


def _save_synchronously() -> None:
    save = Checkpoints.save

    def waiting(self: Checkpoints, *arguments: Any, **options: Any) -> None:
        save(self, *arguments, **(options | {"wait": True}))

    Checkpoints.save = waiting  # type: ignore[method-assign]


def interrupted(timeout: float, folder: Path) -> None:
    """Rank 0 waits in a handshake that nobody else comes to, until it is interrupted."""
    here = init(timeout=timeout)
    x = torch.randn(1, 8, 2, 8)
    if here.rank:
        time.sleep(8.0)
        return
    fire()
    attention(x, x, x, schedule="ring")
