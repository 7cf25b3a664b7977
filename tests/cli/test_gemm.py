"""`meshflash gemm`: its table, record and picture, and exit code 1 with the rank that has a wrong result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton")

from meshflash.bench import fused
from meshflash.bench.fused_cases import GROUP, HEAP, Case, Setup
from meshflash.cli import app
from meshflash.kernels.triton.common import INTERPRETED
from meshflash.runtime.world import World

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="interprets kernels on a CPU")

TINY = "--device cpu --m 10 --n-cols 36 --k 12 --rounds 1"


def invoke(arguments, *more):
    """Run `meshflash gemm` with these arguments."""
    return CliRunner().invoke(app, ["gemm", *arguments.split(), *map(str, more)], env={"COLUMNS": "100"})


def measure(rank, world, group, *args):
    """Measure on one rank of the pool."""
    return fused._measure(rank, world, lambda _: None, *args)


def measure_with_wrong_rank_1(rank, world, group, *args):
    """Measure with a wrong B on rank 1."""

    def scaled_operands(self, a, b, rank):
        x, y = correct_operands(self, a, b, rank)
        return x, y * (1.01 if rank == 1 else 1)

    correct_operands = Case.operands
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Case, "operands", scaled_operands)
        return measure(rank, world, group, *args)


def run_as_launched_rank(rank, world, group, case, setup):
    """Run the command as torchrun starts it, on one rank of the pool."""
    return fused.run_here(case, setup, World(rank, world, rank, world, 0, torch.device("cpu"), "torchrun", "gloo"))


def run_on_pool(monkeypatch, pool, function):
    """Make the command run `function` on the pool instead of new processes."""
    monkeypatch.setattr(fused, "run_ranks", lambda world, _, *args, **more: pool.run(world, function, *args))


def test_gemm_prints_records_and_draws_every_rank(tmp_path, monkeypatch, pool):
    run_on_pool(monkeypatch, pool, measure)
    monkeypatch.setattr("sys.argv", ["meshflash", "gemm"])
    record, picture = tmp_path / "new" / "gemm.json", tmp_path / "gemm.svg"
    arguments = f"-n 2 -c all_reduce --shots 2 --variant producer_consumer --reference {TINY}"
    result = invoke(arguments, "--json", record, "--timeline", picture)
    assert result.exit_code == 0, result.output
    assert "all_reduce in two shots, 10 x 36 x 12, float32 on cpu" in result.output
    assert "rank 0, 1: all_reduce in two shots, producer_consumer: tiles of" in result.output
    assert "requested" in result.output
    assert "x group" in result.output
    written = json.loads(record.read_text())
    assert written["header"]["command"] == "meshflash gemm"
    rows = written["rows"]
    assert [(row["comm"], row["rank"]) for row in rows] == [(HEAP, 0), (HEAP, 1), (GROUP, 0), (GROUP, 1)]
    assert [row["variant"] for row in rows] == ["producer_consumer"] * 2 + ["bulk"] * 2
    assert [row["backend"] for row in rows] == ["shared heap"] * 2 + ["gloo"] * 2
    assert all(0 < row["error"] < 1e-6 and row["ms"] > 0 for row in rows)
    assert rows[0]["bits"] == rows[1]["bits"]
    assert rows[0]["ratio"] == rows[0]["ms"] / rows[2]["ms"]
    svg = picture.read_text()
    ElementTree.fromstring(svg)
    assert all(f"rank {rank}, tile 0: sent after" in svg for rank in (0, 1))
    assert "received after" in svg


def test_wrong_rank_is_named_and_the_exit_code_is_1(monkeypatch, pool):
    run_on_pool(monkeypatch, pool, measure_with_wrong_rank_1)
    result = invoke(f"-n 2 -c ag_gemm --variant epilogue {TINY}")
    assert result.exit_code == 1
    wrong = [line for line in result.output.splitlines() if line.startswith("wrong: ")]
    assert len(wrong) == 2
    assert wrong[0].startswith("wrong: rank 1, epilogue by shared heap: relative error 1.0e-02 against float64, where")
    assert wrong[1].startswith("wrong: rank 1, epilogue by shared heap: other bits than rank 0 has")


def test_gemm_runs_as_ranks_of_a_launcher(pool):
    case = Case("gemm_rs", 9, 20, 8, 2)
    first, second = pool.run(2, run_as_launched_rank, case, Setup(rounds=1))
    assert second is None
    assert [row.rank for row in first.rows] == [0, 1]
    assert all(row.error < 1e-6 for row in first.rows)
    assert first.times == {}


@pytest.mark.parametrize("collective", ["all_scatter", "ag_gemm"])
def test_local_heap_runs_all_ranks_in_one_process(tmp_path, collective):
    picture = tmp_path / "gemm.svg"
    result = invoke(f"-n 3 -c {collective} --heap local --seed 4 --dtype bfloat16 {TINY}", "--timeline", picture)
    assert result.exit_code == 0, result.output
    assert result.output.count("bulk, local heap") == 3
    assert "no rates of fused GEMMs were measured on this device" in result.output
    if collective == "all_scatter":
        assert "rank 2, tile 0: sent" in picture.read_text()
    else:  # a bulk ag_gemm runs `torch.matmul`, which records no events
        assert "no picture: no tile has an event to draw; try --variant epilogue" in result.output
        assert not picture.exists()


def test_kernels_are_interpreted_on_a_cpu_without_an_environment_variable():
    """Start the command as a user does: no variable is set, and the command starts its ranks."""
    arguments = f"-n 2 -c gemm_rs {TINY}".split()
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "meshflash", "gemm", *arguments], env=clean, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("shared heap") == 2


def test_short_help_option_lists_nproc():
    result = invoke("-h")
    assert result.exit_code == 0
    assert "--nproc" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-c allreduce", "expected one of all_scatter"),
        ("--variant fast", "variant 'fast'"),
        ("--shots 2", "of an all_reduce"),
        ("--dtype float64", "dtype 'float64'"),
        ("--heap symmetric", "expected local or shared"),
        ("--heap local --reference", "needs a process group"),
        ("--mps", "share a GPU"),
    ],
)
def test_invalid_arguments_name_the_remedy(arguments, message):
    result = invoke(f"{TINY} {arguments}")
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_missing_interpreter_names_the_variable_to_set(monkeypatch):
    monkeypatch.setattr("meshflash.kernels.triton.common.INTERPRETED", False)
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1"):
        fused.run(replace(Case("ag_gemm", 4, 4, 4, 2), seed=1), Setup())
