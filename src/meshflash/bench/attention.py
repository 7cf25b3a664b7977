"""Attention over ranks on one machine: each schedule beside the others, beside one rank, and beside plain torch.

All of them do the same total work in turns, in the same processes; each is checked before it is timed. Ranks may share
a GPU: under MPS each has its part of it, and the one rank beside them, in a process of its own, has all of it.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as _distributed
from torch.nn import functional

from meshflash.api import attention, flash_attention
from meshflash.bench.candidates import Attention
from meshflash.bench.cases import Case, Tensors, on_cpu
from meshflash.bench.check import relative_error
from meshflash.bench.peers import peer_bytes
from meshflash.bench.timing import synchronize, watched
from meshflash.core.mask import Mask
from meshflash.engine.membership import member
from meshflash.engine.memory import pool
from meshflash.engine.trace import recording
from meshflash.launch.mps import mps, variables
from meshflash.launch.processes import Tell, run_ranks, take_device
from meshflash.schedules.registry import home, parse
from meshflash.sharding import shard, unshard

dist: Any = _distributed  # torch does not declare all that it exports here

ONE = "one rank"
PLAIN = "torch all-gather"
PASSES = ("forward", "forward+backward")


@dataclass(frozen=True)
class Row:
    """One schedule on one pass: time, speed against one rank, what moved, what it took, and its error.

    Bytes received and peak bytes are those of the rank with the most; the mean is over all ranks. Efficiency is the
    speed for each rank's part of the hardware, which is a whole device or its part of a shared one. Exposed is how
    long the rank waited for messages that waited longest, in one run.
    """

    schedule: str
    direction: str
    world: int
    case: Case
    ms: float
    speedup: float
    efficiency: float
    tflops: float
    exposed_ms: float
    transport: str
    received_bytes: int
    received_mean: float
    peer_bytes: int | None
    peak_bytes: int
    error: float


@dataclass(frozen=True)
class Setup:
    """How ranks run: so many processes of so many threads, by a transport and a kernel; by MPS if they share a GPU."""

    world: int
    rounds: int
    threads: int = 1
    transport: str = "auto"
    kernel: str = "auto"
    forward_only: bool = False
    mps: bool = False

    @property
    def passes(self) -> tuple[str, ...]:
        """What is timed."""
        return PASSES[:1] if self.forward_only else PASSES


def run(case: Case, schedules: tuple[str, ...], setup: Setup, listen: Tell | None = None) -> list[Row]:
    """Every schedule's rows, forward and forward+backward; one that is wrong raises instead of being timed."""
    for schedule in schedules:
        if schedule not in (ONE, PLAIN):
            parse(schedule)
    if PLAIN in schedules and not on_cpu(case.device):
        raise ValueError(f"{PLAIN!r} is measured on CPUs only: its matrix of the mask would not fit a GPU")
    more: dict[str, Any] = dict(threads=setup.threads, timeout=3600.0, listen=listen)
    with mps() if setup.mps else nullcontext():
        alone = None
        if not on_cpu(case.device):  # with the whole device, in a process of its own
            alone = run_ranks(1, _measure, case, (), setup, None, **more)[0]
        share = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // setup.world)} if setup.mps else {}
        with variables(**share):
            rows: list[Row] = run_ranks(setup.world, _measure, case, schedules, setup, alone, **more)[0]
    return rows


def _measure(
    rank: int, world: int, tell: Tell, case: Case, schedules: tuple[str, ...], setup: Setup, alone: list[Row] | None
) -> list[Row]:
    """One rank's part; the rows are rank 0's. Those of one rank alone may be known already."""
    say = tell if rank == 0 else lambda _: None
    device = take_device(case.device, rank)
    q, k, v, dout = case.tensors()
    whole, mask = (q.detach(), k.detach(), v.detach(), dout), case.rule
    calls = {name: _Candidate(name, case, mask, whole, world, setup) for name in (ONE, *schedules)}
    seen: dict[str, _Seen] = {}
    errors: dict[str, tuple[float, float]] = {ONE: (0.0, 0.0)}
    tiny = torch.zeros(1, 1, 1, 8, requires_grad=True, device=device)
    # the first use of the op, of its backward and of the profiler takes seconds
    watched(lambda: flash_attention(tiny, tiny, tiny).sum().backward(), device)
    for name, call in calls.items():
        say(f"checking {name}")
        if name == ONE:
            seen[name] = call.watch(device) if rank == 0 else _Seen([], (0.0, 0.0), (0, 0), (0, 0))
            continue
        seen[name] = call.watch(device)
        assert call.layout is not None
        got = [unshard(x.cpu(), call.layout) for x in seen[name].results]
        errors[name] = _errors(got, [x.cpu() for x in seen[ONE].results], case) if rank == 0 else (0.0, 0.0)
    times: dict[tuple[str, str], list[float]] = {}
    timed = {name: call for name, call in calls.items() if alone is None or name != ONE}
    for n in range(setup.rounds):
        say(f"round {n + 1} of {setup.rounds}")
        for direction in setup.passes:
            for name, call in timed.items():
                milliseconds = _time(call, direction, alone=name == ONE, rank=rank, device=device)
                times.setdefault((name, direction), []).append(milliseconds)
    rows = []
    for n, direction in enumerate(setup.passes):
        ms = {name: statistics.median(times.get((name, direction), [_most(seen[name].ms[n])])) for name in timed}
        if alone is not None:
            ms[ONE] = next(row.ms for row in alone if row.direction == direction)
            rows += [row for row in alone if row.direction == direction]
        for name in timed:
            received, peak, exposed = (_most(x[n]) for x in (seen[name].received, seen[name].peaks, seen[name].exposed))
            speedup = ms[ONE] / ms[name]
            flops = case.flops("forward") + (case.flops("backward") if n else 0.0)
            rows.append(
                Row(
                    schedule=name,
                    direction=direction,
                    world=1 if name == ONE else world,
                    case=case,
                    ms=ms[name],
                    speedup=speedup,
                    efficiency=speedup / (1 if name == ONE or setup.mps else world),
                    tflops=flops / ms[name] / 1e9,
                    exposed_ms=exposed,
                    transport=call_transport(name, device, setup),
                    received_bytes=int(received),
                    received_mean=_sum(seen[name].received[n]) / world,
                    peer_bytes=None if name in (ONE, PLAIN) else peer_bytes(name, case, world, direction),
                    peak_bytes=int(peak),
                    error=errors[name][n],
                )
            )
    return rows


def call_transport(name: str, device: torch.device, setup: Setup) -> str:
    """By what a candidate's messages moved."""
    if name in (ONE, PLAIN):
        return ""
    return member(dist.group.WORLD.group_name).transport(device, setup.transport).name


@dataclass(frozen=True, eq=False)
class _Seen:
    """What runs of a candidate showed: output and gradients; and of each pass milliseconds, bytes, peak, waiting."""

    results: list[Tensor]
    ms: tuple[float, float]
    received: tuple[int, int]
    peaks: tuple[int, int]
    exposed: tuple[float, float] = (0.0, 0.0)


class _Candidate:
    """One way to attend, on this rank's tokens."""

    def __init__(self, name: str, case: Case, mask: Mask, whole: Tensors, world: int, setup: Setup) -> None:
        self.name, self.case, self.world, self.setup = name, case, world, setup
        if name == ONE:
            self.layout = None
            self.local = whole
        else:
            self.layout = home("ring" if name == PLAIN else name)(case.tokens, world)
            self.local = tuple(shard(x, self.layout).contiguous() for x in whole)  # type: ignore[assignment]
        self.leaves = [x.requires_grad_() for x in self.local[:3]]
        self._attention = self._function(mask)

    def forward(self) -> Tensor:
        return self._attention(*self.leaves)

    def both(self) -> tuple[Tensor, ...]:
        """Forward and backward."""
        return torch.autograd.grad(self.forward(), self.leaves, self.local[3])

    def watch(self, device: torch.device) -> _Seen:
        """Run both passes once, looking at results, bytes and memory, and once more at what was waited for."""
        pool(device).clear()  # scratch that another schedule left would not be seen
        if self.name != ONE:
            dist.barrier()
        counters = None
        if self.name not in (ONE, PLAIN):
            counters = member(dist.group.WORLD.group_name).transport(device, self.setup.transport).counters
            counters.clear()
        received, begin = [], time.perf_counter()
        forward = watched(self.forward, device)
        ms = [(time.perf_counter() - begin) * 1e3]
        received.append(counters.received_bytes if counters else 0)
        backward = watched(lambda: torch.autograd.grad(forward.result, self.leaves, self.local[3]), device)
        ms.append((time.perf_counter() - begin) * 1e3)
        received.append(counters.received_bytes if counters else 0)
        if self.name == PLAIN:  # K and V gathered, and their gradients summed and scattered
            gathered = (self.world - 1) * sum(x.nbytes for x in self.local[1:3])
            received = [gathered, 2 * gathered]
        both = max(forward.peak_bytes, forward.held_bytes + backward.peak_bytes)
        return _Seen(
            [forward.result.detach(), *backward.result],
            (ms[0], ms[1]),
            (received[0], received[1]),
            (forward.peak_bytes, both),
            self._exposed(),
        )

    def _exposed(self) -> tuple[float, float]:
        """Milliseconds that this rank waits for messages, in a forward and in both passes."""
        if self.name in (ONE, PLAIN):
            return 0.0, 0.0
        with recording() as forward:
            self.forward()
        with recording() as both:
            self.both()
        return forward.seconds("other") * 1e3, both.seconds("other") * 1e3

    def _function(self, mask: Mask) -> Attention:
        if self.name == ONE:
            return partial(flash_attention, mask=mask, kernel=self.setup.kernel, deterministic=self.case.deterministic)
        if self.name == PLAIN:
            return self._plain(mask)
        return partial(
            attention,
            mask=mask,
            schedule=self.name,
            layout=self.layout,
            kernel=self.setup.kernel,
            transport=self.setup.transport,
            deterministic=self.case.deterministic,
        )

    def _plain(self, mask: Mask) -> Attention:
        """What one writes in plain torch: gather K and V, then its own attention with a matrix as the mask."""
        from torch.distributed import _functional_collectives as collectives

        # torch 2.13 renamed it and warns of the old name
        old = "all_gather_tensor_autograd"
        all_gather = getattr(collectives, "all_gather_single_autograd", None) or getattr(collectives, old)
        assert self.layout is not None
        mine = self.layout.positions(dist.get_rank())
        others = np.concatenate([self.layout.positions(rank) for rank in range(self.world)])
        matrix = torch.from_numpy(mask.visible(mine[:, None], others[None, :]))

        def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (all_gather(x, 1, dist.group.WORLD) for x in (k, v))
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return functional.scaled_dot_product_attention(q, k, v, matrix, enable_gqa=True).transpose(1, 2)

        return plain


def _time(call: _Candidate, direction: str, alone: bool, rank: int, device: torch.device) -> float:
    """Milliseconds until the last rank is done; alone, of rank 0 while the others wait."""
    function = call.forward if direction == "forward" else call.both
    synchronize(device)
    dist.barrier()
    begin = time.perf_counter()
    if not alone or rank == 0:
        function()
        synchronize(device)
    elapsed = torch.tensor([(time.perf_counter() - begin) * 1e3])
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)


def _errors(got: list[Tensor], want: list[Tensor] | None, case: Case) -> tuple[float, float]:
    """The relative error of the output, and the largest of output and gradients, against one rank."""
    if want is None:
        return 0.0, 0.0
    each = [relative_error(a, b) for a, b in zip(got, want, strict=True)]
    if not max(each) <= case.worst_error:
        raise RuntimeError(
            f"relative error {max(each):.1e} against one rank, where {case.dtype} allows {case.worst_error:.0e}"
        )
    return each[0], max(each)


def _most(number: float) -> float:
    """The largest of all ranks' numbers."""
    return _of_all(number, dist.ReduceOp.MAX)


def _sum(number: float) -> float:
    """The sum of all ranks' numbers."""
    return _of_all(number, dist.ReduceOp.SUM)


def _of_all(number: float, operation: Any) -> float:
    tensor = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(tensor, operation)
    return float(tensor)
