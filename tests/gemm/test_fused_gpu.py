"""Fused products on a GPU that ranks share, by MPS and by streams of one process: run with `-m gpu`."""

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
from meshflash.gemm.distributed.problem import FusedProduct
from meshflash.kernels.hopper.launch import has_gluon
from meshflash.runtime import mps
from meshflash.runtime.devices import take_device
from meshflash.runtime.processes import RankError, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

#: Norm of the difference over that of the result, as in test_gemm_gpu.py; what is rounded on its way adds as much.
ALLOWED = {torch.float32: 3e-6, torch.bfloat16: 2.5e-3, torch.float16: 4e-4}
EVERY = [("all_scatter", None), ("all_reduce", 1), ("all_reduce", 2), ("ag_gemm", None), ("gemm_rs", None)]
#: Even and ragged.
SHAPES = [(2048, 2048, 4096), (1003, 777, 1501)]
HEAP = 2**29
#: Of a product by warps that have roles: even, and with edges that descriptors describe, of parts on 2 and 4 ranks.
DESCRIBED = [(2048, 2048, 4096), (1003, 1312, 1496)]
#: And such that tiles are in parts: less than a round of them, and some after a round.
IN_PARTS = [(1536, 1536, 4096), (2816, 1536, 4096)]
#: With room for half of a tile that is sent, and for all of it.
ROLES = tuple(
    replace(config, stages=config.stages - fewer)
    for config in configs.HOPPER_CANDIDATES
    if config.roles
    for fewer in (0, 1)
)
needs_gluon = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_gluon(torch.device("cuda")), reason="needs a Hopper GPU, and Gluon"
)


def parts(collective, world, shape, dtype, seed):
    """What each rank has, and the whole product in float64."""
    m, n, k = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    a, b = (torch.randn(size, generator=generator, device="cuda").to(dtype) for size in ((m, k), (k, n)))
    want = a.double() @ b.double()
    sizes = FusedProduct.of(collective, m, n, k, world, dtype).sizes
    if collective == "all_scatter":
        return [(a, part) for part in b.split(sizes, 1)], want
    if collective == "ag_gemm":
        return [(part, b) for part in a.split(sizes)], want
    some = FusedProduct.of("ag_gemm", k, n, m, world, dtype).sizes
    return list(zip(a.split(some, 1), b.split(some), strict=True)), want


def mine(collective, rank, world, want):
    """What a rank gets of the whole."""
    if collective != "gemm_rs":
        return want
    return want.split(FusedProduct.of(collective, len(want), want.shape[1], 1, world, torch.float32).sizes)[rank]


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


def bits(x):
    """A number that tells results apart."""
    words = x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32).long().flatten()
    return int((words * (torch.arange(len(words), device=words.device) % 8191 + 1)).sum())


def repeated(rank, world, tell, calls):
    """So many calls of each collective and variant, on inputs that change; the errors, and what bits came."""
    device = take_device("cuda", rank)
    heap = open_heap(bytes=HEAP, device=device, timeout=60)
    for collective, shots in EVERY:
        for variant in VARIANTS:
            for shape in SHAPES:
                for dtype in (torch.bfloat16, torch.float32) if shape == SHAPES[1] else (torch.bfloat16,):
                    name = f"{collective} {shots} {variant} {shape} {dtype}"
                    inputs = [parts(collective, world, shape, dtype, seed) for seed in range(3)]
                    gemm = FusedGemm(heap, collective, *shape, dtype, variant=variant, shots=shots)
                    worst, seen = 0.0, dict[int, set[int]]()
                    for call in range(calls):
                        seed = call % 3
                        out = gemm(*inputs[seed][0][rank], copy=call % 2 == 0)
                        seen.setdefault(seed, set()).add(bits(out))
                        worst = max(worst, error(out, mine(collective, rank, world, inputs[seed][1])))
                    gemm.free()
                    heap.barrier()
                    tell((name, rank, worst / ALLOWED[dtype], {seed: sorted(found) for seed, found in seen.items()}))
    heap.close()


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_of_one_gpu_and_changing_inputs(world):
    if mps.missing():
        pytest.skip(str(mps.missing()))
    told: list[Any] = []
    with mps.mps():
        run_ranks(world, repeated, 200, timeout=1500, listen=told.append)
    assert len(told) == world * len(EVERY) * len(VARIANTS) * (len(SHAPES) + 1)
    check_told(told)


def check_told(told):
    """Results are near enough, and their bits the same in each call and on all ranks."""
    found: dict[str, list[Any]] = {}
    for name, rank, worst, seen in told:
        assert worst <= 1, (name, rank, worst)
        assert all(len(different) == 1 for different in seen.values()), (name, rank, "not the same bits each time")
        found.setdefault(name, []).append(seen)
    for name, seen in found.items():
        if not name.startswith("gemm_rs"):
            assert all(one == seen[0] for one in seen), (name, "not the same bits on all ranks")


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("collective", "shots"), EVERY)
def test_one_process_plays_all_ranks(collective, shots, variant, world):
    for shape in SHAPES:
        with (
            open_heap(world, bytes=HEAP, device="cuda", timeout=30) as heap,
            FusedGemm(heap, collective, *shape, torch.bfloat16, variant=variant, shots=shots) as gemm,
        ):
            for seed in range(20):
                pairs, want = parts(collective, world, shape, torch.bfloat16, seed)
                outs = gemm([a for a, _ in pairs], [b for _, b in pairs])
                for rank, out in enumerate(outs):
                    assert error(out, mine(collective, rank, world, want)) <= ALLOWED[torch.bfloat16]
                    assert collective == "gemm_rs" or torch.equal(out, outs[0])
            heap.check()


@pytest.fixture
def by_roles(monkeypatch):
    """Ranks that sent by warps that have roles, in the order in which they did."""
    seen: list[int] = []
    send = distributed_launch.send_by_roles

    def record_kernels(ends, *more):
        seen.append(ends.rank)
        send(ends, *more)

    monkeypatch.setattr(distributed_launch, "send_by_roles", record_kernels)
    return seen


@contextmanager
def apart():
    """Ranks as if each had a GPU of as many multiprocessors as its share of this one: none leaves any to the next."""
    plan_fused = distributed_api.plan_fused

    def planned(*arguments: Any, cores: int, **more: Any) -> FusedPlan:
        plan = plan_fused(*arguments, cores=cores, **more)
        return replace(plan, in_turn=False, programs=cores * plan.blocks.per_core) if plan.in_turn else plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_api, "plan_fused", planned)
        yield


@needs_gluon
@pytest.mark.parametrize(
    ("config", "world"), [*((config, world) for config in ROLES for world in (2, 4)), (ROLES[0], 1), (ROLES[0], 8)]
)
def test_warps_that_have_roles_send_to_all_that_one_process_plays(config, world, by_roles):
    calls, parts_of = 20, 0
    for shape in [*DESCRIBED, *IN_PARTS] if world < 8 else DESCRIBED[:1]:
        by_roles.clear()
        with (
            apart() if shape in IN_PARTS else nullcontext(),
            open_heap(world, bytes=HEAP, device="cuda", timeout=30) as heap,
            FusedGemm(
                heap, "all_scatter", *shape, torch.bfloat16, variant="epilogue", config=config, timed=True
            ) as gemm,
        ):
            for seed in range(calls):
                pairs, want = parts("all_scatter", world, shape, torch.bfloat16, seed)
                bs = [b.contiguous() for _, b in pairs]
                outs = gemm([a for a, _ in pairs], bs, copy=seed % 2 == 0)
                for out in outs:
                    assert error(out, want) <= ALLOWED[torch.bfloat16]
                    assert torch.equal(out, outs[0])
            heap.check()
            for rank, times in gemm.times.items():
                own = times[: gemm.plan.rows * gemm.plan.columns(rank)]
                assert (own[:, 0] > 0).all()
                assert (own[:, 1] >= own[:, 0]).all()
            parts_of += gemm.plan.partition(0).shared
        assert by_roles == list(range(world)) * calls
    assert world == 8 or parts_of > 0


@needs_gluon
@pytest.mark.parametrize("layout", ["nt", "tn", "tt"])
def test_warps_that_have_roles_and_operands_by_columns(layout, by_roles):
    shape = DESCRIBED[1]
    with (
        open_heap(2, bytes=HEAP, device="cuda", timeout=30) as heap,
        FusedGemm(heap, "all_scatter", 1000, *shape[1:], torch.float16, variant="epilogue", config=ROLES[0]) as gemm,
    ):
        pairs, want = parts("all_scatter", 2, (1000, *shape[1:]), torch.float16, 0)

        def laid(x, how):
            return x.T.contiguous().T if how == "t" else x.contiguous()

        outs = gemm([laid(a, layout[0]) for a, _ in pairs], [laid(b, layout[1]) for _, b in pairs])
        assert all(error(out, want) <= ALLOWED[torch.float16] for out in outs)
        assert by_roles == [0, 1]


@needs_gluon
def test_ranks_whose_columns_no_descriptor_describes_send_as_before(by_roles):
    """So that one rank sends in one way and the other in the other, and each counts alike."""
    m, n, k = 1024, 1001, 4096
    with (
        apart(),
        open_heap(3, bytes=HEAP, device="cuda", timeout=30) as heap,
        FusedGemm(
            *(heap, "all_scatter", m, n, k, torch.bfloat16),
            sizes=(512, 333, 156),
            variant="epilogue",
            config=ROLES[0],
        ) as gemm,
    ):
        a, b = (torch.randn(size, device="cuda").bfloat16() for size in ((m, k), (k, n)))
        bs = [x.contiguous() for x in b.split((512, 333, 156), 1)]
        for _ in range(5):
            outs = gemm([a] * 3, bs)
            heap.check()
            assert all(error(out, a.double() @ b.double()) <= ALLOWED[torch.bfloat16] for out in outs)
            assert all(torch.equal(out, outs[0]) for out in outs)
        assert gemm.plan.partition(0).shared > 0
    assert by_roles == [0] * 5


def roles_repeated(rank, world, tell, calls):
    """As `repeated`, of the all_scatter by warps that have roles."""
    device = take_device("cuda", rank)
    heap = open_heap(bytes=HEAP, device=device, timeout=60)
    for config in ROLES[:2]:
        for shape in (*DESCRIBED, IN_PARTS[0]):
            inputs = [parts("all_scatter", world, shape, torch.bfloat16, seed) for seed in range(3)]
            own = [(pairs[rank][0], pairs[rank][1].contiguous(), want) for pairs, want in inputs]
            with apart() if shape in IN_PARTS else nullcontext():
                gemm = FusedGemm(heap, "all_scatter", *shape, torch.bfloat16, variant="epilogue", config=config)
            assert (gemm.plan.partition(rank).shared > 0) == (shape in IN_PARTS)
            assert gemm._exchange is not None
            assert all(gemm._exchange._columns[rank]), "the kernel in Gluon serves it"
            worst, seen = 0.0, dict[int, set[int]]()
            for call in range(calls):
                a, b, want = own[call % 3]
                out = gemm(a, b, copy=call % 2 == 0)
                seen.setdefault(call % 3, set()).add(bits(out))
                worst = max(worst, error(out, want))
            gemm.free()
            heap.barrier()
            told = {seed: sorted(found) for seed, found in seen.items()}
            tell((f"{config} {shape}", rank, worst / ALLOWED[torch.bfloat16], told))
    heap.close()


@needs_gluon
@pytest.mark.parametrize("world", [2, 4])
def test_warps_that_have_roles_send_to_processes(world):
    if mps.missing():
        pytest.skip(str(mps.missing()))
    told: list[Any] = []
    with mps.mps():
        run_ranks(world, roles_repeated, 200, timeout=900, listen=told.append)
    assert len(told) == world * 2 * (len(DESCRIBED) + 1)
    check_told(told)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("collective", "shots"), EVERY)
def test_dtypes_and_sums_that_travel_rounded(collective, shots, dtype):
    shape = SHAPES[1]
    with open_heap(2, bytes=HEAP, device="cuda", timeout=30) as heap:
        for reduce in (torch.float32, torch.bfloat16):
            more = dict(variant="epilogue", shots=shots, reduce_dtype=reduce)
            with FusedGemm(heap, collective, *shape, dtype, **more) as gemm:
                pairs, want = parts(collective, 2, shape, dtype, 0)
                outs = gemm([a for a, _ in pairs], [b for _, b in pairs])
                allowed = ALLOWED[dtype] + (ALLOWED[reduce] if reduce != torch.float32 else 0)
                for rank, out in enumerate(outs):
                    assert error(out, mine(collective, rank, 2, want)) <= allowed


def test_a_graph_is_refused():
    with (
        open_heap(2, bytes=2**22, device="cuda", timeout=30) as heap,
        FusedGemm(heap, "all_scatter", 64, 64, 64, variant="epilogue") as gemm,
    ):
        pairs, _ = parts("all_scatter", 2, (64, 64, 64), torch.float32, 0)
        a, b = [a for a, _ in pairs], [b for _, b in pairs]
        gemm(a, b)
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            gemm(a, b)


def lost(rank, world, tell, collective, shots, dtype, config):
    """Rank 1 does not come to the second call; the others say so, and have NaN."""
    device = take_device("cuda", rank)
    shape = (512, 768, 512)
    pairs, want = parts(collective, world, shape, dtype, 0)
    pairs = [(a, b.contiguous()) for a, b in pairs]
    for seconds in (60, 4):  # what is compiled in the first call takes longer than the second heap waits
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
    tell((rank, str(raised.value), bool(out.isnan().any())))


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(("all_reduce", 2, torch.float32, None), id="all_reduce"),
        pytest.param(("all_scatter", None, torch.bfloat16, ROLES[0]), id="all_scatter by roles", marks=needs_gluon),
    ],
)
def test_a_lost_rank_is_named(way):
    if mps.missing():
        pytest.skip(str(mps.missing()))
    told: list[Any] = []
    with mps.mps(), suppress(RankError):  # rank 1 waits at the end for the others, or they for it
        run_ranks(3, lost, *way, timeout=200, listen=told.append)
    assert sorted(each[0] for each in told) == [0, 2]
    for rank, text, has_nan in told:
        assert text.startswith(f"rank {rank} waited 4 s in step 2 for rank 1")
        assert has_nan
