"""The command `meshflash train`: --show and --config agree, progress, and errors and Ctrl-C without tracebacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshflash import shutdown
from meshflash.cli import app
from meshflash.core.reading import read_toml
from meshflash.train import config as configs
from meshflash.train import loop
from meshflash.train.config import PRESETS, preset, to_toml
from meshflash.train.report import ProgressLine

#: Time limit of a subprocess, in seconds; a loaded machine takes 20 to import torch.
LIMIT_SECONDS = 120
SMALL = [
    "--set",
    "data.tokens=16",
    "--set",
    "data.batch=2",
    "--set",
    "data.micro=2",
    "--set",
    "run.evaluate=0",
    "--set",
    "run.compare=0",
]


@pytest.fixture(autouse=True)
def _no_job():
    """Shut down after every test."""
    yield
    shutdown()


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in PRESETS for name in PRESETS[kind]])
def test_config_reads_what_show_prints(kind, name, tmp_path):
    shown = CliRunner().invoke(app, ["train", kind, "--preset", name, "--show", "--cp", "4"])
    assert shown.exit_code == 0
    (tmp_path / "run.toml").write_text(shown.output)
    again = CliRunner().invoke(app, ["train", "--config", str(tmp_path / "run.toml"), "--show"])
    assert again.output == shown.output
    changes = read_toml(tmp_path / "run.toml")
    want = preset(kind, name)
    assert configs.change(preset(changes.pop("kind"), "tiny"), changes) == replace(want, mesh=replace(want.mesh, cp=4))


def test_toml_with_special_characters_extreme_numbers_and_missing_values_round_trips(tmp_path):
    changes: Any = {
        "data": {"source": 'a"b\\c\n\x7f\u00e9\U0001f600', "valid": "x"},
        "optimizer": {"lr": 1e-300, "eps": 0.0},
        "mesh": {"mode": "full"},
    }
    config = configs.change(preset("gpt", "llama3.2-1b"), changes)
    config = configs.change(config, {"model": {"scaling": None}, "mesh": {"mode": None}})
    (tmp_path / "run.toml").write_text(to_toml(config))
    read = read_toml(tmp_path / "run.toml")
    assert read.pop("kind") == "gpt"
    assert configs.change(preset("gpt", "llama3.2-1b"), read) == config


def test_kind_that_contradicts_the_file_is_refused(tmp_path):
    (tmp_path / "run.toml").write_text('kind = "vit"\n')
    result = CliRunner().invoke(app, ["train", "gpt", "--config", str(tmp_path / "run.toml")])
    assert result.exit_code == 2
    assert "kind='vit', and the command says 'gpt'" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("arguments", [["train", "--show"], ["train", "vit", "--preset", "2.6b", "--show"]])
def test_show_does_not_import_torch(arguments):
    code = f"import sys; from meshflash.cli import app; app({arguments!r}, standalone_mode=False); "
    code += "assert not [name for name in sys.modules if name.split('.')[0] in ('torch', 'triton')]"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("kind = ")


def test_progress_does_not_import_torch():
    code = "import sys; from meshflash.train.report import ProgressLine; ProgressLine(7); "
    code += "assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "0/7  starting\n"


@pytest.mark.parametrize("log", [0, 2, 5])
def test_progress_ends_at_the_last_step(log):
    arguments = ["train", "gpt", "--steps", "5", "--set", f"run.log={log}", *SMALL]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    lines = result.stderr.splitlines()
    assert lines[0] == "0/5  starting"
    assert lines[-1].split("  ")[0] == "5/5"


def test_progress_on_a_terminal_is_a_bar_that_ends_full(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    line = ProgressLine(3)
    for step in range(1, 4):
        line.update(step, f"loss {step}")
    line.close()
    line.close()
    shown = capsys.readouterr().err
    assert "starting" in shown
    assert "3/3" in shown


def test_unexpected_error_is_printed_as_one_line(monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("something broke")

    monkeypatch.setattr(loop, "build", fail)
    result = CliRunner().invoke(app, ["train", "gpt", "--steps", "1", *SMALL])
    assert result.exit_code == 1
    assert "[rank 0] RuntimeError: something broke (MESHFLASH_LOG=debug shows where)" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("nproc", [1, 2])
def test_ctrl_c_ends_without_a_traceback(nproc, tmp_path):
    arguments = ["train", "gpt", "--steps", "1000000", "--set", "run.log=1", *SMALL, "--nproc", str(nproc)]
    log = tmp_path / "log"
    with log.open("w") as stream:
        running = subprocess.Popen(
            [sys.executable, "-m", "meshflash", *arguments], stderr=stream, start_new_session=True
        )
        try:
            _wait_for_a_step(running, log)
            os.killpg(running.pid, signal.SIGINT)  # the terminal sends it to the whole process group
            code = running.wait(LIMIT_SECONDS)
        finally:
            running.kill()
    text = log.read_text()
    assert code == 130, text
    assert "Traceback" not in text
    assert text.startswith("0/1000000  starting\n" if nproc == 1 else "starting 2 ranks\n")
    if nproc == 1:
        assert text.endswith("interrupted\n")


def _wait_for_a_step(running: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the log shows step 2, or until the process ends."""
    for _ in range(LIMIT_SECONDS * 10):
        if "2/1000000" in log.read_text() or running.poll() is not None:
            return
        try:
            running.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(log.read_text())
