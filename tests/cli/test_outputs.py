"""Commands that write files: an unwritable path is refused before any work, and errors take one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks import __main__ as benchmarks_main
from benchmarks import step
from commands import app
from meshflash.bench import attention, learning, record
from meshflash.cli import bench

WIDE = {"COLUMNS": "300"}


def run_command(arguments: list[str]) -> Result:
    """Run a command and return its result; an uncaught exception fails the test."""
    return CliRunner().invoke(app, arguments, env=WIDE, catch_exceptions=False)


@pytest.fixture
def path_below_a_file(tmp_path: Path) -> str:
    """Return a path that cannot exist, because its folder is a file."""
    (tmp_path / "file").touch()
    return str(tmp_path / "file" / "x.json")


#: Every benchmark, as (group, name).
BENCHMARKS = [
    [group, command.name or getattr(command.callback, "__name__", "")]
    for group, module in (("bench", bench), ("benchmarks", benchmarks_main))
    for command in module.app.registered_commands
]
COMMANDS = [
    *([*arguments, "--output"] for arguments in BENCHMARKS),
    ["bench", "attention", "--plot"],
    ["bench", "attention", "--trace"],
    ["bench", "attention", "--profile"],
    ["draw", "ring", "--svg"],
    ["demo", "--folder"],
    ["gemm", "--device", "cpu", "--json"],
    ["gemm", "--device", "cpu", "--timeline"],
    ["train", "gpt", "--output"],
    ["train", "gpt", "--nproc", "2", "--output"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_unwritable_path_is_refused_before_any_work(
    arguments: list[str], path_below_a_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.chdir(Path(path_below_a_file).parent.parent)
    monkeypatch.setattr("meshflash.runtime.processes.run_ranks", work)
    for module in (attention, learning):  # imported above, so that no module keeps `work` after the test
        monkeypatch.setattr(module, "run_ranks", work)
    monkeypatch.setattr(step, "run", work)
    monkeypatch.setattr("meshflash.job.init", work)
    monkeypatch.setattr("os.execv", work)
    result = run_command([*arguments, path_below_a_file])
    assert result.exit_code == 2, result.output
    assert f"{path_below_a_file}: it cannot be written (" in result.output


def test_trace_refuses_an_unwritable_picture_before_reading(tmp_path: Path, path_below_a_file: str) -> None:
    for option in ("--svg", "--merged"):
        result = run_command(["trace", str(tmp_path), option, path_below_a_file])
        assert (result.exit_code, "it cannot be written (" in result.output) == (2, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["draw", "ring", "--tokens", "8", "--svg"],
        ["benchmarks", "tiles", "--tokens", "64", "--documents", "2", "--ranks", "2", "--output"],
    ],
    ids=" ".join,
)
def test_full_disk_prints_one_line(arguments: list[str]) -> None:
    result = run_command([*arguments, "/dev/full"])
    assert result.exit_code == 1
    assert result.stderr == "meshflash: /dev/full: it cannot be written (No space left on device)\n"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["benchmarks", "lengths", "--from"], "x.json"),
        (["benchmarks", "model", "--from"], "x.json"),
        (["benchmarks", "ddp", "--from"], "x.json"),
        (["benchmarks", "peers", "--from"], "x.json"),
        (["benchmarks", "peers", "--device", "cpu", "--output"], "x.json"),
        (["benchmarks", "variants", "--from"], "x.json"),
        (["trace"], ""),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else x,
)
@pytest.mark.parametrize("content", ['{"rows": [', "[]", '{"rows": 3}'])
def test_file_with_invalid_json_is_named(arguments: list[str], name: str, content: str, tmp_path: Path) -> None:
    file = tmp_path / (name or "trace-0.json")
    file.write_text(content)
    result = run_command([*arguments, str(tmp_path / name)])
    assert result.exit_code == 2, result.output
    assert f"{file}: " in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "a", "--checkpoint", "nope"], "'nope' does not exist"),
        (["predict", "images", "--output", "x", "--checkpoint", "nope"], "'nope' does not exist"),
        (["train", "gpt", "--from-step", "3", "--output", "nope"], "the folder nope does not exist"),
        (["trace", "nope"], "nope: there is no such folder"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_missing_folder_is_named(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_command(arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not list(tmp_path.iterdir())


def test_record_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "x.json"
    record.write(path, [{"a": 1}], "meshflash bench")
    assert record.read(path)["rows"] == [{"a": 1}]
    assert json.loads(path.read_text())["header"]["command"] == "meshflash bench"
