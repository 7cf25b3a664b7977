"""The kernel benchmark: its records, its masks, and that a wrong kernel is refused rather than timed."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from meshflash.bench import kernels, plots
from meshflash.bench.timing import interleaved, peak_bytes
from meshflash.cli import app
from meshflash.core.mask import Mask
from meshflash.kernels.tiled import Tiled

COLUMNS = {
    "kernel", "ran", "pass", "head_dim", "tokens", "batch", "heads", "kv_heads", "mask", "dtype", "device",
    "ms", "tflops", "error", "peak_bytes",
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
        ("--dtype int8", "expected one of float64"),
        ("--kernel fast", "expected one of auto, vendor"),
        ("--kernel vendor --mask window-4", "lacks windows"),
        ("--device tpu", "device 'tpu'"),
        ("--tokens 0", "'--tokens'"),
        ("--kv-heads 0", "'--kv-heads'"),
    ],
)
def test_bad_arguments_are_explained(arguments, message, tmp_path):
    base = f"bench kernels --tokens 16 --heads 1 --dim 8 --rounds 1 --output {tmp_path / 'x.json'}"
    result = CliRunner().invoke(app, [*base.split(), "--device", "cpu", *arguments.split()], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    right = Tiled.forward

    def wrong(self, x, outputs=None, carry=None):
        out_BTHE, lse_BHT = right(self, x, outputs, carry)
        out_BTHE[0, 0] += 1
        return out_BTHE, lse_BHT

    monkeypatch.setattr(Tiled, "forward", wrong)
    with pytest.raises(RuntimeError, match=r"tiled, forward: relative error .* it is wrong, so it is not timed"):
        list(kernels.run(kernels.Cell(tokens=32, heads=1, kv_heads=1, head_dim=8), ("tiled",), rounds=1))


def test_masks_by_name():
    assert kernels.parse_mask("full", 8) == Mask.full()
    assert kernels.parse_mask("documents-3", 8) == Mask.causal() & Mask.documents([3, 3, 2])
    with pytest.raises(ValueError, match="expected full"):
        kernels.parse_mask("documents-9", 8)


def test_flops_count_visible_pairs():
    cell = kernels.Cell(tokens=4, batch=2, heads=3, kv_heads=1, head_dim=8, mask="causal")
    assert cell.flops("forward") == 4 * 2 * 3 * 8 * 10
    assert cell.flops("backward") == 2.5 * cell.flops("forward")


def test_peak_bytes_sees_what_is_freed_again():
    def work():
        return (torch.empty(1000, dtype=torch.float32) * 2 + 1).sum()

    assert 8000 <= peak_bytes(work, torch.device("cpu")) < 20000


def test_interleaved_gives_every_function_its_turn():
    calls = []
    functions = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    assert set(interleaved(functions, torch.device("cpu"), rounds=2)) == {"a", "b"}
    assert calls == ["a", "b"] * 3


def test_plots_say_what_is_missing(monkeypatch, tmp_path: Path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match=r"pip install 'meshflash\[plots\]'"):
        plots.kernels([], "", tmp_path / "x.png")
