"""Fused products against the same products unfused, over shapes: `meshflash bench gemm --fused`.

Unfused is twice there: the bulk of a heap, whose kernels move tiles after the product; and, where one process plays all
ranks, the product and then torch's own copies. Results stay where messages put them, of all alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshflash.bench import fused_tables, fused_tune, plots, record
from meshflash.bench.cases import on_cpu
from meshflash.bench.fused import LOCAL, Played, in_ranks, opened, planned, sharing_of
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

#: C of the seed's product, over K; and small ones for interpreted kernels.
DEPTHS = (1024, 2048, 4096, 8192, 16384, 36864)
LARGE = tuple((8192, 4608, k) for k in DEPTHS)
SMALL = ((24, 40, 16), (24, 40, 48))
#: Collectives with their shots.
WAYS = (("all_scatter", None), ("all_reduce", 1), ("all_reduce", 2), ("ag_gemm", None), ("gemm_rs", None))
COPIES = "copies"


@dataclass(frozen=True)
class SweepRow:
    """One variant of one product: the slowest rank's milliseconds, and the worst rank's error.

    `ratio` is the time as a multiple of the best unfused one's, `behind` of the best of all; `auto` says that "auto"
    takes this variant, in this configuration. TFLOP/s are of one rank. `config` is what a table of rates has, and
    `sharing` how many ranks share a device.
    """

    case: Case
    heap: str
    variant: str
    fused: bool
    auto: bool
    ms: float
    tflops: float
    ratio: float
    behind: float
    error: float
    plan: str
    config: tuple[int, ...] = ()
    sharing: int = 1


def cases(
    device: str, world: int, numbers: str, shapes: Sequence[tuple[int, int, int]], collectives: Sequence[str]
) -> list[Case]:
    """Those of each collective, an all_reduce in one shot and in two."""
    unknown = [name for name in collectives if name not in COLLECTIVES]
    if unknown:
        raise ValueError(f"collective {unknown[0]!r}: expected one of {', '.join(COLLECTIVES)}")
    ways = [way for way in WAYS if not collectives or way[0] in collectives]
    sizes = shapes or (SMALL if on_cpu(device) else LARGE)
    return [Case(name, *size, world, numbers, device, shots) for name, shots in ways for size in sizes]


def run(cases: Sequence[Case], setup: Setup, listen: Tell, tune: bool = False, write: bool = False) -> None:
    """All cases in the same processes; `listen` hears what is under way, and the rows of each case once they are known.

    With `tune`, each variant is in the best of its configurations; with `write` too, the rates of each case go to the
    user's table as soon as they are known, and `listen` hears where it lies. One that is wrong raises instead of being
    timed.
    """
    for case in cases:
        check_setup(case, setup)
    in_ranks(_run, cases[0], setup, cases, tune, write, listen=listen)


def _run(
    rank: int, world: int, tell: Tell, setup: Setup, cases: Sequence[Case], tune: bool = False, write: bool = False
) -> None:
    """One process's part; rank 0 tells."""
    told: Tell = tell if rank == 0 else lambda _: None
    for case in cases:
        head = f"{case.collective} {case.m}x{case.n}x{case.k} {case.numbers} on {case.world} ranks"
        told(head)
        chosen = fused_tune.best(rank, setup, case, partial(_headed, told, head)) if tune else None
        rows = _measure(rank, setup, case, chosen)
        told(rows)
        if write and rank == 0:
            told(rates.add(rates_of(rows), torch.device(case.device), record.header("")["versions"]))


def _headed(tell: Tell, head: str, text: str) -> None:
    tell(f"{head}: {text}")


def rates_of(rows: Sequence[SweepRow]) -> list[Rate]:
    """What a table of rates takes of the variants of a case."""
    return [
        distributed_rates.make_rate(
            *(row.case.product, row.case.numbers, rate_mode(row.variant, row.case.shots or 0)),
            *(row.sharing, row.config, row.ms),
        )
        for row in rows
        if row.variant in VARIANTS
    ]


def _measure(rank: int, setup: Setup, case: Case, chosen: Mapping[str, Config] | None = None) -> list[SweepRow]:
    """The rows of a case, the same on all ranks: its variants, or those for which a configuration was chosen."""
    ways: Mapping[str, Config | None] = dict.fromkeys(VARIANTS) if chosen is None else chosen
    with opened(case, setup, rank, list(ways.items())) as heap, ExitStack() as stack:
        played = Played(case, heap)
        gemms = {name: stack.enter_context(played.gemm(name, config=config)) for name, config in ways.items()}
        auto = planned(case, setup, heap.device, "auto")
        calls: dict[str, Callable[[], list[Tensor]]] = {
            name: partial(played.call, gemm, copy=False) for name, gemm in gemms.items()
        }
        if heap.kind == LOCAL:
            calls[COPIES] = Copies(played, next(iter(gemms.values())).plan.shots)
        errors = {name: played.check(name, call()) for name, call in calls.items()}
        ms = {name: played.most(own) for name, own in played.time(calls, setup.rounds).items()}
        heap.check()
        kind = f"{heap.kind} heap{', MPS' if setup.mps else ''}"
        plans = {name: gemm.plan for name, gemm in gemms.items()}
        sharing = sharing_of(case, setup, heap.device)
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
            behind=ms[name] / best,
            error=errors[name],
            plan=str(plans.get(name, "the product of each rank, then torch's copies")),
            config=distributed_rates.config_list(plans[name]) if name in plans else (),
            sharing=sharing,
        )
        for name in calls
    ]


class Copies:
    """What one writes without kernels that talk: each rank's product, torch's copies to the others, and sums of them.

    One process plays all ranks, each on its stream. No flags are needed, for streams wait for each other.
    """

    def __init__(self, played: Played, shots: int) -> None:
        self.played, self.shots = played, shots
        self.case, self.product, self.heap = played.case, played.case.product, played.heap
        device, world = self.heap.device, self.case.world
        self.streams = None if device.type == "cpu" else DeviceStreams(device)
        shape, dtype = (self.case.m, self.case.n), self.product.out_dtype
        #: Columns or rows that a rank has, or adds up.
        self.sizes = self.product.sizes or split(self.case.m, world)
        if self.case.collective == "ag_gemm":
            shape, dtype = (self.case.m, self.case.k), self.product.dtype
        self.whole = [torch.empty(shape, dtype=dtype, device=device) for _ in range(world)]
        self.inbox: list[Tensor] = []
        if self.case.collective in ("all_reduce", "gemm_rs"):
            heights = [self.case.m] * world if shots == 1 else self.sizes
            self.inbox = [
                torch.empty(world, rows, self.case.n, dtype=self.product.reduce_dtype, device=device)
                for rows in heights
            ]

    def __call__(self) -> list[Tensor]:
        """What each rank gets."""
        if self.case.collective == "all_scatter":
            self._each(self._scatter)
            return self.whole
        if self.case.collective == "ag_gemm":
            self._each(lambda rank: self._spread(rank, self.played.operands[rank][0]))
            return self._each(lambda rank: self._multiply(self.whole[rank], rank, self.product.out_dtype))
        self._each(self._send)
        if self.shots == 1 or self.case.collective == "gemm_rs":
            return self._each(self._sum)
        self._each(lambda rank: self._spread(rank, self._sum(rank)))
        return self.whole

    def _scatter(self, rank: int) -> None:
        made = self._multiply(self.played.operands[rank][0], rank, self.product.out_dtype)
        first = self.product.shard_starts[rank]
        for c in self.whole:
            c[:, first : first + made.shape[1]].copy_(made)

    def _spread(self, rank: int, rows: Tensor) -> None:
        first = sum(self.sizes[:rank])
        for x in self.whole:
            x[first : first + len(rows)].copy_(rows)

    def _send(self, rank: int) -> None:
        made = self._multiply(self.played.operands[rank][0], rank, self.product.reduce_dtype)
        parts = [made] * self.case.world if self.shots == 1 else made.split(self.sizes)
        for inbox, part in zip(self.inbox, parts, strict=True):
            inbox[rank].copy_(part)

    def _sum(self, rank: int) -> Tensor:
        return self.inbox[rank].sum(0).to(self.product.out_dtype)

    def _multiply(self, a: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
        b = self.played.operands[rank][1]
        plan = choose(GemmProblem.of(a, b, self.product.precision), "auto")
        return run_plan(plan, a, b, self.product.precision, Epilogue(dtype))[0]

    def _each(self, do: Callable[[int], Any]) -> list[Any]:
        """On each rank's stream; the caller's comes after all of them."""
        out, marks = [], []
        for rank in self.heap.local_ranks:
            with self.heap.as_rank(rank):
                out.append(do(rank))
                if self.streams:
                    marks.append(self.streams.record_event(self.streams.current_stream()))
        for rank, mark in enumerate(marks):
            assert self.streams is not None
            self.streams.wait_event(self.streams.current_stream(), mark)
            if isinstance(out[rank], Tensor):
                self.streams.record_stream(out[rank], self.streams.current_stream())
        return out


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Lines of the time as a multiple of the best unfused one over K, a panel for each collective."""
    plots.over_depth(rows, fused_tables.title, title, path)
