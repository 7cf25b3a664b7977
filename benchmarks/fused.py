"""Fused GEMM + collectives against the same GEMMs unfused, over shapes.

There are two unfused baselines: the bulk variant, whose kernels move tiles after the GEMM; and, where one process
emulates all ranks, the GEMM followed by torch's copies. All of them leave results where communication put them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import fused_tune
from meshflash.bench import record
from meshflash.bench.cases import on_cpu
from meshflash.bench.fused import LOCAL, Harness, open_case_heap, plan_case, ranks_per_device, run_in_ranks
from meshflash.bench.fused_cases import Case, Setup, check_setup
from meshflash.comm.streams import DeviceStreams
from meshflash.gemm import rates
from meshflash.gemm.configs import Config
from meshflash.gemm.distributed import rates as distributed_rates
from meshflash.gemm.distributed.plan import BULK, VARIANTS, rate_mode
from meshflash.gemm.distributed.problem import COLLECTIVES
from meshflash.gemm.distributed.tiles import split
from meshflash.gemm.launch import Epilogue
from meshflash.gemm.launch import run as run_plan
from meshflash.gemm.plan import GemmProblem, choose
from meshflash.gemm.rates import Rate
from meshflash.runtime.processes import Tell

#: M, N and K: the C of `meshflash gemm` by default, over K; and small ones for interpreted kernels.
LARGE = tuple((8192, 4608, k) for k in (1024, 2048, 4096, 8192, 16384, 36864))
SMALL = ((24, 40, 16), (24, 40, 48))
#: Collectives with their shots.
COLLECTIVE_SHOTS = (("all_scatter", None), ("all_reduce", 1), ("all_reduce", 2), ("ag_gemm", None), ("gemm_rs", None))
#: The unfused baseline of a GEMM followed by torch's copies.
COPIES = "copies"


@dataclass(frozen=True)
class SweepRow:
    """One variant of one case: the slowest rank's milliseconds, and the worst rank's error.

    `ratio` is the time over the best unfused one, `vs_best` over the best of all; `auto` says that "auto" takes this
    variant in this configuration. TFLOP/s are of one rank. `config` is that of a rate table.
    """

    case: Case
    heap: str
    variant: str
    fused: bool
    auto: bool
    ms: float
    tflops: float
    ratio: float
    vs_best: float
    error: float
    plan: str
    config: tuple[int, ...] = ()
    ranks_per_device: int = 1


def cases_of(
    device: str, world: int, dtype: str, shapes: Sequence[tuple[int, int, int]], collectives: Sequence[str]
) -> list[Case]:
    """Return the cases of each collective, an all_reduce in one shot and in two.

    Args:
        device: The device of all ranks.
        world: The number of ranks.
        dtype: The dtype by name.
        shapes: M, N and K of each GEMM. Empty means those that suit the device.
        collectives: The collectives. Empty means all.
    """
    unknown = [name for name in collectives if name not in COLLECTIVES]
    if unknown:
        raise ValueError(f"collective {unknown[0]!r}: expected one of {', '.join(COLLECTIVES)}")
    chosen = [(name, shots) for name, shots in COLLECTIVE_SHOTS if not collectives or name in collectives]
    sizes = shapes or (SMALL if on_cpu(device) else LARGE)
    return [Case(name, *size, world, dtype, device, shots) for name, shots in chosen for size in sizes]


def run(cases: Sequence[Case], setup: Setup, listen: Tell, tune: bool = False, write: bool = False) -> None:
    """Run all cases in the same processes; a wrong result raises instead of being timed.

    Args:
        cases: The cases to measure.
        setup: How ranks run.
        listen: A function that is called with progress messages, the rows of each case, and the path of the rate table.
        tune: Whether each variant runs in the best of its configurations instead of its default.
        write: Whether the rates of each case are added to the user's table as soon as they are known.
    """
    for case in cases:
        check_setup(case, setup)
    run_in_ranks(_run, cases[0], setup, cases, tune, write, listen=listen)


def _run(
    rank: int, world: int, tell: Tell, setup: Setup, cases: Sequence[Case], tune: bool = False, write: bool = False
) -> None:
    """Measure all cases in one process; rank 0 reports."""
    report: Tell = tell if rank == 0 else lambda _: None
    for case in cases:
        head = f"{case.collective} {case.m}x{case.n}x{case.k} {case.dtype} on {case.world} ranks"
        report(head)
        chosen = fused_tune.best(rank, setup, case, partial(_report_trial, report, head)) if tune else None
        rows = _measure(rank, setup, case, chosen)
        report(rows)
        if write and rank == 0:
            report(rates.add(rates_of(rows), torch.device(case.device), record.header("")["versions"]))


def _report_trial(report: Tell, head: str, text: str) -> None:
    report(f"{head}: {text}")


def rates_of(rows: Sequence[SweepRow]) -> list[Rate]:
    """Return the rates of a case's variants, as a rate table holds them."""
    return [
        distributed_rates.make_rate(
            *(row.case.problem, row.case.dtype, rate_mode(row.variant, row.case.shots or 0)),
            *(row.ranks_per_device, row.config, row.ms),
        )
        for row in rows
        if row.variant in VARIANTS
    ]


def _measure(rank: int, setup: Setup, case: Case, chosen: Mapping[str, Config] | None = None) -> list[SweepRow]:
    """Return the rows of a case, the same on all ranks: of all variants, or of those with a chosen configuration."""
    variants: Mapping[str, Config | None] = dict.fromkeys(VARIANTS) if chosen is None else chosen
    with open_case_heap(case, setup, rank, list(variants.items())) as heap, ExitStack() as stack:
        harness = Harness(case, heap)
        gemms = {name: stack.enter_context(harness.make_gemm(name, config=config)) for name, config in variants.items()}
        auto = plan_case(case, setup, heap.device, "auto")
        calls: dict[str, Callable[[], list[Tensor]]] = {
            name: partial(harness.call, gemm, copy=False) for name, gemm in gemms.items()
        }
        if heap.kind == LOCAL:
            calls[COPIES] = Copies(harness, next(iter(gemms.values())).plan.shots)
        errors = {name: harness.check(name, call()) for name, call in calls.items()}
        ms = {name: harness.max_over_ranks(own) for name, own in harness.time(calls, setup.rounds).items()}
        heap.check()
        kind = f"{heap.kind} heap{', MPS' if setup.mps else ''}"
        plans = {name: gemm.plan for name, gemm in gemms.items()}
        sharing = ranks_per_device(case, setup, heap.device)
    unfused = min(ms[name] for name in (BULK, COPIES) if name in ms)
    best = min(ms.values())
    return [
        SweepRow(
            case=case,
            heap=kind,
            variant=name,
            fused=name not in (BULK, COPIES),
            auto=name == auto.variant
            and distributed_rates.config_list(plans[name]) == distributed_rates.config_list(auto),
            ms=ms[name],
            tflops=case.tflop / ms[name] * 1e3,
            ratio=ms[name] / unfused,
            vs_best=ms[name] / best,
            error=errors[name],
            plan=str(plans.get(name, "the GEMM of each rank, then torch's copies")),
            config=distributed_rates.config_list(plans[name]) if name in plans else (),
            ranks_per_device=sharing,
        )
        for name in calls
    ]


class Copies:
    """The unfused baseline in plain torch: each rank's GEMM, copies to the other ranks, and sums of them.

    One process emulates all ranks, each on its stream. Streams wait for each other, so no flags are needed.
    """

    def __init__(self, harness: Harness, shots: int) -> None:
        self.harness, self.shots = harness, shots
        self.case, self.problem, self.heap = harness.case, harness.case.problem, harness.heap
        device, world = self.heap.device, self.case.world
        self.streams = None if device.type == "cpu" else DeviceStreams(device)
        shape, dtype = (self.case.m, self.case.n), self.problem.out_dtype
        #: Columns or rows that each rank holds or reduces.
        self.sizes = self.problem.sizes or split(self.case.m, world)
        if self.case.collective == "ag_gemm":
            shape, dtype = (self.case.m, self.case.k), self.problem.dtype
        self.gathered = [torch.empty(shape, dtype=dtype, device=device) for _ in range(world)]
        self.inbox: list[Tensor] = []
        if self.case.collective in ("all_reduce", "gemm_rs"):
            heights = [self.case.m] * world if shots == 1 else self.sizes
            self.inbox = [
                torch.empty(world, rows, self.case.n, dtype=self.problem.reduce_dtype, device=device)
                for rows in heights
            ]

    def __call__(self) -> list[Tensor]:
        """Return the result of each rank."""
        if self.case.collective == "all_scatter":
            self._on_each_rank(self._scatter)
            return self.gathered
        if self.case.collective == "ag_gemm":
            self._on_each_rank(lambda rank: self._broadcast_rows(rank, self.harness.operands[rank][0]))
            return self._on_each_rank(lambda rank: self._multiply(self.gathered[rank], rank, self.problem.out_dtype))
        self._on_each_rank(self._send)
        if self.shots == 1 or self.case.collective == "gemm_rs":
            return self._on_each_rank(self._sum)
        self._on_each_rank(lambda rank: self._broadcast_rows(rank, self._sum(rank)))
        return self.gathered

    def _scatter(self, rank: int) -> None:
        made = self._multiply(self.harness.operands[rank][0], rank, self.problem.out_dtype)
        first = self.problem.shard_starts[rank]
        for c in self.gathered:
            c[:, first : first + made.shape[1]].copy_(made)

    def _broadcast_rows(self, rank: int, rows: Tensor) -> None:
        first = sum(self.sizes[:rank])
        for x in self.gathered:
            x[first : first + len(rows)].copy_(rows)

    def _send(self, rank: int) -> None:
        made = self._multiply(self.harness.operands[rank][0], rank, self.problem.reduce_dtype)
        parts = [made] * self.case.world if self.shots == 1 else made.split(self.sizes)
        for inbox, part in zip(self.inbox, parts, strict=True):
            inbox[rank].copy_(part)

    def _sum(self, rank: int) -> Tensor:
        return self.inbox[rank].sum(0).to(self.problem.out_dtype)

    def _multiply(self, a: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
        b = self.harness.operands[rank][1]
        plan = choose(GemmProblem.of(a, b, self.problem.precision), "auto")
        return run_plan(plan, a, b, self.problem.precision, Epilogue(dtype))[0]

    def _on_each_rank(self, function: Callable[[int], Any]) -> list[Any]:
        """Call a function on each rank's stream; the caller's stream waits for all of them."""
        out, marks = [], []
        for rank in self.heap.local_ranks:
            with self.heap.as_rank(rank):
                out.append(function(rank))
                if self.streams:
                    marks.append(self.streams.record_event(self.streams.current_stream()))
        for rank, mark in enumerate(marks):
            assert self.streams is not None
            self.streams.wait_event(self.streams.current_stream(), mark)
            if isinstance(out[rank], Tensor):
                self.streams.record_stream(out[rank], self.streams.current_stream())
        return out
