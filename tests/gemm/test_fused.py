"""Fused GEMMs interpreted across real processes: ragged shapes, many epochs, and the same bits on all ranks."""

from __future__ import annotations

import os
import signal as signals
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from meshflash.comm.handshake import DisagreementError
from meshflash.comm.heap.api import open_heap
from meshflash.comm.transports.contract import TransportError
from meshflash.gemm import FusedGemm
from meshflash.gemm.distributed import launch as distributed_launch
from meshflash.gemm.distributed.plan import VARIANTS
from meshflash.gemm.distributed.problem import DistributedGemm
from meshflash.kernels.triton.common import INTERPRETED
from meshflash.runtime.processes import RankError, run_ranks

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="test_fused_gpu.py runs them on a GPU")

#: Relative errors as in test_stream_k.py; a rounded `reduce` dtype adds its own.
ALLOWED = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 4e-4}


@dataclass(frozen=True)
class Case:
    """A fused GEMM + collective on random operands; `calls` is how often it runs, each time with new operands."""

    collective: str
    variant: str
    shots: int | None = None
    shape: tuple[int, int, int] = (19, 40, 20)
    dtype: torch.dtype = torch.float32
    sizes: tuple[int, ...] | None = None
    reduce: torch.dtype | None = None
    out: torch.dtype | None = None
    transposed: bool = False
    calls: int = 3

    def whole(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the unsharded A and B."""
        m, n, k = self.shape
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(shape, generator=generator).to(self.dtype) for shape in ((m, k), (k, n))]
        return made[0], made[1]

    def shards(self, a: torch.Tensor, b: torch.Tensor, world: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the shards of each rank; column shards are not contiguous, and with `transposed` none is row-major."""
        problem = DistributedGemm.of(self.collective, *self.shape, world, self.dtype, sizes=self.sizes)
        k = self.shape[2]
        cuts = [0, *sorted((7 * rank * k) // (7 * world - 1) for rank in range(1, world)), k]  # uneven shards of K
        k_sizes = [cuts[rank + 1] - cuts[rank] for rank in range(world)]
        if self.collective == "all_scatter":
            pairs = [(a, shard) for shard in b.split(problem.sizes, 1)]
        elif self.collective == "ag_gemm":
            pairs = [(shard, b) for shard in a.split(problem.sizes)]
        else:
            pairs = list(zip(a.split(k_sizes, 1), b.split(k_sizes), strict=True))
        return [(x.T.contiguous().T, y.T.contiguous().T) for x, y in pairs] if self.transposed else pairs

    def check(self, got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        want = a.double() @ b.double()
        assert got.shape == want.shape
        assert got.dtype == (self.out or self.dtype)
        allowed = ALLOWED[got.dtype] + (ALLOWED[self.reduce] if self.reduce else 0)
        error = float((got.double() - want).norm() / want.norm())
        assert error <= allowed, (self, error)


def run_cases(rank, world, group, cases, delay_seconds=0.0):
    """Return the results of all calls of all cases on this rank; the last rank delays its second call."""
    results = []
    with open_heap(group, bytes=2**21, device="cpu", timeout=30) as heap:
        for number, case in enumerate(cases):
            m, n, k = case.shape
            options = dict(variant=case.variant, shots=case.shots, sizes=case.sizes, mode="data_parallel")
            options |= dict(reduce_dtype=case.reduce, out_dtype=case.out)
            with FusedGemm(heap, case.collective, m, n, k, case.dtype, **options) as gemm:
                assert heap.usage.used <= gemm.plan.heap_bytes
                for call in range(case.calls):
                    time.sleep(delay_seconds if rank == world - 1 and call == 1 else 0)
                    a, b = case.shards(*case.whole(10 * number + call), world)[rank]
                    result = gemm(a, b, copy=call % 2 == 0)
                    results.append(result.clone())
    return results


def check_calls(case, number, by_rank):
    """Check that all calls of a case are right, with the same bits on every rank."""
    for call in range(case.calls):
        a, b = case.whole(10 * number + call)
        got = [results[call] for results in by_rank]
        if case.collective == "gemm_rs":
            case.check(torch.cat(got), a, b)
            continue
        case.check(got[0], a, b)
        for x in got[1:]:
            assert torch.equal(x, got[0]), case


def run_and_check(pool, world, cases, delay_seconds=0.0):
    """Run cases on all ranks, check their results, and return them by rank."""
    by_rank = pool.run(world, run_cases, cases, delay_seconds, timeout=240)
    first = 0
    for number, case in enumerate(cases):
        check_calls(case, number, [results[first : first + case.calls] for results in by_rank])
        first += case.calls
    return by_rank


#: (collective, shots) of every collective.
ALL_COLLECTIVES = [
    ("all_scatter", None),
    ("all_reduce", 1),
    ("all_reduce", 2),
    ("ag_gemm", None),
    ("gemm_rs", None),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_match_float64_on_changing_inputs(pool, variant):
    calls = 2 if variant == "bulk" else 3
    run_and_check(pool, 2, [Case(collective, variant, shots, calls=calls) for collective, shots in ALL_COLLECTIVES])


@pytest.mark.parametrize("variant", VARIANTS)
def test_four_processes_match_float64_on_uneven_shards(pool, variant):
    """Uneven shards, a rank without any, and a result smaller than one tile per rank."""
    sizes = {"all_scatter": (1, 0, 20, 16), "ag_gemm": (2, 0, 15, 1), "gemm_rs": (0, 15, 2, 1)}
    cases = [
        Case(collective, variant, shots, (18, 37, 10), sizes=sizes.get(collective), calls=2)
        for collective, shots in ALL_COLLECTIVES
    ]
    run_and_check(pool, 4, cases)


def test_dtypes_strides_and_rounded_partial_sums_match_float64(pool):
    cases = [
        Case("all_scatter", "epilogue", dtype=torch.bfloat16, calls=1),
        Case("all_scatter", "producer_consumer", dtype=torch.float16, out=torch.float32, calls=1, transposed=True),
        Case("all_reduce", "epilogue", 2, dtype=torch.float16, calls=1, transposed=True),
        Case("all_reduce", "producer_consumer", 1, dtype=torch.bfloat16, reduce=torch.bfloat16, calls=1),
        Case("ag_gemm", "producer_consumer", dtype=torch.float16, calls=1, transposed=True),
        Case("ag_gemm", "epilogue", dtype=torch.bfloat16, calls=1),
        Case("gemm_rs", "bulk", dtype=torch.bfloat16, reduce=torch.float16, calls=1),
        Case("gemm_rs", "epilogue", dtype=torch.float16, out=torch.float32, calls=1, transposed=True),
    ]
    run_and_check(pool, 2, cases)


def test_rank_without_rows_does_not_run_ahead_of_a_late_rank(pool):
    """Rank 0 receives no tiles, so only the begun flags keep it from the next call."""
    run_and_check(pool, 2, [Case("gemm_rs", "epilogue", shape=(5, 8, 8), sizes=(0, 5), calls=6)], delay_seconds=0.7)


def test_all_reduce_and_reduce_scatter_variants_give_the_same_bits(pool):
    """Partial sums are the same, and every reducer adds them in rank order."""
    cases = [Case("all_reduce", variant, shots, calls=1) for variant in VARIANTS for shots in (1, 2)]
    cases += [Case("gemm_rs", variant, calls=1) for variant in VARIANTS]
    by_rank = pool.run(2, run_on_same_inputs, cases, timeout=120)
    sums = [by_rank[0][number] for number in range(6)]
    sums += [torch.cat([results[number] for results in by_rank]) for number in range(6, 9)]
    for x in sums:
        assert torch.equal(x, sums[0])


def run_on_same_inputs(rank, world, group, cases):
    """Return the first call of each case, all on the same inputs."""
    results = []
    with open_heap(group, bytes=2**21, device="cpu", timeout=30) as heap:
        for case in cases:
            options: Any = dict(variant=case.variant, shots=case.shots, mode="data_parallel")
            with FusedGemm(heap, case.collective, *case.shape, **options) as gemm:
                results.append(gemm(*case.shards(*case.whole(0), world)[rank]))
    return results


def run_with_process_group(rank, world, group, cases):
    """Return the results of all cases, computed with a process group."""
    results = []
    for number, case in enumerate(cases):
        options: Any = dict(sizes=case.sizes, reduce_dtype=case.reduce, out_dtype=case.out)
        m, n, k = case.shape
        gemm = FusedGemm(group, case.collective, m, n, k, case.dtype, **options)
        assert gemm.plan.backend == "group"
        for name in ("timed", "config"):
            heap_only: Any = {name: True}
            with pytest.raises(ValueError, match="give a heap"):
                FusedGemm(group, case.collective, m, n, k, case.dtype, **heap_only)
        assert gemm.plan.heap_bytes == 0
        for call in range(case.calls):
            results.append(gemm(*case.shards(*case.whole(10 * number + call), world)[rank]))
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_process_group_matches_float64_without_a_heap(pool, world):
    sizes = {"all_scatter": (1, 0, 20, 19), "ag_gemm": (2, 0, 16, 1), "gemm_rs": (0, 16, 2, 1)} if world == 4 else {}
    cases = [
        Case(collective, "bulk", dtype=dtype, sizes=sizes.get(collective), calls=2)
        for collective in ("all_scatter", "all_reduce", "ag_gemm", "gemm_rs")
        for dtype in (torch.float32, torch.bfloat16)
    ]
    by_rank = pool.run(world, run_with_process_group, cases)
    for number, case in enumerate(cases):
        check_calls(case, number, [results[2 * number : 2 * number + 2] for results in by_rank])
    exact = Case("gemm_rs", "bulk", dtype=torch.float64, calls=1)
    a, b = exact.whole(0)
    got = torch.cat([results[0] for results in pool.run(world, run_with_process_group, [exact])])
    torch.testing.assert_close(got, a @ b)


def open_different_problems(rank, world, group):
    with open_heap(group, bytes=2**20, device="cpu", timeout=10) as heap:
        FusedGemm(heap, "all_reduce", 16, 16 + 16 * rank, 16)


def test_ranks_with_different_problems_raise(pool):
    with pytest.raises(Exception, match=r"ranks disagree in n of a fused GEMM: rank 0 has 16, rank 1 32") as raised:
        pool.run(2, open_different_problems)
    assert DisagreementError.__name__ in str(raised.value)


def kill_rank_1_before_its_reduction(rank, world, report):
    """In the second call rank 1 sends its partial tiles and is killed before it reduces its own tiles."""
    heap = open_heap(bytes=2**20, device="cpu", timeout=2)
    gemm = FusedGemm(heap, "all_reduce", 33, 40, 18, variant="epilogue", shots=2)
    case = Case("all_reduce", "epilogue", 2, (33, 40, 18))
    a, b = case.whole(0)
    operands = case.shards(a, b, world)[rank]
    case.check(gemm(*operands), a, b)
    if rank == 1:
        distributed_launch.reduce_tiles = lambda *arguments: os.kill(os.getpid(), signals.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(TransportError) as raised:
        gemm(*operands)
    report((rank, str(raised.value), time.monotonic() - begin))


def test_rank_killed_in_a_call_raises_on_the_others(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # new processes import this file as tests.gemm.test_fused
    reports: list[Any] = []
    with pytest.raises(RankError, match="rank 1 died with exit code -9"):
        run_ranks(3, kill_rank_1_before_its_reduction, timeout=120, listen=reports.append)
    assert sorted(report[0] for report in reports) == [0, 2]
    for rank, text, seconds in reports:
        assert text.startswith(f"rank {rank} waited 2 s in step 2 for rank 1, whose signal stands at")
        assert text.endswith("of rank 1 has ended")
        assert seconds < 20
