"""The judge of the soak campaign reports every kind of failure; a few cases of each family run as slow tests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from soak import cases
from soak.campaign import Campaign, damage
from soak.judge import judge_load, judge_losses, judge_refused_save, judge_success, judge_survivors, seconds_to_end
from soak.zygote import FinishedJob, Zygote


def finished_job(folder: Path, codes: list[int | None], messages: list[str], fired: float | None = 0.0) -> FinishedJob:
    """Return a finished job whose ranks had these exit codes and error messages."""
    for rank, message in enumerate(messages):
        if message:
            report = {"error": "TransportError", "message": message, "trace": ""}
            (folder / f"rank-{rank}.json").write_text(json.dumps(report))
    return FinishedJob(folder, codes, [1.0 + rank for rank in range(len(codes))], fired)


def test_survivors_that_name_the_victim_in_time_pass(tmp_path):
    job = finished_job(tmp_path, [3, -9, 3], ["rank 1 was lost", "", "rank 2 of 3: rank 0 reported: rank 1 was lost"])
    assert judge_survivors(job, [1], 5.0) == []
    assert seconds_to_end(job, [1]) == 3.0


@pytest.mark.parametrize(
    ("code", "message", "wrong"),
    [
        (3, "rank 2 was lost", "rank 0 blames 2, and the fault was of 1"),
        (3, "rank 1, 2 did not come", "rank 0 blames 1, 2, and the fault was of 1"),
        (3, "rank 1 or rank 2 was lost", "rank 0 blames 1, 2, and the fault was of 1"),
        (3, "Connection closed by peer [127.0.0.1]:7043", "rank 0 names no rank"),
        (None, "", "rank 0 still ran 15 s after the fault"),
        (None, "rank 1 was lost", "rank 0 still ran 15 s after the fault after it had raised"),
        (-6, "rank 1 was lost", "rank 0 ended by SIGABRT"),
        (0, "", "rank 0 ended with code 0 and did not notice the fault"),
    ],
)
def test_survivors_that_blame_another_rank_or_hang_or_abort_fail(tmp_path, code, message, wrong):
    job = finished_job(tmp_path, [code, -9, 3], [message, "", "rank 1 was lost"])
    (found,) = judge_survivors(job, [1], 5.0)
    assert found.startswith(wrong)


def test_missing_fault_and_failed_job_are_failures(tmp_path):
    assert "never came" in judge_survivors(finished_job(tmp_path, [0, 0], [], fired=None), [1], 5.0)[0]
    assert len(judge_success(finished_job(tmp_path, [0, 3], []), "resumed")) == 1


def test_damaged_checkpoint_must_be_refused_with_its_file_named(tmp_path):
    refused = {"error": "CheckpointError", "message": f"{tmp_path / 'index.json'}: missing", "changed": False}
    assert judge_load(refused, 0, "digest", tmp_path, ["index.json"]) == []
    assert judge_load({"digest": "digest"}, 0, "digest", tmp_path, ["index.json"]) == []
    for report, code, wrong in (
        ({"digest": "another"}, 0, "the values are not the saved ones"),
        (refused | {"error": "KeyError"}, 0, "refused by KeyError"),
        (refused | {"changed": True}, 0, "the model has changed"),
        (refused | {"message": "it is damaged"}, 0, "refused without the name of index.json"),
        ({}, -11, "loading ended with code -11"),
        ({}, None, "loading hung"),
    ):
        (found,) = judge_load(report, code, "digest", tmp_path, ["index.json"])
        assert wrong in found


def test_different_losses_and_errors_without_a_path_are_failures():
    undisturbed = {1: 0.5, 2: 0.25, 3: 0.125}
    assert judge_losses([0.25, 0.125], 3, undisturbed) == []
    assert len(judge_losses([0.25, 0.1250000000000001], 3, undisturbed)) == 1
    assert len(judge_losses([0.5, 0.25], 2, undisturbed)) == 1
    assert judge_refused_save("/run: No space left on device", "/run", ["No space"]) == []
    assert len(judge_refused_save("Traceback (most recent call last): /run: No space", "/run", ["No space"])) == 1
    assert len(judge_refused_save("[Errno 28] No space left on device", "/run", ["No space"])) == 1


def test_cases_depend_only_on_seed_family_and_number():
    drawn = cases.selection([], 3, seed=7)
    assert len(drawn) == 3 * len(cases.FAMILIES)
    assert drawn == cases.selection([], 3, seed=7) != cases.selection([], 3, seed=8)
    assert len(cases.selection([], None, seed=0)) == 200 + 100 + 200 + 200 + 50
    with pytest.raises(ValueError, match="family 'sigterm': expected one of"):
        cases.selection(["sigterm"], None, 0)


def test_every_kind_of_damage_changes_a_file(tmp_path):
    for number in range(60):
        drawn = cases.draw("damage", 1, number).values
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in ("a", "b", "c"):
            (folder / name).write_bytes(hashlib.sha256(name.encode()).digest() * 9)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        names = damage(folder, drawn)
        after = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert {name for name in before if before[name] != after.get(name)} == set(names), drawn


@pytest.mark.slow
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_five_cases_of_each_family_pass(tmp_path, family):
    zygote, campaign = Zygote(), Campaign(tmp_path)
    try:
        for case in cases.selection([family], 5, seed=1):
            assert campaign.run(case, zygote).wrong == [], case.name
    finally:
        zygote.close()
