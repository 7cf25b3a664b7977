"""The table of models under context parallelism: verdicts, processes that raise, hang or die, and the docs' copy."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import integrations
from benchmarks.integration_cases import FEATURES, MODELS
from benchmarks.options import RESULTS
from commands import app

DOCS = Path(__file__).parents[2] / "docs" / "transformers.md"
RECORD = RESULTS / "integrations.json"
RIGHT = {"errors": {"logits": 1e-7, "loss": 0.0, "gradients": 1e-6}, "needs_gpu": False}


def _wrong(error, needs_gpu=False):
    return {"errors": {"logits": error, "loss": 0.0, "gradients": 1e-6}, "needs_gpu": needs_gpu}


def _raised(error, needs_gpu=False):
    return {"error": error, "needs_gpu": needs_gpu}


@pytest.mark.parametrize(
    ("answers", "verdict", "note"),
    [
        ([RIGHT, RIGHT], "right", ""),
        ([RIGHT, _wrong(0.1)], "wrong", ""),
        ([_wrong(None), RIGHT], "wrong", ""),
        ([_wrong(0.1, True), _wrong(0.1, True)], "needs a GPU", "lacks what this model needs"),
        ([_raised("ValueError: no"), RIGHT], "refused", "ValueError: no"),
        ([_raised("ValueError: no"), None], "refused", "ValueError: no"),
        ([_raised("no kernel", True), _raised("ValueError: no")], "refused", "ValueError: no"),
        ([_raised("no kernel", True), _raised("no kernel", True)], "needs a GPU", "no kernel"),
        ([RIGHT, None], "no answer", "rank 1 did not answer"),
        ([_raised("Connection reset"), {"died": "SIGABRT"}], "no answer", "rank 1 died with SIGABRT"),
        ([{"inapplicable": True}, {"inapplicable": True}], "", ""),
    ],
)
def test_verdicts(answers, verdict, note):
    got, errors, said = integrations.judge(answers)
    assert got == verdict
    assert note in said
    assert bool(errors) == (verdict in ("right", "wrong"))


def test_the_largest_error_over_ranks_counts():
    _, errors, _ = integrations.judge([_wrong(0.2), _wrong(0.1)])
    assert errors == {"logits": 0.2, "loss": 0.0, "gradients": 1e-6}


FAKE = """
import os, time
from benchmarks.one_device import gradients


class Fake:
    title, packages, inner = "fake", ("torch",), ""

    def load(self):
        print("what libraries print is no answer")

    def train(self, model, batches, num_items, mesh):
        scale = 1.1 if self.wrong else 1.0
        out = model(**batches[0])
        out.loss.backward()
        if self.hangs and mesh.get_local_rank() == 1:
            time.sleep(1000)
        if self.dies and mesh.get_local_rank() == 1:
            os.abort()
        if self.raises:
            raise ValueError("not supported\\nand more")
        return out.logits.detach(), out.loss.detach(), [scale * g for g in gradients(model)]


def fake(what):
    kinds = ("wrong", "hangs", "dies", "raises")
    return type("Fake", (Fake,), {kind: kind == what for kind in kinds})


class Missing(Fake):
    def load(self):
        import no_such_module


PEERS = {what: fake(what) for what in ("right", "wrong", "hangs", "dies", "raises")} | {"missing": Missing}
"""


@pytest.mark.slow
def test_peers_that_are_right_wrong_hang_die_and_raise(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "fakes.py"
    path.write_text(FAKE)
    verdicts = {}
    with integrations.Ranks(sys.executable, str(path)) as ranks:
        assert "No module named 'no_such_module'" in ranks.ask(peer="missing")["missing"]
        assert ranks.ask(peer="right")["version"].startswith("torch 2")
        for name in ("right", "wrong", "raises", "hangs", "dies", "right"):
            answer = ranks.ask(peer=name, model="llama", feature="plain", seconds=8.0 if name == "hangs" else 60.0)
            verdicts[name] = integrations.judge(answer["answers"])
    assert {name: verdict for name, (verdict, _, _) in verdicts.items()} == {
        "right": "right",
        "wrong": "wrong",
        "raises": "refused",
        "hangs": "no answer",
        "dies": "no answer",
    }
    assert verdicts["wrong"][1]["gradients"] == pytest.approx(0.1, rel=1e-3)
    assert verdicts["raises"][2] == "ValueError: not supported"
    assert verdicts["dies"][2] == "rank 1 died with SIGABRT"


def test_the_table_of_the_docs_is_that_of_the_record():
    rows = integrations.BENCHMARK.read(RECORD)["rows"]
    assert {row["peer"] for row in rows} == {"meshflash", "accelerate", "ringmaster"}
    assert len(rows) == 3 * len(MODELS) * len(FEATURES)
    page = DOCS.read_text()
    assert integrations.markdown(rows) in page
    for line in integrations.versions(rows):
        for version in line.partition(": ")[2].split(", "):
            assert version in " ".join(page.split()), line


def test_ours_is_right_or_refuses():
    rows = [row for row in integrations.BENCHMARK.read(RECORD)["rows"] if row["peer"] == "meshflash"]
    assert {row["verdict"] for row in rows if row["model"] != "lfm2"} == {"right", ""}
    assert {row["verdict"] for row in rows if row["model"] == "lfm2"} == {"refused"}


def test_unknown_models_and_interpreters_are_explained():
    for words, said in (("--model nope", "expected one of llama"), ("--python /bin/false", "its process ended")):
        result = CliRunner().invoke(app, ["benchmarks", "integrations", *words.split()])
        assert result.exit_code == 2
        assert said in " ".join(result.output.replace("│", " ").split())
