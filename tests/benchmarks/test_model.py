"""`python -m benchmarks model`: standard attention in a model beside ours, and what happens where it does not fit."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import model
from benchmarks.training import Training
from commands import app
from meshflash import shutdown
from meshflash.bench import candidates, record
from meshflash.parallel import MeshAttention

SMALL = Training(layers=2, dim=32, heads=2, vocabulary=64, tokens=24, batch=1)


@pytest.fixture(autouse=True)
def _end():
    yield
    shutdown()  # the job that a mesh started


def invoke(words, *more):
    return CliRunner().invoke(app, [*words.split(), *map(str, more)], env={"COLUMNS": "80"})


def test_model_writes_a_record_and_shows_it_again(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmarks/__main__.py", "model"])
    output, plot = tmp_path / "model.json", tmp_path / "model.png"
    sizes = "--layers 2 --dim 32 --heads 2 --vocabulary 64 --tokens 16 --tokens 256"
    words = f"benchmarks model --device cpu {sizes} --rounds 1"
    result = invoke(words, "--output", output, "--plot", plot)
    assert result.exit_code == 0, result.output
    rows = record.read(output)["rows"]
    names = [(16, "standard"), (16, "auto"), (256, "standard"), (256, "auto")]
    assert [(row["tokens"], row["kernel"]) for row in rows] == names
    for standard, ours in (rows[:2], rows[2:]):
        assert (standard["ran"], ours["ran"]) == ("standard", "vendor")
        assert (standard["speedup"], standard["saved"]) == (1.0, 0.0)
        assert ours["speedup"] == pytest.approx(standard["ms"] / ours["ms"])
        assert ours["loss"] == pytest.approx(standard["loss"], rel=1e-5)
    assert rows[3]["saved"] > 0.3
    assert plot.stat().st_size > 1000
    again = invoke("benchmarks model", "--from", output)
    assert again.exit_code == 0, again.output
    assert again.output in result.output
    written = invoke("benchmarks model --markdown", "--from", output).output
    assert written.startswith("`python -m benchmarks model` on ")
    assert "| 256 | auto (vendor) | " in written
    assert invoke("benchmarks ddp", "--from", output).exit_code == 2


def test_standard_attention_keeps_the_scores_of_every_layer():
    case = replace(SMALL, tokens=256)
    matrix = case.heads * case.tokens**2 * 4
    matrices = []
    for layers in (1, 4):
        standard, ours = (row.peak_bytes for row in model.run(replace(case, layers=layers), rounds=1))
        assert standard is not None
        assert ours is not None
        matrices.append((standard - ours) / matrix)
    assert matrices[1] - matrices[0] == pytest.approx(3, abs=0.3)  # one for each layer more
    assert matrices[1] < 4 - 1 + candidates.STANDARD_MATRICES


def test_peaks_count_weights_and_the_state_of_adamw():
    rows = model.run(replace(SMALL, vocabulary=8192, layers=1), rounds=1)
    weights = 4 * replace(SMALL, vocabulary=8192, layers=1).config.num_parameters
    for row in rows:
        assert row.peak_bytes is not None
        assert 4 * weights < row.peak_bytes < 6 * weights  # and gradients


@pytest.mark.parametrize("layers", [1, 8])
def test_standard_attention_without_memory_is_shown_as_out_of_memory(layers, monkeypatch, tmp_path):
    case = replace(SMALL, layers=layers)
    matrix = case.heads * case.tokens**2 * 4
    for module in (candidates, model):
        monkeypatch.setattr(module, "free_bytes", lambda: 3 * matrix if layers == 1 else 6 * matrix)
    rows = [record.flat(row) for row in model.run(case, rounds=1)]
    standard, ours = rows
    assert standard["ms"] is standard["peak_bytes"] is standard["loss"] is None
    assert ours["speedup"] is ours["saved"] is None
    assert ours["ms"] > 0
    assert "| 24 | standard | out of memory |  |  |  |  |" in model.BENCHMARK.markdown(rows)
    model.plot(rows, "title", tmp_path / "x.svg")
    assert "no bar: out of memory" in (tmp_path / "x.svg").read_text()


def test_attention_that_runs_out_of_memory_leaves_the_other_timed(monkeypatch):
    def greedy(case, name):
        def attention(q, k, v):
            raise torch.OutOfMemoryError("too much")

        return attention

    monkeypatch.setattr(model, "candidate", greedy)
    standard, ours = model.run(SMALL, rounds=1)
    assert standard.ms is standard.loss is None
    assert ours.ms is not None
    assert ours.loss is not None


def test_wrong_attention_is_not_timed(monkeypatch):
    right = model.candidate

    def unmasked(case, name):
        return right(replace(case, mask="full"), name)

    monkeypatch.setattr(model, "candidate", unmasked)
    with pytest.raises(RuntimeError, match=r"auto: loss .* where standard has .* it is wrong"):
        model.run(SMALL, rounds=1)


def test_standard_attention_ignores_autocast():
    module = model._standard(replace(SMALL, dtype="bfloat16"))
    assert isinstance(module, MeshAttention)  # a model asks its attention for a mesh
    q = torch.randn(1, 24, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(q, q, q, mask=None, layout=None)
    assert out.dtype == torch.bfloat16
    kept: list[torch.dtype] = []

    def keep(x):
        kept.append(x.dtype)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), torch.autocast("cpu", torch.bfloat16):
        module(q, q, q)
    assert set(kept) == {torch.bfloat16, torch.bool}


def test_lengths_suit_the_device():
    assert model.default_lengths("cpu") == [256, 512, 1024, 2048]
    assert model.default_lengths("cuda") == [1024, 2048, 4096, 8192, 16384, 32768]
