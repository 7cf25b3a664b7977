"""Attention over ranks of one machine: schedules beside each other, a single device (baseline) and plain torch.

All candidates do the same total work and are interleaved, so that heat and clocks affect all of them alike; each is
checked before it is timed. Ranks may share a GPU: under MPS each rank has its part of it, and the single device, a
process of its own, has all of it.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as _distributed
from torch.nn import functional

from meshflash.api import attention, flash_attention
from meshflash.bench.candidates import SDPA, Attention
from meshflash.bench.cases import Case, Tensors, on_cpu
from meshflash.bench.check import relative_error
from meshflash.bench.exposed import Exposed, exposed
from meshflash.bench.peers import peer_bytes
from meshflash.bench.tables import SINGLE_DEVICE
from meshflash.bench.timing import synchronize, watched
from meshflash.comm.transports.contract import Transport
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.engine.group_context import group_context
from meshflash.engine.memory import pool
from meshflash.engine.trace import recording
from meshflash.kernels import registry
from meshflash.parallel.step import resolve_layout
from meshflash.planner.timeline import Timeline
from meshflash.runtime.cores import cores_here
from meshflash.runtime.devices import take_device
from meshflash.runtime.mps import mps
from meshflash.runtime.processes import Tell, run_ranks
from meshflash.schedules.registry import default_layout, parse
from meshflash.sharding import shard
from meshflash.viz import recorded

dist: Any = _distributed  # torch does not declare all that it exports here

#: The single device with its best kernel, beside one with the kernel of the ranks.
BEST = "single device, best kernel"
#: K and V gathered, then torch's own attention: what one writes in plain torch.
PLAIN = "torch all-gather"
PASSES = ("forward", "forward+backward")
#: The least milliseconds and calls of a sample on a GPU. Ranks do not begin a sample at the same moment, and that
#: difference counts once in each sample.
SAMPLE_MS = 200.0
MIN_CALLS = 2
#: Number of recorded runs; the timeline is the one of median length.
RECORDED_RUNS = 3


@dataclass(frozen=True)
class ScheduleRow:
    """One schedule on one pass: time, speedup over a single device, communication, memory, and error.

    `ms` is the median of the rounds, `ms_low` and `ms_high` the least and the largest. `speedup_limit` is the largest
    speedup that the ranks, and the cores that they share, could give: one beyond it shows a disturbed run.

    `received_bytes` and `peak_bytes` are of the rank with the most, `received_mean` is over all ranks. `efficiency` is
    the speedup for each rank's part of the hardware: a whole device, or its part of a shared one. `tflops` is of a
    device, or of all ranks that share it. `exposed_ms` is the communication that the rank with the most waits for, as
    measured; `simulated_ms` is the same in a simulation of the programs, which needs a throttled transport. Means over
    ranks are `attend_ms`, of steps that attend, `wait_ms`, of waits for messages, `rest_ms`, of all other steps,
    and `elapsed_ms`, from the beginning of a call to that of the next one.

    `layout` is the one that was asked for: a name, or "auto" for the schedule's own.

    `forward_ran` and `backward_ran` name the kernels that ranks ran, whatever `kernel` requested; a forward has no
    `backward_ran`.
    """

    schedule: str
    direction: str
    world: int
    case: Case
    rounds: int
    ms: float
    ms_low: float
    ms_high: float
    speedup: float
    speedup_limit: float
    iterations_per_second: float
    efficiency: float
    tflops: float
    exposed_ms: float
    simulated_ms: float | None
    attend_ms: float
    wait_ms: float
    rest_ms: float
    elapsed_ms: float
    layout: str
    transport: str
    kernel: str
    forward_ran: str
    backward_ran: str
    received_bytes: int
    received_mean: float
    peer_bytes: int | None
    peak_bytes: int
    error: float


@dataclass(frozen=True)
class Setup:
    """How ranks run.

    Attributes:
        world: The number of ranks, one process each.
        rounds: The number of rounds, in each of which every candidate is timed once.
        threads: The threads of each process.
        transport: The transport, as in `attention`.
        kernel: The kernel of all ranks and of the single device.
        forward_only: Whether no backward is timed.
        mps: Whether ranks share a GPU through MPS.
        layout: The layout of all schedules by name, or "auto" for the default one of each.
        profile: A folder for traces of torch's profiler. Empty means none.
        timeline: A schedule whose forward is recorded step by step. Empty means none.
    """

    world: int
    rounds: int
    threads: int = 1
    transport: str = "auto"
    kernel: str = "auto"
    forward_only: bool = False
    mps: bool = False
    layout: str = "auto"
    profile: str = ""
    timeline: str = ""

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes that are timed."""
        return PASSES[:1] if self.forward_only else PASSES


@dataclass(frozen=True)
class Measured:
    """The rows, and the measured timeline of the schedule that `Setup.timeline` names. `run` makes it."""

    rows: list[ScheduleRow]
    timeline: Timeline | None


def run(case: Case, schedules: tuple[str, ...], setup: Setup, listen: Tell | None = None) -> Measured:
    """Measure every schedule, forward and forward+backward; a wrong result raises instead of being timed.

    Args:
        case: The shape, mask and dtype over all ranks together.
        schedules: The schedules by name, and PLAIN.
        setup: How ranks run.
        listen: A function that is called with progress messages.
    """
    if setup.rounds < 1:
        raise ValueError(f"rounds={setup.rounds}: expected at least 1, and 3 to see how far rounds differ")
    if setup.timeline and setup.timeline not in schedules:
        raise ValueError(f"timeline={setup.timeline!r}: expected one of the schedules, {', '.join(schedules)}")
    for schedule in schedules:
        if schedule not in (SINGLE_DEVICE, PLAIN):
            parse(schedule)
    if setup.layout != "auto":
        resolve_layout(setup.layout, Mask.full(), 1, 1)
    if PLAIN in schedules and not on_cpu(case.device):
        raise ValueError(f"{PLAIN!r} is measured on CPUs only: its matrix of the mask would not fit a GPU")
    baseline_process = not on_cpu(case.device)  # one more process, which has the whole GPU while the ranks wait
    with mps() if setup.mps else nullcontext():
        found: Measured = run_ranks(
            setup.world + baseline_process,
            *(_measure, case, schedules, setup, len(cores_here())),
            threads=setup.threads,
            timeout=3600.0,
            listen=listen,
        )[0]
    return found


def _measure(
    rank: int, processes: int, tell: Tell, case: Case, schedules: tuple[str, ...], setup: Setup, cores: int
) -> Measured:
    """Check and time all candidates in one process; rank 0 has the figures."""
    world = setup.world
    say = tell if rank == 0 else lambda _: None
    group = dist.new_group(range(world)) if processes > world else dist.group.WORLD
    if setup.mps and rank < world:  # CUDA reads it when the process first uses the device
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // world)
    device = take_device(case.device, rank)
    baselines = (SINGLE_DEVICE, *((BEST,) if processes > world and setup.kernel != "auto" else ()))
    names = (*baselines, *schedules)
    # on a GPU ranks run the schedules and the additional process the baselines; on a CPU rank 0 runs both
    here = names if processes == world else baselines if rank == world else schedules
    here = tuple(name for name in here if name not in baselines or rank in (0, world))
    q, k, v, dout = case.tensors()
    whole, mask = (q.detach(), k.detach(), v.detach(), dout), case.rule
    calls = {name: _Candidate(name, case, mask, whole, group, setup) for name in dict.fromkeys((SINGLE_DEVICE, *here))}
    errors: dict[str, tuple[float, float]] = dict.fromkeys(baselines, (0.0, 0.0))
    tiny = torch.zeros(1, 1, 1, 8, requires_grad=True, device=device)
    # the first use of the op, of its backward and of the profiler takes seconds: not part of any figure
    watched(lambda: flash_attention(tiny, tiny, tiny).sum().backward(), device)
    say(f"checking {SINGLE_DEVICE}")
    seen = {SINGLE_DEVICE: _run_baseline(calls[SINGLE_DEVICE], rank, device)}
    for name in names[1:]:
        say(f"checking {name}")
        seen[name] = calls[name].observe(device) if name in here else _Observed([], (0, 0), (0, 0))
        if name in schedules:
            layout = calls[name].layout if name in here else None
            wanted = [shard(x, layout, group) for x in seen[SINGLE_DEVICE].results] if layout else []
            errors[name] = _errors(seen[name].results, wanted, case)
        seen[name].results.clear()
    times: dict[tuple[str, str], list[float]] = {}
    for n in range(setup.rounds):
        say(f"round {n + 1} of {setup.rounds}")
        for direction in setup.passes:
            for name in names:
                milliseconds = _time(calls[name] if name in here else None, direction, device)
                times.setdefault((name, direction), []).append(milliseconds)
    if setup.profile:
        say("profiling")
        Path(setup.profile).mkdir(parents=True, exist_ok=True)
        for name in here:
            if name in schedules:
                calls[name].profile(Path(setup.profile), rank)
    timeline = None
    if setup.timeline:
        say(f"recording {setup.timeline}")
        timeline = _record_timeline(calls.get(setup.timeline), device)
    ran = {name: (_gather_names(seen[name].ran[0]), _gather_names(seen[name].ran[1])) for name in names}
    rows = []
    for n, direction in enumerate(setup.passes):
        ms = {name: statistics.median(times[name, direction]) for name in names}
        for name in names:
            received, peak = (_max_over_ranks(x[n]) for x in (seen[name].received, seen[name].peaks))
            speedup, exposed_comm = ms[SINGLE_DEVICE] / ms[name], seen[name].exposed[n]
            flops = case.flops("forward") + (case.flops("backward") if n else 0.0)
            ranks = 1 if name in baselines else world
            has_peer_bytes = name not in (*baselines, PLAIN) and setup.layout == "auto"
            devices = 1 if setup.mps else ranks
            rows.append(
                ScheduleRow(
                    schedule=name,
                    direction=direction,
                    world=ranks,
                    case=case,
                    rounds=setup.rounds,
                    ms=ms[name],
                    ms_low=min(times[name, direction]),
                    ms_high=max(times[name, direction]),
                    speedup=speedup,
                    speedup_limit=max_speedup(ranks, setup.threads, cores) if on_cpu(case.device) else float(ranks),
                    iterations_per_second=1e3 / ms[name],
                    efficiency=speedup / devices,
                    tflops=flops / ms[name] / 1e9 / devices,
                    exposed_ms=exposed_comm.measured,
                    simulated_ms=exposed_comm.simulated,
                    attend_ms=exposed_comm.attends,
                    wait_ms=exposed_comm.waits,
                    rest_ms=exposed_comm.rest,
                    elapsed_ms=exposed_comm.elapsed,
                    layout="" if name in baselines else setup.layout,
                    transport=calls[name].transport_name if name in here else "",
                    kernel="auto" if name == BEST else setup.kernel,
                    forward_ran=ran[name][0],
                    backward_ran=ran[name][1] if n else "",
                    received_bytes=int(received),
                    received_mean=_sum_over_ranks(seen[name].received[n]) / world,
                    peer_bytes=peer_bytes(name, case, world, direction) if has_peer_bytes else None,
                    peak_bytes=int(peak),
                    error=errors[name][n],
                )
            )
    return Measured(rows, timeline)


def max_speedup(ranks: int, threads: int, cores: int) -> float:
    """Return the largest speedup over a single process that ranks of `threads` threads can have on these cores.

    >>> max_speedup(4, 1, 2), max_speedup(2, 1, 8), max_speedup(2, 4, 4)
    (2.0, 2.0, 1.0)
    """
    return min(ranks * threads, cores) / min(threads, cores)


#: No exposed communication: of a forward, and of both passes.
NOTHING_EXPOSED = (Exposed(), Exposed())


@dataclass(frozen=True, eq=False)
class _Observed:
    """What runs of a candidate gave: output and gradients, and by pass bytes, peak, kernels, exposed communication."""

    results: list[Tensor]
    received: tuple[int, int]
    peaks: tuple[int, int]
    ran: tuple[str, str] = ("", "")
    exposed: tuple[Exposed, Exposed] = NOTHING_EXPOSED


class _Candidate:
    """One schedule or baseline on this rank's tokens. Each process makes those that it runs."""

    def __init__(self, name: str, case: Case, mask: Mask, whole: Tensors, group: Any, setup: Setup) -> None:
        self.name, self.case, self.group, self.setup = name, case, group, setup
        self.layout: Layout | None = None
        self.local = whole
        if name not in (SINGLE_DEVICE, BEST):
            if setup.layout == "auto":
                self.layout = default_layout("ring" if name == PLAIN else name)(case.tokens, setup.world)
            else:
                self.layout = resolve_layout(setup.layout, mask, case.tokens, setup.world)
            self.local = tuple(shard(x, self.layout, group).contiguous() for x in whole)  # type: ignore[assignment]
        self.leaves = [x.requires_grad_() for x in self.local[:3]]
        self.transport: Transport | None = None
        if name not in (SINGLE_DEVICE, BEST, PLAIN):
            self.transport = group_context(group.group_name).transport(whole[0].device, setup.transport)
        self._attention = self._function(mask)

    @property
    def transport_name(self) -> str:
        """The name of the transport; empty without one."""
        return self.transport.name if self.transport else ""

    def forward(self) -> Tensor:
        return self._attention(*self.leaves)

    def both(self) -> tuple[Tensor, ...]:
        """Run forward and backward; return the gradients."""
        return torch.autograd.grad(self.forward(), self.leaves, self.local[3])

    def observe(self, device: torch.device) -> _Observed:
        """Run both passes once for results, bytes and memory, and again for exposed communication."""
        pool(device).clear()  # scratch memory that another schedule left would not be counted
        if self.layout is not None:
            dist.barrier(self.group)
        counters = self.transport.counters if self.transport else None
        if counters is not None:
            counters.clear()
        received = []
        with registry.record_kernels() as ran:
            forward = watched(self.forward, device)
        received.append(counters.received_bytes if counters else 0)
        with registry.record_kernels() as ran_back:
            backward = watched(lambda: torch.autograd.grad(forward.result, self.leaves, self.local[3]), device)
        received.append(counters.received_bytes if counters else 0)
        if self.name == PLAIN:  # K and V are gathered, and their gradients reduce-scattered
            gathered = (self.setup.world - 1) * sum(x.nbytes for x in self.local[1:3])
            received = [gathered, 2 * gathered]
        both = max(forward.peak_bytes, forward.held_bytes + backward.peak_bytes)
        heap = self.transport.held_bytes if self.transport else 0
        return _Observed(
            [forward.result.detach(), *backward.result],
            (received[0], received[1]),
            (forward.peak_bytes + heap, both + heap),
            (SDPA, SDPA) if self.name == PLAIN else (ran.names("forward"), ran_back.names("backward")),
            self._exposed(device) if self.transport else NOTHING_EXPOSED,
        )

    def _exposed(self, device: torch.device) -> tuple[Exposed, Exposed]:
        """Return the exposed communication of a forward, and of both passes."""
        assert self.transport is not None
        forward = exposed(self.forward, device, self.transport, self.group)
        out = self.forward()
        backward = partial(torch.autograd.grad, out, self.leaves, self.local[3], retain_graph=True)
        return forward, forward + exposed(backward, device, self.transport, self.group)

    def profile(self, folder: Path, rank: int) -> None:
        """Write a trace of one run by torch's profiler, for Perfetto or chrome://tracing."""
        with torch.profiler.profile() as profile:
            self.both()
        profile.export_chrome_trace(str(folder / f"{re.sub('[^a-z0-9]+', '-', self.name).strip('-')}-{rank}.json"))

    def _function(self, mask: Mask) -> Attention:
        if self.name in (SINGLE_DEVICE, BEST):
            kernel = "auto" if self.name == BEST else self.setup.kernel
            return partial(flash_attention, mask=mask, kernel=kernel, deterministic=self.case.deterministic)
        if self.name == PLAIN:
            return self._plain(mask)
        return partial(
            attention,
            mesh=self.group,
            mask=mask,
            schedule=self.name,
            layout=self.layout,
            kernel=self.setup.kernel,
            transport=self.setup.transport,
            deterministic=self.case.deterministic,
        )

    def _plain(self, mask: Mask) -> Attention:
        """Return plain torch: gather K and V, then torch's own attention with a matrix as the mask."""
        from torch.distributed import _functional_collectives as collectives

        # torch 2.13 renamed it and warns about the old name
        old = "all_gather_tensor_autograd"
        all_gather = getattr(collectives, "all_gather_single_autograd", None) or getattr(collectives, old)
        assert self.layout is not None
        own = self.layout.positions(dist.get_rank())
        gathered = np.concatenate([self.layout.positions(rank) for rank in range(self.setup.world)])
        matrix = torch.from_numpy(mask.visible(own[:, None], gathered[None, :]))

        def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (all_gather(x, 1, dist.group.WORLD) for x in (k, v))
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return functional.scaled_dot_product_attention(q, k, v, matrix, enable_gqa=True).transpose(1, 2)

        return plain


def _run_baseline(call: _Candidate, rank: int, device: torch.device) -> _Observed:
    """Run the single device on the whole sequence: on a GPU every rank does, on a CPU rank 0 for all."""
    if rank == 0 or device.type != "cpu":
        seen = call.observe(device)
    else:
        seen = _Observed([torch.empty_like(x) for x in (call.local[3], *call.local[:3])], (0, 0), (0, 0))
    if device.type == "cpu":
        for x in seen.results:
            dist.broadcast(x.detach(), 0)
    return seen


def _record_timeline(call: _Candidate | None, device: torch.device) -> Timeline | None:
    """Record a forward over all ranks several times; return the timeline of median length."""
    found: list[Timeline] = []
    for _ in range(RECORDED_RUNS):
        synchronize(device)
        dist.barrier()
        with recording() as trace:
            if call is not None:
                call.forward()
        synchronize(device)
        own = [event for record in trace.records for event in record.events(0)]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        events = [event for each in gathered for event in each]
        if events:
            found.append(recorded.timeline(events, *recorded.calls(events)[0]))
    return sorted(found, key=lambda each: each.total)[len(found) // 2] if found else None


def _time(call: _Candidate | None, direction: str, device: torch.device) -> float:
    """Return the milliseconds of a call until the last rank is done; processes without the call wait."""
    milliseconds = _sample(call, direction, device, 1)
    if on_cpu(device.type):
        return milliseconds
    calls = max(MIN_CALLS, math.ceil(SAMPLE_MS / milliseconds))  # the same number on all ranks
    return _sample(call, direction, device, calls) / calls


def _sample(call: _Candidate | None, direction: str, device: torch.device, calls: int) -> float:
    synchronize(device)
    dist.barrier()
    begin = time.perf_counter()
    if call is not None:
        function = call.forward if direction == "forward" else call.both
        for _ in range(calls):
            function()
        synchronize(device)
    return _max_over_ranks((time.perf_counter() - begin) * 1e3)


def _errors(got: list[Tensor], want: list[Tensor], case: Case) -> tuple[float, float]:
    """Return the worst rank's error against the single device: of the output, and of output and gradients."""
    own = [relative_error(a, b) if b.numel() else 0.0 for a, b in zip(got, want, strict=True)]
    each = [_max_over_ranks(error) for error in own or (0.0,) * 4]  # zeros where nothing ran: output, dQ, dK, dV
    if not max(each) <= case.worst_error:
        raise RuntimeError(
            f"relative error {max(each):.1e} against a single device, where {case.dtype} allows {case.worst_error:.0e}"
        )
    return each[0], max(each)


def _max_over_ranks(number: float) -> float:
    return _reduce(number, dist.ReduceOp.MAX)


def _sum_over_ranks(number: float) -> float:
    return _reduce(number, dist.ReduceOp.SUM)


def _reduce(number: float, operation: Any) -> float:
    tensor = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(tensor, operation)
    return float(tensor)


def _gather_names(own: str) -> str:
    """Return the kernels of all ranks, each once."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own.split(", "))
    return ", ".join(dict.fromkeys(name for names in found for name in names if name))
