"""`python -m benchmarks step`: a training step beside the sum of its kernels."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks.step import Setup
from commands import app
from meshflash import shutdown


@pytest.fixture(autouse=True)
def _end():
    yield
    shutdown()  # the job that the command's mesh started


def test_step_is_timed_beside_its_kernels(tmp_path):
    options = "--tokens 33 --rounds 1 --activation-checkpointing selective --plain --device cpu"
    words = f"benchmarks step {options} --output {tmp_path}/s.json"
    result = CliRunner().invoke(app, words.split(), catch_exceptions=False)
    assert result.exit_code == 0
    for part in ("attention, backward", "RMSNorm", "loss and its gradients", "clip and AdamW", "the plain model"):
        assert part in result.output
    (row,) = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert row["kernels_ms"] == pytest.approx(sum(part["times"] * part["ms"] for part in row["parts"]))
    assert row["ratio"] == pytest.approx(row["kernels_ms"] / row["ms"])
    assert row["loss"] == pytest.approx(5.55, abs=0.1)  # log 256: nothing is learnt yet
    times = {part["name"]: part["times"] for part in row["parts"]}
    assert times["attention, forward"] == 2  # kept, so not again
    assert times["linear 64 to 64, forward"] == 8  # queries and results of two layers, twice


def test_unknown_preset_is_refused():
    result = CliRunner().invoke(app, ["benchmarks", "step", "--preset", "llama9"])
    assert result.exit_code == 2
    assert "expected one of tiny" in " ".join(result.output.split())
    assert Setup("tiny", dim=128).config.hidden == 512
