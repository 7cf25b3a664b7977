"""The kernel benchmark: its records, its masks, and that a wrong kernel is refused rather than timed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from meshflash import flash_attention
from meshflash.bench import check, kernels, plots, record, timing
from meshflash.bench.cases import Case, parse_mask
from meshflash.bench.timing import interleaved, watched
from meshflash.cli import app
from meshflash.core.mask import Mask
from meshflash.kernels.tiled import Tiled
from meshflash.runtime.oom import attempt

COLUMNS = {
    "kernel", "ran", "pass", "head_dim", "tokens", "batch", "heads", "kv_heads", "mask", "dtype", "device",
    "deterministic", "ms", "tflops", "error", "oracle", "peak_bytes",
}  # fmt: skip


def test_bench_kernels_writes_a_record_and_a_plot(tmp_path):
    output, plot = tmp_path / "deep" / "kernels.json", tmp_path / "kernels.png"
    arguments = (
        "bench kernels --device cpu --tokens 48 --heads 2 --kv-heads 1 --dim 8 --mask causal --mask window-8 --rounds 1"
    )
    result = CliRunner().invoke(app, [*arguments.split(), "--output", str(output), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert "x sdpa" in result.output
    written = json.loads(output.read_text())
    assert set(written["header"]) == {"machine", "versions", "commit", "date", "command"}
    assert {"python", "torch", "meshflash", "triton", "numpy"} == set(written["header"]["versions"])
    rows = written["rows"]
    assert {tuple(sorted(row)) for row in rows} == {tuple(sorted(COLUMNS))}
    assert {(row["kernel"], row["pass"]) for row in rows} == {
        (kernel, direction) for kernel in ("auto", "tiled", "torch sdpa") for direction in ("forward", "backward")
    }
    assert {row["ran"] for row in rows if row["kernel"] == "auto" and row["mask"] == "causal"} == {"vendor"}
    assert all(row["ms"] > 0 and row["error"] < 1e-5 and row["peak_bytes"] > 0 for row in rows)
    assert plot.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mask diagonal", "expected full, causal, window-N"),
        ("--mask window-", "expected full, causal, window-N"),
        ("--dtype int8", "expected one of float32"),
        ("--kernel fast", "expected one of auto, vendor"),
        ("--kernel vendor --mask window-4", "does not support windows"),
        ("--device tpu", "device 'tpu'"),
        ("--tokens 0", "'--tokens'"),
        ("--kv-heads 0", "'--kv-heads'"),
        ("--heads 3 --kv-heads 2", "2 key heads do not divide 3 query heads"),
    ],
)
def test_invalid_arguments_name_the_remedy(arguments, message, tmp_path):
    base = f"bench kernels --tokens 16 --heads 1 --dim 8 --rounds 1 --output {tmp_path / 'x.json'}"
    result = CliRunner().invoke(app, [*base.split(), "--device", "cpu", *arguments.split()], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_wrong_kernel_is_not_timed(monkeypatch):
    right = Tiled.forward

    def wrong(self, x, outputs=None, carry=None):
        out_BTHE, lse_BHT = right(self, x, outputs, carry)
        out_BTHE[0, 0] += 1
        return out_BTHE, lse_BHT

    monkeypatch.setattr(Tiled, "forward", wrong)
    with pytest.raises(RuntimeError, match=r"tiled, forward: relative error .* it is wrong, so it is not timed"):
        list(kernels.run(Case(tokens=32, heads=1, kv_heads=1, head_dim=8), ("tiled",), rounds=1))


def test_masks_by_name():
    assert parse_mask("full", 8) == Mask.full()
    assert parse_mask("documents-3", 8) == Mask.causal() & Mask.documents([3, 3, 2])
    for name in ("documents-9", "documents-lognormal-0", "lognormal-4", "full-2", "documents-"):
        with pytest.raises(ValueError, match="expected full"):
            parse_mask(name, 8)


def test_lognormal_documents_have_their_mean_and_are_deterministic():
    mask = parse_mask("documents-lognormal-100", 100_000)
    assert mask == parse_mask("documents-lognormal-100", 100_000)
    (documents,) = mask.documents_nodes
    lengths = np.diff(documents.q_cuts(0))
    assert lengths.sum() == 100_000
    assert 85 < lengths.mean() < 115
    assert lengths.max() > 5 * lengths.mean()
    assert parse_mask("documents-lognormal-100", 7) == Mask.causal() & Mask.documents([7])


def test_flops_count_visible_pairs():
    cell = Case(tokens=4, batch=2, heads=3, kv_heads=1, head_dim=8, mask="causal")
    assert cell.flops("forward") == 4 * 2 * 3 * 8 * 10
    assert cell.flops("backward") == 2.5 * cell.flops("forward")


def test_peak_bytes_include_memory_that_is_freed_again():
    def work():
        return (torch.empty(1000, dtype=torch.float32) * 2 + 1).sum()

    assert 8000 <= watched(work, torch.device("cpu")).peak_bytes < 20000


def test_interleaved_alternates_samples_of_all_functions(monkeypatch):
    calls = []
    functions = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    monkeypatch.setattr(timing, "MOST_CALLS", 3)
    assert set(interleaved(functions, torch.device("cpu"), rounds=2)) == {"a", "b"}
    done = "".join(calls)
    assert done[:8] == "a" + "aaa" + "b" + "bbb"
    assert {done[8:14], done[14:]} <= {"aaabbb", "bbbaaa"}


def test_samples_on_a_gpu_last_as_long_as_the_longest_call(monkeypatch):
    took: dict[Any, float] = {"long": 40.0, "short": 0.4, "very short": 0.01}
    samples = []

    def milliseconds(function, device, calls, lead=True):
        samples.append((function, calls))
        return took[function]

    monkeypatch.setattr(timing, "_milliseconds", milliseconds)
    assert interleaved({name: name for name in took}, torch.device("cuda"), rounds=1) == took
    assert dict(samples[-3:]) == {"long": 1, "short": 100, "very short": timing.MOST_CALLS}


@pytest.mark.parametrize("host", [0.0, 0.01, 1.0, 33.0, 1e4])
def test_gpu_is_kept_busy_while_a_sample_is_issued(host):
    calls = timing._issued_while_held(timing.MOST_CALLS, host)
    assert 1 <= calls <= timing.MOST_CALLS
    assert calls == 1 or host * (calls + 1) * timing.SPARE <= timing.HELD_MS
    assert calls == timing.MOST_CALLS or host * (calls + 2) * timing.SPARE > timing.HELD_MS


def test_interleaved_times_slow_functions_once_and_leaves_out_those_without_memory(monkeypatch):
    calls = []

    def greedy():
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(timing, "SLOW_MS", -1.0)
    times = interleaved({"greedy": greedy, "slow": lambda: calls.append(1)}, torch.device("cpu"), rounds=5)
    assert set(times) == {"slow"}
    assert calls == [1]


def test_other_errors_are_not_taken_for_out_of_memory():
    def broken():
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        attempt(broken)
    assert attempt(lambda: torch.empty(2**60)) is None


@pytest.mark.parametrize("oracle", ["torch sdpa in float32", "tiled in float64"])
def test_oracles_agree_when_computed_a_few_heads_at_a_time(oracle, monkeypatch):
    case = Case(tokens=24, batch=2, heads=6, kv_heads=3, head_dim=8)
    tensors = case.tensors()
    want = check.truth(case, tensors)
    assert want.oracle == "reference in float64"
    monkeypatch.setattr(check, "oracle_of", lambda *_: oracle)
    monkeypatch.setattr(check, "MATRIX_BYTES", 24 * 24 * 2 * 4 * 2)  # two key heads
    for a, b in zip(check.truth(case, tensors).results, want.results, strict=True):
        assert a.shape == b.shape
        assert check.relative_error(a, b) < 1e-6


def test_oracle_depends_on_length_mask_dtype_and_device():
    long = Case(tokens=8192, device="cuda", dtype="bfloat16")
    assert check.oracle_of(long) == "torch sdpa in float32"
    assert check.oracle_of(long, exact=True) == "tiled in float64"
    for other in (replace(long, mask="window-4"), replace(long, dtype="float64"), replace(long, device="cpu")):
        assert check.oracle_of(other) == "tiled in float64"
    assert check.oracle_of(replace(long, tokens=4096)) == "reference in float64"


def test_deterministic_option_reaches_the_kernel(monkeypatch):
    asked = []
    monkeypatch.setattr(Tiled, "unsupported_reason", lambda self, ask: asked.append(ask.deterministic))
    case = Case(tokens=8, heads=1, kv_heads=1, head_dim=8, deterministic=True)
    rows = list(kernels.run(case, ("tiled",), rounds=1))
    assert asked
    assert all(asked)
    assert all(record.flat(row)["deterministic"] for row in rows)


def test_plot_without_matplotlib_names_the_package(monkeypatch, tmp_path: Path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match=r"pip install matplotlib"):
        plots.kernels([], "", tmp_path / "x.png")


@pytest.mark.parametrize("tokens", [48, 50])  # documents of equal length, and not
def test_oracle_of_documents_is_that_of_the_mask(tokens):
    case = Case(tokens=tokens, batch=2, heads=4, kv_heads=2, head_dim=8, mask="documents-4", dtype="float64")
    tensors = case.tensors()
    found = check.truth(case, tensors)
    out = flash_attention(*tensors[:3], mask=case.rule, kernel="reference")
    want = (out, *torch.autograd.grad(out, tensors[:3], tensors[3]))
    for got, exact in zip(found.results, want, strict=True):
        torch.testing.assert_close(got, exact.detach())
