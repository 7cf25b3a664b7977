"""Fused GEMM + collectives in benchmarks: shards, bytes, failures, and the sweep of `python -m benchmarks fused`."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton")

from benchmarks import fused as sweep
from benchmarks import fused_tables, fused_tune
from benchmarks.fused import COLLECTIVE_SHOTS, COPIES, Copies
from commands import app
from meshflash.bench import fused, record
from meshflash.bench.fused import Harness, plan_case
from meshflash.bench.fused_cases import GROUP, HEAP, Case, RankRow, Setup, default_shape, default_world, find_failures
from meshflash.comm.heap.api import open_heap
from meshflash.gemm import configs, rates
from meshflash.gemm.configs import Config
from meshflash.gemm.distributed.plan import VARIANTS, FusedConfig, plan_fused
from meshflash.kernels.triton.common import INTERPRETED

interpreted = pytest.mark.skipif(not INTERPRETED, reason="interprets kernels on a CPU")


def invoke(words, *more):
    return CliRunner().invoke(app, ["benchmarks", "fused", *words.split(), *map(str, more)], env={"COLUMNS": "100"})


@pytest.mark.parametrize("collective", [name for name, _ in COLLECTIVE_SHOTS])
def test_shards_of_operands_give_the_whole_gemm(collective):
    case = Case(collective, 7, 10, 8, 3, seed=2)
    a, b = case.tensors(torch.device("cpu"))
    parts = [case.operands(a, b, rank) for rank in range(3)]
    made = [x.double() @ y.double() for x, y in parts]
    whole = {
        "all_scatter": lambda: torch.cat(made, 1),
        "ag_gemm": lambda: torch.cat(made),
        "all_reduce": lambda: torch.stack(made).sum(0),
        "gemm_rs": lambda: torch.stack(made).sum(0),
    }[collective]()
    torch.testing.assert_close(whole, a.double() @ b.double())
    shares = [case.output(whole, rank) for rank in range(3)]
    assert [len(x) for x in shares] == ([3, 2, 2] if collective == "gemm_rs" else [7, 7, 7])
    again = case.tensors(torch.device("cpu"))[0]
    assert torch.equal(a, again)
    assert not torch.equal(a, replace(case, seed=3).tensors(torch.device("cpu"))[0])


def test_sent_bytes_follow_from_shapes():
    def sent(collective, rank, shots=0):
        return Case(collective, 8, 12, 16, 4, "bfloat16").sent_bytes(rank, shots)

    assert sent("all_scatter", 0) == 3 * 8 * 3 * 2
    assert sent("ag_gemm", 0) == 3 * 2 * 16 * 2
    assert sent("gemm_rs", 0) == 6 * 12 * 4  # sums in float32
    assert sent("all_reduce", 0, 1) == 3 * 8 * 12 * 4
    assert sent("all_reduce", 0, 2) == 3 / 4 * 8 * 12 * (4 + 2)
    assert Case("all_scatter", 8, 10, 16, 4).sent_bytes(3, 0) == 3 * 8 * 2 * 4  # a smaller part


def test_case_on_a_gpu_needs_no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert Case("all_reduce", 8, 8, 8, 2, "bfloat16", "cuda", 1).problem.world == 2
    with pytest.raises(ValueError, match="shots=3"):
        Case("all_reduce", 8, 8, 8, 2, "bfloat16", "cuda", 3)


def test_processes_under_mps_may_use_all_sms(monkeypatch):
    """Shares of SMs that MPS gives may overlap: a CTA that spins would keep an SM from the peer that it waits for."""

    def started(world, function, *args, **more):
        return [os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")] * world

    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    monkeypatch.setattr(fused, "mps", nullcontext)
    monkeypatch.setattr(fused, "run_ranks", started)
    case = Case("ag_gemm", 8, 8, 8, 8, "bfloat16", "cuda")
    assert fused.run_in_ranks(started, case, Setup(mps=True)) == [None] * 8


def test_defaults_on_a_cpu_are_small():
    assert max(default_shape("cpu")) < 100
    assert default_world("cpu") == 2


def test_failures_name_their_rank():
    right = RankRow(Case("all_reduce", 8, 8, 8, 2), 0, HEAP, "shared heap", "bulk", 1, "", 1, 1, 1, 1e-7, None, "a")
    assert find_failures([right, replace(right, rank=1)]) == []
    nan, other = replace(right, rank=1, error=math.nan), replace(right, rank=1, bits="b")
    assert find_failures([right, nan]) == [
        "rank 1, bulk by shared heap: relative error nan against float64, where float32 allows 1e-05"
    ]
    assert "other bits than rank 0" in find_failures([right, other])[0]
    assert find_failures([right, replace(other, comm=GROUP)]) == []  # a group has the bits of its library
    rows = replace(other, case=replace(right.case, collective="gemm_rs"))
    assert find_failures([replace(rows, rank=0, bits="a"), rows]) == []


@pytest.mark.parametrize(("collective", "shots"), COLLECTIVE_SHOTS, ids=str)
def test_copies_give_the_same_results(collective, shots):
    case = Case(collective, 7, 10, 8, 3, "bfloat16", shots=shots)
    with open_heap(3, bytes=4096, device="cpu") as heap:
        harness = Harness(case, heap)
        call = Copies(harness, shots or 0)
        for _ in range(2):
            assert max(harness.errors(call())) < 5e-3


def test_sweep_has_each_collective_at_each_shape():
    found = sweep.cases_of("cpu", 2, "float32", [], [])
    assert len(found) == len(COLLECTIVE_SHOTS) * len(sweep.SMALL)
    found = sweep.cases_of("cpu", 2, "float32", [(1, 2, 3)], ["all_reduce"])
    assert [(case.shots, case.k) for case in found] == [(1, 3), (2, 3)]
    with pytest.raises(ValueError, match="collective 'all'"):
        sweep.cases_of("cpu", 2, "float32", [], ["all"])


@interpreted
def test_fused_writes_a_record_and_shows_it_again(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmarks/__main__.py", "fused"])
    output, plot = tmp_path / "fused.json", tmp_path / "fused.png"
    words = "-c all_scatter --shape 10x36x8 --shape 10x36x20 --rounds 1 --device cpu"
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
        assert min(row["vs_best"] for row in own) == 1
        assert all(row["error"] < 1e-6 for row in own)
    again = invoke("", "--device", "cpu", "--from", output)
    assert again.exit_code == 0, again.output
    assert again.output in done.output
    assert "| 10x36x20 | " in invoke("--device cpu --markdown", "--from", output).output


def run_sweep(rank, world, group, setup, cases):
    told: list = []
    sweep._run(rank, world, told.append, setup, cases)
    return told


@interpreted
def test_sweep_runs_over_processes(pool):
    told, others = pool.run(2, run_sweep, Setup(rounds=1), [Case("all_reduce", 10, 36, 8, 2, shots=1)])
    assert others == []
    assert told[0] == "all_reduce 10x36x8 float32 on 2 ranks"
    assert [row.variant for row in told[1]] == ["epilogue", "producer_consumer", "bulk"]
    assert {row.heap for row in told[1]} == {"shared heap"}


@interpreted
def test_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(Copies, "_sum", lambda self, rank: self.inbox[rank][0])
    with pytest.raises(RuntimeError, match=r"copies: relative error .* it is wrong, so it is not timed"):
        sweep.run([Case("gemm_rs", 6, 8, 8, 2)], Setup(rounds=1, local=True), lambda _: None)


#: What does not fit, and two that do.
TRIED = (Config(16, 32, 16, 1, 2), Config(16, 32, 16, 1, 1), Config(8, 16, 16, 1, 1))


@pytest.fixture
def tried(monkeypatch):
    """Candidates of which the first does not run and the last is the fastest, with one communication SM."""
    call, time = Harness.call, Harness.time

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
    monkeypatch.setattr(Harness, "call", refused)
    monkeypatch.setattr(Harness, "time", timed)


@pytest.mark.slow
@interpreted
def test_tuning_finds_the_best_configuration_of_each_variant(tried):
    said: list = []
    case = Case("gemm_rs", 20, 36, 8, 2)
    chosen = fused_tune.best(0, Setup(rounds=1, local=True), case, said.append)
    one_comm_sm = FusedConfig.of(TRIED[2], 1)
    assert chosen == dict.fromkeys(VARIANTS, TRIED[2]) | {"producer_consumer": one_comm_sm}
    left_out = "does not run: RuntimeError: out of resource: shared memory"
    assert said == [
        *(f"epilogue {x}" for x in (TRIED[0], f"{TRIED[0]} {left_out}", *TRIED[1:])),
        *(f"producer_consumer {x}" for x in (TRIED[0], f"{TRIED[0]} {left_out}", *TRIED[1:])),
        *(f"producer_consumer {TRIED[2]} {number}comm" for number in (1, 2)),
        *(f"bulk {x}" for x in (TRIED[2], TRIED[0], f"{TRIED[0]} {left_out}")),  # tiles of other sizes
    ]
    rows = sweep._measure(0, Setup(rounds=1, local=True), case, chosen)
    assert [row.config[:2] for row in rows if row.config] == [(8, 16)] * 3
    assert [row.config[-1] for row in rows if row.config] == [0, 1, 0]  # communication SMs
    assert not any(row.auto for row in rows)  # auto takes other blocks
    auto = plan_case(case, Setup(local=True), torch.device("cpu"), "auto")
    same = FusedConfig.of(auto.tiling, auto.num_comm_sms)  # as a table has it
    rows = sweep._measure(0, Setup(rounds=1, local=True), case, chosen | {auto.variant: same})
    assert [row.variant for row in rows if row.auto] == [auto.variant]


@interpreted
def test_wrong_configuration_raises(tried, monkeypatch):
    monkeypatch.setattr(Harness, "errors", lambda self, results: [0.1])
    with pytest.raises(RuntimeError, match=r"epilogue 16x32x16 1w 1s: relative error .* it is wrong"):
        fused_tune.best(0, Setup(rounds=1, local=True), Case("gemm_rs", 20, 36, 8, 2), lambda _: None)


def tuned(rank, world, group, setup, case):
    return fused_tune.best(rank, setup, case, lambda _: None)


@interpreted
def test_processes_choose_the_same_configurations(pool):
    one, other = pool.run(2, tuned, Setup(rounds=1), Case("ag_gemm", 10, 20, 8, 2))
    assert one == other
    assert set(one) == set(VARIANTS)


@pytest.fixture
def no_table():
    """What a test reads is forgotten after it."""
    rates._known.cache_clear()
    yield
    rates._known.cache_clear()


def test_rates_are_added_to_the_users_table(tmp_path, monkeypatch, no_table):
    """Rates of other GEMMs stay, equal ones are replaced, and `auto` takes the fastest with its communication SMs."""
    monkeypatch.setenv("MESHFLASH_RATES", str(tmp_path))
    monkeypatch.setattr(rates, "identity", lambda device: ("a GPU", "sm_90"))
    monkeypatch.setattr(rates, "known", lambda device: rates._known("a GPU", "sm_90"))
    monkeypatch.setattr(rates, "SHIPPED", tmp_path / "none")
    monkeypatch.setattr(configs, "num_sms", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    plain = rates.Rate("torch", "bfloat16", "nn", 4096, 4096, 4096, 700.0)
    rates.write(rates.Table("a GPU", "sm_90", (plain,)), rates.file_of("a GPU"))
    case = Case("all_reduce", 4096, 4096, 4096, 4, "bfloat16", "cuda", 2)
    row = sweep.SweepRow(case, "local heap", "bulk", False, False, 2.0, 1.0, 1.0, 1.0, 0.0, "", ranks_per_device=4)
    moving = replace(row, variant="producer_consumer", ms=1.0, config=(128, 128, 64, 8, 4, 8, 1, 0, 3))
    found = sweep.rates_of([row, moving, replace(row, variant=COPIES)])
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
    plan = plan_fused(case.problem, device, ranks_per_device=4)
    assert (plan.variant, plan.shots, plan.num_comm_sms, plan.num_ctas) == ("producer_consumer", 2, 3, 30)
    rates.add(sweep.rates_of([replace(moving, ms=4.0)]), device, {})
    assert plan_fused(case.problem, device, ranks_per_device=4).variant == "bulk"


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
    sweep.run(cases, Setup(rounds=1, local=True), told.append, tune=True, write=True)
    assert added == [[(f"{name}/1", k, 9) for name in VARIANTS] for k in (8, 12)]
    assert told.count(tmp_path) == 2
    assert "all_reduce 10x20x12 float32 on 2 ranks: epilogue 16x32x16 1w 1s g2" in told


@interpreted
def test_fused_tunes_and_names_configurations(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmarks/__main__.py", "fused"])
    output = tmp_path / "tuned.json"
    done = invoke("--tune -c ag_gemm --shape 10x20x8 --rounds 1 --device cpu", "--output", output)
    assert done.exit_code == 0, done.output
    assert "ag_gemm, 10x20x8: producer_consumer in 16x32x16 1w 1s g2 " in done.output
    assert [len(row["config"]) for row in record.read(output)["rows"]] == [9, 9, 9, 0]


def test_verdict_lists_where_fusing_loses():
    case = Case("all_reduce", 8, 8, 8, 2, shots=2)
    best = sweep.SweepRow(case, "local heap", "epilogue", True, False, 1.0, 1.0, 1.25, 1.25, 0.0, "")
    rows = [
        best,
        replace(best, variant="producer_consumer", ratio=1.5),
        replace(best, case=replace(case, k=16), ratio=0.9),
    ]
    assert fused_tables.verdict([record.flat(row) for row in rows]) == [
        "fusing pays in 1 of 2 GEMMs",
        "it loses: all_reduce in two shots, 8x8x8: epilogue takes 1.250 times the unfused time",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--calibrate --device cpu", "kernels are interpreted, and have no rates"),
        ("--device cpu --mps", "share a GPU"),
        ("--device cpu --heap symmetric", "expected local or shared"),
    ],
)
def test_invalid_options_name_the_remedy(words, message):
    done = invoke(words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
