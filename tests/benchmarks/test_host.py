"""Host time: every part of the command on a CPU, its table from a record, and what calibration measures."""

import json
import re
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import host, host_calls, host_ranks, host_timing
from commands import app
from meshflash.bench import host as issue_time
from meshflash.bench import record
from meshflash.bench.candidates import SDPA
from meshflash.bench.cases import Case
from meshflash.bench.check import WrongError
from meshflash.kernels import registry


def invoke(words, *more):
    return CliRunner().invoke(app, [*words.split(), *map(str, more)], env={"COLUMNS": "80"})


@pytest.fixture
def short_samples(monkeypatch):
    monkeypatch.setattr(host_timing, "SAMPLE_MS", 0.1)


def test_host_measures_every_part_and_shows_its_record_again(tmp_path, short_samples):
    threads = torch.get_num_threads()
    output = tmp_path / "host.json"
    result = invoke("benchmarks host --device cpu --rounds 2 --ranks 2", "--output", output)
    assert result.exit_code == 0, result.output
    assert torch.get_num_threads() == threads
    assert "ranks: round 2 of 2" in result.stderr
    written = json.loads(output.read_text())
    assert written["header"].keys() >= {"machine", "versions", "commit", "date", "command"}
    rows = written["rows"]
    parts = {part: list(own) for part, own in groupby(rows, key=lambda row: row["part"])}
    assert tuple(parts) == host.PARTS
    timed = [row for row in rows if not row["note"]]
    for row in timed:
        assert 0 < row["min_microseconds"] <= row["microseconds"]
        assert row["error"] < 1e-5

    masks = {(row["mask"], row["pass"]) for row in parts["attention"]}
    assert masks == {(mask, p) for mask in ("full", "causal") for p in ("forward", "forward+backward")}
    assert {row["pass"] for row in parts["short"]} == {"forward", "backward", "forward+backward"}
    assert all(row["kv_heads"] < row["heads"] for row in parts["short"])
    assert all(row["tflops"] > 0 for row in timed if row["part"] in ("short", "matmul"))
    known = {kernel.name for kernel in registry.kernels()}
    for row in (*parts["attention"], *parts["short"]):
        assert row["kernel"] in (("auto",) if row["ours"] else host_calls.PEERS[row["part"]])
        assert not row["ours"] or set(row["ran"].split(", ")) <= known
    assert [row["kernel"] for row in parts["matmul"]] == ["auto", "torch.mm"] * 2

    for row in parts["ranks"]:
        assert row["transport"] == "gloo"
        assert row["step_microseconds"] == pytest.approx((row["microseconds"] - 80) / row["steps"])
    in_order = [(row["pass"], row["kernel"], row["rank"]) for row in parts["ranks"]]
    passes = ("forward", "forward+backward")
    assert in_order == [(p, schedule, rank) for p in passes for schedule in host_ranks.SCHEDULES for rank in (0, 1)]
    steps = {(row["kernel"], row["pass"]): row["steps"] for row in parts["ranks"] if row["rank"] == 0}
    assert all(steps[name, "forward"] < steps[name, "forward+backward"] for name in host_ranks.SCHEDULES)

    again = invoke("benchmarks host", "--from", output)
    assert again.exit_code == 0, again.output
    assert again.stdout.splitlines() == result.stdout.splitlines()[:-1]  # the last line names the file
    assert "short: sdpa cudnn was left out: No" in again.stdout
    markdown = invoke("benchmarks host --markdown", "--from", output).stdout
    assert len(re.findall(r"^\| (?!call|---)", markdown, re.MULTILINE)) == len(timed)


def test_host_runs_the_parts_that_are_asked_for(tmp_path, short_samples):
    result = invoke("benchmarks host --device cpu --rounds 1 --only matmul --output", tmp_path / "x")
    assert result.exit_code == 0, result.output
    assert {row["part"] for row in record.read(tmp_path / "x")["rows"]} == {"matmul"}
    wrong = invoke("benchmarks host --device cpu --only attentoin")
    assert wrong.exit_code == 2
    assert "expected one of" in wrong.output


def test_host_refuses_a_record_of_launch_times(tmp_path):
    row = {"kernel": "auto", "pass": "forward", "microseconds": 1.0, "min_microseconds": 1.0}
    (tmp_path / "old.json").write_text(json.dumps({"header": {}, "rows": [row]}))
    result = invoke("benchmarks host", "--from", tmp_path / "old.json")
    assert result.exit_code == 2
    assert "record of `python -m benchmarks host`" in result.output


def call(kernel, ours, direction="forward"):
    return host_timing.Call(kernel, kernel, direction, lambda: None, 0.0, ours, tflop=1e-6)


def test_ratio_is_our_time_over_that_of_the_best_peer_of_the_pass(monkeypatch):
    times = {"auto": 30.0, "slow": 40.0, "fast": 20.0, "other": 5.0}
    monkeypatch.setattr(host_timing, "_sample", lambda call, device, calls: times[call.kernel])
    calls = [call("auto", True), call("slow", False), call("fast", False), call("other", False, "backward")]
    left_out = host_timing.CallRow("short", "gone", "gone", "forward", Case(), False, 3, note="refused")
    rows = list(host_timing.time_rows("short", Case(), calls, [left_out], rounds=3))
    assert [row.kernel for row in rows] == ["auto", "slow", "fast", "gone", "other"]
    assert [row.ratio for row in rows] == [1.5, None, None, None, None]
    assert [row.kernel for row in rows if row.best_peer] == ["fast", "other"]
    assert rows[0].tflops == pytest.approx(1e-6 / 30e-6)
    assert host.notes([record.flat(row) for row in rows]) == ["short: gone was left out: refused"]


def test_ours_has_no_ratio_without_a_peer(monkeypatch):
    monkeypatch.setattr(host_timing, "_sample", lambda call, device, calls: 1.0)
    (row,) = host_timing.time_rows("short", Case(), [call("auto", True)], [], rounds=1)
    assert row.ratio is None


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_wrong_result_of_ours_raises_and_a_wrong_peer_is_left_out(direction, monkeypatch, short_samples):
    right = host_calls._functions

    def functions(attention, plain, leaves):
        made = right(attention, plain, leaves)
        good = made[direction]

        def wrong():
            result = good()
            return result * 1.1 if direction == "forward" else [x * 1.1 for x in result]

        is_sdpa = getattr(attention, "func", None) is torch.nn.functional.scaled_dot_product_attention
        return made | ({direction: wrong} if is_sdpa == wrong_peer else {})

    monkeypatch.setattr(host_calls, "_functions", functions)
    wrong_peer = False
    with pytest.raises(WrongError, match=re.escape(f"auto, {direction} in a loop: relative error 1.0e-01")):
        list(host_calls.run_attention("attention", "cpu", 1, lambda _: None))
    wrong_peer = True
    rows = list(host_calls.run_attention("attention", "cpu", 1, lambda _: None))
    assert {row.kernel for row in rows if row.note is None} == {"auto"}
    notes = [row.note or "" for row in rows if row.kernel == SDPA]
    assert all("it is wrong, so it is not timed" in note for note in notes)
    assert len(notes) == 4


def test_host_shapes_suit_the_device():
    full, causal = host_calls.attention_cases("attention", "cuda")
    assert replace(full, mask="causal") == causal
    assert causal == Case(128, 1, 8, 8, 64, "causal", "bfloat16", "cuda")
    assert host_calls.attention_cases("short", "cuda") == [Case(512, 4, 32, 8, 128, "causal", "bfloat16", "cuda")]
    assert host_ranks.ranks_case("cuda", 4).tokens == 2048
    assert host_ranks.ranks_case("cpu", 4).tokens == 32


def test_calibration_measures_launch_time_relative_to_sdpa(monkeypatch):
    monkeypatch.setattr(issue_time, "CALLS", 2)
    threads = torch.get_num_threads()
    rows = issue_time.run(Case(tokens=4, heads=2, kv_heads=1, head_dim=8), ("auto", "tiled"), rounds=2)
    assert torch.get_num_threads() == threads
    names = ("auto", "tiled", SDPA)
    assert [(row.direction, row.kernel) for row in rows] == [(p, name) for p in issue_time.PASSES for name in names]
    assert all(0 < row.min_microseconds <= row.microseconds for row in rows)
    assert {row.ratio for row in rows if row.kernel == SDPA} == {1.0}
