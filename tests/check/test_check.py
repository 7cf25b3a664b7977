"""`meshflash check`: what it checks, that it misses what is wrong, and that it says so."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from meshflash.check import run, suite
from meshflash.check.spread import Moved, run_items
from meshflash.cli import app
from meshflash.schedules.registry import names


def test_everything_is_everything():
    checks = suite.everything(("ring", "ringx4"), 3)
    cells = {(each.item.schedule, each.layout, each.mask, each.features) for each in checks}
    assert len(cells) == len(checks) == 2 * len(suite.LAYOUTS) * len(suite.MASKS) * len(suite.FEATURES)
    assert {each.item.dtype for each in checks} == set(suite.DTYPES)


def test_quickly_every_schedule_meets_several_masks_and_features():
    checks = suite.everything(names(), 2, quick=True)
    for name in names():
        own = [each for each in checks if each.item.schedule == name]
        assert {each.mask for each in own} == set(suite.QUICK_MASKS)
        assert len({each.features for each in own}) >= 4


@pytest.fixture
def one(pool):
    """A check, and its parts as two ranks made them."""
    each = next(c for c in suite.everything(("zigzag",), 2, quick=True) if (c.mask, c.features) == ("causal", "mqa"))
    return each, [parts[0] for parts in pool.run(2, run_items, [each.item])]


def test_what_is_right_is_right(one):
    verdict = run._judge(*one)
    assert verdict.outcome == "right"
    assert 0 < verdict.error <= verdict.allowed
    assert verdict.forward_bytes > 0
    assert verdict.backward_bytes > verdict.forward_bytes


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_wrong_numbers_are_missed(one, name):
    each, (first, (results, moved)) = one
    wrong = results | {name: results[name] * 1.01}
    verdict = run._judge(each, [first, (wrong, moved)])
    assert verdict.outcome == "missed"
    assert verdict.message.startswith(name)


def test_nan_and_other_bytes_and_refusals_of_some_are_missed(one):
    each, (first, (results, moved)) = one
    spoiled = results | {"dv": torch.full_like(results["dv"], torch.nan)}
    assert "NaN" in run._judge(each, [first, (spoiled, moved)]).message
    more = {way: Moved({0: 10**6}, held.scratch_bytes) for way, held in moved.items()}
    assert "other bytes" in run._judge(each, [first, (results, more)]).message
    held = {way: replace(was, scratch_bytes=0) for way, was in moved.items()}
    assert "other scratch" in run._judge(each, [first, (results, held)]).message
    assert run._judge(each, [first, "not here"]).outcome == "missed"
    refused = run._judge(each, ["not here", "not here"])
    assert (refused.outcome, refused.message) == ("refused", "not here")


def test_the_command(tmp_path):
    report = tmp_path / "report.json"
    options = ["check", "-n", "2", "--quick", "--schedule", "ringx1", "--schedule", "zigzag"]
    result = CliRunner().invoke(app, [*options, "--output", str(report)])
    assert result.exit_code == 0, result.output
    assert "16 checks, none missed" in result.output
    rows = json.loads(report.read_text())["rows"]
    assert [row["outcome"] for row in rows] == ["right"] * 16


def test_the_command_ends_with_1_where_something_is_missed(monkeypatch):
    def missed(checks, world, listen):
        return [run.Verdict("ring", world, "zigzag", "causal", "plain", 37, "float32", "missed", message="dq: wrong")]

    monkeypatch.setattr(run, "run", missed)
    result = CliRunner().invoke(app, ["check", "-n", "2", "--quick", "--schedule", "ring"])
    assert result.exit_code == 1
    assert "missed: ring, zigzag, causal, plain, 37, float32: dq: wrong" in result.output


@pytest.mark.parametrize(
    ("options", "word"),
    [(["--schedule", "spiral"], "spiral"), (["--device", "abacus"], "abacus"), (["--transport", "pigeon"], "pigeon")],
)
def test_what_is_not_there(options, word):
    result = CliRunner().invoke(app, ["check", *options])
    assert result.exit_code == 2
    assert word in result.output
