"""The command line: answers without torch, and what `doctor` prints and exits with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshflash import __version__, shutdown
from meshflash.cli import app, doctor
from meshflash.runtime.doctor import Finding, examine

FINE = Finding("limits", "[odd] name", "ok", "64 GiB [/free]")
NOTE = Finding("devices", "GPU", "note", "none", "plug one in")
PROBLEM = Finding("torch", "version", "problem", "1.0", "pip install torch")


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What the doctor finds, for a test to fill."""
    found: list[Finding] = []
    monkeypatch.setattr(doctor, "examine", lambda: found)
    return found


@pytest.mark.parametrize("words", [["--help"], ["doctor", "--help"], ["--version"]])
def test_help_and_version_do_not_wait_for_torch(words: list[str]) -> None:
    script = (
        "import sys\n"
        "from meshflash.cli import app\n"
        "try:\n"
        "    app(sys.argv[1:], prog_name='meshflash')\n"
        "finally:\n"
        "    heavy = {'torch', 'triton', 'numpy'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "meshflash" in done.stdout


def test_python_m_meshflash() -> None:
    command = [sys.executable, "-m", "meshflash", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"meshflash {__version__}\n")


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"meshflash {__version__}\n")


def test_without_words_it_shows_its_commands() -> None:
    assert "doctor" in CliRunner().invoke(app, []).output


def test_doctor_lists_problems_with_their_advice_last(findings: list[Finding]) -> None:
    findings += [PROBLEM, FINE, NOTE]
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    table, _, summary = done.stdout.partition("1 problem found:")
    assert all(finding.detail in table and finding.name in table for finding in findings)
    assert "plug one in" in table
    assert " ".join(summary.split()) == "torch, version: 1.0 pip install torch"


def test_doctor_without_problems_exits_0(findings: list[Finding]) -> None:
    findings += [FINE, NOTE]
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0
    assert "No problems found." in done.stdout


@pytest.mark.parametrize("problems", [0, 1])
def test_doctor_json(findings: list[Finding], problems: int) -> None:
    findings += [FINE, NOTE, *[PROBLEM] * problems]
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == problems
    report = json.loads(done.stdout)
    assert (report["version"], report["problems"]) == (__version__, problems)
    assert [Finding(**finding) for finding in report["findings"]] == findings


def test_doctor_on_this_machine() -> None:
    problems = sum(finding.status == "problem" for finding in examine())
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == min(problems, 1)
    assert all(topic in done.stdout for topic in ("torch", "kernels", "limits"))


@pytest.mark.parametrize("words", [["checksum"], ["train", "gpt", "--steps", "1"], ["gemm", "--device", "cpu"]])
def test_a_rank_that_cannot_join_says_so_in_a_line(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shutdown()  # an earlier test may have left a world of one rank
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    (line,) = done.output.splitlines()
    assert line.startswith("meshflash: RANK=1 is set, as by variables, and WORLD_SIZE is not: ")


def test_a_script_that_is_not_there_is_not_started() -> None:
    done = CliRunner().invoke(app, ["launch", "-n", "2", "nowhere.py"])
    assert done.exit_code == 2
    assert "nowhere.py: there is no such file or folder" in done.output


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, ["train", "gpt", "--output", str(tmp_path / "file")])
    assert done.exit_code == 2
