"""Fused products of ranks that one process plays, their plans and their mistakes."""

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
from meshflash.gemm.distributed.api import _agree
from meshflash.gemm.distributed.exchange import Exchange
from meshflash.gemm.distributed.plan import BULK, VARIANTS, FusedConfig, computed, cores_of, key_of, mode_of, plan_fused
from meshflash.gemm.distributed.problem import COLLECTIVES, FusedProduct
from meshflash.gemm.distributed.tiles import owner_of, peer_of, section_of, split
from meshflash.gemm.launch import in_blocks
from meshflash.gemm.partition import stream_k
from meshflash.gemm.rates import Known, Rate, Table
from meshflash.kernels.triton import configs as triton_configs
from meshflash.kernels.triton.common import INTERPRETED

CONFIG = Config(16, 32, 16, 1, 1)
LARGE = Config(128, 256, 64, 8, 3)
CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="on a GPU test_fused_gpu.py runs them")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that nobody wrote is NaN."""
    empty = torch.empty

    def poison(*args, **more):
        x = empty(*args, **more)
        return x.fill_(torch.nan) if x.dtype.is_floating_point else x

    monkeypatch.setattr(torch, "empty", poison)


def local(world, timeout=20.0):
    return open_heap(world, bytes=2**20, device="cpu", timeout=timeout)


def operands(collective, world, m, n, k, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (k, n)))
    if collective == "all_scatter":
        return [a] * world, list(b.split(split(n, world), 1)), a.double() @ b.double()
    if collective == "ag_gemm":
        return list(a.split(split(m, world))), [b] * world, a.double() @ b.double()
    some = split(k, world)
    return list(a.split(some, 1)), list(b.split(some)), a.double() @ b.double()


def check(collective, outs, want, allowed=1e-6):
    if collective == "gemm_rs":
        outs = [torch.cat(outs)]
    for out in outs:
        assert torch.equal(out, outs[0])
    assert float((outs[0].double() - want).norm()) <= allowed * float(want.norm())


@interpreted
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_process_plays_three_ranks(collective, variant):
    with local(3) as heap, FusedGemm(heap, collective, 18, 33, 12, variant=variant) as gemm:
        for seed in range(2):
            a, b, want = operands(collective, 3, 18, 33, 12, seed=seed)
            check(collective, gemm(a, b), want)


@interpreted
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_next_to_nothing(collective, variant):
    with local(2) as heap:
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
def test_operands_by_descriptors(collective, variant, monkeypatch):
    """Where rows are read in place, a kernel makes descriptors of them itself."""
    made: list[Any] = []

    def keep(*given):
        found = in_blocks(*given)
        made.extend(found or ())
        return found

    monkeypatch.setattr(triton_configs, "has_descriptors", lambda device: True)
    monkeypatch.setattr(distributed_launch, "in_blocks", keep)
    with local(2) as heap, FusedGemm(heap, collective, 20, 32, 32, torch.float16, variant=variant) as gemm:
        a, b, want = operands(collective, 2, 20, 32, 32, torch.float16)
        check(collective, gemm(a, b), want, 6e-4)
    assert len(made) == 4


@interpreted
def test_what_is_lent_stays_until_the_next_call():
    with local(2) as heap, FusedGemm(heap, "all_scatter", 4, 6, 5, variant="epilogue") as gemm:
        first = operands("all_scatter", 2, 4, 6, 5, seed=0)
        lent = gemm(*first[:2], copy=False)
        kept = gemm(*first[:2])
        check("all_scatter", lent, first[2])
        for seed in (1, 2):
            gemm(*operands("all_scatter", 2, 4, 6, 5, seed=seed)[:2])
        check("all_scatter", kept, first[2])
        assert not torch.allclose(lent[0].double(), first[2])


@interpreted
def test_gathered_rows():
    with local(2) as heap:
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
def test_times_of_tiles(collective, variant):
    """Of 2 x 2 tiles, where each rank computes all, or one column, and adds up half, or none."""
    more = dict(variant=variant, shots=2 if collective == "all_reduce" else None)
    with local(2) as heap, FusedGemm(heap, collective, 20, 40, 18, timed=True, **more) as gemm:
        a, b, want = operands(collective, 2, 20, 40, 18)
        check(collective, gemm(a, b), want)
        for times in gemm.times.values():
            computed, sent, received = times.T
            assert computed.count_nonzero() == (2 if collective == "all_scatter" else 4)
            if collective == "ag_gemm":
                assert received.all()
                assert (computed >= received).all()
                assert not sent.any()  # what is sent are tiles of A
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
def test_a_rank_that_does_not_come_is_named_and_its_numbers_are_nan(collective, shots, dtype, monkeypatch):
    """Rank 1 starts nothing in the second call."""
    start, stages = Exchange._start, Exchange._stages
    seen: dict[int, torch.Tensor] = {}

    def start_rank_0(self, rank, stage):
        if rank == 0 or self.epoch == 1:
            start(self, rank, stage)

    def note(self, ends, a, b, results):
        made = stages(self, ends, a, b, results)
        seen.update(results)
        return made

    monkeypatch.setattr(Exchange, "_start", start_rank_0)
    monkeypatch.setattr(Exchange, "_stages", note)
    a, b, want = operands(collective, 2, 20, 40, 18, dtype)

    def call_twice():
        with local(2, timeout=0.2) as heap:
            gemm = FusedGemm(heap, collective, 20, 40, 18, dtype, variant="epilogue", shots=shots)
            check(collective, gemm(a, b), want, 6e-3)
            gemm(a, b)

    with pytest.raises(TransportError, match=r"rank 0 waited 0.2 s in step 2 for rank 1, whose signal stands at"):
        call_twice()
    assert seen[0].isnan().any()


def test_every_tile_is_added_up_once_and_flags_count_what_comes():
    for world in (1, 2, 3, 4, 8):
        assert sum(split(17, world)) == 17
        assert sorted(section_of(turn, 2, world) for turn in range(world)) == list(range(world))
        for rank in range(world):
            assert [peer_of(turn, rank, world) for turn in range(world)][-1] == rank
        for m, n in ((1, 1), (40, 33), (100, 300)):
            product = FusedProduct.of("all_reduce", m, n, 64, world, torch.float32)
            plan = FusedPlan(product, "epilogue", 2, "", CONFIG, 4)
            tiles = plan.rows * plan.columns(0)
            owners = [owner_of(0, tile, world, 1) for tile in range(tiles)]
            assert len(set(owners)) == tiles
            assert all(place < plan.places for _, place in owners)
            assert plan.wanted() == [sum(owner == rank for owner, _ in owners) for rank in range(world)]
            rows = FusedProduct.of("gemm_rs", m, n, 64, world, torch.float32)
            assert FusedPlan(rows, "epilogue", 0, "", CONFIG, 4).places * world >= tiles
            columns = FusedPlan(FusedProduct.of("all_scatter", m, n, 64, world, torch.float32), BULK, 0, "", CONFIG, 4)
            assert sum(columns.wanted()) == sum(-(-m // 16) * -(-part // 32) for part in split(n, world))


def test_an_all_scatter_is_cut_where_multiprocessors_would_be_idle():
    def planned(k, config, variant="epilogue", cores=132):
        product = FusedProduct.of("all_scatter", 8192, 4608, k, 4, torch.bfloat16)
        return FusedPlan(product, variant, 0, "", config, cores)

    roles = Config(256, 128, 64, 8, 4, roles=1)
    plan = planned(36864, roles)
    split = plan.partition(0)
    assert (split.tiles, split.shared, split.programs) == (288, 24, 132)  # 2 rounds, and 24 tiles for all
    assert "132 programs, 24 tiles of the first rank in parts, " in str(plan)
    assert "in parts" not in str(planned(1024, roles))
    assert planned(1024, roles).partition(0).shared == 0  # 2 rounds and a third of 16 slices: parts cost as much
    assert planned(36864, roles, cores=33).partition(0).shared == 0  # 8 rounds and a ninth: 3% idle
    assert (plan.pieces, plan.wanted()) == (16, [288 * 16] * 4)
    assert planned(1024, roles).wanted() == plan.wanted()
    assert planned(36864, replace(roles, roles=0)).wanted() == [288] * 4
    assert planned(36864, roles, BULK).wanted() == [288] * 4


def test_ranks_that_share_a_device_scatter_in_turn():
    """Each has all of it but a multiprocessor for every rank that waits; who adds up or gathers shares it instead."""

    def planned(collective, variant="epilogue", **sharing):
        product = FusedProduct.of(collective, 64, 64, 4096, 2, torch.float32)
        return plan_fused(product, torch.device("cpu"), variant=variant, **sharing)

    alone, shared = planned("all_scatter"), planned("all_scatter", sharing=2, cores=2)
    assert (alone.programs, alone.in_turn) == (5, False)
    assert (shared.programs, shared.in_turn) == (3, True)
    assert " 3 programs in turn, " in str(shared)
    assert alone.partition(0).shared > 0
    assert shared.partition(0).shared == 0  # the other rank takes what is idle
    for collective, variant in (("all_reduce", "epilogue"), ("ag_gemm", "epilogue"), ("all_scatter", BULK)):
        plan = planned(collective, variant, sharing=2, cores=2)
        assert (plan.programs, plan.in_turn) == (2, False)


@interpreted
@pytest.mark.parametrize(("rows", "columns", "steps", "programs"), [(3, 2, 9, 4), (2, 1, 7, 5), (1, 3, 8, 6)])
def test_tiles_in_parts_are_added_up_and_put_to_all(rows, columns, steps, programs):
    from meshflash.gemm.kernels.fused import send_sums
    from meshflash.gemm.kernels.stream_k import place_of

    world, height, block_m, block_n = 2, 8, 16, 32
    m, n = rows * block_m - 3, columns * block_n - 5
    cut = stream_k(rows, columns, steps, programs)
    assert 0 < cut.shared <= rows * columns
    parts = torch.randn(cut.programs, cut.slots, block_m, block_n)
    with local(world) as heap:
        matrix = heap.allocate((m, n), torch.float32, name="matrix")
        arrived = heap.allocate((world,), torch.int64, name="arrived")
        for rank in range(world):
            with heap.play(rank):
                matrix.local.fill_(torch.nan)
                arrived.local.zero_()
        with heap.play(1):
            send_sums[(cut.shared, block_m // height)](
                *(parts, matrix.local, arrived.local, arrived.local, heap.bases, 1, m, n, n, rows),
                *(steps, cut.crew, cut.slices),
                WORLD=world,
                SLOTS=cut.slots,
                ROWS=height,
                AT_ONCE=2,
                TIMED=False,
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                GROUP=8,
            )
        want = torch.full((rows * block_m, columns * block_n), torch.nan)
        for tile in range(cut.shared):
            row, column = place_of(tile, rows, columns, 8)
            own = [p for p in range(cut.programs) if any(t == tile for t, _, _ in cut.segments(p))]
            total = parts[own[0], cut.slots - 1]  # who begins a tile has it as its last one
            for program in own[1:]:
                total = total + parts[program, 0]
            want[row * block_m : (row + 1) * block_m, column * block_n : (column + 1) * block_n] = total
        for rank in range(world):
            with heap.play(rank):
                assert torch.equal(matrix.local.nan_to_num(9.0), want[:m, :n].nan_to_num(9.0))
                assert arrived.local.tolist() == [0, cut.shared * (block_m // height)]
        matrix.free()
        arrived.free()


@interpreted
@pytest.mark.parametrize("sizes", [None, (0, 40, 30)])
def test_ranks_without_roles_count_tiles_as_those_that_have_them(sizes):
    roles = replace(CONFIG, block_m=128, roles=1)
    a, b = torch.randn(150, 40), torch.randn(40, 70)
    with local(3) as heap, FusedGemm(
        *(heap, "all_scatter", 150, 70, 40, torch.float32), variant="epilogue", sizes=sizes, config=roles
    ) as gemm:  # fmt: skip
        assert gemm.plan.pieces == 8
        for _ in range(3):
            for out in gemm([a] * 3, list(b.split(gemm.plan.product.sizes, 1))):
                torch.testing.assert_close(out, a @ b)


def test_who_adds_up_has_one_program_on_each_of_its_multiprocessors(monkeypatch):
    """Two would keep ranks that share the GPU from starting the products that it waits for."""
    from meshflash.gemm.kernels import fused as fused_kernels

    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **constants: None

    monkeypatch.setattr(fused_kernels, "receive", Kernel())
    product = FusedProduct.of("all_reduce", 64, 64, 64, 2, torch.float32)
    words = torch.zeros(1, dtype=torch.int32)
    rooms: dict[str, Any] = dict.fromkeys(
        ("bases", "status", "begun", "arrived", "flags", "ready", "inbox", "matrix"), words
    )
    ends = distributed_launch.Ends(rank=0, epoch=1, **rooms, firsts=words, wanted=words)
    for per_core in (1, 2):
        plan = FusedPlan(product, "epilogue", 2, "", replace(CONFIG, per_core=per_core), 5 * per_core)
        distributed_launch.receive(ends, plan, torch.zeros(64, 64))
    assert grids == [(5,), (5,)]


def test_a_group_has_the_bulk_alone():
    product = FusedProduct.of("gemm_rs", 5, 6, 7, 2, torch.float64)
    plan = plan_fused(product, CPU, means="group")
    assert (plan.variant, plan.heap_bytes, product.reduce_dtype) == (BULK, 0, torch.float64)
    assert "by the process group: a process group has no memory" in str(plan)
    with pytest.raises(ValueError, match=r'needs a heap.*variant="bulk"'):
        plan_fused(product, CPU, variant="epilogue", means="group")


@pytest.fixture
def a_gpu(monkeypatch):
    """Plans for a GPU that is not here, of 132 multiprocessors and no tables."""
    monkeypatch.setattr(configs, "cores", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(rates, "known", lambda device: None)
    monkeypatch.setattr(distributed_plan, "has_gluon", lambda device: True)
    return torch.device("cuda")


def test_auto_takes_the_bulk_where_nothing_was_measured(a_gpu):
    product = FusedProduct.of("all_reduce", 4096, 4096, 4096, 4, torch.bfloat16)
    plan = plan_fused(product, a_gpu, sharing=4)
    assert (plan.variant, plan.shots, plan.programs, plan.movers) == (BULK, 2, 33, 0)
    assert "no rates of fused products were measured on this device" in str(plan)
    two = FusedProduct.of("all_reduce", 4096, 4096, 4096, 2, torch.bfloat16)
    assert plan_fused(two, a_gpu).shots == 1


def test_auto_takes_the_fastest_at_the_nearest_shape(a_gpu, monkeypatch):
    product = FusedProduct.of("all_reduce", 4096, 4096, 4096, 4, torch.bfloat16)
    slim = (64, 128, 64, 4, 4, 8, 2, 0)

    def rate(mode, m, tflops, key=None):
        config = {"epilogue": slim, "producer_consumer": (*slim, 7)}.get(mode.partition("/")[0], ())
        return Rate(mode, "bfloat16", key or key_of(product, 1), m, m, m, tflops, config)

    rows = (
        rate(mode_of("epilogue", 2), 4096, 500.0),
        rate(mode_of(BULK, 1), 4096, 400.0),
        rate(mode_of("producer_consumer", 1), 1024, 900.0),
        rate("torch", 4096, 999.0, "nn"),
        rate(mode_of("producer_consumer", 1), 4096, 999.0, key_of(product, 4)),
    )
    table = Table("a GPU", "sm_90", rows)
    monkeypatch.setattr(rates, "known", lambda device: Known(table, "a table"))
    plan = plan_fused(product, a_gpu)
    assert (plan.variant, plan.shots, plan.config) == ("epilogue", 2, FusedConfig(*slim))
    assert plan.why == "the fastest at 4096x4096x4096 on 4 ranks (a table)"
    one = plan_fused(product, a_gpu, shots=1)  # the fastest of those in one shot
    assert (one.variant, one.shots, one.why) == (BULK, 1, plan.why)
    asked = plan_fused(product, a_gpu, variant="epilogue")
    assert (asked.shots, asked.config, asked.why) == (2, FusedConfig(*slim), "asked for")
    assert plan_fused(product, a_gpu, variant="epilogue", shots=1).config == LARGE  # was not measured
    moving = plan_fused(FusedProduct.of("all_reduce", 1024, 1024, 1024, 4, torch.bfloat16), a_gpu)
    assert (moving.variant, moving.shots, moving.movers, moving.programs) == ("producer_consumer", 1, 7, 2 * 125)
    nothing = FusedProduct.of("all_reduce", 0, 64, 64, 4, torch.bfloat16)
    assert plan_fused(nothing, a_gpu).variant == BULK
    small = FusedProduct.of("all_reduce", 64, 64, 64, 4, torch.bfloat16)
    assert "no fused product near this one is among the rates (a table)" in plan_fused(small, a_gpu).why


def test_movers_have_a_share_of_the_multiprocessors(a_gpu):
    def planned(collective, k, sharing=1, movers=0, shots=None):
        product = FusedProduct.of(collective, 8192, 4608, k, 4, torch.bfloat16)
        config = FusedConfig(128, 256, 64, 8, 3, movers=movers) if movers else None
        return plan_fused(
            product, a_gpu, variant="producer_consumer", sharing=sharing, config=config, shots=shots, cores=None
        )

    plan = planned("all_scatter", 1024, 4)
    # 4 copies of its columns, and a long sum: the more K, the fewer move
    assert plan.product.moved_bytes(0) == 4 * 8192 * 1152 * 2
    assert (plan.programs, plan.movers) == (33 - 7, 7)
    assert "26 programs and 7 that move" in str(plan)
    assert [planned("all_scatter", k, 4).movers for k in (4096, 16384)] == [2, 1]
    assert plan.product.moved_bytes(0) < planned("gemm_rs", 1024).product.moved_bytes(0)
    one, two = (planned("all_reduce", 4096, 4, shots=shots) for shots in (1, 2))
    assert one.movers > two.movers > 1
    assert one.product.moved_bytes(1) == 8192 * 4608 * (4 * 4 + 2)
    assert two.product.moved_bytes(2) == 2048 * 4608 * (4 * 4 + 4 * 2)
    assert (planned("gemm_rs", 4096, 4, movers=5).programs, planned("gemm_rs", 4096, 4, movers=5).movers) == (28, 5)
    assert planned("gemm_rs", 4096, 4, movers=50).movers == 32  # one is left to multiply
    gathering = planned("ag_gemm", 4096, 4)  # they are soon done, wherever they ran
    assert (gathering.programs, gathering.movers) == (32, 4)


def test_tiles_that_waste_least(a_gpu, monkeypatch):
    def chosen(collective, m, n, world=4, sharing=4, k=4096, variant="epilogue", **more):
        product = FusedProduct.of(collective, m, n, k, world, torch.bfloat16, **more)
        return plan_fused(product, a_gpu, variant=variant, sharing=sharing).config

    assert chosen("all_reduce", 8192, 4608) == LARGE
    standing = replace(LARGE, block_m=256, block_n=128, stages=4)
    by_rows = replace(standing, group=1, roles=1)
    assert chosen("all_scatter", 8192, 4608) == by_rows  # 4.5 tiles of 256 columns; 128 programs are 14 rows of 9
    assert chosen("all_scatter", 8192, 4608, sharing=1) == by_rows  # 2.2 tiles for each: what is left is in parts
    assert chosen("all_scatter", 64, 4608).block_m == 64
    few = ("all_scatter", 1024, 4096)  # 32 large tiles: they go to 132 multiprocessors in parts, where K has the slices
    assert chosen(*few, sharing=1).roles
    small = [chosen(*few, sharing=1, **x) for x in ({"k": 1024}, {"out_dtype": torch.float32}, {"variant": BULK})]
    small.append(chosen("all_scatter", 512, 16 * 512, world=16, sharing=1))
    with monkeypatch.context() as without:
        without.setattr(distributed_plan, "has_gluon", lambda device: False)
        small.append(chosen(*few, sharing=1))
    assert {(config.block_m, config.group, config.roles) for config in small} == {(64, 8, 0)}
    assert chosen("all_scatter", 8192, 4 * 4608) == replace(LARGE, roles=1)  # 18 columns of 8 rows are more than 128
    assert chosen("ag_gemm", 256, 4608).block_m == 64  # of each rank's 64 rows
    assert chosen("all_reduce", 64, 4608).block_m == 64
    assert computed(8192, 1152, LARGE, 33) > 1.1 * computed(8192, 1152, standing, 33)
    assert computed(64, 256, LARGE, 33, sections=34) == 2 * computed(64, 256, LARGE, 33, sections=33)


def test_ranks_that_share_devices_unevenly_agree(a_gpu):
    said: list[dict[str, str]] = []

    def hear(word):
        said.append(word)
        return [word]

    heap: Any = SimpleNamespace(_meeting=SimpleNamespace(all=hear))
    product = FusedProduct.of("all_scatter", 8192, 3456, 4096, 3, torch.bfloat16)
    plans = [plan_fused(product, a_gpu, variant="epilogue", sharing=sharing) for sharing in (2, 2, 1)]
    assert [(plan.programs, plan.in_turn) for plan in plans] == [(130, True), (130, True), (132, False)]
    for plan in plans:
        _agree(heap, plan)
    assert said[0] == said[1] == said[2]


def test_mps_counts_the_multiprocessors_of_a_rank(a_gpu, monkeypatch):
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    assert (cores_of(a_gpu, 1), cores_of(a_gpu, 4)) == (132, 33)
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "25")
    assert cores_of(a_gpu, 4) == 132  # which are 33 of the GPU's, as the driver tells


MOVING = FusedConfig(16, 32, 16, 1, 1, movers=1)


def test_fewer_movers_than_none_are_refused():
    with pytest.raises(ValueError, match="movers=-1: expected 0"):
        replace(MOVING, movers=-1)


@pytest.mark.parametrize(
    ("arguments", "more", "words"),
    [
        (("all_gather", 4, 4, 4), {}, "expected one of all_scatter, all_reduce, ag_gemm, gemm_rs"),
        (("all_scatter", 4, 4, -1), {}, "expected sizes >= 0 of the whole product"),
        (("all_scatter", 4, 4, 4), {"sizes": (4,)}, "expected 2 numbers >= 0 with the sum 4"),
        (("all_reduce", 4, 4, 4), {"sizes": (2, 2)}, "part of K may be of any size"),
        (("all_scatter", 4, 4, 4), {"shots": 1}, "expected 1 or 2, of an all_reduce"),
        (("all_reduce", 4, 4, 4), {"shots": 3}, "expected 1 or 2, of an all_reduce"),
        (("all_reduce", 4, 4, 4), {"variant": "tile"}, "one of auto, epilogue, producer_consumer, bulk"),
        (("all_reduce", 4, 4, 4), {"mode": "tile"}, "one of auto, stream_k"),
        (("all_reduce", 4, 4, 4), {"precision": "bf16"}, "one of ieee, tf32"),
        (("all_reduce", 4, 4, 4, torch.int32), {}, "expected torch.float32"),
        (("all_reduce", 4, 4, 4, torch.float64), {}, "no float64; give the process group instead of the heap"),
        (("all_reduce", 4, 4, 4), {"reduce_dtype": torch.float64}, "no torch.float64; give the process group"),
        (("all_reduce", 4000, 4000, 4), {}, "open_heap"),
        (("all_reduce", 4, 4, 4), {"variant": "epilogue", "config": MOVING}, "epilogue has no programs that move"),
        (("all_reduce", 4, 4, 4), {"variant": "bulk", "config": MOVING}, "bulk has no programs that move"),
    ],
)
@interpreted
def test_mistakes_are_told(arguments, more, words):
    with pytest.raises(ValueError, match=words), local(2) as heap:
        FusedGemm(heap, *arguments, **more)


@interpreted
def test_operands_that_were_not_planned_are_told():
    ones = torch.ones
    with local(2) as heap, FusedGemm(heap, "all_scatter", 4, 5, 6) as gemm:
        a, b = [ones(4, 6)] * 2, [ones(6, 3), ones(6, 2)]
        wrong: list[tuple[Any, str]] = [
            ((a[0], b[0]), "plays 2 ranks: expected as many operands"),
            ((a[:1], b[:1]), "plays 2 ranks: expected as many operands"),
            (
                (a, b[::-1]),
                r"b of rank 0 is torch.float32 of \(6, 2\) on cpu: expected .* of \(6, 3\) on cpu",
            ),
            (([x.half() for x in a], b), "a of rank 0 is torch.float16"),
            ((a, [x.requires_grad_() for x in (ones(6, 3), ones(6, 2))]), r"use torch.no_grad\(\)"),
        ]
        for given, words in wrong:
            with pytest.raises(ValueError, match=words):
                gemm(*given)
        with pytest.raises(RuntimeError, match="timed=True"):
            gemm.times  # noqa: B018 - it is the reading that raises
        with pytest.raises(RuntimeError, match="no gathered rows"):
            gemm.gathered()
    with local(2) as heap, FusedGemm(heap, "gemm_rs", 4, 5, 6) as gemm:
        a, b = [ones(4, 3)] * 2, [ones(2, 5)] * 2
        with pytest.raises(ValueError, match="a of rank 0 has 3 columns and b 2 rows"):
            gemm(a, b)
