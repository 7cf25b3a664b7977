"""Measure candidates on one case: check results, then memory, then interleaved times, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from meshflash.bench.candidates import Attention, candidate, check_names
from meshflash.bench.cases import Case, Tensors
from meshflash.bench.check import PASSES, Truth, Verdict, WrongError, judge, truth
from meshflash.bench.timing import interleaved, watched
from meshflash.runtime.oom import attempt

Say = Callable[[str], None]
Oracle = Callable[[Case, Tensors], Truth]


@dataclass(frozen=True)
class Measured:
    """The figures of one candidate: by pass its milliseconds, error, kernel that ran, and peak bytes.

    `ms` is the time of the device, and `loop_ms` that of a call in a plain loop, if it was measured. A pass that ran
    out of memory has no entries. `peak_bytes` is of each pass beyond what was held before it, `both_bytes` of forward
    and backward together beyond the inputs. `check_s` is the seconds of the check, compilation included. `note` says
    why a candidate has no figures.
    """

    oracle: str
    ms: dict[str, float]
    errors: dict[str, float]
    ran: dict[str, str]
    peak_bytes: dict[str, int]
    both_bytes: int | None
    check_s: float
    note: str | None
    loop_ms: dict[str, float]


def both(forward: str, backward: str) -> str:
    """Return the kernels of both passes for a cell of a table.

    >>> both("vendor", "vendor"), both("vendor", "tiled")
    ('vendor', 'vendor, tiled')
    """
    return ", ".join(dict.fromkeys(filter(None, (forward, backward))))


def measure(
    case: Case,
    names: tuple[str, ...],
    rounds: int,
    oracle: Oracle = truth,
    say: Say = lambda _: None,
    noted: Collection[str] = (),
    loops: bool = False,
) -> dict[str, Measured]:
    """Measure each candidate; a wrong one raises WrongError.

    Args:
        case: The shape, mask and dtype.
        names: The candidates by name.
        rounds: The number of rounds, in each of which every candidate is timed once.
        oracle: A function that gives the results to check against.
        say: A function that is called with progress messages.
        noted: The candidates that get a note instead of raising if they fail.
        loops: Whether to also time plain loops, in which the host's time counts.
    """
    check_names(names)
    device, tensors = torch.device(case.device), case.tensors()
    say("computing the oracle")
    want = oracle(case, tensors)
    functions: dict[str, Attention] = {}
    verdicts: dict[str, Verdict] = {}
    seconds: dict[str, float] = {}
    notes: dict[str, str] = {}
    for name in names:
        say(f"checking {name}")
        start = time.perf_counter()
        verdicts[name] = Verdict({}, dict.fromkeys(PASSES, name))
        try:
            verdicts[name], function = _checked(case, name, tensors, want)
            functions |= {} if function is None else {name: function}
        except Exception as error:
            if name not in noted:
                raise
            notes[name] = _why(error)
        function = None
        seconds[name] = time.perf_counter() - start
    judged_by = want.oracle
    del want
    say("measuring memory")
    peaks = {name: _peaks(function, tensors, device) for name, function in functions.items()}
    times: dict[str, dict[str, float]] = {}
    loop_times: dict[str, dict[str, float]] = {}
    for direction in PASSES:
        say(f"timing {direction}")
        forward = {name: partial(function, *tensors[:3]) for name, function in functions.items()}
        calls = forward if direction == "forward" else _backwards(functions, verdicts, tensors)
        times[direction] = interleaved(calls, device, rounds)
        loop_times[direction] = interleaved(calls, device, rounds, count_host=True) if loops else {}
    return {
        name: Measured(
            judged_by,
            _by_pass(times, name),
            verdicts[name].errors,
            verdicts[name].ran,
            *peaks.get(name, ({}, None)),
            seconds[name],
            notes.get(name),
            _by_pass(loop_times, name),
        )
        for name in names
    }


def _by_pass(times: dict[str, dict[str, float]], name: str) -> dict[str, float]:
    """Return the times of one candidate in the passes that it ran."""
    return {direction: times[direction][name] for direction in PASSES if name in times[direction]}


def _checked(case: Case, name: str, tensors: Tensors, want: Truth) -> tuple[Verdict, Attention | None]:
    """Return the verdict on a candidate, and the candidate itself unless memory ran out in its forward."""
    function = attempt(partial(candidate, case, name))
    if function is None:
        return Verdict({}, dict.fromkeys(PASSES, name)), None
    verdict = judge(case, name, function, tensors, want)
    return verdict, function if verdict.errors else None


def _why(error: Exception) -> str:
    """Return why a candidate failed, in one line."""
    kind = "wrong" if isinstance(error, WrongError) else "unable" if isinstance(error, ValueError) else "failed"
    line = next(iter(str(error).splitlines()), "")
    return f"{kind}: {line}" if kind != "failed" else f"{kind}: {type(error).__name__}: {line}"


def _backwards(
    functions: dict[str, Attention], verdicts: dict[str, Verdict], tensors: Tensors
) -> dict[str, Callable[[], Any]]:
    """Return the backward of each candidate that has the memory for it."""
    calls: dict[str, Callable[[], Any]] = {}
    for name, function in functions.items():
        out = attempt(partial(function, *tensors[:3])) if "backward" in verdicts[name].errors else None
        if out is not None:
            calls[name] = partial(torch.autograd.grad, out, tensors[:3], tensors[3], retain_graph=True)
    return calls


def _peaks(function: Attention, tensors: Tensors, device: torch.device) -> tuple[dict[str, int], int | None]:
    """Return the peak of each pass, and of both together."""
    forward = attempt(lambda: watched(lambda: function(*tensors[:3]), device))
    if forward is None:
        return {}, None
    backward = attempt(lambda: watched(lambda: torch.autograd.grad(forward.result, tensors[:3], tensors[3]), device))
    if backward is None:
        return {"forward": forward.peak_bytes}, None
    both = max(forward.peak_bytes, forward.held_bytes + backward.peak_bytes)
    return {"forward": forward.peak_bytes, "backward": backward.peak_bytes}, both
