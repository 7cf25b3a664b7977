"""Time and memory of a function on a device. Functions that are compared take turns, so that drift is shared."""

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

#: Milliseconds that a sample lasts at least: it is as many calls, back to back, as that takes.
SAMPLE_MS = 5.0
#: On a GPU samples of all functions last as long as the longest call of any, up to this: its clock follows the load,
#: and short calls after a long one would have that one's.
LONGEST_MS = 100.0
#: The most calls in a sample.
MOST_CALLS = 1000
#: A call of more milliseconds than this is timed once.
SLOW_MS = 2000.0
#: Milliseconds that a GPU is held at most, of how long what is issued takes the host, and the cycles of a millisecond.
HELD_MS = 100.0
SPARE = 1.5
CYCLES = 1.8e6


def interleaved(functions: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, float]:
    """The median milliseconds of a call of each function over `rounds` rounds, in each of which all take their turn.

    The functions have run before. A turn is a sample of several calls without a pause, and the order of turns is
    another one in each round: a GPU is faster after one that left it cool. A function that runs out of memory is
    left out, and one that takes seconds is timed once.

    A GPU is held busy while the host issues a sample, so that the host's own time, which `python -m benchmarks host`
    shows, does not count.
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
    for _ in range(rounds):
        for name in order.sample(waiting, len(waiting)):
            times[name].append(_milliseconds(functions[name], device, calls[name]))
    return {name: statistics.median(values) for name, values in times.items()}


@dataclass(frozen=True)
class Watched:
    """A call's result, the most memory that it held beyond what was held before, and what it still holds."""

    result: Any
    peak_bytes: int
    held_bytes: int


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type != CPU:
        torch.get_device_module(device).synchronize(device)


def watched(function: Callable[[], Any], device: torch.device) -> Watched:
    """Call a function and watch the memory that it takes."""
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
    """How many calls of this length make a sample, of at least so many milliseconds."""
    return min(MOST_CALLS, max(1, math.ceil(max(SAMPLE_MS, least) / max(milliseconds, 1e-6))))


def _milliseconds(function: Callable[[], Any], device: torch.device, calls: int, lead: bool = True) -> float:
    """Of one call, by a sample of several."""
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
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) * 1e3 / calls


def _issued_while_held(calls: int, host: float) -> int:
    """How many calls, each of so many milliseconds of the host, a GPU can be held for; one at least."""
    return max(1, min(calls, int(HELD_MS / (SPARE * max(host, 1e-3))) - 1))


def _hold(module: Any, milliseconds: float) -> None:
    """Keep the current device busy for about so long, and a bit longer, where it can be told to sleep."""
    if sleep := getattr(module, "_sleep", None):
        sleep(int(min(milliseconds * SPARE + 0.1, HELD_MS) * CYCLES))
