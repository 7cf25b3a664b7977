"""`meshflash check`: the suite of checks, its verdicts on wrong results, and the command."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from mesh_cases import run_items
from meshflash.check import run, suite
from meshflash.check.spread import Moved
from meshflash.cli import app
from meshflash.schedules.registry import names


def test_suite_covers_every_combination_of_layout_mask_and_features():
    checks = suite.everything(("ring", "ringx4"), 3)
    cells = {(each.item.schedule, each.layout, each.mask, each.features) for each in checks}
    assert len(cells) == len(checks) == 2 * len(suite.LAYOUTS) * len(suite.MASKS) * len(suite.FEATURES)
    assert {each.item.dtype for each in checks} == set(suite.DTYPES)


def test_quick_suite_has_several_masks_and_features_for_every_schedule():
    checks = suite.everything(names(), 2, quick=True)
    for name in names():
        own = [each for each in checks if each.item.schedule == name]
        assert {each.mask for each in own} == set(suite.QUICK_MASKS)
        assert len({each.features for each in own}) >= 4


@pytest.fixture
def checked_results(pool):
    """Return a check, and the results of two ranks."""
    each = next(c for c in suite.everything(("zigzag",), 2, quick=True) if (c.mask, c.features) == ("causal", "mqa"))
    return each, [parts[0] for parts in pool.run(2, run_items, [each.item])]


def test_correct_results_count_as_right(checked_results):
    verdict = run._judge(*checked_results)
    assert verdict.outcome == "right"
    assert 0 < verdict.error <= verdict.allowed
    assert verdict.forward_bytes > 0
    assert verdict.backward_bytes > verdict.forward_bytes


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_wrong_values_count_as_missed(checked_results, name):
    each, (first, (results, moved)) = checked_results
    wrong = results | {name: results[name] * 1.01}
    verdict = run._judge(each, [first, (wrong, moved)])
    assert verdict.outcome == "missed"
    assert verdict.message.startswith(name)


def test_nan_wrong_bytes_and_partial_refusals_count_as_missed(checked_results):
    each, (first, (results, moved)) = checked_results
    with_nan = results | {"dv": torch.full_like(results["dv"], torch.nan)}
    assert "NaN" in run._judge(each, [first, (with_nan, moved)]).message
    more = {direction: Moved({0: 10**6}, held.scratch_bytes) for direction, held in moved.items()}
    assert "other bytes" in run._judge(each, [first, (results, more)]).message
    held = {direction: replace(was, scratch_bytes=0) for direction, was in moved.items()}
    assert "other scratch" in run._judge(each, [first, (results, held)]).message
    assert run._judge(each, [first, "not here"]).outcome == "missed"
    refused = run._judge(each, ["not here", "not here"])
    assert (refused.outcome, refused.message) == ("refused", "not here")


def test_command_writes_a_report(tmp_path):
    report = tmp_path / "report.json"
    options = ["check", "-n", "2", "--quick", "--schedule", "ringx1", "--schedule", "zigzag"]
    result = CliRunner().invoke(app, [*options, "--output", str(report)])
    assert result.exit_code == 0, result.output
    assert "16 checks, none missed" in result.output
    rows = json.loads(report.read_text())["rows"]
    assert [row["outcome"] for row in rows] == ["right"] * 16


def test_command_exits_with_1_if_a_check_is_missed(monkeypatch):
    def missed(checks, world, listen):
        return [run.Verdict("ring", world, "zigzag", "causal", "plain", 37, "float32", "missed", message="dq: wrong")]

    monkeypatch.setattr(run, "run", missed)
    result = CliRunner().invoke(app, ["check", "-n", "2", "--quick", "--schedule", "ring"])
    assert result.exit_code == 1
    assert "missed: ring, zigzag, causal, plain, 37, float32: dq: wrong" in result.output


@pytest.mark.parametrize(
    ("options", "name"),
    [(["--schedule", "spiral"], "spiral"), (["--device", "abacus"], "abacus"), (["--transport", "pigeon"], "pigeon")],
)
def test_command_refuses_unknown_names(options, name):
    result = CliRunner().invoke(app, ["check", *options])
    assert result.exit_code == 2
    assert name in result.output
