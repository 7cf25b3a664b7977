"""The host's time for a call of `attention` over ranks in steady state, on each rank, beside its number of steps.

Ranks that share a GPU make its own time meaningless, so here only the host's counts: the time until a call returns. A
sample has so few calls that the device's queue never fills. Over gloo a call also waits for messages.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.host_timing import BOTH, FORWARD, WARM_UP_CALLS, CallRow, refuse_wrong
from meshflash.api import attention
from meshflash.bench.cases import Case, on_cpu, pick_dtype
from meshflash.bench.check import block_error, truth, worst
from meshflash.bench.host import undisturbed
from meshflash.bench.measure import both
from meshflash.bench.timing import synchronize
from meshflash.core.problem import Problem
from meshflash.core.program import Direction
from meshflash.kernels import registry
from meshflash.runtime import mps
from meshflash.runtime.devices import count, take_device
from meshflash.runtime.processes import Tell, run_ranks
from meshflash.schedules.registry import build, default_layout
from meshflash.sharding import shard

RANKS = "ranks"
SCHEDULES = ("ring", "allgather")
#: Passes of a program.
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
#: Calls in a sample: a call over four ranks launches up to about a hundred kernels and signals, and a GPU's launch
#: queue holds about a thousand.
CALLS = 4
#: Microseconds of a call besides its steps; what is left, over the number of steps, is the cost of a step.
FIXED_MICROSECONDS = 80.0
#: Seconds after which the ranks are given up.
TIMEOUT_SECONDS = 600.0


def ranks_case(device: str, world: int) -> Case:
    """Return the case: 2,048 tokens over all ranks on a GPU, and 8 a rank on a CPU, where computing must not count.

    The mask is full, so that all ranks have programs of about as many steps.
    """
    tokens = 8 * world if on_cpu(device) else 2048
    return Case(tokens, 1, 8, 8, 64, "full", pick_dtype(None, device), device)


def run(device: str, world: int, rounds: int, say: Tell, use_mps: bool | None = None) -> list[CallRow]:
    """Return a row for each schedule, pass and rank; RankError if a result is wrong on any rank.

    Args:
        device: The device that was picked.
        world: The number of ranks, one process each.
        rounds: The number of rounds, in each of which every call has one sample.
        say: A function that is called with progress messages.
        use_mps: Whether ranks share a GPU through MPS. None means that they do where they must share one and MPS is
            installed: without it they take turns on the GPU in slices of milliseconds.
    """
    if world < 2:
        raise ValueError(f"ranks={world}: expected at least 2")
    case = ranks_case(device, world)
    if use_mps is None:
        use_mps = not on_cpu(device) and count(torch.device(device).type) < world and mps.missing() is None
    with mps.mps() if use_mps else nullcontext():
        found = run_ranks(world, _measure, case, rounds, use_mps, timeout=TIMEOUT_SECONDS, listen=say)
    rows = [row for own in found for row in own]
    return sorted(rows, key=lambda row: (row.direction != FORWARD, SCHEDULES.index(row.kernel), row.rank))


@dataclass(frozen=True, eq=False)
class _Call:
    """A schedule on one pass on this rank, checked."""

    row: CallRow
    function: Callable[[], Any]


def _measure(rank: int, world: int, tell: Tell, case: Case, rounds: int, use_mps: bool) -> list[CallRow]:
    """Check and time all calls in one process; return this rank's rows."""
    say = tell if rank == 0 else lambda _: None
    if use_mps:  # CUDA reads it when the process first uses the device
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // world)
    device = take_device(torch.device(case.device).type, rank)
    calls = []
    for schedule in SCHEDULES:
        say(f"{RANKS}: checking {schedule}")
        calls += _checked(schedule, case, rank, world, rounds, use_mps)
    samples: list[list[float]] = [[] for _ in calls]
    order = random.Random(0)  # the same order on all ranks
    with undisturbed():
        for n in range(rounds):
            say(f"{RANKS}: round {n + 1} of {rounds}")
            for number in order.sample(range(len(calls)), len(calls)):
                samples[number].append(_sample(calls[number].function, device))
    return [_timed(call.row, own) for call, own in zip(calls, samples, strict=True)]


def _checked(schedule: str, case: Case, rank: int, world: int, rounds: int, use_mps: bool) -> list[_Call]:
    """Return the calls of a schedule on each pass; WrongError if this rank's results differ from float64."""
    layout = default_layout(schedule)(case.tokens, world)
    tensors = case.tensors()
    want = truth(case, tensors)
    wanted = [shard(x, layout) for x in want.results]
    q, k, v, dout = (shard(x.detach(), layout).contiguous() for x in tensors)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    transport = "process_group" if on_cpu(case.device) else "symmetric"
    call = partial(attention, mask=case.rule, schedule=schedule, layout=layout, transport=transport)

    def forward_and_backward() -> list[Tensor | None]:
        for x in leaves:
            x.grad = None
        call(*leaves).backward(dout)
        return [x.grad for x in leaves]

    forward: Callable[[], Tensor] = partial(call, q, k, v)
    explanation = call(q, k, v, return_plan=True)[1]
    held = layout.ranges
    problem = Problem(held, held, case.rule, case.heads, case.kv_heads, lse=False)
    steps = {direction: len(build(schedule, problem, rank, direction).steps) for direction in DIRECTIONS}
    assert len(explanation.program.steps) == steps["forward"], "the engine runs the program of the registry"
    row = CallRow(
        part=RANKS,
        kernel=schedule,
        ran="",
        direction=FORWARD,
        case=case,
        ours=True,
        rounds=rounds,
        calls=CALLS,
        world=world,
        rank=rank,
        transport=explanation.transport,
        mps=use_mps,
    )
    found = []
    functions: dict[str, Callable[[], Any]] = {FORWARD: forward, BOTH: forward_and_backward}
    for direction, function in functions.items():
        with registry.record_kernels() as seen:
            function()
        for _ in range(WARM_UP_CALLS):
            result = function()
        got, known = ([result], wanted[:1]) if direction == FORWARD else (result, wanted[1:])
        error = worst(block_error(a, b) for a, b in zip(got, known, strict=True))
        refuse_wrong(f"{schedule}, {direction} on rank {rank}", error, case, want.oracle)
        passes = DIRECTIONS if direction == BOTH else DIRECTIONS[:1]
        ran = both(seen.names("forward"), seen.names("backward"))
        number = sum(steps[each] for each in passes)
        found.append(_Call(replace(row, direction=direction, ran=ran, error=error, steps=number), function))
    return found


def _timed(row: CallRow, samples: Sequence[float]) -> CallRow:
    """Return a row with the figures of its samples."""
    assert row.steps is not None
    median = statistics.median(samples)
    each = (median - FIXED_MICROSECONDS) / row.steps
    return replace(row, microseconds=median, min_microseconds=min(samples), step_microseconds=each)


def _sample(function: Callable[[], Any], device: torch.device) -> float:
    """Return the host's microseconds until one call returns, from a sample of a few that all ranks make."""
    synchronize(device)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(CALLS):
        function()
    elapsed = time.perf_counter() - begin
    synchronize(device)
    return elapsed * 1e6 / CALLS
