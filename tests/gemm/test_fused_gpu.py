"""Fused GEMMs of ranks that share a GPU, through MPS or as streams of one process: run with `-m gpu`."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshflash.comm.heap.api import open_heap
from meshflash.comm.transports.contract import TransportError
from meshflash.gemm import FusedGemm, configs
from meshflash.gemm.distributed import api as distributed_api
from meshflash.gemm.distributed import launch as distributed_launch
from meshflash.gemm.distributed.plan import VARIANTS, FusedPlan
from meshflash.gemm.distributed.problem import DistributedGemm
from meshflash.kernels.hopper.support import has_gluon
from meshflash.runtime import mps
from meshflash.runtime.devices import take_device
from meshflash.runtime.processes import RankError, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

#: Relative errors as in test_gemm_gpu.py; a rounded reduce dtype adds its own.
ALLOWED = {torch.float32: 3e-6, torch.bfloat16: 2.5e-3, torch.float16: 4e-4}
ALL_COLLECTIVES = [("all_scatter", None), ("all_reduce", 1), ("all_reduce", 2), ("ag_gemm", None), ("gemm_rs", None)]
#: Tile-aligned and ragged shapes.
SHAPES = [(2048, 2048, 4096), (1003, 777, 1501)]
HEAP_BYTES = 2**29
#: Shapes of the warp-specialized kernel on 2 and 4 ranks: tile-aligned, and ragged but TMA-aligned.
TMA_ALIGNED = [(2048, 2048, 4096), (1003, 1312, 1496)]
#: Shapes with split tiles: less than one wave, and a tail after one wave.
WITH_SPLIT_TILES = [(1536, 1536, 4096), (2816, 1536, 4096)]
#: Configurations with one and with two output buffers.
WARP_SPECIALIZED = tuple(
    replace(config, num_stages=config.num_stages - fewer)
    for config in configs.HOPPER_CANDIDATES
    if config.warp_specialized
    for fewer in (0, 1)
)
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_gluon(torch.device("cuda")), reason="needs a Hopper GPU and Gluon"
)


def shards(collective, world, shape, dtype, seed):
    """Return the shards of each rank, and the unsharded result in float64."""
    m, n, k = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    a, b = (torch.randn(size, generator=generator, device="cuda").to(dtype) for size in ((m, k), (k, n)))
    want = a.double() @ b.double()
    sizes = DistributedGemm.of(collective, m, n, k, world, dtype).sizes
    if collective == "all_scatter":
        return [(a, shard) for shard in b.split(sizes, 1)], want
    if collective == "ag_gemm":
        return [(shard, b) for shard in a.split(sizes)], want
    k_sizes = DistributedGemm.of("ag_gemm", k, n, m, world, dtype).sizes
    return list(zip(a.split(k_sizes, 1), b.split(k_sizes), strict=True)), want


def shard_of_result(collective, rank, world, want):
    """Return a rank's shard of the unsharded result."""
    if collective != "gemm_rs":
        return want
    return want.split(DistributedGemm.of(collective, len(want), want.shape[1], 1, world, torch.float32).sizes)[rank]


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


def checksum(x):
    """Return a checksum of the bits of a tensor."""
    words = x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32).long().flatten()
    return int((words * (torch.arange(len(words), device=words.device) % 8191 + 1)).sum())


def run_all_variants_repeatedly(rank, world, report, calls):
    """Run many calls of each collective and variant on changing inputs; report errors and checksums."""
    device = take_device("cuda", rank)
    heap = open_heap(bytes=HEAP_BYTES, device=device, timeout=60)
    for collective, shots in ALL_COLLECTIVES:
        for variant in VARIANTS:
            for shape in SHAPES:
                for dtype in (torch.bfloat16, torch.float32) if shape == SHAPES[1] else (torch.bfloat16,):
                    name = f"{collective} {shots} {variant} {shape} {dtype}"
                    inputs = [shards(collective, world, shape, dtype, seed) for seed in range(3)]
                    gemm = FusedGemm(heap, collective, *shape, dtype, variant=variant, shots=shots)
                    worst, checksums = 0.0, dict[int, set[int]]()
                    for call in range(calls):
                        seed = call % 3
                        out = gemm(*inputs[seed][0][rank], copy=call % 2 == 0)
                        checksums.setdefault(seed, set()).add(checksum(out))
                        worst = max(worst, error(out, shard_of_result(collective, rank, world, inputs[seed][1])))
                    gemm.free()
                    heap.barrier()
                    report(
                        (name, rank, worst / ALLOWED[dtype], {seed: sorted(found) for seed, found in checksums.items()})
                    )
    heap.close()


@pytest.mark.parametrize("world", [2, 4])
def test_processes_on_one_gpu_match_float64_on_changing_inputs(world):
    if mps.missing():
        pytest.skip(str(mps.missing()))
    reports: list[Any] = []
    with mps.mps():
        run_ranks(world, run_all_variants_repeatedly, 200, timeout=1500, listen=reports.append)
    assert len(reports) == world * len(ALL_COLLECTIVES) * len(VARIANTS) * (len(SHAPES) + 1)
    check_reports(reports)


def check_reports(reports):
    """Check errors, and that bits are the same in each call and on all ranks."""
    found: dict[str, list[Any]] = {}
    for name, rank, worst, checksums in reports:
        assert worst <= 1, (name, rank, worst)
        assert all(len(different) == 1 for different in checksums.values()), (name, rank, "not the same bits each time")
        found.setdefault(name, []).append(checksums)
    for name, checksums in found.items():
        if not name.startswith("gemm_rs"):
            assert all(one == checksums[0] for one in checksums), (name, "not the same bits on all ranks")


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("collective", "shots"), ALL_COLLECTIVES)
def test_ranks_emulated_in_one_process_match_float64(collective, shots, variant, world):
    for shape in SHAPES:
        with (
            open_heap(world, bytes=HEAP_BYTES, device="cuda", timeout=30) as heap,
            FusedGemm(heap, collective, *shape, torch.bfloat16, variant=variant, shots=shots) as gemm,
        ):
            for seed in range(20):
                pairs, want = shards(collective, world, shape, torch.bfloat16, seed)
                outs = gemm([a for a, _ in pairs], [b for _, b in pairs])
                for rank, out in enumerate(outs):
                    assert error(out, shard_of_result(collective, rank, world, want)) <= ALLOWED[torch.bfloat16]
                    assert collective == "gemm_rs" or torch.equal(out, outs[0])
            heap.check()


@pytest.fixture
def warp_specialized_ranks(monkeypatch):
    """Record the ranks that launch the warp-specialized kernel, in order."""
    ranks: list[int] = []
    send = distributed_launch.send_warp_specialized

    def record(buffers, *arguments):
        ranks.append(buffers.rank)
        send(buffers, *arguments)

    monkeypatch.setattr(distributed_launch, "send_warp_specialized", record)
    return ranks


@contextmanager
def not_time_shared():
    """Plan as if each rank had a separate GPU with as many SMs as its share of this one."""
    plan_fused = distributed_api.plan_fused

    def planned(*arguments: Any, num_sms: int, **options: Any) -> FusedPlan:
        plan = plan_fused(*arguments, num_sms=num_sms, **options)
        return (
            replace(plan, time_shared=False, num_ctas=num_sms * plan.tiling.ctas_per_sm) if plan.time_shared else plan
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_api, "plan_fused", planned)
        yield


@needs_hopper
@pytest.mark.parametrize(
    ("config", "world"),
    [
        *((config, world) for config in WARP_SPECIALIZED for world in (2, 4)),
        (WARP_SPECIALIZED[0], 1),
        (WARP_SPECIALIZED[0], 8),
    ],
)
def test_warp_specialized_all_scatter_in_one_process_matches_float64(config, world, warp_specialized_ranks):
    calls, num_split_tiles = 20, 0
    for shape in [*TMA_ALIGNED, *WITH_SPLIT_TILES] if world < 8 else TMA_ALIGNED[:1]:
        warp_specialized_ranks.clear()
        with (
            not_time_shared() if shape in WITH_SPLIT_TILES else nullcontext(),
            open_heap(world, bytes=HEAP_BYTES, device="cuda", timeout=30) as heap,
            FusedGemm(
                heap, "all_scatter", *shape, torch.bfloat16, variant="epilogue", config=config, timed=True
            ) as gemm,
        ):
            for seed in range(calls):
                pairs, want = shards("all_scatter", world, shape, torch.bfloat16, seed)
                bs = [b.contiguous() for _, b in pairs]
                outs = gemm([a for a, _ in pairs], bs, copy=seed % 2 == 0)
                for out in outs:
                    assert error(out, want) <= ALLOWED[torch.bfloat16]
                    assert torch.equal(out, outs[0])
            heap.check()
            for rank, times in gemm.times.items():
                own = times[: gemm.plan.tiles_m * gemm.plan.tiles_n(rank)]
                assert (own[:, 0] > 0).all()
                assert (own[:, 1] >= own[:, 0]).all()
            num_split_tiles += gemm.plan.partition(0).num_split_tiles
        assert warp_specialized_ranks == list(range(world)) * calls
    assert world == 8 or num_split_tiles > 0


@needs_hopper
@pytest.mark.parametrize("layout", ["nt", "tn", "tt"])
def test_warp_specialized_all_scatter_with_transposed_operands_matches_float64(layout, warp_specialized_ranks):
    shape = TMA_ALIGNED[1]
    with (
        open_heap(2, bytes=HEAP_BYTES, device="cuda", timeout=30) as heap,
        FusedGemm(
            heap, "all_scatter", 1000, *shape[1:], torch.float16, variant="epilogue", config=WARP_SPECIALIZED[0]
        ) as gemm,
    ):
        pairs, want = shards("all_scatter", 2, (1000, *shape[1:]), torch.float16, 0)

        def in_layout(x, how):
            return x.T.contiguous().T if how == "t" else x.contiguous()

        outs = gemm([in_layout(a, layout[0]) for a, _ in pairs], [in_layout(b, layout[1]) for _, b in pairs])
        assert all(error(out, want) <= ALLOWED[torch.float16] for out in outs)
        assert warp_specialized_ranks == [0, 1]


@needs_hopper
def test_ranks_with_unaligned_columns_use_the_triton_kernel(warp_specialized_ranks):
    """Ranks with different kernels count the same arrivals."""
    m, n, k = 1024, 1001, 4096
    with (
        not_time_shared(),
        open_heap(3, bytes=HEAP_BYTES, device="cuda", timeout=30) as heap,
        FusedGemm(
            *(heap, "all_scatter", m, n, k, torch.bfloat16),
            sizes=(512, 333, 156),
            variant="epilogue",
            config=WARP_SPECIALIZED[0],
        ) as gemm,
    ):
        a, b = (torch.randn(size, device="cuda").bfloat16() for size in ((m, k), (k, n)))
        bs = [x.contiguous() for x in b.split((512, 333, 156), 1)]
        for _ in range(5):
            outs = gemm([a] * 3, bs)
            heap.check()
            assert all(error(out, a.double() @ b.double()) <= ALLOWED[torch.bfloat16] for out in outs)
            assert all(torch.equal(out, outs[0]) for out in outs)
        assert gemm.plan.partition(0).num_split_tiles > 0
    assert warp_specialized_ranks == [0] * 5


def run_warp_specialized_repeatedly(rank, world, report, calls):
    """Run many calls of the warp-specialized all_scatter on changing inputs; report errors and checksums."""
    device = take_device("cuda", rank)
    heap = open_heap(bytes=HEAP_BYTES, device=device, timeout=60)
    for config in WARP_SPECIALIZED[:2]:
        for shape in (*TMA_ALIGNED, WITH_SPLIT_TILES[0]):
            inputs = [shards("all_scatter", world, shape, torch.bfloat16, seed) for seed in range(3)]
            own = [(pairs[rank][0], pairs[rank][1].contiguous(), want) for pairs, want in inputs]
            with not_time_shared() if shape in WITH_SPLIT_TILES else nullcontext():
                gemm = FusedGemm(heap, "all_scatter", *shape, torch.bfloat16, variant="epilogue", config=config)
            assert (gemm.plan.partition(rank).num_split_tiles > 0) == (shape in WITH_SPLIT_TILES)
            assert gemm._exchange is not None
            assert all(gemm._exchange._peer_columns[rank]), "the warp-specialized kernel must run"
            worst, checksums = 0.0, dict[int, set[int]]()
            for call in range(calls):
                a, b, want = own[call % 3]
                out = gemm(a, b, copy=call % 2 == 0)
                checksums.setdefault(call % 3, set()).add(checksum(out))
                worst = max(worst, error(out, want))
            gemm.free()
            heap.barrier()
            by_seed = {seed: sorted(found) for seed, found in checksums.items()}
            report((f"{config} {shape}", rank, worst / ALLOWED[torch.bfloat16], by_seed))
    heap.close()


@needs_hopper
@pytest.mark.parametrize("world", [2, 4])
def test_warp_specialized_all_scatter_across_processes_matches_float64(world):
    if mps.missing():
        pytest.skip(str(mps.missing()))
    reports: list[Any] = []
    with mps.mps():
        run_ranks(world, run_warp_specialized_repeatedly, 200, timeout=900, listen=reports.append)
    assert len(reports) == world * 2 * (len(TMA_ALIGNED) + 1)
    check_reports(reports)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("collective", "shots"), ALL_COLLECTIVES)
def test_dtypes_and_rounded_partial_sums_match_float64(collective, shots, dtype):
    shape = SHAPES[1]
    with open_heap(2, bytes=HEAP_BYTES, device="cuda", timeout=30) as heap:
        for reduce in (torch.float32, torch.bfloat16):
            options = dict(variant="epilogue", shots=shots, reduce_dtype=reduce)
            with FusedGemm(heap, collective, *shape, dtype, **options) as gemm:
                pairs, want = shards(collective, 2, shape, dtype, 0)
                outs = gemm([a for a, _ in pairs], [b for _, b in pairs])
                allowed = ALLOWED[dtype] + (ALLOWED[reduce] if reduce != torch.float32 else 0)
                for rank, out in enumerate(outs):
                    assert error(out, shard_of_result(collective, rank, 2, want)) <= allowed


def test_cuda_graph_capture_raises():
    with (
        open_heap(2, bytes=2**22, device="cuda", timeout=30) as heap,
        FusedGemm(heap, "all_scatter", 64, 64, 64, variant="epilogue") as gemm,
    ):
        pairs, _ = shards("all_scatter", 2, (64, 64, 64), torch.float32, 0)
        a, b = [a for a, _ in pairs], [b for _, b in pairs]
        gemm(a, b)
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            gemm(a, b)


def skip_second_call_on_rank_1(rank, world, report, collective, shots, dtype, config):
    """Rank 1 skips the second call; the others name it, and their results have NaN."""
    device = take_device("cuda", rank)
    shape = (512, 768, 512)
    pairs, want = shards(collective, world, shape, dtype, 0)
    pairs = [(a, b.contiguous()) for a, b in pairs]
    for seconds in (60, 4):  # the first call compiles, which takes longer than the second timeout
        heap = open_heap(bytes=2**26, device=device, timeout=seconds)
        gemm = FusedGemm(heap, collective, *shape, dtype, variant="epilogue", shots=shots, config=config)
        assert error(gemm(*pairs[rank]), want) <= ALLOWED[dtype]
        heap.barrier()
        if seconds == 60:
            gemm.free()
            heap.close()
    if rank == 1:
        return
    out = gemm(*pairs[rank])
    with pytest.raises(TransportError) as raised:
        heap.check()
    report((rank, str(raised.value), bool(out.isnan().any())))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("all_reduce", 2, torch.float32, None), id="all_reduce"),
        pytest.param(
            ("all_scatter", None, torch.bfloat16, WARP_SPECIALIZED[0]),
            id="all_scatter warp-specialized",
            marks=needs_hopper,
        ),
    ],
)
def test_rank_that_skips_a_call_is_named_by_the_others(case):
    if mps.missing():
        pytest.skip(str(mps.missing()))
    reports: list[Any] = []
    with mps.mps(), suppress(RankError):  # rank 1 waits at the end for the others, or they for it
        run_ranks(3, skip_second_call_on_rank_1, *case, timeout=200, listen=reports.append)
    assert sorted(report[0] for report in reports) == [0, 2]
    for rank, text, has_nan in reports:
        assert text.startswith(f"rank {rank} waited 4 s in step 2 for rank 1")
        assert has_nan
