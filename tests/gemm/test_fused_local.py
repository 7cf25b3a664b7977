"""Fused GEMMs whose ranks are emulated in one process, their plans, and their errors."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from meshflash.comm.heap.api import open_heap
from meshflash.comm.transports.contract import TransportError
from meshflash.gemm import FusedGemm, FusedPlan, configs, rates
from meshflash.gemm.configs import Config
from meshflash.gemm.distributed import launch as distributed_launch
from meshflash.gemm.distributed import plan as distributed_plan
from meshflash.gemm.distributed.api import _check_agreement
from meshflash.gemm.distributed.exchange import Exchange
from meshflash.gemm.distributed.plan import (
    BULK,
    VARIANTS,
    FusedConfig,
    elements_per_sm,
    plan_fused,
    rate_layout,
    rate_mode,
    sms_per_rank,
)
from meshflash.gemm.distributed.problem import COLLECTIVES, DistributedGemm
from meshflash.gemm.distributed.tiles import peer_of, reducer_of_tile, section_of, split
from meshflash.gemm.launch import describe_operands
from meshflash.gemm.partition import stream_k
from meshflash.gemm.rates import Known, Rate, Table
from meshflash.kernels.triton import configs as triton_configs
from meshflash.kernels.triton.common import INTERPRETED

CONFIG = Config(16, 32, 16, 1, 1)
LARGE = Config(128, 256, 64, 8, 3)
CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="test_fused_gpu.py runs them on a GPU")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill uninitialized memory with NaN."""
    empty = torch.empty

    def poison(*args, **options):
        x = empty(*args, **options)
        return x.fill_(torch.nan) if x.dtype.is_floating_point else x

    monkeypatch.setattr(torch, "empty", poison)


def open_local_heap(world, timeout=20.0):
    return open_heap(world, bytes=2**20, device="cpu", timeout=timeout)


def operands(collective, world, m, n, k, dtype=torch.float32, seed=0):
    """Return the shards of A and B by rank, and the unsharded result in float64."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (k, n)))
    if collective == "all_scatter":
        return [a] * world, list(b.split(split(n, world), 1)), a.double() @ b.double()
    if collective == "ag_gemm":
        return list(a.split(split(m, world))), [b] * world, a.double() @ b.double()
    k_sizes = split(k, world)
    return list(a.split(k_sizes, 1)), list(b.split(k_sizes)), a.double() @ b.double()


def check(collective, outs, want, allowed=1e-6):
    """Check that all ranks have the same bits, close to float64."""
    if collective == "gemm_rs":
        outs = [torch.cat(outs)]
    for out in outs:
        assert torch.equal(out, outs[0])
    assert float((outs[0].double() - want).norm()) <= allowed * float(want.norm())


@interpreted
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_three_ranks_in_one_process_match_float64(collective, variant):
    with open_local_heap(3) as heap, FusedGemm(heap, collective, 18, 33, 12, variant=variant) as gemm:
        for seed in range(2):
            a, b, want = operands(collective, 3, 18, 33, 12, seed=seed)
            check(collective, gemm(a, b), want)


@interpreted
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_empty_and_tiny_shapes_match_float64(collective, variant):
    with open_local_heap(2) as heap:
        for m, n, k in [(0, 5, 4), (5, 0, 4), (5, 4, 0), (1, 1, 1)]:
            with FusedGemm(heap, collective, m, n, k, variant=variant) as gemm:
                a, b, want = operands(collective, 2, m, n, k)
                outs = gemm(a, b)
                check(collective, outs, want)
                assert outs[0].shape == ((split(m, 2)[0], n) if collective == "gemm_rs" else (m, n))


@interpreted
@pytest.mark.parametrize(
    ("collective", "variant"),
    [(name, "producer_consumer") for name in ("all_scatter", "ag_gemm", "gemm_rs")] + [("ag_gemm", "epilogue")],
)
def test_operands_are_loaded_by_tma_descriptors(collective, variant, monkeypatch):
    """If rows are read from their rank's memory, the kernel makes the descriptors itself."""
    made: list[Any] = []

    def record(*given):
        found = describe_operands(*given)
        made.extend(found or ())
        return found

    monkeypatch.setattr(triton_configs, "has_descriptors", lambda device: True)
    monkeypatch.setattr(distributed_launch, "describe_operands", record)
    with open_local_heap(2) as heap, FusedGemm(heap, collective, 20, 32, 32, torch.float16, variant=variant) as gemm:
        a, b, want = operands(collective, 2, 20, 32, 32, torch.float16)
        check(collective, gemm(a, b), want, 6e-4)
    assert len(made) == 4


@interpreted
def test_uncopied_results_stay_valid_until_the_next_call():
    with open_local_heap(2) as heap, FusedGemm(heap, "all_scatter", 4, 6, 5, variant="epilogue") as gemm:
        first = operands("all_scatter", 2, 4, 6, 5, seed=0)
        uncopied = gemm(*first[:2], copy=False)
        copied = gemm(*first[:2])
        check("all_scatter", uncopied, first[2])
        for seed in (1, 2):
            gemm(*operands("all_scatter", 2, 4, 6, 5, seed=seed)[:2])
        check("all_scatter", copied, first[2])
        assert not torch.allclose(uncopied[0].double(), first[2])


@interpreted
def test_gathered_rows_are_available_after_a_call():
    with open_local_heap(2) as heap:
        for variant in ("producer_consumer", "bulk"):
            with FusedGemm(heap, "ag_gemm", 5, 6, 7, variant=variant) as gemm:
                with pytest.raises(RuntimeError, match="after a call"):
                    gemm.gathered()
                a, b, _ = operands("ag_gemm", 2, 5, 6, 7)
                gemm(a, b)
                assert all(torch.equal(gemm.gathered(rank), torch.cat(a)) for rank in range(2))


@interpreted
@pytest.mark.parametrize(
    ("collective", "variant"),
    [
        ("all_scatter", "producer_consumer"),
        ("all_reduce", "epilogue"),
        ("ag_gemm", "producer_consumer"),
        ("gemm_rs", "epilogue"),
    ],
)
def test_recorded_tile_times_are_in_order(collective, variant):
    """With 2 x 2 tiles, each rank computes all or one column of them, and reduces half or none."""
    options = dict(variant=variant, shots=2 if collective == "all_reduce" else None)
    with open_local_heap(2) as heap, FusedGemm(heap, collective, 20, 40, 18, timed=True, **options) as gemm:
        a, b, want = operands(collective, 2, 20, 40, 18)
        check(collective, gemm(a, b), want)
        for times in gemm.times.values():
            computed, sent, received = times.T
            assert computed.count_nonzero() == (2 if collective == "all_scatter" else 4)
            if collective == "ag_gemm":
                assert received.all()
                assert (computed >= received).all()
                assert not sent.any()  # tiles of A are sent, and are not timed
            else:
                assert (sent >= computed).all()
                assert sent.count_nonzero() == computed.count_nonzero()
                assert received.count_nonzero() == (0 if collective == "all_scatter" else 2)


@interpreted
@pytest.mark.parametrize(
    ("collective", "shots", "dtype"),
    [
        ("all_scatter", None, torch.bfloat16),
        ("all_reduce", 1, torch.float32),
        ("all_reduce", 2, torch.float16),
        ("ag_gemm", None, torch.float32),
        ("gemm_rs", None, torch.bfloat16),
    ],
)
def test_missing_rank_is_named_and_its_elements_are_nan(collective, shots, dtype, monkeypatch):
    """Rank 1 launches nothing in the second call."""
    launch_stage, stages = Exchange._launch_stage, Exchange._stages
    seen: dict[int, torch.Tensor] = {}

    def launch_on_rank_0(self, rank, stage):
        if rank == 0 or self.epoch == 1:
            launch_stage(self, rank, stage)

    def record(self, buffers, a, b, results):
        made = stages(self, buffers, a, b, results)
        seen.update(results)
        return made

    monkeypatch.setattr(Exchange, "_launch_stage", launch_on_rank_0)
    monkeypatch.setattr(Exchange, "_stages", record)
    a, b, want = operands(collective, 2, 20, 40, 18, dtype)

    def call_twice():
        with open_local_heap(2, timeout=0.2) as heap:
            gemm = FusedGemm(heap, collective, 20, 40, 18, dtype, variant="epilogue", shots=shots)
            check(collective, gemm(a, b), want, 6e-3)
            gemm(a, b)

    with pytest.raises(TransportError, match=r"rank 0 waited 0.2 s in step 2 for rank 1, whose signal stands at"):
        call_twice()
    assert seen[0].isnan().any()


def test_every_tile_has_one_reducer_and_counters_expect_its_arrivals():
    for world in (1, 2, 3, 4, 8):
        assert sum(split(17, world)) == 17
        assert sorted(section_of(step, 2, world) for step in range(world)) == list(range(world))
        for rank in range(world):
            assert [peer_of(step, rank, world) for step in range(world)][-1] == rank
        for m, n in ((1, 1), (40, 33), (100, 300)):
            problem = DistributedGemm.of("all_reduce", m, n, 64, world, torch.float32)
            plan = FusedPlan(problem, "epilogue", 2, "", CONFIG, 4)
            tiles = plan.tiles_m * plan.tiles_n(0)
            reducers = [reducer_of_tile(0, tile, world, 1) for tile in range(tiles)]
            assert len(set(reducers)) == tiles
            assert all(slot < plan.num_slots for _, slot in reducers)
            assert plan.expected_arrivals() == [
                sum(reducer == rank for reducer, _ in reducers) for rank in range(world)
            ]
            rows = DistributedGemm.of("gemm_rs", m, n, 64, world, torch.float32)
            assert FusedPlan(rows, "epilogue", 0, "", CONFIG, 4).num_slots * world >= tiles
            columns = FusedPlan(
                DistributedGemm.of("all_scatter", m, n, 64, world, torch.float32), BULK, 0, "", CONFIG, 4
            )
            assert sum(columns.expected_arrivals()) == sum(-(-m // 16) * -(-part // 32) for part in split(n, world))


def test_all_scatter_splits_tiles_where_sms_would_be_idle():
    def planned(k, config, variant="epilogue", num_sms=132):
        problem = DistributedGemm.of("all_scatter", 8192, 4608, k, 4, torch.bfloat16)
        return FusedPlan(problem, variant, 0, "", config, num_sms)

    warp_specialized = Config(256, 128, 64, 8, 4, warp_specialized=1)
    plan = planned(36864, warp_specialized)
    split = plan.partition(0)
    assert (split.num_tiles, split.num_split_tiles, split.num_ctas) == (288, 24, 132)  # 2 waves, and a tail of 24 tiles
    assert "132 CTAs, 24 tiles of the first rank split along K, " in str(plan)
    assert "split along K" not in str(planned(1024, warp_specialized))
    # 2 waves and a third of 16 iterations: splitting costs as much
    assert planned(1024, warp_specialized).partition(0).num_split_tiles == 0
    # 8 waves and a ninth: 3% idle
    assert planned(36864, warp_specialized, num_sms=33).partition(0).num_split_tiles == 0
    assert (plan.arrivals_per_tile, plan.expected_arrivals()) == (16, [288 * 16] * 4)
    assert planned(1024, warp_specialized).expected_arrivals() == plan.expected_arrivals()
    assert planned(36864, replace(warp_specialized, warp_specialized=0)).expected_arrivals() == [288] * 4
    assert planned(36864, warp_specialized, BULK).expected_arrivals() == [288] * 4


def test_all_scatter_of_ranks_on_one_device_is_time_shared():
    """Each rank has all SMs but one for every waiting rank; other collectives divide the SMs."""

    def planned(collective, variant="epilogue", **options):
        problem = DistributedGemm.of(collective, 64, 64, 4096, 2, torch.float32)
        return plan_fused(problem, torch.device("cpu"), variant=variant, **options)

    alone, shared = planned("all_scatter"), planned("all_scatter", ranks_per_device=2, num_sms=2)
    assert (alone.num_ctas, alone.time_shared) == (5, False)
    assert (shared.num_ctas, shared.time_shared) == (3, True)
    assert " 3 CTAs, ranks in turn, " in str(shared)
    assert alone.partition(0).num_split_tiles > 0
    assert shared.partition(0).num_split_tiles == 0  # the other rank takes idle SMs
    for collective, variant in (("all_reduce", "epilogue"), ("ag_gemm", "epilogue"), ("all_scatter", BULK)):
        plan = planned(collective, variant, ranks_per_device=2, num_sms=2)
        assert (plan.num_ctas, plan.time_shared) == (2, False)


@interpreted
@pytest.mark.parametrize(
    ("tiles_m", "tiles_n", "iters_per_tile", "num_ctas"), [(3, 2, 9, 4), (2, 1, 7, 5), (1, 3, 8, 6)]
)
def test_split_tiles_are_reduced_and_stored_to_all_ranks(tiles_m, tiles_n, iters_per_tile, num_ctas):
    from meshflash.gemm.kernels.fused import send_split_tiles
    from meshflash.gemm.kernels.stream_k import swizzle_tile

    world, height, block_m, block_n = 2, 8, 16, 32
    m, n = tiles_m * block_m - 3, tiles_n * block_n - 5
    cut = stream_k(tiles_m, tiles_n, iters_per_tile, num_ctas)
    assert 0 < cut.num_split_tiles <= tiles_m * tiles_n
    partials = torch.randn(cut.num_ctas, cut.partials_per_cta, block_m, block_n)
    with open_local_heap(world) as heap:
        matrix = heap.allocate((m, n), torch.float32, name="matrix")
        arrived = heap.allocate((world,), torch.int64, name="arrived")
        for rank in range(world):
            with heap.as_rank(rank):
                matrix.local.fill_(torch.nan)
                arrived.local.zero_()
        with heap.as_rank(1):
            send_split_tiles[(cut.num_split_tiles, block_m // height)](
                *(partials, matrix.local, arrived.local, arrived.local, heap.bases, 1, m, n, n, tiles_m),
                *(iters_per_tile, cut.ctas_per_group, cut.iters_per_group),
                WORLD=world,
                PARTIALS_PER_CTA=cut.partials_per_cta,
                ROWS=height,
                LOADS_IN_FLIGHT=2,
                TIMED=False,
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                L2_SWIZZLE=8,
            )
        want = torch.full((tiles_m * block_m, tiles_n * block_n), torch.nan)
        for tile in range(cut.num_split_tiles):
            row, column = swizzle_tile(tile, tiles_m, tiles_n, 8)
            own = [cta for cta in range(cut.num_ctas) if any(t == tile for t, _, _ in cut.segments(cta))]
            total = partials[own[0], cut.partials_per_cta - 1]  # the CTA that begins a tile has it in its last slot
            for cta in own[1:]:
                total = total + partials[cta, 0]
            want[row * block_m : (row + 1) * block_m, column * block_n : (column + 1) * block_n] = total
        for rank in range(world):
            with heap.as_rank(rank):
                assert torch.equal(matrix.local.nan_to_num(9.0), want[:m, :n].nan_to_num(9.0))
                assert arrived.local.tolist() == [0, cut.num_split_tiles * (block_m // height)]
        matrix.free()
        arrived.free()


@interpreted
@pytest.mark.parametrize("sizes", [None, (0, 40, 30)])
def test_ranks_without_the_warp_specialized_kernel_count_the_same_arrivals(sizes):
    warp_specialized = replace(CONFIG, block_m=128, warp_specialized=1)
    a, b = torch.randn(150, 40), torch.randn(40, 70)
    with open_local_heap(3) as heap, FusedGemm(
        *(heap, "all_scatter", 150, 70, 40, torch.float32), variant="epilogue", sizes=sizes, config=warp_specialized
    ) as gemm:  # fmt: skip
        assert gemm.plan.arrivals_per_tile == 8
        for _ in range(3):
            for out in gemm([a] * 3, list(b.split(gemm.plan.problem.sizes, 1))):
                torch.testing.assert_close(out, a @ b)


def test_reducers_are_capped_at_one_cta_per_sm(monkeypatch):
    """With two, ranks that share the GPU could not start the GEMMs that the reducers wait for."""
    from meshflash.gemm.kernels import fused as fused_kernels

    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **constants: None

    monkeypatch.setattr(fused_kernels, "reduce_tiles", Kernel())
    problem = DistributedGemm.of("all_reduce", 64, 64, 64, 2, torch.float32)
    words = torch.zeros(1, dtype=torch.int32)
    heap_buffers: dict[str, Any] = dict.fromkeys(
        ("bases", "status", "begun", "arrived", "flags", "ready", "inbox", "matrix"), words
    )
    buffers = distributed_launch.CallBuffers(rank=0, epoch=1, **heap_buffers, section_starts=words, expected=words)
    for ctas_per_sm in (1, 2):
        plan = FusedPlan(problem, "epilogue", 2, "", replace(CONFIG, ctas_per_sm=ctas_per_sm), 5 * ctas_per_sm)
        distributed_launch.reduce_tiles(buffers, plan, torch.zeros(64, 64))
    assert grids == [(5,), (5,)]


def test_process_group_supports_the_bulk_variant_only():
    problem = DistributedGemm.of("gemm_rs", 5, 6, 7, 2, torch.float64)
    plan = plan_fused(problem, CPU, backend="group")
    assert (plan.variant, plan.heap_bytes, problem.reduce_dtype) == (BULK, 0, torch.float64)
    assert "by the process group: a process group has no memory" in str(plan)
    with pytest.raises(ValueError, match=r'needs a heap.*variant="bulk"'):
        plan_fused(problem, CPU, variant="epilogue", backend="group")


@pytest.fixture
def hopper_gpu(monkeypatch):
    """Make plans believe in a Hopper GPU of 132 SMs, without rate tables."""
    monkeypatch.setattr(configs, "num_sms", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(rates, "known", lambda device: None)
    monkeypatch.setattr(distributed_plan, "has_tested_gluon", lambda device: True)
    return torch.device("cuda")


def test_auto_takes_the_bulk_variant_without_measured_rates(hopper_gpu):
    problem = DistributedGemm.of("all_reduce", 4096, 4096, 4096, 4, torch.bfloat16)
    plan = plan_fused(problem, hopper_gpu, ranks_per_device=4)
    assert (plan.variant, plan.shots, plan.num_ctas, plan.num_comm_sms) == (BULK, 2, 33, 0)
    assert "no rates of fused GEMMs were measured on this device" in str(plan)
    two = DistributedGemm.of("all_reduce", 4096, 4096, 4096, 2, torch.bfloat16)
    assert plan_fused(two, hopper_gpu).shots == 1


def test_auto_takes_the_fastest_at_the_nearest_shape(hopper_gpu, monkeypatch):
    problem = DistributedGemm.of("all_reduce", 4096, 4096, 4096, 4, torch.bfloat16)
    slim = (64, 128, 64, 4, 4, 8, 2, 0)

    def rate(mode, m, tflops, key=None):
        config = {"epilogue": slim, "producer_consumer": (*slim, 7)}.get(mode.partition("/")[0], ())
        return Rate(mode, "bfloat16", key or rate_layout(problem, 1), m, m, m, tflops, config)

    rows = (
        rate(rate_mode("epilogue", 2), 4096, 500.0),
        rate(rate_mode(BULK, 1), 4096, 400.0),
        rate(rate_mode("producer_consumer", 1), 1024, 900.0),
        rate("torch", 4096, 999.0, "nn"),
        rate(rate_mode("producer_consumer", 1), 4096, 999.0, rate_layout(problem, 4)),
    )
    table = Table("a GPU", "sm_90", rows)
    monkeypatch.setattr(rates, "known", lambda device: Known(table, "a table"))
    plan = plan_fused(problem, hopper_gpu)
    assert (plan.variant, plan.shots, plan.config) == ("epilogue", 2, FusedConfig(*slim))
    assert plan.why == "the fastest at 4096x4096x4096 on 4 ranks (a table)"
    one = plan_fused(problem, hopper_gpu, shots=1)  # the fastest of those in one shot
    assert (one.variant, one.shots, one.why) == (BULK, 1, plan.why)
    fixed = plan_fused(problem, hopper_gpu, variant="epilogue")
    assert (fixed.shots, fixed.config, fixed.why) == (2, FusedConfig(*slim), "requested")
    assert plan_fused(problem, hopper_gpu, variant="epilogue", shots=1).config == LARGE  # not measured
    moving = plan_fused(DistributedGemm.of("all_reduce", 1024, 1024, 1024, 4, torch.bfloat16), hopper_gpu)
    assert (moving.variant, moving.shots, moving.num_comm_sms, moving.num_ctas) == ("producer_consumer", 1, 7, 2 * 125)
    nothing = DistributedGemm.of("all_reduce", 0, 64, 64, 4, torch.bfloat16)
    assert plan_fused(nothing, hopper_gpu).variant == BULK
    small = DistributedGemm.of("all_reduce", 64, 64, 64, 4, torch.bfloat16)
    assert "no fused GEMM near this one was measured (a table)" in plan_fused(small, hopper_gpu).why


def test_number_of_comm_sms_follows_from_the_bytes_moved(hopper_gpu):
    def planned(collective, k, ranks_per_device=1, num_comm_sms=0, shots=None):
        problem = DistributedGemm.of(collective, 8192, 4608, k, 4, torch.bfloat16)
        config = FusedConfig(128, 256, 64, 8, 3, num_comm_sms=num_comm_sms) if num_comm_sms else None
        return plan_fused(
            problem,
            hopper_gpu,
            variant="producer_consumer",
            ranks_per_device=ranks_per_device,
            config=config,
            shots=shots,
            num_sms=None,
        )

    plan = planned("all_scatter", 1024, 4)
    # 4 copies of its columns: the longer K, the fewer comm SMs
    assert plan.problem.moved_bytes(0) == 4 * 8192 * 1152 * 2
    assert (plan.num_ctas, plan.num_comm_sms) == (33 - 7, 7)
    assert "26 CTAs and 7 comm SMs" in str(plan)
    assert [planned("all_scatter", k, 4).num_comm_sms for k in (4096, 16384)] == [2, 1]
    assert plan.problem.moved_bytes(0) < planned("gemm_rs", 1024).problem.moved_bytes(0)
    one, two = (planned("all_reduce", 4096, 4, shots=shots) for shots in (1, 2))
    assert one.num_comm_sms > two.num_comm_sms > 1
    assert one.problem.moved_bytes(1) == 8192 * 4608 * (4 * 4 + 2)
    assert two.problem.moved_bytes(2) == 2048 * 4608 * (4 * 4 + 4 * 2)
    assert (
        planned("gemm_rs", 4096, 4, num_comm_sms=5).num_ctas,
        planned("gemm_rs", 4096, 4, num_comm_sms=5).num_comm_sms,
    ) == (28, 5)
    assert planned("gemm_rs", 4096, 4, num_comm_sms=50).num_comm_sms == 32  # at least one SM computes
    gathering = planned("ag_gemm", 4096, 4)  # copies of a gather are short, and run beside the GEMM
    assert (gathering.num_ctas, gathering.num_comm_sms) == (32, 4)


def test_default_tiles_waste_the_fewest_elements(hopper_gpu, monkeypatch):
    def chosen(collective, m, n, world=4, ranks_per_device=4, k=4096, variant="epilogue", **options):
        problem = DistributedGemm.of(collective, m, n, k, world, torch.bfloat16, **options)
        return plan_fused(problem, hopper_gpu, variant=variant, ranks_per_device=ranks_per_device).config

    assert chosen("all_reduce", 8192, 4608) == LARGE
    tall = replace(LARGE, block_m=256, block_n=128, num_stages=4)
    by_rows = replace(tall, l2_swizzle=1, warp_specialized=1)
    assert chosen("all_scatter", 8192, 4608) == by_rows  # 4.5 tiles of 256 columns; 128 CTAs cover 14 rows of 9
    assert chosen("all_scatter", 8192, 4608, ranks_per_device=1) == by_rows  # 2.2 tiles per CTA: the tail is split
    assert chosen("all_scatter", 64, 4608).block_m == 64
    few = ("all_scatter", 1024, 4096)  # 32 large tiles are split over 132 SMs if K is long enough
    assert chosen(*few, ranks_per_device=1).warp_specialized
    small = [
        chosen(*few, ranks_per_device=1, **x) for x in ({"k": 1024}, {"out_dtype": torch.float32}, {"variant": BULK})
    ]
    small.append(chosen("all_scatter", 512, 16 * 512, world=16, ranks_per_device=1))
    with monkeypatch.context() as without:
        without.setattr(distributed_plan, "has_tested_gluon", lambda device: False)
        small.append(chosen(*few, ranks_per_device=1))
    assert {(config.block_m, config.l2_swizzle, config.warp_specialized) for config in small} == {(64, 8, 0)}
    assert chosen("all_scatter", 8192, 4 * 4608) == replace(
        LARGE, warp_specialized=1
    )  # 8 rows of 18 columns are more than 128 tiles
    assert chosen("ag_gemm", 256, 4608).block_m == 64  # each rank has 64 rows
    assert chosen("all_reduce", 64, 4608).block_m == 64
    assert elements_per_sm(8192, 1152, LARGE, 33) > 1.1 * elements_per_sm(8192, 1152, tall, 33)
    assert elements_per_sm(64, 256, LARGE, 33, sections=34) == 2 * elements_per_sm(64, 256, LARGE, 33, sections=33)


def test_ranks_with_different_numbers_of_ranks_per_device_agree(hopper_gpu):
    payloads: list[dict[str, str]] = []

    def all_gather(payload):
        payloads.append(payload)
        return [payload]

    heap: Any = SimpleNamespace(_barrier=SimpleNamespace(all_gather=all_gather))
    problem = DistributedGemm.of("all_scatter", 8192, 3456, 4096, 3, torch.bfloat16)
    plans = [plan_fused(problem, hopper_gpu, variant="epilogue", ranks_per_device=number) for number in (2, 2, 1)]
    assert [(plan.num_ctas, plan.time_shared) for plan in plans] == [(130, True), (130, True), (132, False)]
    for plan in plans:
        _check_agreement(heap, plan)
    assert payloads[0] == payloads[1] == payloads[2]


def test_mps_share_counts_as_the_sms_of_a_rank(hopper_gpu, monkeypatch):
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    assert (sms_per_rank(hopper_gpu, 1), sms_per_rank(hopper_gpu, 4)) == (132, 33)
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "25")
    assert sms_per_rank(hopper_gpu, 4) == 132  # the driver reports the share of a rank as the whole device


WITH_COMM_SMS = FusedConfig(16, 32, 16, 1, 1, num_comm_sms=1)


def test_negative_comm_sms_are_refused():
    with pytest.raises(ValueError, match="num_comm_sms=-1: expected 0"):
        replace(WITH_COMM_SMS, num_comm_sms=-1)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("all_gather", 4, 4, 4), {}, "expected one of all_scatter, all_reduce, ag_gemm, gemm_rs"),
        (("all_scatter", 4, 4, -1), {}, "expected sizes >= 0 of the whole GEMM"),
        (("all_scatter", 4, 4, 4), {"sizes": (4,)}, "expected 2 numbers >= 0 with the sum 4"),
        (("all_reduce", 4, 4, 4), {"sizes": (2, 2)}, "shard of K may be of any size"),
        (("all_scatter", 4, 4, 4), {"shots": 1}, "expected 1 or 2, of an all_reduce"),
        (("all_reduce", 4, 4, 4), {"shots": 3}, "expected 1 or 2, of an all_reduce"),
        (("all_reduce", 4, 4, 4), {"variant": "tile"}, "one of auto, epilogue, producer_consumer, bulk"),
        (("all_reduce", 4, 4, 4), {"mode": "tile"}, "one of auto, stream_k"),
        (("all_reduce", 4, 4, 4), {"precision": "bf16"}, "one of ieee, tf32"),
        (("all_reduce", 4, 4, 4, torch.int32), {}, "expected torch.float32"),
        (("all_reduce", 4, 4, 4, torch.float64), {}, "no float64; give the process group instead of the heap"),
        (("all_reduce", 4, 4, 4), {"reduce_dtype": torch.float64}, "no torch.float64; give the process group"),
        (("all_reduce", 4000, 4000, 4), {}, "open_heap"),
        (("all_reduce", 4, 4, 4), {"variant": "epilogue", "config": WITH_COMM_SMS}, "epilogue has no comm SMs"),
        (("all_reduce", 4, 4, 4), {"variant": "bulk", "config": WITH_COMM_SMS}, "bulk has no comm SMs"),
    ],
)
@interpreted
def test_invalid_arguments_raise_with_a_remedy(arguments, options, message):
    with pytest.raises(ValueError, match=message), open_local_heap(2) as heap:
        FusedGemm(heap, *arguments, **options)


@interpreted
def test_operands_that_do_not_match_the_plan_raise():
    ones = torch.ones
    with open_local_heap(2) as heap, FusedGemm(heap, "all_scatter", 4, 5, 6) as gemm:
        a, b = [ones(4, 6)] * 2, [ones(6, 3), ones(6, 2)]
        wrong: list[tuple[Any, str]] = [
            ((a[0], b[0]), "has 2 ranks: expected lists of as many operands"),
            ((a[:1], b[:1]), "has 2 ranks: expected lists of as many operands"),
            (
                (a, b[::-1]),
                r"b of rank 0 is torch.float32 of \(6, 2\) on cpu: expected .* of \(6, 3\) on cpu",
            ),
            (([x.half() for x in a], b), "a of rank 0 is torch.float16"),
            ((a, [x.requires_grad_() for x in (ones(6, 3), ones(6, 2))]), r"use torch.no_grad\(\)"),
        ]
        for given, message in wrong:
            with pytest.raises(ValueError, match=message):
                gemm(*given)
        with pytest.raises(RuntimeError, match="timed=True"):
            gemm.times  # noqa: B018 - it is the reading that raises
        with pytest.raises(RuntimeError, match="no gathered rows"):
            gemm.gathered()
    with open_local_heap(2) as heap, FusedGemm(heap, "gemm_rs", 4, 5, 6) as gemm:
        a, b = [ones(4, 3)] * 2, [ones(2, 5)] * 2
        with pytest.raises(ValueError, match="a of rank 0 has 3 columns and b 2 rows"):
            gemm(a, b)
