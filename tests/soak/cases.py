"""The cases of the soak campaign: each depends only on a seed, a family and a number.

A case describes the work of the ranks, the fault, and the moment of the fault. No case runs in this module.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

#: Seconds beyond the timeout after which a survivor counts as hanging.
GRACE = 10.0
#: MESHFLASH_TIMEOUT in seconds, by fault. Ranks notice a killed rank by its closed connections, a stopped one only
#: by this timeout.
TIMEOUT = {signal.SIGKILL: 10.0, signal.SIGSTOP: 4.0}
#: Schedules, by the smallest world size for which they are useful.
SCHEDULES = {
    "auto": 2,
    "ring": 2,
    "zigzag": 2,
    "striped": 2,
    "allgather": 2,
    "ulysses": 2,
    "hybrid": 4,
    "double_ring": 4,
    "ringx1": 2,
    "ringx2": 2,
    "ringx3": 2,
    "ringx4": 2,
}
#: Moments of attention at which a rank fires its fault; see `ranks.attend`.
MOMENTS = ("handshake", "forward", "backward", "between")
#: Meshes of the training runs.
MESHES: tuple[dict[str, Any], ...] = (
    {"cp": 2},
    {"dp": 2},
    {"fsdp": 2},
    {"cp": 3},
    {"dp": 2, "cp": 2},
)
#: Meshes for saves: a single process, two ranks, or three. Most saves of a campaign use these, because they are cheap.
SAVING_MESHES: tuple[dict[str, Any], ...] = ({}, {"dp": 2}, {"fsdp": 2}, {"cp": 3})
#: Number of steps of a training run, and number of steps between two checkpoints.
STEPS, SAVE = 10, 2
#: The kinds of damage to a checkpoint.
DAMAGE = ("flip", "flips", "truncate", "append", "remove", "swap", "duplicate", "zero", "empty")


@dataclass(frozen=True)
class Case:
    """One case: its family, its number, and its drawn values; `draw` makes it."""

    family: str
    seed: int
    number: int
    values: dict[str, Any]

    @property
    def name(self) -> str:
        """The argument of `--case`.

        >>> draw("damage", 0, 7).name
        'damage/7'
        """
        return f"{self.family}/{self.number}"


def draw(family: str, seed: int, number: int) -> Case:
    """Return the case of this seed, family and number; it is the same on every machine.

    >>> draw("sigkill-attention", 0, 3) == draw("sigkill-attention", 0, 3)
    True
    """
    if family not in FAMILIES:
        raise ValueError(f"family {family!r}: expected one of {', '.join(FAMILIES)}")
    dice = random.Random(f"{seed}/{family}/{number}")
    return Case(family, seed, number, FAMILIES[family].draw(dice))


def num_ranks(mesh: dict[str, int]) -> int:
    """Return the number of ranks of a mesh.

    >>> num_ranks({"dp": 2, "cp": 2}), num_ranks({})
    (4, 1)
    """
    count = 1
    for size in mesh.values():
        count *= size
    return count


def _attention(fault: signal.Signals) -> Callable[[random.Random], dict[str, Any]]:
    """Return a function that draws the values of a fault during attention."""

    def values(dice: random.Random) -> dict[str, Any]:
        world = dice.randint(2, 4)
        return {
            "world": world,
            "schedule": dice.choice([name for name, least in SCHEDULES.items() if world >= least]),
            "victims": [dice.randrange(world)],
            "signal": int(fault),
            "timeout": TIMEOUT[fault],
            "moment": dice.choice(MOMENTS),
            "call": dice.randint(0, 3),
            "delay": dice.choice((0.0, dice.uniform(0.0, 0.01))),
            "shutdown": dice.random() < 0.5,  # do survivors leave through a `with init()` block?
        }

    return values


def _training(fault: signal.Signals) -> Callable[[random.Random], dict[str, Any]]:
    """Return a function that draws the values of a fault during training."""

    def values(dice: random.Random) -> dict[str, Any]:
        mesh = dice.choice(MESHES)
        return {
            "mesh": mesh,
            "world": num_ranks(mesh),
            "victims": [dice.randrange(num_ranks(mesh))],
            "signal": int(fault),
            "timeout": TIMEOUT[fault],
            "step": dice.randint(1, STEPS - 2),
            "delay": dice.choice((0.0, dice.uniform(0.0, 0.05))),
            "sync": dice.random() < 0.3,
        }

    return values


def _saving(dice: random.Random) -> dict[str, Any]:
    """Draw the values of a kill during a save."""
    mesh = dice.choice(SAVING_MESHES)
    world = num_ranks(mesh)
    at_file = dice.random() < 0.6
    return {
        "mesh": mesh,
        "world": world,
        "victims": list(range(world)) if dice.random() < 0.5 else [dice.randrange(world)],
        "signal": int(signal.SIGKILL),
        "timeout": TIMEOUT[signal.SIGKILL],
        "step": SAVE * dice.randint(1, STEPS // SAVE - 1),
        # The fault comes before this file operation, counted from the start of the save, or `delay` seconds after it.
        "file": dice.randint(1, 40) if at_file else 0,
        "delay": 0.0 if at_file else dice.uniform(0.0, 0.03),
        "sync": dice.random() < 0.3,
    }


def _damage(dice: random.Random) -> dict[str, Any]:
    """Draw the values of a damaged checkpoint."""
    return {
        "kind": dice.choice(DAMAGE),
        "file": dice.random(),  # the file and the place in it, as fractions of their number
        "place": dice.random(),
        "bit": dice.randrange(8),
        "num_flips": dice.randint(2, 20),
        "dice": dice.randrange(2**32),
    }


def _full_disk(dice: random.Random) -> dict[str, Any]:
    """Draw the values of a run on a small disk."""
    mesh = dice.choice(SAVING_MESHES[:3])
    return {
        "mesh": mesh,
        "world": num_ranks(mesh),
        "timeout": 20.0,
        # The disk holds this many checkpoints; if negative, not even the first line of the metrics.
        "checkpoints": dice.choice((-1.0, dice.uniform(0.0, 1.0), dice.uniform(1.0, 3.5))),
        # The disk holds at most this many files, 0 for no limit; a checkpoint needs about five.
        "files": dice.choice((0, 0, dice.randint(1, 4), dice.randint(2, 20))),
        "command_line": dice.random() < 0.5,
    }


@dataclass(frozen=True)
class Family:
    """A family of cases: their number in a campaign, the function that draws their values, and a description."""

    count: int
    draw: Callable[[random.Random], dict[str, Any]]
    about: str


FAMILIES: dict[str, Family] = {
    "sigkill-attention": Family(100, _attention(signal.SIGKILL), "a rank is killed during attention"),
    "sigkill-training": Family(100, _training(signal.SIGKILL), "a rank is killed during training"),
    "sigstop-attention": Family(50, _attention(signal.SIGSTOP), "a rank is stopped during attention"),
    "sigstop-training": Family(50, _training(signal.SIGSTOP), "a rank is stopped during training"),
    "kill-save": Family(200, _saving, "some or all ranks are killed while a checkpoint is saved"),
    "damage": Family(200, _damage, "the files of a checkpoint are changed"),
    "full-disk": Family(50, _full_disk, "the disk is full"),
}


def selection(families: Sequence[str], count: int | None, seed: int) -> list[Case]:
    """Return all cases of a campaign, family by family; `count` replaces the default number of each family."""
    unknown = [name for name in families if name not in FAMILIES]
    if unknown:
        raise ValueError(f"family {unknown[0]!r}: expected one of {', '.join(FAMILIES)}")
    return [
        draw(name, seed, number)
        for name in families or FAMILIES
        for number in range(FAMILIES[name].count if count is None else count)
    ]
