"""`python -m benchmarks bytes`: what schedules move, beside their peers."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks import bytes_moved as bench
from commands import app
from meshflash.bench.cases import Case
from meshflash.schedules.registry import names, schedule_variants


@pytest.mark.parametrize("mask", ["full", "causal", "window-64"])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("world", [2, 5, 8])
def test_no_schedule_moves_more_than_its_peers(world, kv_heads, mask):
    case = Case(64 * world, 1, 8, kv_heads, 64, mask, "bfloat16")
    lines = [f"{name}(inner={n})" for name in ("hybrid", "double_ring") for n in (2, 4) if world % n == 0]
    for row in bench.run(case, (*names(), *lines), world):
        most = row.peer_bytes
        if most is None:  # heads that peers cannot divide
            assert row.schedule.startswith(("ulysses", "hybrid"))
            assert world == 5
            continue
        assert 0 < row.received_mean <= row.received_bytes <= most


def test_bytes_writes_a_record_and_prints_markdown(tmp_path):
    path = tmp_path / "bytes.json"
    result = CliRunner().invoke(app, ["benchmarks", "bytes", "-n", "2", "--tokens", "64", "--output", str(path)])
    assert result.exit_code == 0, result.output
    assert "| 32/8 | window-4096 | `zigzag` |" in result.output
    assert len(json.loads(path.read_text())["rows"]) == 2 * 2 * 3 * len(schedule_variants(2))


def test_unknown_schedule_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["benchmarks", "bytes", "--schedule", "spiral", "--output", str(tmp_path / "x")])
    assert result.exit_code == 2
    assert "spiral" in result.output
