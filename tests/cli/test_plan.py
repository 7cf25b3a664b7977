"""`meshflash plan`: a table without torch, files, and mistakes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshflash.cli import app

DOCS = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()


def invoke(*words):
    return CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "100"})


def test_plan_prints_schedules_from_the_fastest_and_writes_them(tmp_path):
    output = tmp_path / "plan.json"
    result = invoke("--tokens", "64K", "-n", "4", "--heads", "16/4", "--output", str(output))
    assert result.exit_code == 0, result.output
    assert "65,536 tokens over 4 ranks of NVIDIA H200" in result.output
    plan = json.loads(output.read_text())["plan"]
    assert plan[0]["schedule"] == "zigzag"
    written = json.loads(output.read_text())
    assert (written["call"]["tokens"], written["call"]["mask"], written["call"]["world"]) == (65536, "causal", 4)
    assert [link["name"] for link in written["machine"]["links"]] == ["NVLink 4", "InfiniBand NDR"]
    assert [each["seconds"] for each in plan] == sorted(each["seconds"] for each in plan)
    assert "meshflash calibrate on an H200" in " ".join(result.output.split())


def test_plan_prints_titles_as_they_are(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", DOCS, re.DOTALL)
    (tmp_path / "mine.toml").write_text(text.replace("four workstations", "rack [red] of [/x] workstations"))
    words = ("--tokens", "8K", "-n", "1", "--machine", str(tmp_path / "mine.toml"), "--schedule", "ring")
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    assert "8,192 tokens over 1 rank of rack [red] of [/x] workstations" in " ".join(result.output.split())


def test_plan_reads_lengths_of_documents(tmp_path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("3000\n5000\n100\n")
    words = ("--tokens", "8192", "-n", "2", "--documents", str(lengths), "--schedule", "ring", "--forward-only")
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    assert "lengths.txt" in result.output
    lengths.write_text("9000\n")
    assert "add up to at most 8,192 tokens" in " ".join(invoke(*words).output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tokens", "many", "-n", "2"), "expected a number from 1 to"),
        (("--tokens", "99999999999M", "-n", "2"), "expected a number from 1 to"),
        (("--tokens", "1K", "-n", "2", "--heads", "8/3"), "expected a number of KV heads that divides"),
        (("--tokens", "1K", "-n", "2", "--heads", "8/"), "tokens over 2 ranks"),
        (("--tokens", "1K", "-n", "2", "--machine", "b300"), "expected one of h100, h200"),
        (("--tokens", "1K", "-n", "2", "--schedule", "rings"), "expected one of auto"),
        (("--tokens", "1K", "-n", "2", "--schedule", "auto"), "the plan compares schedules"),
        (("--tokens", "1K", "-n", "2", "--schedule", "ring[/b]"), "expected a name, or name(option=value)"),
        (("--tokens", "2048M", "-n", "64"), "expected a number from 1 to 67,108,864"),
        (("--tokens", "1K", "-n", "2", "--dim", "512"), "h200: no forward rates at head dim 512"),
        (("--tokens", "1K", "-n", "65"), "expected 1 to 64 ranks"),
    ],
)
def test_mistakes_are_told_in_a_line(words, message):
    result = invoke(*words)
    assert message in " ".join(result.output.replace("│", " ").split())


def test_the_docs_show_what_plan_prints(tmp_path):
    (text,) = re.findall(r"`meshflash plan --tokens 128K -n 8` on the description.*?\n\n", DOCS, re.DOTALL)
    shown = dict(re.findall(r"`(\w+)`[a-z ]*\s(\d+\.\d)", text.replace("\n", " ").split("causal):")[1]))
    assert len(shown) == 5
    names = [word for name in shown for word in ("--schedule", name)]
    assert invoke("--tokens", "128K", "-n", "8", "--output", str(tmp_path / "x.json"), *names).exit_code == 0
    plan = json.loads((tmp_path / "x.json").read_text())["plan"]
    assert shown == {each["schedule"]: f"{each['seconds'] * 1e3:.1f}" for each in plan}


def test_the_machine_of_the_docs_can_be_planned_on(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", DOCS, re.DOTALL)
    (tmp_path / "mine.toml").write_text(text)
    result = invoke("--tokens", "8K", "-n", "4", "--machine", str(tmp_path / "mine.toml"), "--schedule", "zigzag")
    assert result.exit_code == 0, result.output
    assert "four workstations" in result.output


def test_plan_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from meshflash.cli import app; app()"
    words = [sys.executable, "-c", code, "plan", "--tokens", "1K", "-n", "2", "--schedule", "ring"]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "ring" in result.stdout
