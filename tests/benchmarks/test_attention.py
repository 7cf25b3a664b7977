"""Benchmarks over ranks: what they write, and that a wrong schedule is an error."""

import io
import json
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import engine
from commands import app
from meshflash import Layout, Mask
from meshflash.bench import attention, exposed, record, tables
from meshflash.bench.cases import Case
from meshflash.bench.masks import parse_mask
from meshflash.bench.peers import peer_bytes
from meshflash.core.document_layout import rows_moved
from meshflash.core.problem import Problem
from meshflash.schedules.registry import build, names

SMALL = "--tokens 48 --heads 2 --dim 8"


def test_bench_attention_writes_every_schedule_and_pass(tmp_path):
    words = f"bench attention {SMALL} --rounds 1 -n 2 --schedule zigzag --schedule allgather"
    files = ["--output", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png")]
    result = CliRunner().invoke(app, [*words.split(), "--schedule", attention.PLAIN, *files])
    assert result.exit_code == 0, result.output
    rows = record.read(tmp_path / "x.json")["rows"]
    names = (tables.SINGLE_DEVICE, "zigzag", "allgather", attention.PLAIN)
    assert [(row["schedule"], row["pass"]) for row in rows] == [(n, p) for p in attention.PASSES for n in names]
    for row in rows:
        assert row["ms"] > 0
        assert row["tflops"] > 0
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["world"])
        assert row["transport"] == ("gloo" if row["schedule"] in ("zigzag", "allgather") else "")
        assert row["error"] < 1e-5
        assert row["world"] == (1 if row["schedule"] == tables.SINGLE_DEVICE else 2)
        if row["peer_bytes"] is not None:
            assert 0 < row["received_bytes"] <= row["peer_bytes"]
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_bench_attention_forward_only_over_a_slow_link_and_traced(tmp_path):
    words = f"bench attention {SMALL} --rounds 1 -n 2 --schedule ring --forward-only --trace {tmp_path}".split()
    words += ["--transport", "throttled(auto, 0.001, 1000)", "--output", str(tmp_path / "x.json"), "--no-causal"]
    words += ["--profile", str(tmp_path / "profile")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    rows = record.read(tmp_path / "x.json")["rows"]
    assert [(row["schedule"], row["pass"]) for row in rows] == [(tables.SINGLE_DEVICE, "forward"), ("ring", "forward")]
    assert rows[1]["transport"] == "gloo at 0.001 GB/s and 1000 us"
    assert rows[1]["ms"] > 1
    assert rows[1]["exposed_ms"] > 0
    assert rows[1]["simulated_ms"] > 1
    assert rows[1]["attend_ms"] > 0
    assert 0 < rows[1]["wait_ms"] <= rows[1]["exposed_ms"] * 1.5
    parts = [rows[1][name] for name in ("attend_ms", "wait_ms", "rest_ms")]
    assert sum(parts) <= rows[1]["elapsed_ms"] * 1.001
    assert rows[0]["attend_ms"] == rows[0]["wait_ms"] == rows[0]["elapsed_ms"] == 0
    assert not tables.missing_efficiency(rows), "ranks share the cores of a CPU"
    assert rows[0]["simulated_ms"] is None
    assert rows[1]["mask"] == "full"
    assert len(list(tmp_path.glob("trace-*.json"))) == 2
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["ring-0.json", "ring-1.json"]


def test_bench_attention_on_a_balanced_layout_of_documents(tmp_path):
    words = f"bench attention {SMALL} --rounds 1 -n 2 --schedule allgather --forward-only --layout balanced"
    words += f" --mask documents-lognormal-6 --output {tmp_path / 'x.json'}"
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 0, result.output
    single, row = record.read(tmp_path / "x.json")["rows"]
    assert (single["layout"], row["layout"], row["peer_bytes"]) == ("", "balanced", None)
    assert "layout: balanced" in " ".join(result.output.split())
    layout = Layout.balanced(parse_mask("documents-lognormal-6", 48), 48, 2)
    moved = 2 * 2 * 8 * 4 * rows_moved([parse_mask("documents-lognormal-6", 48)], layout.ranges)  # K, V; heads; dim
    assert row["received_bytes"] == moved
    result = CliRunner().invoke(app, [*words.replace("balanced", "even").split()])
    assert result.exit_code == 2
    assert "layout='even': expected a Layout, or one of auto, zigzag" in " ".join(
        result.output.replace("│", " ").split()
    )


def test_impossible_speeds_are_flagged_and_spread_is_shown():
    about = {"mask": "causal", "tokens": 64, "batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "dtype": "float32"}
    about |= {"device": "cpu", "deterministic": False, "world": 2, "pass": "forward", "rounds": 3, "tflops": 1.0}
    about |= {"exposed_ms": 1.0, "simulated_ms": None, "received_mean": 1.0, "error": 0.0, "peak_bytes": 1}
    about |= {"forward_ran": "vendor", "backward_ran": "", "speedup_limit": 2.0, "efficiency": 1.0}
    fast = about | {"schedule": "ring", "ms": 10.0, "ms_low": 9.0, "ms_high": 13.0, "speedup": 13.59}
    slow = about | {"schedule": "zigzag", "ms": 100.0, "ms_low": 100.0, "ms_high": 100.0, "speedup": 1.9}
    (table,) = tables.schedules([fast, slow])
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    text = console.export_text()
    words = " ".join(text.split())
    assert " 20% " in words
    assert "13.59!" in words
    assert "1.90!" not in words
    assert "! impossible: above 2, the most that these ranks and cores could give" in words
    assert "kernels that ran: forward vendor" in words
    assert "exposed comm: measured" in words
    (calm,) = tables.schedules([slow])
    assert "impossible" not in str(calm.caption)


def test_missing_efficiency_is_shown_by_its_parts():
    about = {"mask": "causal", "tokens": 64, "batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "dtype": "bfloat16"}
    about |= {"device": "cuda", "deterministic": False, "world": 4, "pass": "forward"}
    single = about | {"schedule": tables.SINGLE_DEVICE, "ms": 8.0, "efficiency": 1.0, "elapsed_ms": 0.0}
    zigzag = about | {"schedule": "zigzag", "ms": 10.0, "efficiency": 0.8, "attend_ms": 8.5}
    zigzag |= {"wait_ms": 0.7, "rest_ms": 0.2, "elapsed_ms": 9.8}
    old = about | {"schedule": "ring", "ms": 10.0, "efficiency": 0.8}  # of a record without these times
    parts = {"kernels": 0.05, "comm": 0.07, "steps": 0.02, "idle": 0.04, "untraced": 0.02}
    assert tables.missing_parts(zigzag) == parts
    assert sum(tables.missing_parts(zigzag).values()) == pytest.approx(1 - 0.8)
    (table,) = tables.missing_efficiency([single, zigzag, old])
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    text = console.export_text()
    (line,) = [line for line in text.splitlines() if "zigzag" in line]
    assert line.split() == ["forward", "zigzag", "0.800", "5.0%", "7.0%", "2.0%", "4.0%", "2.0%"]
    assert "ring" not in text
    assert not tables.missing_efficiency([single, old])


def test_the_first_and_the_last_call_do_not_count_in_the_breakdown():
    """Two programs a call; program n begins at n * n seconds and waits for n seconds."""

    def record(n):
        events = [{"cat": "other", "dur": n * 1e6}, {"cat": "attend", "dur": 1e9}]
        program = SimpleNamespace(name=n)
        return SimpleNamespace(
            at=n * n,
            program=program,
            events=lambda number: events,
            seconds=lambda: [n],
            seconds_until=lambda later: later.at - n * n,
        )

    count = 2 * (exposed.CALLS + 2)
    trace: Any = SimpleNamespace(records=[record(n) for n in range(count)], calls=count)
    calls = exposed._calls(trace)
    assert [call.waited for call in calls] == [2 + 3, 4 + 5, 6 + 7]
    assert [call.elapsed for call in calls] == [16 - 4, 36 - 16, 64 - 36]
    assert [seconds for _, seconds in calls[0].steps] == [[2], [3]]
    for records, ran in ((trace.records[:-1], count), ([], 0), ([*trace.records, record(count)], count + 1)):
        trace = SimpleNamespace(records=records, calls=ran)
        with pytest.raises(RuntimeError, match=r"5 calls ran .* programs, of which"):
            exposed._calls(trace)


def test_steps_are_counted_by_kind_as_means_over_ranks():
    ranges = Layout.contiguous(8, 2).ranges
    program = build("ring", Problem(ranges, ranges, Mask.causal()), 1, "forward")
    kinds = [type(step).__name__ for step in program.steps]
    seconds = [{"Attend": 0.010, "Wait": 0.004}.get(kind, 0.001) for kind in kinds]
    attends, waits, rest = exposed._mean_by_kind([[(program, seconds)] * 2, []])
    assert attends == pytest.approx(10.0 * kinds.count("Attend"))
    assert waits == pytest.approx(4.0 * kinds.count("Wait"))
    assert rest == pytest.approx(1.0 * (len(kinds) - kinds.count("Attend") - kinds.count("Wait")))


def test_timeline_of_an_unmeasured_schedule_is_refused():
    with pytest.raises(ValueError, match="timeline='ring': expected one of the schedules, zigzag"):
        attention.run(Case(tokens=32), ("zigzag",), attention.Setup(2, 1, timeline="ring"))


def test_draw_says_that_its_timeline_is_simulated(tmp_path):
    words = ["draw", "ring", "--tokens", "16", "-n", "2", "--svg", str(tmp_path / "x.svg")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    for text in (result.output, (tmp_path / "x.svg").read_text()):
        assert "ring forward on 2 ranks, simulated (no machine" in text
        assert "simulated: total" in text


def test_demo_checks_draws_and_writes_its_page(tmp_path):
    words = ["demo", "--tokens", "70", "-n", "3", "--heads", "2", "--steps", "10", "--folder", str(tmp_path)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    for name in ("ring", "zigzag", "striped", "allgather", "keys of", "link", "learnt to repeat", "index.html"):
        assert name in result.output
    rows = json.loads((tmp_path / "demo.json").read_text())["rows"]
    assert {row["schedule"] for row in rows} == {tables.SINGLE_DEVICE, *names()}
    assert all(row["error"] < 1e-5 for row in rows)
    assert ElementTree.fromstring((tmp_path / "demo.svg").read_text()).tag.endswith("svg")
    page = (tmp_path / "index.html").read_text()
    assert (page.count("<svg"), page.count("<h2>"), page.count("<table>")) == (4, 5, 2)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    for label in ("training step", "loss (cross-entropy, nats)", "exposed comm (ms)", "single device (baseline)"):
        assert label in page
    assert "…" not in result.output  # nothing is cut at 80 columns
    for text in (page, result.output):
        assert "zigzag forward on 3 ranks, simulated (links of 1 GB/s, kernel rate of the single-device run)" in text
        assert "zigzag forward on 3 ranks, measured" in text
        assert "simulated: total" in text
        assert "measured: total" in text
        assert "as timed" not in text
    assert "median of 3 interleaved rounds" in " ".join(result.output.split())
    for row in rows:
        assert row["rounds"] == 3
        assert 0 < row["ms_low"] <= row["ms"] <= row["ms_high"]
    learnt = json.loads((tmp_path / "learning.json").read_text())["rows"]
    assert [row["step"] for row in learnt] == list(range(1, 11))
    assert all(row["over_ranks"] == pytest.approx(row["alone"], rel=1e-4) for row in learnt)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench attention --schedule spiral", "expected one of auto, allgather, double_ring"),
        ("bench attention --dtype int8", "expected one of float32"),
        ("bench attention --mask diagonal", "expected full"),
        ("demo --schedule spiral", "expected one of auto, allgather, double_ring"),
        ("benchmarks engine --schedule spiral", "expected one of auto, allgather, double_ring"),
    ],
)
def test_invalid_arguments_name_the_remedy(words, message):
    result = CliRunner().invoke(app, words.split(), env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_rank_times_one_rank_without_communication(tmp_path):
    words = (
        f"benchmarks rank -n 4 --rank 2 --local-tokens 16 --heads 4 --dim 8 --rounds 1 --output {tmp_path / 'x.json'}"
    )
    result = CliRunner().invoke(app, [*words.split(), "--schedule", "zigzag", "--schedule", "ulysses"])
    assert result.exit_code == 0, result.output
    rows = record.read(tmp_path / "x.json")["rows"]
    assert [(row["schedule"], row["pass"]) for row in rows] == [
        (schedule, direction) for schedule in ("zigzag", "ulysses") for direction in ("forward", "backward")
    ]
    for row in rows:
        assert (row["world"], row["rank"], row["tokens"]) == (4, 2, 64)
        assert row["ratio"] == pytest.approx(row["ms"] / row["single_kernel_ms"])
        assert row["kernels_ms"] > 0
    result = CliRunner().invoke(app, ["benchmarks", "rank", "-n", "2", "--rank", "2"])
    assert result.exit_code == 2
    assert "expected 0 to 1" in result.output


def test_engine_times_every_program(tmp_path):
    words = f"benchmarks engine -n 3 --rounds 1 --schedule zigzag --output {tmp_path / 'x.json'}"
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 0, result.output
    rows = record.read(tmp_path / "x.json")["rows"]
    assert [(row["schedule"], row["pass"]) for row in rows] == [("zigzag", "forward"), ("zigzag", "backward")]
    assert all(row["microseconds"] > 0 and row["steps"] > 5 for row in rows)
    assert engine.run(("zigzag",), 3, 1)[0].steps == rows[0]["steps"]


def test_peer_bytes_follow_the_formulas():
    case = Case(tokens=64, heads=4, kv_heads=2, head_dim=8, dtype="bfloat16")
    keys = 16 * 2 * 8 * 2
    assert peer_bytes("zigzag", case, 4, "forward") == 3 * 2 * keys
    assert peer_bytes("zigzag", case, 4, "forward+backward") == 2 * 3 * 2 * keys + 4 * 4 * keys
    assert peer_bytes("allgather(head_stride=1)", case, 4, "forward+backward") == 2 * 3 * 2 * keys + 3 * 4 * keys
    assert peer_bytes("my_own", case, 4, "forward") is None
