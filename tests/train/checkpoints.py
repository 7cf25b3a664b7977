"""Checkpoints filled with a single value, and helpers that damage their files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from meshflash.train import checkpoint_files
from meshflash.train.checkpoint import Checkpoints
from train import crash

TENSORS, INDEX, MANIFEST = "rank-00000.safetensors", checkpoint_files.INDEX, checkpoint_files.MANIFEST


def save_steps(folder: Path, *steps: int, keep: int = 9) -> Checkpoints:
    """Save checkpoints whose values are all ten times their step."""
    checkpoints, (model, optimizer) = Checkpoints(folder, keep=keep), crash.build()
    for step in steps:
        crash.fill(model, optimizer, 10.0 * step)
        checkpoints.save(step, model, optimizer, {"value": 10.0 * step}, wait=True)
    return checkpoints


def load_value(checkpoints: Checkpoints, step: int | None = None) -> float:
    """Load a checkpoint and return the single value that fills it."""
    model, optimizer = crash.build()
    state = checkpoints.load(model, optimizer, step)
    assert crash.distinct_values(model, optimizer) == {state["value"]}
    return state["value"]


def flip_bit(path: Path) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def raise_disk_full(handle):
    """Fail as `os.fsync` does on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
