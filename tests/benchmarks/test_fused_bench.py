"""Fused products in benchmarks: parts, bytes, the verdict, and the sweep of `meshflash bench gemm --fused`."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton")

from meshflash.bench import fused, fused_sweep, fused_tables, fused_tune, record
from meshflash.bench.fused import Played, planned
from meshflash.bench.fused_cases import GROUP, HEAP, Case, RankRow, Setup, default_shape, default_world, failures
from meshflash.bench.fused_sweep import COPIES, WAYS, Copies
from meshflash.cli import app
from meshflash.comm.heap.api import open_heap
from meshflash.gemm import configs, rates
from meshflash.gemm.configs import Config
from meshflash.gemm.distributed.plan import VARIANTS, FusedConfig, plan_fused
from meshflash.kernels.triton.common import INTERPRETED

interpreted = pytest.mark.skipif(not INTERPRETED, reason="interprets kernels on a CPU")


def invoke(words, *more):
    return CliRunner().invoke(app, ["bench", "gemm", *words.split(), *map(str, more)], env={"COLUMNS": "100"})


@pytest.mark.parametrize("collective", [name for name, _ in WAYS])
def test_parts_make_the_whole(collective):
    case = Case(collective, 7, 10, 8, 3, seed=2)
    a, b = case.tensors(torch.device("cpu"))
    parts = [case.part(a, b, rank) for rank in range(3)]
    made = [x.double() @ y.double() for x, y in parts]
    whole = {
        "all_scatter": lambda: torch.cat(made, 1),
        "ag_gemm": lambda: torch.cat(made),
        "all_reduce": lambda: torch.stack(made).sum(0),
        "gemm_rs": lambda: torch.stack(made).sum(0),
    }[collective]()
    torch.testing.assert_close(whole, a.double() @ b.double())
    shares = [case.share(whole, rank) for rank in range(3)]
    assert [len(x) for x in shares] == ([3, 2, 2] if collective == "gemm_rs" else [7, 7, 7])
    again = case.tensors(torch.device("cpu"))[0]
    assert torch.equal(a, again)
    assert not torch.equal(a, replace(case, seed=3).tensors(torch.device("cpu"))[0])


def test_bytes_that_a_rank_sends():
    def sent(collective, rank, shots=0):
        return Case(collective, 8, 12, 16, 4, "bfloat16").sent_bytes(rank, shots)

    assert sent("all_scatter", 0) == 3 * 8 * 3 * 2
    assert sent("ag_gemm", 0) == 3 * 2 * 16 * 2
    assert sent("gemm_rs", 0) == 6 * 12 * 4  # sums in float32
    assert sent("all_reduce", 0, 1) == 3 * 8 * 12 * 4
    assert sent("all_reduce", 0, 2) == 3 / 4 * 8 * 12 * (4 + 2)
    assert Case("all_scatter", 8, 10, 16, 4).sent_bytes(3, 0) == 3 * 8 * 2 * 4  # a smaller part


def test_a_case_of_a_gpu_needs_no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert Case("all_reduce", 8, 8, 8, 2, "bfloat16", "cuda", 1).product.world == 2
    with pytest.raises(ValueError, match="shots=3"):
        Case("all_reduce", 8, 8, 8, 2, "bfloat16", "cuda", 3)


def test_processes_that_share_a_gpu_by_mps_may_use_all_of_it(monkeypatch):
    """Shares of multiprocessors that MPS gives may overlap: then who waits on one keeps it from whom it waits for."""

    def started(world, function, *args, **more):
        return [os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")] * world

    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    monkeypatch.setattr(fused, "mps", nullcontext)
    monkeypatch.setattr(fused, "run_ranks", started)
    case = Case("ag_gemm", 8, 8, 8, 8, "bfloat16", "cuda")
    assert fused.in_ranks(started, case, Setup(mps=True)) == [None] * 8


def test_defaults_on_a_cpu_are_small():
    assert max(default_shape("cpu")) < 100
    assert default_world("cpu") == 2


def test_failures_name_ranks():
    right = RankRow(Case("all_reduce", 8, 8, 8, 2), 0, HEAP, "shared heap", "bulk", 1, "", 1, 1, 1, 1e-7, None, "a")
    assert failures([right, replace(right, rank=1)]) == []
    nan, other = replace(right, rank=1, error=math.nan), replace(right, rank=1, bits="b")
    assert failures([right, nan]) == [
        "rank 1, bulk by shared heap: relative error nan against float64, where float32 allows 1e-05"
    ]
    assert "other bits than rank 0" in failures([right, other])[0]
    assert failures([right, replace(other, by=GROUP)]) == []  # a group has the bits of its library
    rows = replace(other, case=replace(right.case, collective="gemm_rs"))
    assert failures([replace(rows, rank=0, bits="a"), rows]) == []


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_copies_are_the_same_product(way):
    collective, shots = way
    case = Case(collective, 7, 10, 8, 3, "bfloat16", shots=shots)
    with open_heap(3, bytes=4096, device="cpu") as heap:
        played = Played(case, heap)
        call = Copies(played, shots or 0)
        for _ in range(2):
            assert max(played.errors(call())) < 5e-3


def test_cases_of_a_sweep():
    found = fused_sweep.cases("cpu", 2, "float32", [], [])
    assert len(found) == len(WAYS) * len(fused_sweep.SMALL)
    found = fused_sweep.cases("cpu", 2, "float32", [(1, 2, 3)], ["all_reduce"])
    assert [(case.shots, case.k) for case in found] == [(1, 3), (2, 3)]
    with pytest.raises(ValueError, match="collective 'all'"):
        fused_sweep.cases("cpu", 2, "float32", [], ["all"])


@interpreted
def test_bench_gemm_fused_writes_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["meshflash", "bench", "gemm"])
    output, plot = tmp_path / "fused.json", tmp_path / "fused.png"
    words = "--fused -c all_scatter --shape 10x36x8 --shape 10x36x20 --rounds 1 --device cpu"
    done = invoke(words, "--output", output, "--plot", plot)
    assert done.exit_code == 0, done.output
    assert "all_scatter, 2 ranks, local heap, float32 on cpu" in done.output
    assert "not a speed" in done.output
    rows = record.read(output)["rows"]
    assert [row["k"] for row in rows] == [8] * 4 + [20] * 4
    assert [row["variant"] for row in rows[:4]] == ["epilogue", "producer_consumer", "bulk", COPIES]
    assert [row["fused"] for row in rows[:4]] == [True, True, False, False]
    assert [row["auto"] for row in rows[:4]] == [False, False, True, False]
    for own in (rows[:4], rows[4:]):
        unfused = min(row["ms"] for row in own[2:])
        assert all(row["ratio"] == row["ms"] / unfused for row in own)
        assert min(row["behind"] for row in own) == 1
        assert all(row["error"] < 1e-6 for row in own)


def sweep(rank, world, group, setup, cases):
    told: list = []
    fused_sweep._run(rank, world, told.append, setup, cases)
    return told


@interpreted
def test_a_sweep_over_processes(pool):
    told, others = pool.run(2, sweep, Setup(rounds=1), [Case("all_reduce", 10, 36, 8, 2, shots=1)])
    assert others == []
    assert told[0] == "all_reduce 10x36x8 float32 on 2 ranks"
    assert [row.variant for row in told[1]] == ["epilogue", "producer_consumer", "bulk"]
    assert {row.heap for row in told[1]} == {"shared heap"}


@interpreted
def test_what_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr(Copies, "_sum", lambda self, rank: self.inbox[rank][0])
    with pytest.raises(RuntimeError, match=r"copies: relative error .* it is wrong, so it is not timed"):
        fused_sweep.run([Case("gemm_rs", 6, 8, 8, 2)], Setup(rounds=1, local=True), lambda _: None)


#: What does not fit, and two that do.
TRIED = (Config(16, 32, 16, 1, 2), Config(16, 32, 16, 1, 1), Config(8, 16, 16, 1, 1))


@pytest.fixture
def tried(monkeypatch):
    """Candidates of which the first one does not run and the last one is the fastest, with one that moves."""
    call, time = Played.call, Played.time

    def refused(self, gemm, copy=True):
        if gemm.plan.tiling.num_stages == 2:
            raise RuntimeError("out of resource: shared memory")
        return call(self, gemm, copy)

    def timed(self, calls, rounds):
        time(self, calls, 1)
        return {name: 1.0 if name.endswith(" 1comm") else 3.0 if "16x32" in name else 2.0 for name in calls}

    monkeypatch.setattr(
        configs, "candidates", lambda dtype_name, device: (*TRIED, replace(TRIED[1], warp_specialized=1))
    )
    monkeypatch.setattr(Played, "call", refused)
    monkeypatch.setattr(Played, "time", timed)


@pytest.mark.slow
@interpreted
def test_the_best_configuration_of_each_variant(tried):
    said: list = []
    case = Case("gemm_rs", 20, 36, 8, 2)
    chosen = fused_tune.best(0, Setup(rounds=1, local=True), case, said.append)
    one_moves = FusedConfig.of(TRIED[2], 1)
    assert chosen == dict.fromkeys(VARIANTS, TRIED[2]) | {"producer_consumer": one_moves}
    left_out = "does not run: RuntimeError: out of resource: shared memory"
    assert said == [
        *(f"epilogue {x}" for x in (TRIED[0], f"{TRIED[0]} {left_out}", *TRIED[1:])),
        *(f"producer_consumer {x}" for x in (TRIED[0], f"{TRIED[0]} {left_out}", *TRIED[1:])),
        *(f"producer_consumer {TRIED[2]} {number}comm" for number in (1, 2)),
        *(f"bulk {x}" for x in (TRIED[2], TRIED[0], f"{TRIED[0]} {left_out}")),  # tiles of other sizes
    ]
    rows = fused_sweep._measure(0, Setup(rounds=1, local=True), case, chosen)
    assert [row.config[:2] for row in rows if row.config] == [(8, 16)] * 3
    assert [row.config[-1] for row in rows if row.config] == [0, 1, 0]  # movers
    assert not any(row.auto for row in rows)  # auto takes other blocks
    auto = planned(case, Setup(local=True), torch.device("cpu"), "auto")
    same = FusedConfig.of(auto.tiling, auto.num_comm_sms)  # as a table has it
    rows = fused_sweep._measure(0, Setup(rounds=1, local=True), case, chosen | {auto.variant: same})
    assert [row.variant for row in rows if row.auto] == [auto.variant]


@interpreted
def test_a_configuration_that_is_wrong_raises(tried, monkeypatch):
    monkeypatch.setattr(Played, "errors", lambda self, results: [0.1])
    with pytest.raises(RuntimeError, match=r"epilogue 16x32x16 1w 1s: relative error .* it is wrong"):
        fused_tune.best(0, Setup(rounds=1, local=True), Case("gemm_rs", 20, 36, 8, 2), lambda _: None)


def tuned(rank, world, group, setup, case):
    return fused_tune.best(rank, setup, case, lambda _: None)


@interpreted
def test_processes_choose_the_same(pool):
    one, other = pool.run(2, tuned, Setup(rounds=1), Case("ag_gemm", 10, 20, 8, 2))
    assert one == other
    assert set(one) == set(VARIANTS)


@pytest.fixture
def no_table():
    """What a test reads is forgotten after it."""
    rates._known.cache_clear()
    yield
    rates._known.cache_clear()


def test_rates_join_the_users_own_table(tmp_path, monkeypatch, no_table):
    """Those of other products stay, the same ones are replaced, and `auto` takes the fastest with its movers."""
    monkeypatch.setenv("MESHFLASH_RATES", str(tmp_path))
    monkeypatch.setattr(rates, "identity", lambda device: ("a GPU", "sm_90"))
    monkeypatch.setattr(rates, "known", lambda device: rates._known("a GPU", "sm_90"))
    monkeypatch.setattr(rates, "SHIPPED", tmp_path / "none")
    monkeypatch.setattr(configs, "num_sms", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    plain = rates.Rate("torch", "bfloat16", "nn", 4096, 4096, 4096, 700.0)
    rates.write(rates.Table("a GPU", "sm_90", (plain,)), rates.file_of("a GPU"))
    case = Case("all_reduce", 4096, 4096, 4096, 4, "bfloat16", "cuda", 2)
    row = fused_sweep.SweepRow(case, "local heap", "bulk", False, False, 2.0, 1.0, 1.0, 1.0, 0.0, "", sharing=4)
    moving = replace(row, variant="producer_consumer", ms=1.0, config=(128, 128, 64, 8, 4, 8, 1, 0, 3))
    found = fused_sweep.rates_of([row, moving, replace(row, variant=COPIES)])
    assert [(rate.mode, rate.layout) for rate in found] == [
        ("bulk/2", "all_reduce/4/4"),
        ("producer_consumer/2", "all_reduce/4/4"),
    ]
    assert found[1].tflops == 2 * found[0].tflops == pytest.approx(2 * 4096**3 / 1e9)
    device = torch.device("cuda")
    for _ in range(2):
        path = rates.add(found, device, {"torch": "2"})
    assert len(rates._read(path).rates) == 3
    assert rates._read(path).best("bfloat16", "nn", 4096, 4096, 4096) == plain
    plan = plan_fused(case.product, device, ranks_per_device=4)
    assert (plan.variant, plan.shots, plan.num_comm_sms, plan.num_ctas) == ("producer_consumer", 2, 3, 30)
    rates.add(fused_sweep.rates_of([replace(moving, ms=4.0)]), device, {})
    assert plan_fused(case.product, device, ranks_per_device=4).variant == "bulk"


@interpreted
def test_calibrating_adds_the_rates_of_each_case(tmp_path, monkeypatch):
    added: list = []

    def add(found, device, measured_with):
        assert "torch" in measured_with
        added.append([(rate.mode, rate.k, len(rate.config)) for rate in found])
        return tmp_path

    monkeypatch.setattr(rates, "add", add)
    told: list = []
    cases = [Case("all_reduce", 10, 20, k, 2, shots=1) for k in (8, 12)]
    fused_sweep.run(cases, Setup(rounds=1, local=True), told.append, tune=True, write=True)
    assert added == [[(f"{name}/1", k, 9) for name in VARIANTS] for k in (8, 12)]
    assert told.count(tmp_path) == 2
    assert "all_reduce 10x20x12 float32 on 2 ranks: epilogue 16x32x16 1w 1s g2" in told


@interpreted
def test_bench_gemm_fused_tunes(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["meshflash", "bench", "gemm"])
    output = tmp_path / "tuned.json"
    done = invoke("--fused --tune -c ag_gemm --shape 10x20x8 --rounds 1 --device cpu", "--output", output)
    assert done.exit_code == 0, done.output
    assert "ag_gemm, 10x20x8: producer_consumer in 16x32x16 1w 1s g2 " in done.output
    assert [len(row["config"]) for row in record.read(output)["rows"]] == [9, 9, 9, 0]


def test_losses_are_told():
    case = Case("all_reduce", 8, 8, 8, 2, shots=2)
    best = fused_sweep.SweepRow(case, "local heap", "epilogue", True, False, 1.0, 1.0, 1.25, 1.25, 0.0, "")
    rows = [
        best,
        replace(best, variant="producer_consumer", ratio=1.5),
        replace(best, case=replace(case, k=16), ratio=0.9),
    ]
    assert fused_tables.verdict([record.flat(row) for row in rows]) == [
        "fusing pays in 1 of 2 products",
        "it loses: all_reduce in two shots, 8x8x8: epilogue takes 1.250 times the unfused time",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--fused --layout nn", "--layout: not with --fused"),
        ("--fused --calibrate --device cpu", "kernels are interpreted, and have no rates"),
        ("-n 2 --mps", "--nproc, --mps: not without --fused"),
        ("--fused --device cpu --mps", "share a GPU"),
        ("--fused --device cpu --heap symmetric", "expected local or shared"),
    ],
)
def test_options_that_do_not_go_together(words, message):
    done = invoke(words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
