"""Wall time of calls in a plain loop: what a user pays for a call, the host's time included.

A sample is as many calls as users write them, then one synchronize, divided by the number of calls. It is the host's
time where the host takes longer than the device, and the device's time elsewhere.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from meshflash.bench import cases, gemm
from meshflash.bench.check import WrongError
from meshflash.bench.host import undisturbed
from meshflash.bench.timing import loop_milliseconds

#: The milliseconds of a sample, about: all candidates are timed over samples of the same length, because the clock of a
#: GPU follows its load. The wait for the last call at the end of a sample counts once, and does not show.
SAMPLE_MS = 20.0
#: The most calls in a sample.
MAX_CALLS = 1000
#: Calls before the check of a candidate, and again before its first sample. The first calls compile kernels, and calls
#: after them take the path that a loop takes.
WARM_UP_CALLS = 3

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"


@dataclass(frozen=True)
class CallRow:
    """One candidate on one pass: the median and the least microseconds of a call over samples.

    `ours` tells our calls from those of peers. `ratio` is our time over that of the best peer, which has `best_peer`.
    `calls` is the number of calls in a sample. A peer that was left out has a `note` instead of figures. `error` is the
    relative error against float64.

    Rows of calls over ranks are those of one rank: `microseconds` is the time until a call returns, `steps` the number
    of steps of its programs, and `step_microseconds` the time for a step beyond a fixed cost of the call.
    """

    part: str
    kernel: str
    ran: str
    direction: str
    case: cases.Case | gemm.Case
    ours: bool
    rounds: int
    calls: int | None = None
    microseconds: float | None = None
    min_microseconds: float | None = None
    tflops: float | None = None
    ratio: float | None = None
    best_peer: bool = False
    error: float | None = None
    note: str | None = None
    world: int = 1
    rank: int | None = None
    transport: str = ""
    mps: bool = False
    steps: int | None = None
    step_microseconds: float | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """A candidate on one pass that passed its check. A sample runs inside `setting`, which is entered untimed."""

    kernel: str
    ran: str
    direction: str
    function: Callable[[], Any]
    error: float
    ours: bool
    tflop: float | None = None
    setting: Callable[[], AbstractContextManager[Any]] = nullcontext


def time_rows(
    part: str, case: cases.Case | gemm.Case, calls: Sequence[Call], notes: Sequence[CallRow], rounds: int
) -> Iterator[CallRow]:
    """Time calls in interleaved rounds, and yield their rows by pass, each with its ratio to the best peer.

    Args:
        part: The part of the benchmark that the rows belong to.
        case: The shape and dtype of all calls.
        calls: The calls, on all passes.
        notes: Rows of peers that were left out; each follows the rows of its pass.
        rounds: The number of rounds, in each of which every call has one sample.
    """
    device = torch.device(case.device)
    numbers = range(len(calls))
    samples: list[list[float]] = [[] for _ in calls]
    counts = []
    order = random.Random(0)
    with undisturbed():
        for call in calls:
            _sample(call, device, WARM_UP_CALLS)
            counts.append(_calls(_sample(call, device, WARM_UP_CALLS)))
            _sample(call, device, counts[-1])
        for _ in range(rounds):
            for n in order.sample(numbers, len(calls)):
                samples[n].append(_sample(calls[n], device, counts[n]))
    median = [statistics.median(own) for own in samples]
    for direction in dict.fromkeys(call.direction for call in calls):
        own = [n for n in numbers if calls[n].direction == direction]
        best = min((n for n in own if not calls[n].ours), key=lambda n: median[n], default=None)
        for n in own:
            call = calls[n]
            yield CallRow(
                part=part,
                kernel=call.kernel,
                ran=call.ran,
                direction=direction,
                case=case,
                ours=call.ours,
                rounds=rounds,
                calls=counts[n],
                microseconds=median[n],
                min_microseconds=min(samples[n]),
                tflops=None if call.tflop is None else call.tflop / median[n] * 1e6,
                ratio=median[n] / median[best] if call.ours and best is not None else None,
                best_peer=n == best,
                error=call.error,
            )
        yield from (row for row in notes if row.direction == direction)


def refuse_wrong(name: str, error: float, case: cases.Case, oracle: str) -> None:
    """Raise WrongError if a relative error is beyond what the dtype of the case allows.

    Args:
        name: The call in words.
        error: Its relative error; NaN is refused.
        case: The shape and dtype.
        oracle: What the result was compared with.
    """
    if not error <= case.worst_error:
        raise WrongError(
            f"{name}: relative error {error:.1e} against {oracle} at {case}, where {case.dtype} allows "
            f"{case.worst_error:.0e}; it is wrong, so it is not timed"
        )


def _calls(microseconds: float) -> int:
    """Return how many calls of this length make a sample."""
    return min(MAX_CALLS, max(1, math.ceil(SAMPLE_MS * 1e3 / microseconds)))


def _sample(call: Call, device: torch.device, calls: int) -> float:
    """Return the microseconds of one call in a loop of several that ends with a synchronize."""
    with call.setting():
        return loop_milliseconds(call.function, device, calls) * 1e3
