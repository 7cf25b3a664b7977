"""The headline set: what it measures, what it skips and leaves out, what it says, and a judge that can fail."""

import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import peers, peers_table, plots, sampled
from commands import app
from meshflash.bench import candidates, check, measure, record
from meshflash.bench.cases import Case
from meshflash.kernels.tiled import Tiled

SMALL = "benchmarks peers --device cpu --tokens 16 --tokens 24 --dim 8 --rounds 1"
CASES = peers.cases_of("cpu", tokens=[16, 24], dims=[8])


def invoke(words, *more):
    return CliRunner().invoke(app, [*words.split(), *map(str, more)], env={"COLUMNS": "80"})


def quiet(_text):
    pass


def row(kernel, ms, note=None, tokens=4096, direction="forward", check_s=0.0, **other):
    base = replace(CASES[0], tokens=tokens, head_dim=64, mask=other.pop("mask", "causal"), device="cuda")
    figures = dict(ms=ms, tflops=None if ms is None else 600.0, error=None, oracle="", peak_bytes=None)
    own = dict(version=peers.version_of(kernel), rounds=1, check_s=check_s, note=note)
    own["loop_ms"] = None if ms is None else 2 * ms
    return record.flat(peers.Peer(kernel=kernel, ran=kernel, direction=direction, case=base, **figures, **own))


def test_headline_set_on_a_gpu_has_24_cells():
    cases = peers.cases_of("cuda")
    assert len(cases) * len(check.PASSES) == 24
    assert [case.tokens for case in cases] == sorted(case.tokens for case in cases)
    assert {(case.tokens, case.batch) for case in cases} == {(4096, 8), (16384, 2), (65536, 1)}
    assert {(case.head_dim, case.heads, case.kv_heads) for case in cases} == {(64, 32, 32), (128, 16, 16)}
    assert {(case.mask, case.dtype) for case in cases} == {("causal", "bfloat16"), ("full", "bfloat16")}
    assert peers.default_kernels("cuda") == (candidates.own_kernel("cuda"), "fa4", "cudnn", "fa2", "flex")
    (narrow,) = peers.cases_of("cuda", [65536], [128], ["full"])
    assert narrow in cases


def test_peers_are_measured_shown_and_not_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmarks/__main__.py", "peers"])
    output, plot = tmp_path / "peers.json", tmp_path / "peers.png"
    names = ("auto", "tiled", "torch sdpa", "flex", "cudnn")
    words = f"{SMALL} --mask causal" + "".join(f" --kernel {name}" for name in ("auto", "tiled", "flex", "cudnn"))
    result = invoke(words, "--kernel", "torch sdpa", "--output", output, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert plot.stat().st_size > 1000
    rows = json.loads(output.read_text())["rows"]
    assert len(rows) == 2 * 2 * len(names)
    assert {row["kernel"] for row in rows if row["ms"] is None} == {"flex", "cudnn"}
    for own in rows:
        assert own["note"] is None or own["note"].startswith(
            "failed: NotImplementedError" if own["kernel"] == "flex" else "absent"
        )
        assert own["ms"] is None or (own["ms"] > 0 and own["error"] < 1e-5 and own["check_s"] > 0)
        assert (own["loop_ms"] is None) == (own["ms"] is None)
    text = " ".join(result.output.split())
    assert "cudnn, 4 of 4 cells: absent: " in text
    assert "auto against torch sdpa: at least 1.00x in " in text
    assert "auto against cudnn: no cell has both" in text

    monkeypatch.setattr(peers, "measure", None)  # nothing is measured from here on
    again = invoke(words, "--kernel", "torch sdpa", "--output", output)
    assert again.exit_code == 0, (again.output, again.exception)
    assert "skipped: 2 of 2 cases" in again.output
    assert json.loads(output.read_text())["rows"] == rows
    narrow = invoke(
        "benchmarks peers --device cpu --dim 8 --tokens 24 --mask causal --kernel auto --rounds 1",
        "--output",
        output,
    )
    assert "skipped: 1 of 1 cases" in narrow.output
    assert json.loads(output.read_text())["rows"] == rows
    shown = invoke("benchmarks peers --markdown", "--from", output)
    assert shown.output.startswith("`python -m benchmarks peers` on ")
    assert "| 10x24 | 8 | causal | backward | " in shown.output
    assert "- flex, 4 of 4 cells: failed: NotImplementedError" in shown.output
    fresh = invoke(words, "--kernel", "torch sdpa", "--output", output, "--fresh")
    assert isinstance(fresh.exception, TypeError)  # it would have measured


def test_interrupted_run_continues_from_its_record(tmp_path):
    names, budget = ("auto", "tiled"), peers.Budget(10)
    first = next(peers.run(CASES, names, 1, budget, [], quiet))
    assert [case for case, _ in peers.by_case(first)] == CASES[:1]
    record.write(tmp_path / "x.json", first, "")
    known = peers.still_valid(peers_table.BENCHMARK.read(tmp_path / "x.json"))
    assert known == first
    said: list[str] = []
    *_, last = peers.run(CASES, names, 1, budget, known, said.append)
    assert [case for case, _ in peers.by_case(last)] == CASES
    assert last[: len(first)] == first
    assert said[0].startswith("1 of 3, 16 x 16 tokens, dim 8, full: ")


def test_rows_of_other_rounds_or_kernels_do_not_count_as_measured():
    rows = [row("triton", 1.0), row("triton", 1.0, direction="backward"), row("flex", None, "no time: over")]
    ((case, _),) = peers.by_case(rows)
    assert peers.holds(rows, case, ("triton",), 1)
    assert not peers.holds(rows, case, ("triton",), 2)
    assert not peers.holds(rows, case, ("triton", "cudnn"), 1)
    assert not peers.holds(rows, case, ("triton", "flex"), 1)
    assert not peers.holds(rows, CASES[0], ("triton",), 1)


def test_rows_of_other_code_machines_or_kernels_are_dropped(monkeypatch):
    (rows,) = peers.run(CASES[:1], ("auto", "fa4"), 1, peers.Budget(10), [], quiet)
    written: dict[str, Any] = {"header": record.header(""), "rows": rows}
    assert peers.still_valid(written) == rows
    assert peers.still_valid(written | {"header": written["header"] | {"machine": {"cpu": "other"}}}) == []
    with monkeypatch.context() as patch:
        patch.setattr(peers, "_sources", lambda: "other")
        assert peers.still_valid(written) == []
    with monkeypatch.context() as patch:
        patch.setattr(type(peers.registry._KERNELS["fa4"]), "missing", lambda self: None)
        assert peers.still_valid(written) == []


def test_environment_variables_change_the_version_of_our_kernels(monkeypatch):
    before = peers.version_of("triton")
    peers._sources.cache_clear()
    monkeypatch.setenv("MESHFLASH_SOMETHING", "1")
    assert peers.version_of("triton") != before
    peers._sources.cache_clear()


def test_slow_peers_are_left_out_first():
    names = ("triton", "cudnn", "fa2", "flex")
    short, long = (replace(CASES[0], tokens=t, head_dim=64, device="cuda") for t in (4096, 8192))
    rows = [row(name, 1000.0, direction=p) for name in names for p in check.PASSES]
    each = peers._seconds(long, "triton", 1, rows)
    assert each == pytest.approx(1.2 * 2 * 4 * (2 * 2 * 1 + peers.OTHER_CALLS), rel=1e-3)  # two passes of 4 s a call
    for share, taken in ((4.1, names), (3.1, names[:3]), (2.1, names[:2]), (0.5, ())):
        budget = peers.Budget(share * each / 60, clock=lambda: 0.0)
        assert budget.affords([long], names, 1, rows) == taken, share
    compiled = [row(name, 1000.0, direction=p, check_s=50) for name in names for p in check.PASSES]
    assert peers._seconds(long, "triton", 1, compiled) == each
    assert peers._seconds(long, "flex", 1, compiled) == pytest.approx(each + 1.2 * 50)
    both = 2 * each + 2 * peers._seconds(short, "triton", 1, rows)
    assert peers.Budget(both / 60 + 0.01, clock=lambda: 0.0).affords([short, long], names, 1, rows) == names[:2]
    assert peers.Budget(1e-9, clock=lambda: 0.0).affords([long], names, 1, []) == names


def test_kernels_without_time_are_noted_and_measured_next_time(monkeypatch):
    monkeypatch.setattr(peers, "SLOW", ("tiled",))
    names = ("auto", "tiled")
    monkeypatch.setattr(peers.Budget, "affords", lambda self, todo, *_: ("auto",) if todo[0] == CASES[0] else ())
    *_, rows = peers.run(CASES[:2], names, 1, peers.Budget(10), [], quiet)
    assert [own["kernel"] for own in rows if own["ms"]] == ["auto", "auto"]
    assert sum(own["note"] is not None and own["note"].startswith("no time") for own in rows) == 6
    assert "no time" in peers_table.markdown(rows)
    assert list(peers.run(CASES[:2], names, 1, peers.Budget(10), rows, quiet))[-1] == rows  # nothing is lost
    monkeypatch.undo()
    *_, rows = peers.run(CASES[:2], names, 1, peers.Budget(10), rows, quiet)
    assert all(own["ms"] for own in rows)


def test_wrong_peer_is_noted_and_wrong_kernel_of_ours_raises(monkeypatch):
    right = Tiled.forward

    def wrong(self, x, outputs=None, carry=None):
        out_BTHE, lse_BHT = right(self, x, outputs, carry)
        out_BTHE[0, 0] += 1
        return out_BTHE, lse_BHT

    monkeypatch.setattr(Tiled, "forward", wrong)
    (rows,) = peers.run(CASES[:1], ("auto", "tiled"), 1, peers.Budget(10), [], quiet)
    noted = [own for own in rows if own["note"]]
    assert {own["kernel"] for own in noted} == {"tiled"}
    assert all(own["note"].startswith("wrong: tiled, forward: relative error") and own["ms"] is None for own in noted)
    with pytest.raises(check.WrongError, match="it is wrong, so it is not timed"):
        list(peers.run(CASES[:1], ("tiled", "auto"), 1, peers.Budget(10), [], quiet))


def test_summary_counts_speedups_and_names_the_smallest():
    rows = [row("triton", 1.0), row("fa4", 0.98), row("cudnn", 1.2), row("flex", None, "no time: over")]
    rows += [row(name, ms, direction="backward") for name, ms in (("triton", 1.0), ("fa4", 1.1), ("cudnn", 0.9))]
    cudnn, fa4 = peers_table.summary(rows)
    cell = "4,096 tokens, dim 64, causal"
    counts = "at least 1.00x in 1 of 2 cells; median 1.050x"
    assert cudnn == f"triton against cudnn: {counts}; smallest 0.900x: {cell}, backward"
    assert fa4.startswith("triton against fa4: at least 0.95x in 2 of 2 cells, at least 1.00x in 1 of 2 cells; ")
    assert fa4.endswith(f"median 1.040x; smallest 0.980x: {cell}, forward")
    text = peers_table.markdown(rows)
    assert "| 16x4,096 | 64 | causal | forward | 600 | 600 | 600 | no time | 1.20 | 0.98 |" in text
    assert text.endswith("- flex, 1 of 2 cells: no time: over")


def test_plain_loops_have_a_table_of_their_own():
    rows = [row("triton", 1.0), row("cudnn", 1.2) | {"loop_ms": 1.0}]
    kernel_time, loops = peers_table.markdown(rows).split("\n\nPlain loops, host time included:\n\n")
    assert "| forward | 600 | 600 | 1.20 |" in kernel_time  # both rows say 600, whatever their time
    assert "| forward | 300 | 720 | 0.50 |" in loops
    assert "at least 1.00x in 1 of 1 cells" in kernel_time
    assert "at least 1.00x in 0 of 1 cells" in loops
    older = [{key: value for key, value in own.items() if key != "loop_ms"} for own in rows]
    assert peers_table.markdown(older) == kernel_time


def test_table_of_all_peers_fits_80_columns():
    notes = {"fa4": "absent: no package", "fa2": "no time: over", "flex": "memory: it ran out"}
    rows = [
        row(name, None if name in notes else 1.0, notes.get(name), tokens=65536, direction=p)
        for p in check.PASSES
        for name in peers.default_kernels("cuda")
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*peers_table.tables(rows))
    text = console.export_text()
    assert "…" not in text
    assert "causal backward    600 absent   600 no time memory    1.00" in text


def test_plot_without_figures_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="no kernel has figures"):
        plots.peers([row("triton", None, "no time: over")], "title", tmp_path / "x.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--output x.json --update", "--output and --update name two records; give one of them"),
        ("--mask window-4", "peers are compared on causal and full"),
        ("--kernel fast", "expected one of auto, vendor"),
        ("--kernel triton", "does not support the device cpu"),
    ],
)
def test_invalid_arguments_name_the_remedy(arguments, message):
    words = f"benchmarks peers --device cpu --tokens 16 --rounds 1 {arguments}"
    result = CliRunner().invoke(app, words.split(), env={"COLUMNS": "300", "TRITON_INTERPRET": "0"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_record_of_another_benchmark_is_refused(tmp_path):
    (tmp_path / "x.json").write_text('{"header": {}, "rows": [{"ms": 1}]}')
    words = ["benchmarks", "peers", "--from", str(tmp_path / "x.json")]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert "is not a record of" in result.output


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_sampled_oracle_agrees_with_the_dense_one(mask, monkeypatch):
    case = Case(tokens=50, batch=2, heads=3, kv_heads=3, head_dim=8, mask=mask)
    monkeypatch.setattr(sampled, "ROWS", 7)
    monkeypatch.setattr(sampled, "MATRIX_BYTES", 2 * 7 * 50 * 8)  # two heads, and seven rows of them
    tensors = case.tensors()
    dense, found = check.truth(case, tensors), sampled.sampled(case, tensors)
    assert (found.blocks[0], found.blocks[-1], len(found.blocks)) == (slice(0, 7), slice(43, 50), 8)
    assert found.forward_error(dense.results[0]) < 1e-10
    assert found.backward_error(dense.results[1:]) < 1e-10


@pytest.mark.parametrize("gradient", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 25, 49])
def test_sampled_oracle_detects_wrong_rows(gradient, at, monkeypatch):
    case = Case(tokens=50, heads=1, kv_heads=1, head_dim=8)
    monkeypatch.setattr(sampled, "ROWS", 7)
    tensors = case.tensors()
    dense, found = check.truth(case, tensors), sampled.sampled(case, tensors)
    grads = [grad.clone() for grad in dense.results[1:]]
    grads[gradient][0, at] += 0.01
    assert found.backward_error(grads) > 1e-3
    grads[gradient][0, at] = math.nan
    assert math.isnan(found.backward_error(grads))
    out = dense.results[0].clone()
    out[0, at] *= 1.5
    assert found.forward_error(out) > 1e-3


def test_nan_between_sampled_blocks_is_detected(monkeypatch):
    case = Case(tokens=50, heads=1, kv_heads=1, head_dim=8)
    monkeypatch.setattr(sampled, "ROWS", 2)
    tensors = case.tensors()
    found, right = sampled.sampled(case, tensors), candidates.candidate(case, "tiled")
    assert not any(block.start <= 3 < block.stop for block in found.blocks)

    class Spoiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            dx = dx.clone()
            dx[0, 3] = math.nan
            return dx

    with pytest.raises(check.WrongError, match="backward: relative error nan"):
        check.judge(case, "tiled", lambda q, k, v: right(Spoiled.apply(q), k, v), tensors, found)


def test_failing_candidate_raises_unless_it_is_noted(monkeypatch):
    def broken(case, name):
        raise NotImplementedError("not on this machine\nand more")

    monkeypatch.setattr(measure, "candidate", broken)
    figures = measure.measure(CASES[0], ("tiled",), 1, noted=("tiled",))["tiled"]
    assert figures.note == "failed: NotImplementedError: not on this machine"
    with pytest.raises(NotImplementedError):
        measure.measure(CASES[0], ("tiled",), 1)


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_flex_has_the_mask_of_the_case(mask, monkeypatch):
    case = Case(tokens=48, heads=4, kv_heads=2, head_dim=16, mask=mask)
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: compiled(function, backend="eager"))
    q, k, v, _ = (x.detach() for x in case.tensors())
    want = candidates.candidate(case, "reference")(q, k, v)
    assert check.relative_error(candidates.candidate(case, "flex")(q, k, v), want) < 1e-5
    with pytest.raises(ValueError, match="full and causal"):
        candidates.candidate(replace(case, mask="window-4"), "flex")
