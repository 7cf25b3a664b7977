"""Lengths and peak memory: what they write, and what happens when memory runs out."""

import json

import torch
from typer.testing import CliRunner

from benchmarks import lengths, memory, plots
from commands import app
from meshflash.bench import candidates, measure, record
from meshflash.bench.cases import Case

SMALL = "--device cpu --heads 2 --kv-heads 1 --dim 8"


def invoke(words, *more):
    return CliRunner().invoke(app, [*words.split(), *map(str, more)], env={"COLUMNS": "80"})


def test_lengths_writes_a_record_and_shows_it_again(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmarks/__main__.py", "lengths"])
    output, plot = tmp_path / "lengths.json", tmp_path / "lengths.png"
    words = f"benchmarks lengths {SMALL} --tokens 16 --tokens 32 --rounds 1"
    result = invoke(words, "--output", output, "--plot", plot)
    assert result.exit_code == 0, result.output
    rows = json.loads(output.read_text())["rows"]
    names = ("standard", "tiled", "auto")
    assert [(row["tokens"], row["kernel"]) for row in rows] == [(t, name) for t in (16, 32) for name in names]
    for row in rows:
        assert row["ms"] == row["forward_ms"] + row["backward_ms"] > 0
        assert row["error"] < 1e-5
    assert [row["speedup"] for row in rows if row["kernel"] == "standard"] == [1.0, 1.0]
    assert [row["saved"] for row in rows if row["kernel"] == "standard"] == [0.0, 0.0]
    assert plot.stat().st_size > 1000

    plot.unlink()
    again = invoke("benchmarks lengths", "--from", output, "--plot", plot)
    assert again.exit_code == 0, again.output
    assert again.output.splitlines()[1:-1] == result.output.splitlines()[1:-2]
    assert plot.stat().st_size > 1000
    written = invoke("benchmarks lengths --markdown", "--from", output)
    assert written.output.startswith("`python -m benchmarks lengths` on ")
    assert "| 32 | auto (vendor) | " in written.output
    assert len(written.output.splitlines()) == 2 + 2 + len(rows)


def test_lengths_refuses_files_that_are_not_its_record(tmp_path):
    for text in ('{"header": {}, "rows": [{"ms": 1}]}', '{"rows": []}', "no JSON"):
        (tmp_path / "x.json").write_text(text)
        result = invoke("benchmarks lengths", "--from", tmp_path / "x.json")
        assert result.exit_code == 2, result.output


def test_standard_attention_without_memory_is_shown_as_out_of_memory(monkeypatch):
    monkeypatch.setattr(candidates, "free_bytes", lambda: 1000)
    case = Case(tokens=32, heads=2, kv_heads=2, head_dim=8)
    rows = {row.kernel: record.flat(row) for row in lengths.run(case, ("standard", "auto"), rounds=1)}
    assert rows["standard"]["ms"] is rows["standard"]["peak_bytes"] is rows["auto"]["speedup"] is None
    assert rows["auto"]["ms"] > 0
    table = lengths.BENCHMARK.markdown(list(rows.values()))
    assert "| 32 | standard |  |  | out of memory |  |  |  |" in table


def test_plot_marks_where_memory_ran_out(tmp_path):
    row = {"kernel": "standard", "ms": 2.0, "peak_bytes": 2**20}
    rows = [{**row, "tokens": 16}, {**row, "tokens": 32}, {**row, "tokens": 64, "ms": None, "peak_bytes": None}]
    rows += [{**row, "tokens": tokens, "kernel": "auto"} for tokens in (16, 32, 64)]
    plots.lengths(rows, "title", tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text().count("<!-- out of memory beyond -->") == 2


def test_forward_has_figures_if_the_backward_runs_out_of_memory(monkeypatch):
    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            raise torch.OutOfMemoryError("too much")

    right = measure.candidate
    monkeypatch.setattr(measure, "candidate", lambda case, name: lambda *x: Greedy.apply(right(case, name)(*x)))
    case = Case(tokens=16, heads=1, kv_heads=1, head_dim=8)
    (row,) = lengths.run(case, ("tiled",), rounds=1)
    assert row.forward_ms is not None
    assert row.backward_ms is row.ms is row.peak_bytes is None
    assert "out of memory" in lengths.BENCHMARK.markdown([record.flat(row)])


def test_standard_attention_holds_every_score():
    case = Case(tokens=256, heads=2, kv_heads=1, head_dim=8, mask="window-7")
    peak = measure.measure(case, ("standard",), rounds=1)["standard"].both_bytes
    assert peak is not None
    assert 3 < peak / (2 * 256 * 256 * 4) < candidates.STANDARD_MATRICES + 0.1


def test_defaults_suit_the_device():
    assert lengths.default_lengths("cpu") == [1024, 2048, 4096]
    assert lengths.default_lengths("cuda")[-1] == 65536
    assert "triton" not in lengths.default_kernels("cpu")


def test_memory_counts_inputs_outputs_and_gradients(tmp_path):
    kernels = "--kernel auto --kernel standard --deterministic"
    words = f"benchmarks memory --device cpu --heads 2 --kv-heads 1 --tokens 512 {kernels}"
    result = invoke(words, "--output", tmp_path / "x")
    assert result.exit_code == 0, result.output
    ours, standard = record.read(tmp_path / "x")["rows"]
    assert ours["needed_bytes"] == 512 * 128 * 4 * (2 + 1 + 1 + 2) * 2
    assert ours["deterministic"]
    assert 1 <= ours["ratio"] < 1.3 < standard["ratio"]


def test_memory_has_no_ratio_if_memory_runs_out(monkeypatch):
    case = Case(tokens=64, heads=1, kv_heads=1, head_dim=8)
    monkeypatch.setattr(memory, "attempt", lambda _: None)
    (row,) = memory.run(case, ("auto",))
    assert row.ratio is None
