"""The held-out shapes: what they cover, what a row says, and a summary that names the cells that `auto` misses."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import held_out
from commands import app
from meshflash.bench import calibrate, record
from meshflash.bench.check import WrongError
from meshflash.kernels.tiled import Tiled


def row(kernel, ms, loop_ms=None, direction="forward", ran="", note=None, case=held_out.ON_GPU[0]):
    figures = dict(ms=ms, tflops=None if ms is None else 100.0 / ms, error=None, oracle="", peak_bytes=None)
    loop_ms = ms if loop_ms is None else loop_ms
    made = held_out.HeldOutRow(kernel, ran or kernel, direction, case, **figures, loop_ms=loop_ms, note=note)
    return record.flat(made)


def test_no_held_out_shape_is_calibrated():
    for case in held_out.ON_GPU:
        for variant in ("", *calibrate.VARIANTS):
            assert case != calibrate.case_of(case.tokens, case.head_dim, case.mask, case.device, variant)


def test_held_out_shapes_cover_what_users_have():
    cases = held_out.ON_GPU
    assert {32, 64, 80, 96, 128, 160, 192, 256} == {case.head_dim for case in cases}
    assert {"bfloat16", "float16"} == {case.dtype for case in cases}
    assert {"full", "causal", "window", "documents"} == {case.mask.split("-")[0] for case in cases}
    assert any((case.heads, case.kv_heads) == (64, 8) for case in cases)
    assert sum(case.tokens <= 2048 for case in cases) >= 8
    assert sum(case.tokens % 2 for case in cases) >= 8
    assert [case.tokens for case in cases] == sorted(case.tokens for case in cases)


def test_run_measures_auto_beside_the_kernels_that_it_may_choose(tmp_path):
    output = tmp_path / "x.json"
    words = ["benchmarks", "held-out", "--device", "cpu", "--rounds", "1", "--tokens", "37"]
    result = CliRunner().invoke(app, [*words, "--output", str(output)], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    assert "1x37 4/2x16 causal fp32" in result.output
    rows = json.loads(output.read_text())["rows"]
    assert [(row["kernel"], row["pass"]) for row in rows] == [
        (kernel, direction) for direction in ("forward", "backward") for kernel in ("auto", "vendor")
    ]
    assert all(row["ms"] > 0 and row["loop_ms"] > 0 and row["ran"] == "vendor" for row in rows)
    shown = CliRunner().invoke(app, ["benchmarks", "held-out", "--from", str(output), "--markdown"])
    assert "| 1x37 4/2x16 causal fp32 | vendor | " in shown.output


def test_wrong_result_of_auto_raises(monkeypatch):
    right = Tiled.forward

    def wrong(self, x, outputs=None, carry=None):
        out_BTHE, lse_BHT = right(self, x, outputs, carry)
        out_BTHE[0, 0] += 1
        return out_BTHE, lse_BHT

    window = held_out.ON_CPU[1]
    assert calibrate.supported(window) == ("tiled",)
    monkeypatch.setattr(Tiled, "forward", wrong)
    with pytest.raises(WrongError, match="it is wrong, so it is not timed"):
        list(held_out.run(window, 1, lambda _: None))


def test_summary_names_shapes_where_auto_is_slow():
    rows = [row("auto", 1.0, 3.0, ran="fa2"), row("cudnn", 0.5, 3.0), row("fa2", 1.0, 4.0)]
    rows += [row("auto", 2.0, direction="backward", ran="cudnn"), row("cudnn", 2.0, 3.0, direction="backward")]
    rows += [row("fa2", 3.0, direction="backward")]
    lines = held_out.summary(rows)
    shape = "4x256 16x64 causal bf16"
    assert lines == [
        "kernel time: auto reaches 0.97x of the best kernel at 0 of 1 shapes",
        f"  0.83x: {shape}: fa2, cudnn, best cudnn",
        "plain loops: auto reaches 0.97x of the best kernel at 1 of 1 shapes",
    ]
    assert f"| {shape} | fa2, cudnn | 100 | 50 | cudnn | 0.83 | 1.20 |" in held_out.markdown(rows)


def test_kernels_without_figures_are_named():
    rows = [row(name, ms, direction=direction, note=note) for direction in ("forward", "backward")
            for name, ms, note in (("auto", 1.0, None), ("fa4", None, "failed: RuntimeError: no"))]  # fmt: skip
    *counts, note = held_out.summary(rows)
    assert [line.split(": ")[1] for line in counts] == ["auto reaches 0.97x of the best kernel at 0 of 0 shapes"] * 2
    assert note == "fa4 at 4x256 16x64 causal bf16: failed: RuntimeError: no"


def test_kernel_of_one_pass_is_not_the_best_of_both():
    rows = [row("auto", 1.0), row("auto", 1.0, direction="backward"), row("fa4", 0.1)]
    assert held_out.summary(rows)[0].endswith("at 0 of 0 shapes")


def test_table_fits_100_columns():
    rows = [row(name, 1.0, direction=p, case=case) for case in held_out.ON_GPU for p in ("forward", "backward")
            for name in ("auto", "hopper")]  # fmt: skip
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(*held_out.tables(rows))
    text = console.export_text()
    assert "…" not in text
    assert "1x16384 32/8x128 documents-lognormal-2048 bf16" in text


def test_unknown_length_names_those_that_exist():
    with pytest.raises(ValueError, match="no shape has 5 tokens; they have 37, 64"):
        held_out.cases_of("cpu", [5])
