"""`meshflash check --fuzz`: reproducible cases, verdicts on wrong results, and campaigns that resume."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from meshflash.check import campaign, fuzz, scenario
from meshflash.check.campaign import Campaign, Record, RecordError, go_on
from meshflash.check.fuzz import Settings, derive
from meshflash.check.oracle import Case, check, gradients
from meshflash.check.scenario import Begun, Failed, Judged
from meshflash.check.spread import restride
from meshflash.cli import app
from meshflash.kernels.tiled import Tiled
from meshflash.runtime.processes import RankError

HEADER = {"machine": {"cores": 2}, "versions": {"meshflash": "1"}, "commit": "abc"}


def test_case_depends_only_on_its_seed_and_number():
    settings = Settings(seed=5)
    cases = {number: derive(settings, number) for number in range(30)}
    for number in reversed(cases):
        assert derive(Settings(seed=5), number) == cases[number]
    assert derive(Settings(seed=6), 7) != cases[7]
    assert [cases[n].world for n in range(6)] == [2, 3, 4, 2, 3, 4]
    three_rank_cases = [derive(Settings(seed=5, worlds=(3,)), n) for n in range(5)]
    assert {case.world for case in three_rank_cases} == {3}


def test_cases_vary_every_dimension():
    seen: dict[str, set[str]] = {}
    for number in range(300):
        for name, values in derive(Settings(seed=1, threads=True), number).dimensions.items():
            seen.setdefault(name, set()).update(values)
    assert seen["dtype"] == {"float64", "float32", "bfloat16", "float16"}
    for name in ("q", "k", "v", "dout"):
        assert seen[f"strides of {name}"] == {"contiguous", "transposed", "sliced", "stepped", "expanded"}
    assert seen["autograd"] == {"grad", "no_grad", "inference_mode"}
    assert seen["LSE gradient"] == {"yes", "no"}
    assert {"q+k+v", "q", "k", "v", "no q, k, v"} <= seen["gradients"]
    assert seen["pattern"] == {"single", "repeated", "mixed", "threads", "local threads"}
    assert seen["order"] >= {"as called", "reversed", "shuffled", "together", "each backward at once"}
    assert seen["groups"] >= {"world", "group", "new group", "disjoint groups", "overlapping groups", "mesh of 2 dims"}
    assert {"flash_attention", "ring", "ulysses", "hybrid", "double_ring"} <= seen["schedule"]
    assert seen["ranks"] == {"1", "2", "3", "4"}


def test_calls_of_a_case_are_valid_for_their_groups():
    for number in range(200):
        case = derive(Settings(seed=2, threads=True), number)
        for call in case.calls:
            assert call.item.world == len(call.group.ranks) == len(set(call.group.ranks))
            assert set(call.group.ranks) <= set(range(case.world))
            positions = sorted(n for ranges in call.item.q.ranges for r in ranges for n in r)
            assert positions == list(range(call.item.case.tokens))
        forwards = [n for does, n in case.steps if does == "forward"]
        assert forwards == list(range(len(case.calls)))
        if dict(case.names)["pattern"] == "threads":  # no two threads share a group
            by_thread = [{c.group for c in case.calls if c.thread == thread} for thread in (0, 1)]
            assert not by_thread[0] & by_thread[1]


@pytest.mark.parametrize("how", ["contiguous", "transposed", "sliced", "stepped", "expanded"])
def test_restride_keeps_values(how):
    x = torch.randn(2, 5, 3, 4)
    x[1] = x[0]
    y = restride(x, how, (0,))
    assert torch.equal(x, y)
    assert y.is_contiguous() == (how == "contiguous")
    assert (y.stride(0) == 0) == (how == "expanded")


def test_tolerance_covers_the_rounding_of_delta_for_zero_gradients():
    # Each row sees one key, so that dS = dP - delta is the difference of two roundings of the same value.
    case = Case(batch=3, tokens=1, heads=6, kv_heads=2, scale=0.4, softcap=3.0)
    leaves = case.inputs(torch.float32, seed=824267725)
    got = gradients(case.run(leaves), leaves, case)
    errors = check(got, case, leaves, units=8)  # the error is 11 units or more, depending on the CPU
    assert 8 * torch.finfo(torch.float32).eps < errors["dq"].error <= errors["dq"].allowed < 1e-5
    with pytest.raises(AssertionError, match="dq: error"):
        check(got | {"dq": got["dq"] + 1e-5}, case, leaves, units=8)


def test_rerun_command_has_all_settings_of_a_case():
    assert Settings(seed=3).rerun("7") == "meshflash check --case 7 --seed 3"
    other = Settings(3, (2,), ("ring", "hybrid(inner=2)"), "cuda", "symmetric", not fuzz.THREADS)
    assert other.rerun("7") == (
        "meshflash check --case 7 --seed 3 -n 2 --schedule 'ring' --schedule 'hybrid(inner=2)' --device cuda "
        f"--transport 'symmetric' --{'no-' * fuzz.THREADS}threads"
    )


def run_cases_on_rank(rank, world, group, settings, numbers):
    """Run these cases on one rank and return their outcomes."""
    outcomes: list[object] = []
    groups = scenario.Groups(rank)
    for number in numbers:
        case = derive(settings, number)
        outcomes.append(scenario.take_part(rank, case, groups, settings.threads))
    return outcomes


SMALL = Settings(seed=4, worlds=(2,), schedules=("zigzag",))


@pytest.fixture(scope="module")
def cases_and_outcomes(pool):
    """Return six cases with several calls each, and their outcomes on two ranks."""
    numbers = [n for n in range(60) if len(derive(SMALL, n).calls) > 1][:6]
    outcomes = pool.run(2, run_cases_on_rank, SMALL, numbers)
    return [(derive(SMALL, n), [rank[i] for rank in outcomes]) for i, n in enumerate(numbers)]


def test_correct_results_count_as_right(cases_and_outcomes):
    for case, parts in cases_and_outcomes:
        verdict = scenario.judged(case, parts)
        assert (verdict.outcome, verdict.message) == ("right", "")
        assert verdict.calls == {"right": len(case.calls), "refused": 0, "missed": 0}
        assert 0 < verdict.share <= 1


def test_wrong_results_of_any_call_count_as_missed(cases_and_outcomes):
    found = 0
    for case, parts in cases_and_outcomes[:4]:
        for n, call in list(enumerate(case.calls))[-1:]:
            rank = call.group.ranks[-1]
            results, moved = parts[rank][n]
            for name, x in results.items():
                if not x.numel() or not x.double().abs().max() > 0.01:
                    continue
                wrong = [dict(part) for part in parts]
                wrong[rank][n] = (results | {name: x * 1.05}, moved)
                verdict = scenario.judged(case, wrong)
                assert verdict.outcome == "missed", (case.number, n, name)
                assert verdict.message.startswith(f"call {n} of {len(case.calls)}: {name}")
                found += 1
    assert found >= 8


def test_stale_results_missing_gradients_and_partial_refusals_count_as_missed(cases_and_outcomes):
    case, parts = next((case, parts) for case, parts in cases_and_outcomes if dict(case.names)["pattern"] == "repeated")
    stale = [part | {1: part[0]} for part in parts]  # as if a cache returned the results of the first call
    if case.calls[1].group == case.calls[0].group:
        assert scenario.judged(case, stale).outcome == "missed"
    rank = case.calls[0].group.ranks[0]
    results, moved = parts[rank][0]
    fewer = [dict(part) for part in parts]
    fewer[rank][0] = ({name: x for name, x in results.items() if name != "out"}, moved)
    assert "expected" in scenario.judged(case, fewer).message
    fewer[rank][0] = "not here"
    single_rank = len(case.calls[0].group.ranks) == 1
    assert scenario.judged(case, fewer).outcome == ("refused" if single_rank else "missed")


def verdict(number, outcome="right", message="", refusals=()):
    """Return the verdict that a rank would send for a case."""
    counts = {"right": 0, "refused": 0, "missed": 0, outcome: 1}
    return Judged(number, outcome, counts, {"world": ("2",)}, 0.5, "dq", message, refusals)


def fake_ranks(monkeypatch, behave):
    """Replace `run_ranks` by a stub that sends messages; `behave(number)` returns the message of a case, or raises."""
    started = []

    def run_ranks(world, function, settings, numbers, limit, folder, timeout, listen):
        started.append((world, numbers))
        for number in numbers:
            listen(Begun(number))
            listen(behave(number))

    monkeypatch.setattr(campaign, "run_ranks", run_ranks)
    return started


def test_interrupted_campaign_resumes_where_it_stopped(monkeypatch, tmp_path):
    path, settings = tmp_path / "record.json", Settings(seed=9)

    def interrupted(number):
        if number == 7:
            raise KeyboardInterrupt
        return verdict(number)

    fake_ranks(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        Campaign(Record(settings, HEADER), path, lambda text: None).run(range(12))
    before = go_on(path, settings, HEADER)
    assert before.done == {0, 3, 6, 9, 1, 4}  # all cases on two ranks, and the first ones on three
    started = fake_ranks(monkeypatch, lambda n: verdict(n, "refused", refusals=(f"heads={n} of 4: no",)))
    Campaign(before, path, lambda text: None).run(range(12))
    assert started == [(3, [7, 10]), (4, [2, 5, 8, 11])]
    after = json.loads(path.read_text())
    assert after["done"] == "0-11"
    assert after["outcomes"] == {"right": 6, "refused": 6, "missed": 0}
    assert after["refusals"] == {"heads=# of #: no": 6}
    assert after["refused share"] == 0.5
    assert after["settings"]["seed"] == 9
    assert after["dimensions"]["world"]["2"] == {"right": 6, "refused": 6, "missed": 0}
    assert os.listdir(tmp_path) == ["record.json"]


@pytest.mark.parametrize("how", ["hangs", "raises"])
def test_case_that_ends_its_ranks_is_missed_and_the_campaign_continues(monkeypatch, how):
    def behave(number):
        if number == 4 and how == "hangs":
            raise RankError("rank 1 died with exit code 1")
        if number == 4:
            raise AssertionError
        return verdict(number)

    started = fake_ranks(monkeypatch, behave)
    if how == "raises":
        inner = campaign.run_ranks

        def raising(world, function, settings, numbers, limit, folder, timeout, listen):
            try:
                inner(world, function, settings, numbers, limit, folder, timeout, listen)
            except AssertionError:
                listen(Failed(4, 1, "KeyError: 'q'"))
                listen(Begun(7))
                raise RankError("rank 0 did not end") from None

        monkeypatch.setattr(campaign, "run_ranks", raising)
    record = Record(Settings(seed=9, worlds=(3,)), HEADER)
    Campaign(record, None, lambda text: None).run(range(9))
    assert [numbers[0] for _, numbers in started] == [0, 5]
    assert record.done == set(range(9))
    (miss,) = record.misses
    assert miss["case"] == 4
    assert ("KeyError" if how == "raises" else "exit code 1") in miss["message"]
    assert miss["rerun"] == "meshflash check --case 4 --seed 9 -n 3"
    assert miss["rerun with those before"] == "meshflash check --case 0-4 --seed 9 -n 3"


def test_campaign_raises_if_its_processes_do_not_start(monkeypatch):
    def run_ranks(*args, **kwargs):
        raise RankError("rank 0 died with exit code 9")

    monkeypatch.setattr(campaign, "run_ranks", run_ranks)
    with pytest.raises(RankError, match="exit code 9"):
        Campaign(Record(Settings(), HEADER), None, lambda text: None).run(range(3))


def test_records_of_other_campaigns_are_refused(tmp_path):
    path = tmp_path / "record.json"
    Record(Settings(seed=1), HEADER, {0, 1}).write(path)
    assert go_on(path, Settings(seed=1), HEADER).done == {0, 1}
    with pytest.raises(RecordError, match=re.escape("seed=1, not 2; give another --output, or --fresh")):
        go_on(path, Settings(seed=2), HEADER)
    with pytest.raises(RecordError, match="worlds="):
        go_on(path, Settings(seed=1, worlds=(2,)), HEADER)
    with pytest.raises(RecordError, match="its versions is"):
        go_on(path, Settings(seed=1), HEADER | {"versions": {"meshflash": "2"}})
    path.write_text('{"rows": []}')
    with pytest.raises(RecordError, match="no record of `meshflash check --fuzz`"):
        go_on(path, Settings(seed=1), HEADER)
    path.write_text("{")
    with pytest.raises(RecordError, match="no record"):
        go_on(path, Settings(seed=1), HEADER)


def test_command_refuses_invalid_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other.json"
    other.write_text("[]")
    result = CliRunner().invoke(app, ["check", "--fuzz", "3", "--output", str(other)])
    assert result.exit_code == 2
    assert "no record" in result.output
    assert other.read_text() == "[]"
    result = CliRunner().invoke(app, ["check", "--case", "some"])
    assert result.exit_code == 2
    assert "12 or 3-7" in result.output


def run_with_wrong_kernel(rank, world, group, settings, numbers, limit, folder):
    """Run cases with a CPU kernel that makes dK slightly too large; return the messages of the rank."""
    messages: list[object] = []
    right = Tiled.backward

    def wrong(self, x, rows, grads=None):
        result = right(self, x, rows, grads)
        if x.q_BTHD.dtype == torch.float64:
            result.dk_BSKD.mul_(1.001)
        return result

    handler = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tiled, "backward", wrong)
        scenario.run_cases(rank, world, messages.append, settings, numbers, limit, folder)
    signal.signal(signal.SIGINT, handler)
    return messages


def test_fuzzing_finds_a_wrong_kernel_and_names_its_cases(pool, monkeypatch, tmp_path):
    def run_ranks(world, function, settings, numbers, limit, folder, timeout, listen):
        for messages in pool.run(world, run_with_wrong_kernel, settings, numbers, limit, folder):
            for message in messages:
                listen(message)

    monkeypatch.setattr(campaign, "run_ranks", run_ranks)
    monkeypatch.chdir(tmp_path)
    options = ["check", "-n", "2", "--fuzz", "24", "--seed", "6", "--schedule", "ring", "--no-threads"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 1, result.output
    record = json.loads((tmp_path / "fuzz-seed6.json").read_text())
    assert record["done"] == "0-23"
    assert record["outcomes"]["right"] > 5
    assert len(record["misses"]) == record["outcomes"]["missed"] >= 1
    for miss in record["misses"]:
        case = derive(Settings(6, (2,), ("ring",)), miss["case"])
        assert "float64" in case.dimensions["dtype"]
        assert " dk: error" in miss["message"]
        command = f"meshflash check --case {miss['case']} --seed 6 -n 2 --schedule 'ring' --no-threads"
        assert miss["rerun"] == command
        assert f"repeat: {command}" in result.output
    again = CliRunner().invoke(app, ["check", "--case", str(record["misses"][0]["case"]), *options[1:3], *options[5:]])
    assert again.exit_code == 1
    assert "1 of 1 cases missed" in again.output


def restore_interrupts():
    """Let Ctrl-C end this process again."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_command(folder, *options):
    """Start `meshflash check` so that Ctrl-C ends it, even if the tests run in the background and ignore SIGINT."""
    return subprocess.Popen(
        [sys.executable, "-m", "meshflash", "check", *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=restore_interrupts,
    )


def num_done(path):
    """Return the number of finished cases in a record, 0 if there is none."""
    return len(campaign.numbers_of(json.loads(path.read_text())["done"])) if path.exists() else 0


@pytest.mark.slow
def test_interrupted_and_killed_campaign_resumes_and_completes(tmp_path):
    path = tmp_path / "fuzz-seed3.json"
    options = ("--fuzz", "300", "--seed", "3")
    for stop in (signal.SIGINT, signal.SIGKILL):
        process = run_command(tmp_path, *options)
        before, deadline = num_done(path), time.monotonic() + 240
        while num_done(path) < before + 20 and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(stop)
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
        assert before < num_done(path) < 300
        if stop == signal.SIGINT:
            assert process.returncode == 130
            assert "the same command goes on" in output
    before = num_done(path)
    output, _ = (process := run_command(tmp_path, *options)).communicate(timeout=900)
    assert process.returncode == 0, output
    assert f"{before} cases are done" in output
    assert "300 cases, none missed" in output
    record = json.loads(path.read_text())
    assert record["done"] == "0-299"
    assert sum(record["outcomes"].values()) == 300
    assert record["outcomes"]["missed"] == 0
    assert {world: sum(counts.values()) for world, counts in record["dimensions"]["world"].items()} == {
        "2": 100,
        "3": 100,
        "4": 100,
    }
    assert record["refused share"] < 0.1
    assert {"seed", "worlds", "threads"} <= record["settings"].keys()
    assert {"machine", "versions", "commit", "command"} <= record["header"].keys()
