"""Candidates on one case: right first, then their memory, then their times in turns, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from meshflash.bench.candidates import Attention, candidate, check_names
from meshflash.bench.cases import Case, Tensors
from meshflash.bench.check import PASSES, Verdict, judge, truth
from meshflash.bench.timing import interleaved, watched
from meshflash.launch.room import attempt

Say = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """One candidate: by pass its milliseconds, peak bytes, error and the kernel that ran.

    A pass that ran out of memory is in none of them. `peak_bytes` are of each pass beyond what was held
    before it, `both_bytes` of forward and backward together, beyond the inputs.
    """

    oracle: str
    ms: dict[str, float]
    errors: dict[str, float]
    ran: dict[str, str]
    peak_bytes: dict[str, int]
    both_bytes: int | None


def measure(
    case: Case, names: tuple[str, ...], rounds: int, exact: bool = False, say: Say = lambda _: None
) -> dict[str, Measured]:
    """Measure each candidate; RuntimeError for one that is wrong. `exact` checks against float64 at any length."""
    check_names(names)
    device, tensors = torch.device(case.device), case.tensors()
    say("asking the oracle")
    want = truth(case, tensors, exact)
    functions: dict[str, Attention] = {}
    verdicts: dict[str, Verdict] = {}
    for name in names:
        say(f"checking {name}")
        function = attempt(partial(candidate, case, name))
        verdicts[name] = Verdict({}, dict.fromkeys(PASSES, name))
        if function is not None:
            verdicts[name] = judge(case, name, function, tensors, want)
            functions |= {name: function} if verdicts[name].errors else {}
        function = None
    oracle = want.oracle
    del want
    say("watching memory")
    peaks = {name: _peaks(function, tensors, device) for name, function in functions.items()}
    say("timing forward")
    times = {"forward": interleaved({n: partial(f, *tensors[:3]) for n, f in functions.items()}, device, rounds)}
    say("timing backward")
    times["backward"] = interleaved(_backwards(functions, verdicts, tensors), device, rounds)
    return {
        name: Measured(
            oracle,
            {direction: times[direction][name] for direction in PASSES if name in times[direction]},
            verdicts[name].errors,
            verdicts[name].ran,
            *peaks.get(name, ({}, None)),
        )
        for name in names
    }


def _backwards(
    functions: dict[str, Attention], verdicts: dict[str, Verdict], tensors: Tensors
) -> dict[str, Callable[[], Any]]:
    """The backward alone of each function that has the memory for it."""
    calls: dict[str, Callable[[], Any]] = {}
    for name, function in functions.items():
        out = attempt(partial(function, *tensors[:3])) if "backward" in verdicts[name].errors else None
        if out is not None:
            calls[name] = partial(torch.autograd.grad, out, tensors[:3], tensors[3], retain_graph=True)
    return calls


def _peaks(function: Attention, tensors: Tensors, device: torch.device) -> tuple[dict[str, int], int | None]:
    """The peak of each pass, and of both together."""
    forward = attempt(lambda: watched(lambda: function(*tensors[:3]), device))
    if forward is None:
        return {}, None
    backward = attempt(lambda: watched(lambda: torch.autograd.grad(forward.result, tensors[:3], tensors[3]), device))
    if backward is None:
        return {"forward": forward.peak_bytes}, None
    both = max(forward.peak_bytes, forward.held_bytes + backward.peak_bytes)
    return {"forward": forward.peak_bytes, "backward": backward.peak_bytes}, both
