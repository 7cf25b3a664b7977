"""The host's own time for a call: CPU overhead of dispatch and launch, with next to no work for the device.

Calibration measures it, and `kernel="auto"` counts it for short calls. What a user pays for a call in a loop, device
and host together, is shown by `python -m benchmarks host`.

On a GPU it is the time to issue calls. The device is idle at the start, and a sample has too few calls to fill its
launch queue, so the host never blocks unless a call synchronizes. On a CPU so few tokens are used that computing them
does not count. One thread computes them, because waking others would count.
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
from meshflash.bench.cases import Case, Tensors
from meshflash.bench.check import judge, truth
from meshflash.bench.timing import synchronize
from meshflash.engine.compile import compile_spec
from meshflash.engine.spec import AttentionSpec, CallTensors

PASSES = ("forward", "forward with grad", "backward")

#: Calls in a sample: at a handful of launches each, a GPU's launch queue of about a thousand never fills.
CALLS = 50
#: Calls before the first sample.
WARM_UP = 20


@dataclass(frozen=True)
class HostRow:
    """One kernel on one pass: the median and the least microseconds of a call over samples; `ratio` is over SDPA."""

    kernel: str
    ran: str
    direction: str
    case: Case
    microseconds: float
    min_microseconds: float
    ratio: float


def run(case: Case, names: tuple[str, ...], rounds: int) -> list[HostRow]:
    """Return rows of each kernel and of SDPA, the baseline; each round times all of them on all passes.

    The kernels are checked first. SDPA gets tensors in its own layout, `[batch, heads, tokens, dim]`, made beforehand.
    The pass "forward" is without gradients. A call of "forward with grad" includes freeing what it saved. The backward
    of a kernel runs without autograd, whose time is the same for all of them; that of SDPA over a retained graph.
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
    with undisturbed():
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
    """Return the call of each pass."""
    function = sdpa(case) if name == SDPA else candidate(case, name)
    plain = [x.detach().transpose(1, 2) if name == SDPA else x.detach() for x in tensors]
    leaves = [x.detach().requires_grad_() for x in plain[:3]]
    if name == SDPA:
        backward: Callable[[], Any] = partial(
            torch.autograd.grad, function(*leaves), leaves, plain[3], retain_graph=True
        )
    else:
        x = CallTensors(*plain[:3])
        executable = compile_spec(AttentionSpec(case.rule.canonical(), case.head_dim**-0.5, kernel=name), x)
        backward = partial(executable.backward, x, executable.forward(x), plain[3], None)
    return partial(function, *plain[:3]), partial(function, *leaves), backward


@contextmanager
def undisturbed() -> Iterator[None]:
    """Use one thread and turn the garbage collector off, while calls are timed in this block."""
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
    """Return the host's microseconds for one call, from a sample of several."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - begin
    synchronize(device)
    return elapsed * 1e6 / calls
