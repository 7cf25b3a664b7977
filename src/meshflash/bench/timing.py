"""Time and memory of functions on a device. Compared functions are interleaved, so that drift affects all alike."""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from meshflash.runtime.devices import CPU
from meshflash.runtime.oom import attempt

#: The least milliseconds of a sample: it is as many back-to-back calls as that takes.
SAMPLE_MS = 5.0
#: On a GPU all samples last as long as the longest call of any function, up to these milliseconds. Its clock follows
#: the load, and a short sample after a long one would run at the clock of the long one.
LONGEST_MS = 100.0
#: The most calls in a sample.
MOST_CALLS = 1000
#: A call of more milliseconds than this is timed once.
SLOW_MS = 2000.0
#: The most milliseconds that a GPU is kept busy before a sample.
HELD_MS = 100.0
#: Safety factor of that time over the time that the host takes to issue the sample.
SPARE = 1.5
#: Clock cycles of a millisecond, about: the unit of torch.cuda._sleep.
CYCLES = 1.8e6


def interleaved(
    functions: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int, count_host: bool = False
) -> dict[str, float]:
    """Return the median milliseconds of a call of each function over `rounds` rounds, each with one sample of all.

    The functions have run before. A sample is several calls back to back. The order is shuffled in each round, because
    a GPU is faster after a function that left it cool. A function that runs out of memory is left out, and one that
    takes seconds is timed once.

    By default a GPU is kept busy while the host issues a sample, so the host's own time does not count. With
    `count_host` a sample is a plain loop, which begins with an idle GPU and ends with a synchronize.

    Args:
        functions: The functions by name.
        device: The device that they run on.
        rounds: The number of rounds.
        count_host: Whether the host's time counts, as in a user's loop.
    """
    times: dict[str, list[float]] = {}
    once: dict[str, float] = {}
    for name, function in functions.items():
        first = attempt(partial(_milliseconds, function, device, 1, lead=False))
        if first is None:
            continue
        times[name] = []
        if first > SLOW_MS:
            times[name].append(first)
        elif _calls(first) > 1:  # one call alone includes waiting for the host; the sample warms up too
            first = _milliseconds(function, device, _calls(first))
        once[name] = first
    waiting = [name for name in times if not times[name]]
    longest = 0.0 if device.type == CPU else min(LONGEST_MS, max((once[name] for name in waiting), default=0.0))
    calls = {name: _calls(once[name], longest) for name in waiting}
    order = random.Random(0)
    sample = loop_milliseconds if count_host else _milliseconds
    for _ in range(rounds):
        for name in order.sample(waiting, len(waiting)):
            times[name].append(sample(functions[name], device, calls[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def loop_milliseconds(function: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Return the milliseconds of one call in a plain loop: what a user pays for it, the host's time included.

    Args:
        function: The function to call.
        device: The device that it runs on; it is idle when the loop begins, and when it ends.
        calls: The number of calls.
    """
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3 / calls


@dataclass(frozen=True)
class Watched:
    """A call's result, and its peak and remaining memory in bytes beyond what was held before."""

    result: Any
    peak_bytes: int
    held_bytes: int


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all work."""
    if device.type != CPU:
        torch.get_device_module(device).synchronize(device)


def watched(function: Callable[[], Any], device: torch.device) -> Watched:
    """Call a function and measure the memory that it takes."""
    if device.type != CPU:
        module: Any = torch.get_device_module(device)
        module.synchronize(device)
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        result = function()
        module.synchronize(device)
        peak, held = module.max_memory_allocated(device), module.memory_allocated(device)
        return Watched(result, peak - before, held - before)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would announce itself on stderr
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        result = function()
    assert profile.kineto_results is not None
    held = peak = 0
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return Watched(result, peak, held)


def _calls(milliseconds: float, least: float = 0.0) -> int:
    """Return how many calls of this length make a sample of at least `least` milliseconds."""
    return min(MOST_CALLS, max(1, math.ceil(max(SAMPLE_MS, least) / max(milliseconds, 1e-6))))


def _milliseconds(function: Callable[[], Any], device: torch.device, calls: int, lead: bool = True) -> float:
    """Return the milliseconds of one call, from a sample of several."""
    if device.type != CPU:
        module: Any = torch.get_device_module(device)
        begin, end = (module.Event(enable_timing=True) for _ in range(2))
        stream = module.current_stream(device)
        if lead:
            start = time.perf_counter()
            function()
            host = (time.perf_counter() - start) * 1e3
            calls = _issued_while_held(calls, host)
            _hold(module, host * (calls + 1))
        begin.record(stream)
        for _ in range(calls):
            function()
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / calls
    return loop_milliseconds(function, device, calls)


def _issued_while_held(calls: int, host: float) -> int:
    """Return how many calls the host can issue while a GPU is kept busy, at least one; `host` is ms for a call."""
    return max(1, min(calls, int(HELD_MS / (SPARE * max(host, 1e-3))) - 1))


def _hold(module: Any, milliseconds: float) -> None:
    """Keep the current device busy for somewhat longer than `milliseconds`, if it has a sleep kernel."""
    if sleep := getattr(module, "_sleep", None):
        sleep(int(min(milliseconds * SPARE + 0.1, HELD_MS) * CYCLES))
