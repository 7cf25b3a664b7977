"""A fused GEMM + collective over ranks: checked against float64 on every rank, timed, beside a process group's.

This is what `meshflash gemm` runs. `python -m benchmarks fused` compares variants over shapes with the same parts.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshflash.bench.check import relative_error, worst
from meshflash.bench.fused_cases import GROUP, HEAP, Case, RankRow, Results, Setup, check_setup, merge_results
from meshflash.bench.gemm import check_error
from meshflash.bench.timing import SAMPLE_MS, SLOW_MS, interleaved, synchronize
from meshflash.gemm import FusedGemm, configs
from meshflash.gemm.configs import Config
from meshflash.gemm.distributed.plan import BULK, FusedPlan, plan_fused
from meshflash.runtime.devices import CPU, GLOO, available, dist, name_of, take_device
from meshflash.runtime.mps import mps
from meshflash.runtime.processes import Tell, run_ranks
from meshflash.runtime.world import World

if TYPE_CHECKING:  # a heap needs Triton
    from meshflash.comm.heap.contract import Heap

#: The kind of heap where one process emulates all ranks.
LOCAL = "local"
#: The least number of calls in a sample on a GPU.
MIN_CALLS = 3
#: Seconds after which a run is given up.
TIMEOUT_SECONDS = 3600.0

Calls = Mapping[str, Callable[[], Any]]


def run(case: Case, setup: Setup, listen: Tell | None = None) -> Results:
    """Run a case on ranks of this machine.

    Args:
        case: The GEMM + collective.
        setup: How it runs; ValueError if that cannot be.
        listen: A function that is called with progress messages.
    """
    check_setup(case, setup)
    return merge_results(run_in_ranks(_measure, case, setup, case, listen=listen))


def run_here(case: Case, setup: Setup, here: World) -> Results | None:
    """Run a case as this rank of the default process group; rank 0 returns the results of all."""
    check_setup(case, setup)
    own = _measure(here.rank, here.world_size, lambda _: None, setup, case, here.local_rank)
    parts: list[Any] | None = None if here.rank else [None] * here.world_size
    dist.gather_object(own, parts)
    return None if parts is None else merge_results(parts)


def run_in_ranks(
    function: Callable[..., Any], case: Case, setup: Setup, *args: Any, listen: Tell | None = None
) -> list[Any]:
    """Return `function(rank, world, tell, setup, *args)` of each rank's process, or of this one for all ranks."""
    if setup.local:
        return [function(0, 1, listen or (lambda _: None), setup, *args)]
    # every process may use all SMs: the shares that MPS gives may overlap, and a CTA that spins on a flag would then
    # keep an SM from the peer that is to set it
    with mps() if setup.mps else nullcontext():
        return run_ranks(case.world, function, setup, *args, timeout=TIMEOUT_SECONDS, listen=listen)


class Harness:
    """One case on an open heap: operands and expected results of the ranks in this process. Every rank makes one."""

    def __init__(self, case: Case, heap: Heap) -> None:
        self.case, self.heap = case, heap
        a, b = case.tensors(heap.device)
        self.operands = [case.operands(a, b, rank) for rank in heap.local_ranks]
        c = a.double() @ b.double()
        self.expected = [case.output(c, rank) for rank in heap.local_ranks]

    def make_gemm(self, variant: str, timed: bool = False, config: Config | None = None) -> FusedGemm:
        """Make the fused GEMM; all ranks call this together."""
        case = self.case
        sizes = (case.collective, case.m, case.n, case.k, case.problem.dtype)
        more: dict[str, Any] = {"shots": case.shots, "precision": case.precision, "timed": timed, "config": config}
        return FusedGemm(self.heap, *sizes, variant=variant, **more)

    def make_group_gemm(self, group: Any) -> FusedGemm:
        """Make the baseline: the GEMM, then the collective of a process group."""
        case = self.case
        sizes = (case.collective, case.m, case.n, case.k, case.problem.dtype)
        return FusedGemm(group, *sizes, variant=BULK, precision=case.precision)

    def call(self, gemm: FusedGemm, copy: bool = True) -> list[Tensor]:
        """Return the result of each rank here; without `copy` it may lie in the heap until the next call."""
        if self.heap.kind == LOCAL:
            results: list[Tensor] = gemm([a for a, _ in self.operands], [b for _, b in self.operands], copy=copy)
            return results
        return [gemm(*self.operands[0], copy=copy)]

    def errors(self, results: Sequence[Tensor]) -> list[float]:
        """Return relative errors against float64; 0 for an empty result."""
        pairs = zip(results, self.expected, strict=True)
        return [relative_error(got, want) if want.numel() else 0.0 for got, want in pairs]

    def check(self, name: str, results: Sequence[Tensor]) -> float:
        """Return the worst rank's relative error; RuntimeError if it is beyond what the dtype allows."""
        error = self.max_over_ranks(worst(self.errors(results)))
        self.heap.check()
        check_error(name, self.case, error)
        return error

    def max_over_ranks(self, number: float) -> float:
        """Return the largest of all ranks' numbers, or NaN if one of them is."""
        return worst(self.gather(number))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, the same list on each of them."""
        if self.heap.kind == LOCAL:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def time(self, calls: Calls, rounds: int) -> dict[str, float]:
        """Return the median milliseconds of each call, interleaved: this rank's, or those of all emulated ranks."""
        if self.heap.kind == LOCAL:
            return interleaved(calls, self.heap.device, rounds)
        return _time_in_step(calls, self.heap.device, rounds)


@contextmanager
def open_case_heap(
    case: Case,
    setup: Setup,
    rank: int,
    variants: Sequence[tuple[str, Config | None]],
    at_once: int | None = None,
) -> Iterator[Heap]:
    """Open a heap on this rank's device that is large enough for a case.

    Args:
        case: The GEMM + collective.
        setup: How it runs.
        rank: The local rank, which takes a device.
        variants: The variants that will run, each with its configuration or None for its default.
        at_once: The number of these variants that are open at the same time. None means all.
    """
    from meshflash.comm.heap.api import open_heap

    device = take_device(torch.device(case.device).type, rank)
    sizes = sorted(plan_case(case, setup, device, *variant).heap_bytes for variant in variants)
    size = max(1, sum(sizes[-(at_once or len(sizes)) :]))
    with open_heap(case.world if setup.local else None, bytes=size, device=device) as heap:
        yield heap


def plan_case(case: Case, setup: Setup, device: torch.device, variant: str, config: Config | None = None) -> FusedPlan:
    """Return the plan of a case; all ranks call this together."""
    sharing = ranks_per_device(case, setup, device)
    return plan_fused(
        case.problem,
        device,
        variant=variant,
        shots=case.shots,
        config=config,
        ranks_per_device=sharing,
        num_sms=configs.num_sms(device) // sharing if setup.local else None,
    )


def ranks_per_device(case: Case, setup: Setup, device: torch.device) -> int:
    """Return how many ranks share this rank's device, as plans of fused GEMMs count them."""
    if device.type == CPU:
        return 1
    if setup.local:
        return case.world
    names: list[Any] = [None] * case.world
    dist.all_gather_object(names, name_of(device))
    return names.count(name_of(device))


def _measure(rank: int, world: int, tell: Tell, setup: Setup, case: Case, local_rank: int | None = None) -> Results:
    """Check and time a case in one process; return the rows of its ranks."""
    say = tell if rank == 0 else lambda _: None
    say("float64")
    with open_case_heap(case, setup, rank if local_rank is None else local_rank, [(setup.variant, None)]) as heap:
        harness = Harness(case, heap)
        times: dict[int, list[list[int]]] = {}
        if setup.timeline:
            say("recording tiles")
            with harness.make_gemm(setup.variant, timed=True) as gemm:
                for _ in range(2):  # the first one compiles
                    harness.call(gemm)
                heap.check()
                times = {rank: x.tolist() for rank, x in gemm.times.items()}
        with harness.make_gemm(setup.variant) as gemm:
            say("checking")
            calls = {HEAP: partial(harness.call, gemm)}
            plans = {HEAP: gemm.plan}
            backends = {HEAP: f"{heap.kind} heap"}
            if setup.reference:
                group = _process_group(heap.device)
                by_group = harness.make_group_gemm(group)
                calls[GROUP], plans[GROUP] = partial(harness.call, by_group), by_group.plan
                backends[GROUP] = str(dist.get_backend(group))
            first = {comm: call() for comm, call in calls.items()}
            heap.check()
            say("timing")
            ms = harness.time(calls, setup.rounds)
            last = {comm: call() for comm, call in calls.items()}
            heap.check()
        rows = []
        for comm in calls:
            errors = zip(harness.errors(first[comm]), harness.errors(last[comm]), strict=True)
            for owner, result, error in zip(heap.local_ranks, last[comm], errors, strict=True):
                rows.append(
                    RankRow(
                        case=case,
                        rank=owner,
                        comm=comm,
                        backend=backends[comm],
                        variant=plans[comm].variant,
                        shots=plans[comm].shots,
                        reason=plans[comm].why,
                        ms=ms[comm],
                        tflops=case.tflop / ms[comm] * 1e3,
                        gb_s=case.sent_bytes(owner, plans[comm].shots) / ms[comm] * 1e-6,
                        error=worst(error),
                        ratio=ms[comm] / ms[GROUP] if GROUP in ms else None,
                        bits=_digest(result),
                    )
                )
        return Results(tuple(rows), dict.fromkeys(heap.local_ranks, str(gemm.plan)), times)


def _process_group(device: torch.device) -> Any:
    """Return a group of NCCL if each rank has a GPU of its own, else the default group."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, name_of(device))
    if device.type == CPU or len(set(names)) < len(names) or dist.get_backend() != GLOO or not available("nccl"):
        return dist.group.WORLD
    return dist.new_group(backend="nccl")


def _time_in_step(calls: Calls, device: torch.device, rounds: int) -> dict[str, float]:
    """Return this rank's median milliseconds; all ranks begin a sample together and make as many calls."""

    def sample(function: Callable[[], Any], count: int) -> float:
        synchronize(device)
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            function()
        synchronize(device)
        return (time.perf_counter() - begin) * 1e3 / count

    num_calls, times = dict[str, int](), dict[str, list[float]]()
    for name, function in calls.items():
        once = torch.tensor([sample(function, 1)], dtype=torch.float64)
        dist.all_reduce(once, dist.ReduceOp.MAX)
        num_calls[name] = 1 if device.type == CPU else max(MIN_CALLS, math.ceil(SAMPLE_MS / float(once)))
        times[name] = [] if float(once) <= SLOW_MS else [float(once)]
    interleaved_names = [name for name in calls if not times[name]]
    for _ in range(rounds):
        for name in interleaved_names:
            times[name].append(sample(calls[name], num_calls[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def _digest(x: Tensor) -> str:
    """Return a short digest of the bits of a result."""
    return hashlib.sha256(x.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
