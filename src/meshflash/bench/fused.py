"""A fused product over ranks: checked against float64 on every rank, timed, and beside the process group's way.

What runs on each rank is here. `fused_sweep` compares variants over shapes.
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
from meshflash.bench.fused_cases import GROUP, HEAP, Case, Found, RankRow, Setup, check_setup, joined
from meshflash.bench.gemm import WORST_ERROR
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

#: The kind of heap where one process plays all ranks.
LOCAL = "local"
#: Calls of a sample on a GPU, at least.
LEAST_CALLS = 3
#: Seconds for all of a run.
PATIENCE = 3600.0

Calls = Mapping[str, Callable[[], Any]]


def run(case: Case, setup: Setup, listen: Tell | None = None) -> Found:
    """Ranks of this machine; ValueError for what cannot be."""
    check_setup(case, setup)
    return joined(in_ranks(_measure, case, setup, case, listen=listen))


def run_here(case: Case, setup: Setup, here: World) -> Found | None:
    """The same as a rank of the default process group; rank 0 has what was found."""
    check_setup(case, setup)
    mine = _measure(here.rank, here.world_size, lambda _: None, setup, case, here.local_rank)
    parts: list[Any] | None = None if here.rank else [None] * here.world_size
    dist.gather_object(mine, parts)
    return None if parts is None else joined(parts)


def in_ranks(
    function: Callable[..., Any], case: Case, setup: Setup, *args: Any, listen: Tell | None = None
) -> list[Any]:
    """What `function(rank, world, tell, setup, *args)` gives in each rank's process, or in this one for all."""
    if setup.local:
        return [function(0, 1, listen or (lambda _: None), setup, *args)]
    # each may use every multiprocessor: shares of them that MPS gives may overlap, and then who waits on one keeps
    # those from it that it waits for
    with mps() if setup.mps else nullcontext():
        return run_ranks(case.world, function, setup, *args, timeout=PATIENCE, listen=listen)


class Played:
    """A case as this process has it: the ranks that it plays on a heap, their operands, and what they should get."""

    def __init__(self, case: Case, heap: Heap) -> None:
        self.case, self.heap = case, heap
        a, b = case.tensors(heap.device)
        self.operands = [case.part(a, b, rank) for rank in heap.local_ranks]
        c = a.double() @ b.double()
        self.wanted = [case.share(c, rank) for rank in heap.local_ranks]

    def gemm(self, variant: str, timed: bool = False, config: Config | None = None) -> FusedGemm:
        """The fused product; all ranks make it together."""
        case, product = self.case, self.case.product
        sizes = (case.collective, case.m, case.n, case.k, product.dtype)
        more: dict[str, Any] = {"shots": case.shots, "precision": case.precision, "timed": timed, "config": config}
        return FusedGemm(self.heap, *sizes, variant=variant, **more)

    def by_group(self, group: Any) -> FusedGemm:
        """The product, then the collective of a process group."""
        case, product = self.case, self.case.product
        return FusedGemm(
            group, case.collective, case.m, case.n, case.k, product.dtype, variant=BULK, precision=case.precision
        )

    def call(self, gemm: FusedGemm, copy: bool = True) -> list[Tensor]:
        """What each played rank gets; without `copy` it may lie in the heap, until the next call."""
        if self.heap.kind == LOCAL:
            results: list[Tensor] = gemm([a for a, _ in self.operands], [b for _, b in self.operands], copy=copy)
            return results
        return [gemm(*self.operands[0], copy=copy)]

    def errors(self, results: Sequence[Tensor]) -> list[float]:
        """Relative errors against float64; 0 of what has no numbers."""
        pairs = zip(results, self.wanted, strict=True)
        return [relative_error(got, want) if want.numel() else 0.0 for got, want in pairs]

    def check(self, name: str, results: Sequence[Tensor]) -> float:
        """The worst rank's relative error; what is wrong raises."""
        case = self.case
        error = self.most(worst(self.errors(results)))
        self.heap.check()
        if not error <= WORST_ERROR[case.numbers]:
            raise RuntimeError(
                f"{name}: relative error {error:.1e} against float64 at {case}, where {case.numbers} allows "
                f"{WORST_ERROR[case.numbers]:.0e}; it is wrong, so it is not timed"
            )
        return error

    def most(self, number: float) -> float:
        """The largest of all ranks' numbers, or NaN where there is one."""
        return worst(self.said(number))

    def said(self, word: Any) -> list[Any]:
        """What each process says, the same list on all of them."""
        if self.heap.kind == LOCAL:
            return [word]
        words: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(words, word)
        return words

    def time(self, calls: Calls, rounds: int) -> dict[str, float]:
        """Median milliseconds of a call of each, in turns; this rank's own, or those of all that are played."""
        if self.heap.kind == LOCAL:
            return interleaved(calls, self.heap.device, rounds)
        return _in_step(calls, self.heap.device, rounds)


@contextmanager
def opened(
    case: Case,
    setup: Setup,
    rank: int,
    ways: Sequence[tuple[str, Config | None]],
    at_once: int | None = None,
) -> Iterator[Heap]:
    """A heap on this rank's device with room for so many of these variants at once, in these configurations; or all."""
    from meshflash.comm.heap.api import open_heap

    device = take_device(torch.device(case.device).type, rank)
    sizes = sorted(planned(case, setup, device, *way).heap_bytes for way in ways)
    size = max(1, sum(sizes[-(at_once or len(sizes)) :]))
    with open_heap(case.world if setup.local else None, bytes=size, device=device) as heap:
        yield heap


def planned(case: Case, setup: Setup, device: torch.device, variant: str, config: Config | None = None) -> FusedPlan:
    """The plan that ranks will have; all of them ask together."""
    sharing = sharing_of(case, setup, device)
    num_sms = configs.num_sms(device) // sharing if setup.local else None
    return plan_fused(
        case.product,
        device,
        variant=variant,
        shots=case.shots,
        config=config,
        ranks_per_device=sharing,
        num_sms=num_sms,
    )


def sharing_of(case: Case, setup: Setup, device: torch.device) -> int:
    """How many ranks share this rank's device, as fused products count them."""
    if device.type == CPU:
        return 1
    if setup.local:
        return case.world
    names: list[Any] = [None] * case.world
    dist.all_gather_object(names, name_of(device))
    return names.count(name_of(device))


def _measure(rank: int, world: int, tell: Tell, setup: Setup, case: Case, local_rank: int | None = None) -> Found:
    """One process's part."""
    say = tell if rank == 0 else lambda _: None
    say("float64")
    with opened(case, setup, rank if local_rank is None else local_rank, [(setup.variant, None)]) as heap:
        played = Played(case, heap)
        times: dict[int, list[list[int]]] = {}
        if setup.timeline:
            say("noting when tiles come")
            with played.gemm(setup.variant, timed=True) as gemm:
                for _ in range(2):  # the first one compiles
                    played.call(gemm)
                heap.check()
                times = {one: x.tolist() for one, x in gemm.times.items()}
        with played.gemm(setup.variant) as gemm:
            say("checking")
            ways = {HEAP: partial(played.call, gemm)}
            plans = {HEAP: gemm.plan}
            means = {HEAP: f"{heap.kind} heap"}
            if setup.reference:
                group = _group(device=heap.device)
                by_group = played.by_group(group)
                ways[GROUP], plans[GROUP] = partial(played.call, by_group), by_group.plan
                means[GROUP] = str(dist.get_backend(group))
            first = {by: way() for by, way in ways.items()}
            heap.check()
            say("timing")
            ms = played.time(ways, setup.rounds)
            last = {by: way() for by, way in ways.items()}
            heap.check()
        rows = []
        for by in ways:
            errors = zip(played.errors(first[by]), played.errors(last[by]), strict=True)
            for one, result, error in zip(heap.local_ranks, last[by], errors, strict=True):
                rows.append(
                    RankRow(
                        case=case,
                        rank=one,
                        by=by,
                        means=means[by],
                        variant=plans[by].variant,
                        shots=plans[by].shots,
                        why=plans[by].why,
                        ms=ms[by],
                        tflops=case.tflop / ms[by] * 1e3,
                        gb_s=case.sent_bytes(one, plans[by].shots) / ms[by] * 1e-6,
                        error=worst(error),
                        ratio=ms[by] / ms[GROUP] if GROUP in ms else None,
                        bits=_bits(result),
                    )
                )
        return Found(tuple(rows), dict.fromkeys(heap.local_ranks, str(gemm.plan)), times)


def _group(device: torch.device) -> Any:
    """The process group that serves a device best: the default one, or one of NCCL where each rank has a GPU."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, name_of(device))
    if device.type == CPU or len(set(names)) < len(names) or dist.get_backend() != GLOO or not available("nccl"):
        return dist.group.WORLD
    return dist.new_group(backend="nccl")


def _in_step(calls: Calls, device: torch.device, rounds: int) -> dict[str, float]:
    """Median milliseconds of this rank; all ranks begin a sample together, and call equally often."""

    def sample(function: Callable[[], Any], number: int) -> float:
        synchronize(device)
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(number):
            function()
        synchronize(device)
        return (time.perf_counter() - begin) * 1e3 / number

    numbers, times = dict[str, int](), dict[str, list[float]]()
    for name, function in calls.items():
        once = torch.tensor([sample(function, 1)], dtype=torch.float64)
        dist.all_reduce(once, dist.ReduceOp.MAX)
        numbers[name] = 1 if device.type == CPU else max(LEAST_CALLS, math.ceil(SAMPLE_MS / float(once)))
        times[name] = [] if float(once) <= SLOW_MS else [float(once)]
    waiting = [name for name in calls if not times[name]]
    for _ in range(rounds):
        for name in waiting:
            times[name].append(sample(calls[name], numbers[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def _bits(x: Tensor) -> str:
    """A few letters that tell results apart."""
    return hashlib.sha256(x.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
