"""Time and memory of a function on a device. Functions that are compared take turns, so that drift is shared."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


def interleaved(functions: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, float]:
    """The median milliseconds of each function over `rounds` rounds, in each of which all take their turn."""
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(_milliseconds(function, device))
    return {name: statistics.median(values) for name, values in times.items()}


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """The most memory that a call holds at once beyond what was held before it."""
    return watched(function, device).peak_bytes


@dataclass(frozen=True)
class Watched:
    """A call's result, the most memory that it held beyond what was held before, and what it still holds."""

    result: Any
    peak_bytes: int
    held_bytes: int


def watched(function: Callable[[], Any], device: torch.device) -> Watched:
    """Call a function and watch the memory that it takes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = function()
        torch.cuda.synchronize(device)
        peak, held = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
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


def _milliseconds(function: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3
