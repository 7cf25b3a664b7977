"""`python -m benchmarks transformers`: a step of a Hugging Face Llama, ours beside SDPA and over ranks."""

import pytest
from typer.testing import CliRunner

from benchmarks import transformers_step
from commands import app
from meshflash import shutdown
from meshflash.bench import record


@pytest.fixture(autouse=True)
def _end():
    yield
    shutdown()  # the job that a mesh started


def invoke(words):
    return CliRunner().invoke(app, ["benchmarks", "transformers", *words.split()], env={"COLUMNS": "100"})


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_compare_attentions_and_ranks(tmp_path, ranks):
    output = tmp_path / "step.json"
    result = invoke(f"--device cpu --layers 1 --tokens 41 --rounds 1 --nproc {ranks} --output {output}")
    assert result.exit_code == 0, result.output
    rows = record.read(output)["rows"]
    names = ["sdpa", "plain_attn", "mesh_attn"] if ranks == 1 else ["mesh_attn"] * 2
    assert [row["attention"] for row in rows] == names
    assert all(row["loss"] == pytest.approx(rows[0]["loss"], rel=1e-5) for row in rows)
    if ranks == 1:
        assert rows[2]["ratio"] == pytest.approx(rows[2]["ms"] / rows[0]["ms"])
        assert rows[2]["over_plain"] == pytest.approx(rows[2]["ms"] / rows[1]["ms"])
    else:
        assert rows[1]["efficiency"] == pytest.approx(rows[0]["ms"] / rows[1]["ms"] / 2)


def test_losses_that_differ_and_wrong_options_are_errors(monkeypatch):
    with pytest.raises(RuntimeError, match=r"mesh_attn has the loss 2\.005"):
        transformers_step._check({"sdpa": 2.0, "mesh_attn": 2.005}, "bfloat16")
    result = invoke("--device cpu --mps --nproc 2")
    assert result.exit_code == 2
    assert "it divides a GPU among ranks" in result.output
