"""Commands that write: a path that cannot be written is refused before the work, and failures are a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks import __main__ as outside
from benchmarks import step
from commands import app
from meshflash.bench import attention, learning, record
from meshflash.cli import bench

WIDE = {"COLUMNS": "300"}


def ran(words: list[str]) -> Result:
    """What a command did; an exception that it let through is the test's."""
    return CliRunner().invoke(app, words, env=WIDE, catch_exceptions=False)


@pytest.fixture
def below_a_file(tmp_path: Path) -> str:
    """A path that cannot be: its folder is a file."""
    (tmp_path / "file").touch()
    return str(tmp_path / "file" / "x.json")


#: Every benchmark.
BENCHMARKS = [
    [group, command.name or getattr(command.callback, "__name__", "")]
    for group, module in (("bench", bench), ("benchmarks", outside))
    for command in module.app.registered_commands
]
COMMANDS = [
    *([*words, "--output"] for words in BENCHMARKS),
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


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_unwritable_path_is_refused_before_the_work(
    words: list[str], below_a_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("it has begun")

    monkeypatch.chdir(Path(below_a_file).parent.parent)
    monkeypatch.setattr("meshflash.runtime.processes.run_ranks", work)
    for module in (attention, learning):  # imported above, so that none keeps `work` after the test
        monkeypatch.setattr(module, "run_ranks", work)
    monkeypatch.setattr(step, "run", work)
    monkeypatch.setattr("meshflash.job.init", work)
    monkeypatch.setattr("os.execv", work)
    done = ran([*words, below_a_file])
    assert done.exit_code == 2, done.output
    assert f"{below_a_file}: it cannot be written (" in done.output


def test_trace_refuses_an_unwritable_picture_before_reading(tmp_path: Path, below_a_file: str) -> None:
    for option in ("--svg", "--merged"):
        done = ran(["trace", str(tmp_path), option, below_a_file])
        assert (done.exit_code, "it cannot be written (" in done.output) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ["draw", "ring", "--tokens", "8", "--svg"],
        ["benchmarks", "tiles", "--tokens", "64", "--documents", "2", "--ranks", "2", "--output"],
    ],
    ids=" ".join,
)
def test_full_disk_prints_one_line(words: list[str]) -> None:
    done = ran([*words, "/dev/full"])
    assert done.exit_code == 1
    assert done.stderr == "meshflash: /dev/full: it cannot be written (No space left on device)\n"


@pytest.mark.parametrize(
    ("words", "name"),
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
def test_invalid_json_is_named(words: list[str], name: str, content: str, tmp_path: Path) -> None:
    file = tmp_path / (name or "trace-0.json")
    file.write_text(content)
    done = ran([*words, str(tmp_path / name)])
    assert done.exit_code == 2, done.output
    assert f"{file}: " in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "a", "--checkpoint", "nope"], "'nope' does not exist"),
        (["predict", "images", "--output", "x", "--checkpoint", "nope"], "'nope' does not exist"),
        (["train", "gpt", "--from-step", "3", "--output", "nope"], "the folder nope does not exist"),
        (["trace", "nope"], "nope: there is no such folder"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_missing_folder_is_named(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = ran(words)
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert not list(tmp_path.iterdir())


def test_record_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "x.json"
    record.write(path, [{"a": 1}], "meshflash bench")
    assert record.read(path)["rows"] == [{"a": 1}]
    assert json.loads(path.read_text())["header"]["command"] == "meshflash bench"
