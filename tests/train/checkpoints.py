"""Checkpoints filled with one number, and helpers that damage their files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from meshflash.train import checkpoint_files
from meshflash.train.checkpoint import Checkpoints
from train import crash

TENSORS, INDEX, MANIFEST = "rank-00000.safetensors", checkpoint_files.INDEX, checkpoint_files.MANIFEST


def saved(folder: Path, *steps: int, keep: int = 9) -> Checkpoints:
    """Save checkpoints filled with ten times their step."""
    checkpoints, (model, optimizer) = Checkpoints(folder, keep=keep), crash.made()
    for step in steps:
        crash.fill(model, optimizer, 10.0 * step)
        checkpoints.save(step, model, optimizer, {"number": 10.0 * step}, wait=True)
    return checkpoints


def loaded(checkpoints: Checkpoints, step: int | None = None) -> float:
    """Return the one number that fills a checkpoint."""
    model, optimizer = crash.made()
    state = checkpoints.load(model, optimizer, step)
    assert crash.numbers(model, optimizer) == {state["number"]}
    return state["number"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def full(handle):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
