"""Records say which kernels ran, whatever kernel was asked for."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

import pytest
import torch
from typer.testing import CliRunner

import benchmarks
from benchmarks import options
from commands import app
from meshflash import bench, flash_attention, shutdown
from meshflash.bench import record
from meshflash.kernels import registry
from meshflash.kernels.registry import Choice, KernelLog

#: Benchmarks whose rows hold no figure of an attention kernel, and why.
WITHOUT = {
    "bytes_moved": "counts bytes in programs",
    "engine": "runs kernels that compute nothing",
    "fused": "GEMMs",
    "fused_cases": "GEMMs",
    "gemm": "GEMMs",
    "handshake": "exchanges payloads on the host",
    "integrations": "compares errors of models, ours and others'",
    "scale": "builds programs on the host",
    "tiles": "builds tables on the host",
    "weights": "counts bytes of weights",
}


def row_classes() -> dict[str, set[str]]:
    """Return the fields of each benchmark's rows: of its own dataclasses whose names end with Row, Step or Peer."""
    found = {}
    names = [(package, info.name) for package in (bench, benchmarks) for info in pkgutil.iter_modules(package.__path__)]
    for package, submodule in names:
        if submodule == "__main__":
            continue
        module = importlib.import_module(f"{package.__name__}.{submodule}")
        for name, each in vars(module).items():
            own = dataclasses.is_dataclass(each) and getattr(each, "__module__", "") == module.__name__
            if own and name.endswith(("Row", "Step", "Peer")):
                found[f"{submodule}.{name}"] = {field.name for field in dataclasses.fields(each)}
    return found


def test_rows_of_attention_benchmarks_name_the_kernels_that_ran() -> None:
    rows = row_classes()
    assert {
        "attention.ScheduleRow",
        "kernels.KernelRow",
        "peers.Peer",
        "step.Step",
        "ddp.DdpRow",
        "model.ModelRow",
    } <= set(rows)
    assert {name.partition(".")[0] for name in rows} >= set(WITHOUT)
    for name, fields in rows.items():
        if name.partition(".")[0] not in WITHOUT:
            of_one_pass = "direction" in fields and "ran" in fields
            assert of_one_pass or {"forward_ran", "backward_ran"} <= fields, name


@pytest.mark.parametrize(
    "words",
    [
        "bench attention -n 2 --tokens 32 --heads 2 --dim 8 --rounds 1 --schedule ring --kernel auto",
        "benchmarks rank -n 2 --rank 0 --local-tokens 16 --heads 2 --dim 8 --rounds 1",
        "benchmarks memory --tokens 32 --heads 2 --dim 8 --device cpu",
        "benchmarks step --tokens 32 --layers 1 --dim 32 --no-parts --rounds 1 --device cpu",
    ],
)
def test_records_of_auto_name_real_kernels(words: str, tmp_path) -> None:
    result = CliRunner().invoke(app, [*words.split(), "--output", str(tmp_path / "x.json")])
    shutdown()  # a step starts a job of one rank
    assert result.exit_code == 0, result.output
    rows = record.read(tmp_path / "x.json")["rows"]
    known = {kernel.name for kernel in registry.kernels()}
    for row in rows:
        of_one_pass = ["ran", "single_kernel_ran"] if "single_kernel_ran" in row else ["forward_ran"]
        both = ["backward_ran"] if "backward_ran" in row and row.get("pass") != "forward" else []
        for name in of_one_pass + both:
            assert set(row[name].split(", ")) <= known, (name, row)


def test_log_names_each_kernel_of_a_pass_once() -> None:
    x = torch.zeros(1, 4, 1, 8)
    with registry.record_kernels() as ran:
        flash_attention(x, x, x)
    assert (ran.names("forward"), ran.names("backward")) == ("vendor", "")
    made = KernelLog()
    by_name = {kernel.name: kernel for kernel in registry.kernels()}
    for name in ("hopper", "triton", "hopper"):
        made.note(Choice(by_name[name], "requested"), "backward")
    assert made.names("backward") == "hopper, triton"
    assert made == [("hopper", "backward"), ("triton", "backward"), ("hopper", "backward")]


TILES = "benchmarks tiles --tokens 64 --documents 2 --ranks 2"


def test_no_record_is_written_unless_one_is_asked_for(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "RESULTS", tmp_path / "results")
    for words in (TILES, "bench attention -n 2 --tokens 32 --heads 2 --dim 8 --rounds 1 --schedule ring"):
        result = CliRunner().invoke(app, words.split(), catch_exceptions=False)
        assert result.exit_code == 0
        assert "written" not in result.output
    assert not list(tmp_path.iterdir())


def test_update_replaces_the_tracked_record(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(options, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["benchmarks/__main__.py", "tiles", "--update"])
    result = CliRunner().invoke(app, [*TILES.split(), "--update"], catch_exceptions=False)
    assert result.exit_code == 0
    assert record.read(tmp_path / "tiles.json")["header"]["command"] == "python -m benchmarks tiles --update"
