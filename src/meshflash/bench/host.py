"""The host's own time for a call: what is left when the device has next to nothing to do.

On a GPU it is the time to issue calls: the device is idle at the start, nobody waits for it before the end,
and a sample has too few calls to fill its queue, so that the host never waits, unless a call makes it. On a
CPU the tokens are so few that computing them does not count; it is done by one thread, for waking others does.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from meshflash.bench.candidates import SDPA, candidate, check_names, sdpa
from meshflash.bench.cases import Case, Tensors, on_cpu
from meshflash.bench.check import judge, truth
from meshflash.bench.timing import synchronize

PASSES = ("forward", "forward with grad", "backward")

#: Calls in a sample: at a handful of launches each, a GPU's queue of about a thousand never fills.
CALLS = 50
#: Calls before the first sample.
WARM_UP = 20


@dataclass(frozen=True)
class HostRow:
    """One kernel on one pass: microseconds of a call, the median and the least over samples, and how many of SDPA's."""

    kernel: str
    ran: str
    direction: str
    case: Case
    microseconds: float
    least: float
    ratio: float


def default_tokens(device: str) -> int:
    """As many as still cost the device nothing to speak of."""
    return 8 if on_cpu(device) else 512


def run(case: Case, names: tuple[str, ...], rounds: int) -> list[HostRow]:
    """Rows of each kernel and of SDPA, which is always there: in each round all take their turn on all passes.

    The kernels are checked first. SDPA gets tensors in its own layout, `[batch, heads, tokens, dim]`, made
    beforehand. Forward is of tensors that need no gradient; with grad, a call includes letting go of what it
    saved. Backward is over a graph that is kept.
    """
    names = tuple(dict.fromkeys((*names, SDPA)))
    check_names(names)
    device, tensors = torch.device(case.device), case.tensors()
    want = truth(case, tensors)
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    ran: dict[tuple[str, str], str] = {}
    for name in names:
        verdict = judge(case, name, candidate(case, name), tensors, want)
        for direction, call in zip(PASSES, _calls(case, name, tensors), strict=True):
            calls[name, direction] = call
            ran[name, direction] = verdict.ran["backward" if direction == "backward" else "forward"]
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    with _undisturbed():
        for call in calls.values():
            _microseconds(call, device, WARM_UP)
        for _ in range(rounds):
            for key, call in calls.items():
                samples[key].append(_microseconds(call, device, CALLS))
    median = {key: statistics.median(values) for key, values in samples.items()}
    return [
        HostRow(
            name,
            ran[name, direction],
            direction,
            case,
            median[name, direction],
            min(samples[name, direction]),
            median[name, direction] / median[SDPA, direction],
        )
        for direction in PASSES
        for name in names
    ]


def _calls(case: Case, name: str, tensors: Tensors) -> tuple[Callable[[], Any], ...]:
    """What is called for each pass."""
    function = sdpa(case) if name == SDPA else candidate(case, name)
    plain = [x.detach().transpose(1, 2) if name == SDPA else x.detach() for x in tensors]
    leaves = [x.detach().requires_grad_() for x in plain[:3]]
    backward = partial(torch.autograd.grad, function(*leaves), leaves, plain[3], retain_graph=True)
    return partial(function, *plain[:3]), partial(function, *leaves), backward


@contextmanager
def _undisturbed() -> Iterator[None]:
    """One thread, and no collection of garbage."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.set_num_threads(threads)


def _microseconds(call: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Of the host for one call, by a sample of several."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - begin
    synchronize(device)
    return elapsed * 1e6 / calls
