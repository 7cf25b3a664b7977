"""Run checks over ranks of this machine, and judge what comes back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import distributed as _distributed

from meshflash.check.oracle import check
from meshflash.check.spread import Result, check_moved, run_item, share_rounding, whole
from meshflash.check.suite import Check
from meshflash.runtime.devices import take_device
from meshflash.runtime.processes import Tell, run_ranks
from meshflash.runtime.world import World

#: Of the accumulator, in the last place: a gradient that is truly 0 is a difference of sums in other orders here.
UNITS = 16
dist: Any = _distributed  # torch does not declare all that it exports here


@dataclass(frozen=True)
class Verdict:
    """What became of a check.

    `worst` is the result with the largest share of the error that it may have; bytes are a rank's, on average. A
    refusal is an answer, too: a combination that is refused with a reason is not silently wrong.
    """

    schedule: str
    world: int
    layout: str
    mask: str
    features: str
    tokens: int
    dtype: str
    outcome: str
    worst: str = ""
    error: float = 0.0
    allowed: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    message: str = ""


def run(checks: Sequence[Check], world: int, listen: Tell | None = None) -> list[Verdict]:
    """The verdict of each check; all of them run in the same processes of this machine, joined by gloo."""
    results = run_ranks(world, _run, list(checks), timeout=3600.0, listen=listen)
    verdicts: list[Verdict] = results[0]
    return verdicts


def run_here(checks: Sequence[Check], here: World, listen: Tell) -> list[Verdict]:
    """The same as a rank of the default process group; rank 0 has the verdicts."""
    return _run(here.rank, here.world_size, listen, list(checks), here.local_rank)


def _run(rank: int, world: int, tell: Tell, checks: list[Check], local_rank: int | None = None) -> list[Verdict]:
    """One rank's part of each check; rank 0 judges."""
    warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # torch, on CPUs without bfloat16
    out = []
    for n, each in enumerate(checks):
        take_device(each.item.device, rank if local_rank is None else local_rank)
        try:
            part: Result | str = run_item(rank, dist.group.WORLD, each.item)
        except ValueError as error:
            part = str(error)
        parts: list[Any] | None = None if rank else [None] * world
        dist.gather_object(part, parts)
        if parts is not None:
            out.append(_judge(each, parts))
            tell(f"{n + 1} of {len(checks)}")
    return out


def _judge(each: Check, parts: Sequence[Result | str]) -> Verdict:
    item, case = each.item, each.item.case
    dtype = str(item.dtype).removeprefix("torch.")
    names = (item.schedule, item.world, each.layout, each.mask, each.features, case.tokens, dtype)
    refusals = [part for part in parts if isinstance(part, str)]
    if refusals:
        outcome = "refused" if len(refusals) == len(parts) else "missed"
        return Verdict(*names, outcome, message=refusals[0])
    made = [part for part in parts if not isinstance(part, str)]
    moved = [part[1] for part in made]
    received = [sum(sum(rank[way].received.values()) for rank in moved) / len(moved) for way in ("forward", "backward")]
    try:
        results = [part[0] for part in made]
        leaves = case.inputs(item.dtype)
        errors = check(whole(item, results), case, leaves, UNITS, share_rounding(results))
        check_moved(item, moved)
    except (AssertionError, ValueError) as error:
        return Verdict(*names, "missed", forward_bytes=received[0], backward_bytes=received[1], message=str(error))
    worst = max(errors, key=lambda name: errors[name].error / errors[name].allowed)
    found = errors[worst]
    return Verdict(*names, "right", worst, found.error, found.allowed, received[0], received[1])
