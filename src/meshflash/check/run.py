"""Run checks on several ranks, and compare their results with the oracle."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import distributed as dist

from meshflash.check.oracle import Error, check
from meshflash.check.spread import Item, Result, check_moved, run_item, share_rounding, whole
from meshflash.check.suite import Check
from meshflash.runtime.devices import take_device
from meshflash.runtime.processes import Tell, run_ranks
from meshflash.runtime.world import World

#: The allowed ulp of the accumulator: a gradient that is truly 0 is here a difference of sums in different orders.
UNITS = 16


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check: "right", "refused" or "missed" (wrong).

    `worst` is the result with the largest error relative to the allowed one. Bytes are the mean over ranks. A refusal
    is a valid outcome: a combination that raises an error with a reason is not silently wrong.
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
    """Run checks on processes of this machine, joined by gloo, and return the verdict of each.

    Args:
        checks: The checks to run, in order, all in the same processes.
        world: The number of ranks.
        listen: A function that receives progress messages.
    """
    results = run_ranks(world, _run, list(checks), timeout=3600.0, listen=listen)
    return results[0]


def run_here(checks: Sequence[Check], here: World, listen: Tell) -> list[Verdict]:
    """Run checks as one rank of the default process group; only rank 0 returns verdicts.

    Args:
        checks: The checks to run, the same on all ranks.
        here: This rank.
        listen: A function that receives progress messages.
    """
    return _run(here.rank, here.world_size, listen, list(checks), here.local_rank)


def _run(rank: int, world: int, tell: Tell, checks: list[Check], local_rank: int | None = None) -> list[Verdict]:
    """Run each check as one rank; rank 0 gathers the results and judges them."""
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
    item = each.item
    dtype = str(item.dtype).removeprefix("torch.")
    names = (item.schedule, item.world, each.layout, each.mask, each.features, item.case.tokens, dtype)
    refusals = [part for part in parts if isinstance(part, str)]
    if refusals:
        outcome = "refused" if len(refusals) == len(parts) else "missed"
        return Verdict(*names, outcome, message=refusals[0])
    made = [part for part in parts if not isinstance(part, str)]
    moved = [part[1] for part in made]
    received = [sum(sum(rank[way].received.values()) for rank in moved) / len(moved) for way in ("forward", "backward")]
    try:
        worst, found = worst_error(item, made)
    except (AssertionError, ValueError) as error:
        return Verdict(*names, "missed", forward_bytes=received[0], backward_bytes=received[1], message=str(error))
    return Verdict(*names, "right", worst, found.error, found.allowed, received[0], received[1])


def worst_error(item: Item, parts: Sequence[Result]) -> tuple[str, Error]:
    """Return the name and the error of the result that comes closest to the allowed error.

    Raise AssertionError if a result is wrong, or if ranks moved other bytes than the verifier counted.

    Args:
        item: The item that the ranks ran.
        parts: The results and the traffic of each rank.
    """
    results, leaves = [part[0] for part in parts], item.case.inputs(item.dtype, seed=item.values)
    errors = check(whole(item, results), item.case, leaves, UNITS, share_rounding(results))
    check_moved(item, [part[1] for part in parts])
    return max(errors.items(), key=lambda found: found[1].error / found[1].allowed)
