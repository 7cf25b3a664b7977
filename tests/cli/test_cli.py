"""The command line: start without torch, exit codes and messages after errors and Ctrl-C, and `doctor`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    """Return the list of findings that `doctor` reports; a test fills it."""
    found: list[Finding] = []
    monkeypatch.setattr(doctor, "examine", lambda: found)
    return found


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--help"], ["--version"]])
def test_help_and_version_do_not_import_torch(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from meshflash.cli import app\n"
        "try:\n"
        "    app(sys.argv[1:], prog_name='meshflash')\n"
        "finally:\n"
        "    heavy = {'torch', 'triton', 'numpy'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "meshflash" in result.stdout


def test_draw_does_not_import_torch(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from meshflash.cli import app\n"
        "try:\n"
        "    app(sys.argv[1:], prog_name='meshflash')\n"
        "finally:\n"
        "    heavy = {'torch', 'triton'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    arguments = ["draw", "zigzag", "--mask", "documents-3", "--backward", "--svg", str(tmp_path / "x.svg")]
    result = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "proved right" in result.stdout
    assert (tmp_path / "x.svg").exists()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("tokens=0: expected 1 or more"),
        RuntimeError("rank 1 of 2 raised:\nTraceback (most recent call last):\n  File x\nValueError: no"),
        OSError("no space"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_end_a_command_without_a_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.delenv("MESHFLASH_LOG", raising=False)
    monkeypatch.setattr("meshflash.check.checksum.run", fail)
    result = CliRunner().invoke(app, ["checksum"])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"meshflash: {str(error).splitlines()[0]}")
    assert "Traceback" not in result.output
    assert "File x" not in result.output
    monkeypatch.setenv("MESHFLASH_LOG", "debug")
    with pytest.raises(type(error)):
        CliRunner().invoke(app, ["checksum"], catch_exceptions=False)


def test_unexpected_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("an invariant")

    monkeypatch.setattr("meshflash.check.checksum.run", fail)
    with pytest.raises(AssertionError, match="an invariant"):
        CliRunner().invoke(app, ["checksum"], catch_exceptions=False)


def test_ctrl_c_ends_a_command_and_its_ranks_without_tracebacks() -> None:
    arguments = [sys.executable, "-m", "meshflash", "bench", "attention", "-n", "2", "--rounds", "100000"]
    with subprocess.Popen(
        [*arguments, "--output", os.devnull],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a new process group, so that the signal reaches its ranks as from a terminal
    ) as job:
        assert job.stdout is not None
        first = job.stdout.readline()  # the first line of progress: the ranks run
        os.killpg(job.pid, signal.SIGINT)
        output = first + job.communicate(timeout=60)[0]
    assert job.returncode == 130, output
    assert output.splitlines()[-1] == "meshflash: interrupted"
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "command", ["check", "checksum", "demo", "draw", "generate", "predict", "train", "launch", "gemm"]
)
def test_every_command_names_the_number_of_ranks_nproc(command: str) -> None:
    from typer.main import get_command

    group: Any = get_command(app)
    options = [option for parameter in group.commands[command].params for option in parameter.opts]
    assert {"-n", "--nproc"} <= set(options)
    assert not {"--world", "--ranks"} & set(options)


def test_python_dash_m_meshflash_prints_the_version() -> None:
    command = [sys.executable, "-m", "meshflash", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, f"meshflash {__version__}\n")


def test_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"meshflash {__version__}\n")


def test_command_without_arguments_lists_all_commands() -> None:
    assert "doctor" in CliRunner().invoke(app, []).output


def test_doctor_lists_problems_with_their_advice_last(findings: list[Finding]) -> None:
    findings += [PROBLEM, FINE, NOTE]
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    table, _, summary = result.stdout.partition("1 problem found:")
    assert all(finding.detail in table and finding.name in table for finding in findings)
    assert "plug one in" in table
    assert " ".join(summary.split()) == "torch, version: 1.0 pip install torch"


def test_doctor_without_problems_exits_0(findings: list[Finding]) -> None:
    findings += [FINE, NOTE]
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "No problems found." in result.stdout


@pytest.mark.parametrize("problems", [0, 1])
def test_doctor_prints_json(findings: list[Finding], problems: int) -> None:
    findings += [FINE, NOTE, *[PROBLEM] * problems]
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == problems
    report = json.loads(result.stdout)
    assert (report["version"], report["problems"]) == (__version__, problems)
    assert [Finding(**finding) for finding in report["findings"]] == findings


def test_doctor_runs_on_this_machine() -> None:
    problems = sum(finding.status == "problem" for finding in examine())
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == min(problems, 1)
    assert all(topic in result.stdout for topic in ("torch", "kernels", "limits"))


@pytest.mark.parametrize("arguments", [["checksum"], ["train", "gpt", "--steps", "1"], ["gemm", "--device", "cpu"]])
def test_a_rank_that_cannot_join_prints_one_line(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shutdown()  # an earlier test may have initialized a single rank
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith("meshflash: RANK=1 is set, as by variables, and WORLD_SIZE is not: ")


def test_launch_refuses_a_missing_script() -> None:
    result = CliRunner().invoke(app, ["launch", "-n", "2", "nowhere.py"])
    assert result.exit_code == 2
    assert "nowhere.py: there is no such file or folder" in result.output


def test_train_refuses_an_output_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["train", "gpt", "--output", str(tmp_path / "file")])
    assert result.exit_code == 2
