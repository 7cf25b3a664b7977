"""`meshflash.gemm.matmul`: gradients, edge cases, plans, errors, rate tables, and `meshflash bench gemm`."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from meshflash.bench import gemm as bench
from meshflash.bench import record
from meshflash.cli import app
from meshflash.gemm import Plan, configs, matmul, rates
from meshflash.gemm import plan as gemm_plan
from meshflash.gemm.configs import Config
from meshflash.gemm.launch import ACTIVATIONS
from meshflash.gemm.plan import MODES, GemmProblem, choose
from meshflash.gemm.rates import Known, Rate, Table

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="test_gemm_gpu.py tests it on a GPU")


def leaves(m=17, n=18, k=20, dtype=torch.float32, transposed=False):
    """Return random A, B and bias that require gradients."""
    generator = torch.Generator().manual_seed(0)
    a, b, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (n, k), (n,)))
    b = b if transposed else b.T.contiguous()
    return [x.requires_grad_() for x in (a, b, bias)]


def outputs_and_gradients(function, tensors):
    """Return the output of a function and the gradients of its inputs."""
    out = function(*tensors)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, dout)]


def check(got, want, allowed):
    """Compare tensors by the relative error of their norms."""
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        assert float((x.detach().double() - y.detach()).norm()) <= allowed * float(y.detach().norm())


@interpreted
@pytest.mark.parametrize(
    ("mode", "activation"),
    [*((mode, "gelu") for mode in MODES), *(("stream_k", name) for name in (None, "relu", "silu")), ("torch", "silu")],
)
def test_gradients_match_float64(mode, activation):
    tensors = leaves()
    got = outputs_and_gradients(lambda a, b, bias: matmul(a, b, bias=bias, activation=activation, mode=mode), tensors)
    act = ACTIVATIONS[activation] if activation else lambda x: x
    exact = [x.detach().double().requires_grad_() for x in tensors]
    check(got, outputs_and_gradients(lambda a, b, bias: act(a @ b + bias), exact), 1e-6)


@interpreted
def test_half_precision_gradients_of_a_float32_result_match_float64():
    a, b, bias = leaves(dtype=torch.bfloat16)
    bias = bias.detach().float().requires_grad_()
    for mode in ("stream_k", "torch"):
        got = outputs_and_gradients(
            lambda *x, mode=mode: matmul(*x[:2], bias=x[2], mode=mode, out_dtype=torch.float32), [a, b, bias]
        )
        assert [x.dtype for x in got] == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
        exact = [x.detach().double().requires_grad_() for x in (a, b, bias)]
        want = outputs_and_gradients(lambda a, b, bias: a @ b + bias, exact)
        check(got[:1], want[:1], 1e-6)
        check(got[1:], want[1:], 5e-3)


@interpreted
def test_output_gradient_with_zero_strides_matches_float64():
    a, b, _ = leaves()
    matmul(a, b, mode="stream_k").sum().backward()
    assert a.grad is not None
    check([a.grad], [b.detach().double().sum(1).expand(17, 20)], 1e-6)


def test_only_inputs_that_require_a_gradient_get_one():
    a, b, bias = leaves()
    out = matmul(a.detach(), b, bias=bias.detach(), activation="gelu")
    out.sum().backward()
    assert a.grad is None
    assert bias.grad is None
    assert b.grad is not None
    with torch.no_grad():
        assert not matmul(a, b, bias=bias).requires_grad


def test_float64_goes_to_torch_and_passes_gradcheck():
    tensors = [x.detach().double().requires_grad_() for x in leaves(3, 4, 5)]
    for name in (None, *ACTIVATIONS):
        torch.autograd.gradcheck(lambda a, b, bias, name=name: matmul(a, b, bias=bias, activation=name), tensors)


@pytest.mark.parametrize("mode", ["auto", *(MODES if os.environ.get("TRITON_INTERPRET") == "1" else ["torch"])])
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_empty_operands_give_the_activated_bias(shape, mode):
    m, n, k = shape
    a, b = torch.ones(m, k, requires_grad=True), torch.ones(k, n, requires_grad=True)
    bias = torch.arange(-1.0, n - 1, requires_grad=True)
    out, plan = matmul(a, b, bias=bias, activation="relu", mode=mode, return_plan=True)
    assert plan == Plan("torch", "there is nothing to multiply")
    assert torch.equal(out, torch.relu(bias).expand(m, n))
    out.sum().backward()
    assert bias.grad is not None
    assert torch.equal(bias.grad, m * (bias > 0).float())
    assert a.grad is not None
    assert a.grad.shape == a.shape


def test_autocast_does_not_change_the_dtype():
    a, b, _ = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        assert matmul(a, b).dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((torch.ones(2, 3, 4), torch.ones(4, 5)), {}, r"a has 3 dims.*a\.flatten\(0, -2\)"),
        ((torch.ones(2, 3), torch.ones(4, 3)), {}, r"expected as many columns of a as rows of b; write b\.T"),
        ((torch.ones(2, 3), torch.ones(4, 5)), {}, r"a is \(2, 3\) and b is \(4, 5\)"),
        ((torch.ones(2, 3), torch.ones(3, 4).half()), {}, r"write b\.to\(a\.dtype\)"),
        ((torch.ones(2, 3).int(), torch.ones(3, 4).int()), {}, r"write a\.bfloat16\(\)"),
        ((torch.ones(2, 3), torch.ones(3, 4, device="meta")), {}, r"write b\.to\(a\.device\)"),
        ((torch.ones(2, 3), torch.ones(3, 4)), {"bias": torch.ones(3)}, r"shape \(4,\)"),
        ((torch.ones(2, 3), torch.ones(3, 4)), {"mode": "split"}, "mode 'split': expected one of auto, stream_k"),
        ((torch.ones(2, 3), torch.ones(3, 4)), {"activation": "tanh"}, "None or one of relu, gelu, silu"),
        ((torch.ones(2, 3), torch.ones(3, 4)), {"precision": "bf16"}, "one of ieee, tf32"),
        ((torch.ones(2, 3), torch.ones(3, 4)), {"out_dtype": torch.int32}, "expected torch.float32"),
        ((torch.ones(2, 3), torch.ones(3, 4)), {"out_dtype": torch.float64}, "expected torch.float32"),
        (
            (torch.ones(2, 3).double(), torch.ones(3, 4).double()),
            {"mode": "stream_k"},
            'no float64; write mode="torch"',
        ),
    ],
)
def test_invalid_arguments_raise_with_a_remedy(arguments, options, words):
    with pytest.raises(ValueError, match=words):
        matmul(*arguments, **options)


def test_cpu_without_the_interpreter_raises(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1 is set before the start; write mode"):
        matmul(torch.ones(2, 3), torch.ones(3, 4), mode="stream_k")


@pytest.fixture
def hopper_gpu(monkeypatch):
    """Make plans believe in a Hopper GPU of 132 SMs; return a function that makes GEMM problems on it."""
    device = torch.device("cuda")
    monkeypatch.setattr(configs, "num_sms", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(gemm_plan.triton_configs, "has_descriptors", lambda device: True)
    monkeypatch.setattr(rates, "known", lambda device: None)

    def problem(m, n, k, **options):
        return GemmProblem(m, n, k, torch.bfloat16, device, **options)

    return problem


def test_auto_without_rates_is_torch_and_explains_why(hopper_gpu):
    plan = choose(hopper_gpu(8192, 8192, 8192))
    assert plan.mode == "torch"
    assert "bench gemm --calibrate" in str(plan)
    assert matmul(torch.ones(2, 3), torch.ones(3, 4), return_plan=True)[1].mode == "torch"


def test_auto_takes_the_fastest_at_the_nearest_shape(hopper_gpu, monkeypatch):
    config = (128, 128, 64, 4, 3, 8, 2, 0)
    table = Table(
        "here",
        "sm_90",
        (
            Rate("torch", "bfloat16", "nn", 4096, 4096, 4096, 700.0),
            Rate("stream_k", "bfloat16", "nn", 4096, 4096, 4096, 710.0, config),
            Rate("torch", "bfloat16", "nn", 256, 1024, 16384, 300.0),
            Rate("split_k", "bfloat16", "nn", 256, 1024, 16384, 250.0),
        ),
    )
    read_back = Table.from_json(json.loads(json.dumps(table.to_json())))
    assert read_back.rates == table.rates
    monkeypatch.setattr(rates, "known", lambda device: Known(read_back, "a test"))
    plan = choose(hopper_gpu(5000, 4096, 4000))
    assert (plan.mode, plan.config, plan.num_ctas) == ("stream_k", Config(*config), 264)
    assert plan.why == "the fastest at 4096x4096x4096 (a test)"
    assert choose(hopper_gpu(200, 1024, 16384)).mode == "torch"
    assert choose(hopper_gpu(5000, 4096, 4000), "stream_k").config == Config(*config), "its fastest configuration"
    assert choose(hopper_gpu(5000, 4096, 4000, tma_aligned=False), "stream_k").config != Config(*config)
    for other in (hopper_gpu(64, 64, 64), hopper_gpu(4096, 4096, 4096, layout="tn")):
        assert "no shape near" in choose(other).why
    assert "multiples of 16 bytes" in choose(hopper_gpu(4096, 4096, 4096, tma_aligned=False)).why


def test_plan_describes_tiles_splits_and_ctas(hopper_gpu):
    plan = choose(hopper_gpu(8192, 8192, 8192), "stream_k")
    assert plan.partition is not None
    assert plan.config == Config(128, 256, 64, 8, 3)
    assert (plan.num_ctas, plan.partition.num_tiles, plan.partition.num_split_tiles) == (132, 2048, 68)
    assert str(plan).startswith("stream_k: 2048 tiles of 128x256x64 8w 3s, 68 split along K and 1980 full, on 132 CTAs")
    few = choose(hopper_gpu(256, 1024, 28672), "split_k")
    assert few.partition is not None
    assert few.partition.num_split_tiles == few.partition.num_tiles
    assert few.num_ctas == 128
    unaligned = choose(hopper_gpu(8192, 8192, 8192, tma_aligned=False), "stream_k").config
    assert unaligned is not None
    assert unaligned.block_n == 128


def test_user_rates_take_precedence_over_the_shipped_table_of_the_same_gpu(tmp_path, monkeypatch):
    shipped = tmp_path / "shipped"
    monkeypatch.setattr(rates, "SHIPPED", shipped)
    monkeypatch.setenv("MESHFLASH_RATES", str(tmp_path / "own"))
    shipped_rates = [Rate(mode, "bfloat16", "nn", 8, 8, 8, 2.0) for mode in ("torch", "split_k")]
    rates.write(Table("NVIDIA H200", "sm_90", tuple(shipped_rates)), shipped / "nvidia-h200.json")
    own_rate = Rate("torch", "bfloat16", "nn", 8, 8, 8, 3.0)
    found: dict[str, Any] = {}
    for name in ("NVIDIA H200", "NVIDIA H100"):
        monkeypatch.setattr(rates, "identity", lambda device, name=name: (name, "sm_90"))
        before = rates._known(name, "sm_90")
        assert before is not None
        assert before.table.device == "NVIDIA H200"
        path = rates.add([own_rate], torch.device("cuda"), {})
        assert rates._read(path).rates == (own_rate,), "the user's table has only what was measured here"
        found[name] = rates._known(name, "sm_90")
    rates._known.cache_clear()
    assert found["NVIDIA H200"].table.rates == (shipped_rates[1], own_rate)
    assert found["NVIDIA H200"].source.endswith("and the table of NVIDIA H200")
    assert found["NVIDIA H100"].table.rates == (own_rate,), "rates of another GPU are not mixed in"


def test_split_k_without_rates_takes_the_configuration_of_data_parallel(hopper_gpu, monkeypatch):
    config = (128, 128, 64, 8, 4, 8, 1, 0)
    table = Table("here", "sm_90", (Rate("data_parallel", "bfloat16", "nn", 4096, 4096, 4096, 7.0, config),))
    monkeypatch.setattr(rates, "known", lambda device: Known(table, "a test"))
    assert choose(hopper_gpu(4096, 4096, 4096), "split_k").config == Config(*config)


@pytest.mark.parametrize(
    "fields",
    [(0, 16, 16, 1, 1), (16, 24, 16, 1, 1), (16, 16, 16, 3, 1), (16, 16, 16, 1, 0), (16, 16, 16, 1, 1, 8, 1, 2)],
)
def test_invalid_configurations_are_refused(fields):
    with pytest.raises(ValueError, match="expected s"):
        Config(*fields)


def test_tiles_below_128_rows_do_not_run_warp_specialized():
    assert Config(128, 256, 64, 8, 4, warp_specialized=1).runs_warp_specialized
    assert not Config(64, 256, 64, 8, 4, warp_specialized=1).runs_warp_specialized
    assert not Config(128, 256, 64, 8, 4).runs_warp_specialized


def test_verdict_names_losses_and_how_far_auto_is_behind():
    def row(mode, ms, ratio):
        return dict(m=8, n=8, k=8, dtype="bfloat16", layout="nn", device="cuda", mode=mode, ms=ms, ratio=ratio)

    lines = bench.summary([row("torch", 2.0, 1.0), row("stream_k", 4.0, 0.5), row("auto", 2.2, 0.9)])
    assert lines == [
        "slower than torch.mm at 8x8x8 nn: stream_k 0.500",
        "auto is at most 10.0% behind the best: at 8x8x8 nn",
    ]
    assert bench.summary([row("torch", None, None), row("stream_k", 4.0, None)]) == []


def test_bench_measures_in_a_separate_process():
    messages: list[str] = []
    case = bench.Case(16, 16, 16, "float32", "nn", "cpu")
    (found,) = bench.measure_in_process(case, ["torch"], 1, messages.append)
    assert found.ms is not None
    assert found.case == case
    assert "timing" in messages


def test_rate_tables_round_trip_through_files(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHFLASH_RATES", str(tmp_path))
    monkeypatch.setattr(rates, "SHIPPED", tmp_path / "none")
    path = rates.file_of("NVIDIA H200")
    assert path == tmp_path / "gemm-nvidia-h200.json"
    rates.write(Table("NVIDIA H200", "sm_90", (Rate("torch", "bfloat16", "nn", 1, 2, 3, 4.0),)), path)
    known = rates._known("NVIDIA H200", "sm_90")
    assert known is not None
    assert known.table.rates[0].tflops == 4.0
    assert str(path) in known.source
    path.write_text('{"rates": [{"tflops": 0}]}')
    rates._known.cache_clear()
    with pytest.raises(ValueError, match=r"not a table of GEMM rates.*--calibrate"):
        rates._known("NVIDIA H200", "sm_90")
    rates._known.cache_clear()


def test_shipped_tables_name_the_versions_they_were_measured_with():
    for path in rates.SHIPPED.glob("*.json"):
        table = Table.from_json(json.loads(path.read_text()))
        assert table.measured_with


def invoke(*words):
    return CliRunner().invoke(app, ["bench", "gemm", *map(str, words)], env={"COLUMNS": "80"})


@interpreted
def test_bench_gemm_times_torch_and_checks_the_kernel(tmp_path):
    output, plot = tmp_path / "x.json", tmp_path / "x.png"
    words = ("--shape", "33x20x40", "--mode", "stream_k", "--mode", "auto", "--layout", "nt", "--rounds", 2)
    result = invoke(*words, "--device", "cpu", "--output", output, "--plot", plot)
    assert result.exit_code == 0, (result.output, result.exception)
    rows = record.read(output)["rows"]
    assert [row["mode"] for row in rows] == ["torch", "stream_k", "auto"]
    assert rows[0]["ratio"] == 1.0
    assert rows[0]["ms"] > 0
    assert rows[1]["ms"] is None
    assert all(0 < row["error"] < 1e-6 for row in rows)
    assert "not timed" in result.output
    assert "only torch is timed" in result.output
    assert max(map(len, result.output.splitlines()[:9])) <= 80
    assert plot.stat().st_size > 1000


def test_bench_gemm_does_not_time_wrong_results(monkeypatch):
    monkeypatch.setattr(bench, "run", lambda *args: (torch.zeros(4, 4), None))
    with pytest.raises(RuntimeError, match=r"torch: relative error 1\.0e\+00 .* not timed"):
        bench.measure(bench.Case(4, 4, 4, "float32", device="cpu"), ["torch"], 1)


@pytest.mark.parametrize(
    "words",
    [("--shape", "3x4"), ("--mode", "best"), ("--dtype", "int8"), ("--layout", "nx"), ("--tune",), ("--calibrate",)],
)
def test_bench_gemm_rejects_invalid_options(words, tmp_path):
    result = invoke(*words, "--device", "cpu", "--output", tmp_path / "x.json")
    assert result.exit_code == 2
    assert "Invalid value" in result.output
    assert not (tmp_path / "x.json").exists()


def test_calibration_writes_the_best_of_each_mode(monkeypatch):
    """The rows are made up: on a CPU no kernel is timed."""
    wide, slim = (128, 256, 64, 8, 3, 8, 1, 0), (64, 128, 64, 4, 4, 8, 2, 0)

    def time_configs(case, rounds, say):
        say("timing")
        made = [("torch", (), 500.0), ("stream_k", wide, 400.0), ("stream_k", slim, 450.0), ("split_k", slim, None)]
        return [
            bench.GemmRow(case, mode, config, 1, 0, 1, 1e-3, None if tflops is None else 1.0, tflops, None, "tried")
            for mode, config, tflops in made
        ]

    monkeypatch.setattr(bench, "time_configs", time_configs)
    monkeypatch.setattr(bench, "identity", lambda device: ("a GPU", "sm_90"))
    messages: list[str] = []
    table, rows = bench.calibrate("cuda", [(64, 64, 64)], layouts=("nn", "tn"), say=messages.append)
    assert len(rows) == 8
    assert messages == ["64x64x64 bfloat16 nn: timing", "64x64x64 bfloat16 tn: timing"]
    assert [(rate.mode, rate.layout, rate.config) for rate in table.rates] == [
        ("stream_k", "nn", slim),
        ("torch", "nn", ()),
        ("stream_k", "tn", slim),
        ("torch", "tn", ()),
    ]
    assert table.measured_with["torch"] == torch.__version__


def test_candidates_are_distinct_and_include_the_defaults(hopper_gpu):
    device = torch.device("cuda")
    tried = configs.candidates("bfloat16", device)
    assert len({str(config) for config in tried}) == len(tried)
    assert {configs.default(m, m, "bfloat16", True, device) for m in (64, 1024, 8192)} <= set(tried)


def test_argument_without_a_hash_is_refused_by_name():
    with pytest.raises(ValueError, match="mode"):
        matmul(torch.ones(2, 3), torch.ones(3, 4), mode=[])  # type: ignore[call-overload]


def test_tensors_without_an_address_are_multiplied():
    a, b = torch.randn(5, 2, 3), torch.randn(3, 4)
    torch.testing.assert_close(torch.func.vmap(matmul, in_dims=(0, None))(a, b), a @ b)
    torch.testing.assert_close(matmul(a[0].to_sparse(), b), a[0] @ b)
