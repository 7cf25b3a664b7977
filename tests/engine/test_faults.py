"""Ranks that are killed, stopped or interrupted: every survivor ends in time and names the right rank.

These are a few cases of the soak campaign; `make soak` runs hundreds.
"""

import signal

import pytest

from soak.judge import judge_survivors
from soak.zygote import Zygote


@pytest.fixture(scope="module")
def zygote():
    """Start one process from which all jobs of this module are forked."""
    found = Zygote()
    yield found
    found.close()


@pytest.mark.parametrize(
    ("victim", "schedule", "moment"),
    [(0, "zigzag", "backward"), (1, "allgather", "forward"), (2, "ulysses", "between"), (2, "ring", "handshake")],
)
def test_killed_rank_is_named_by_every_survivor(zygote, tmp_path, victim, schedule, moment):
    arguments = dict(schedule=schedule, moment=moment, call=3, leave=False)
    job = zygote.run(
        "attend", 3, tmp_path, timeout=10.0, limit=20.0, victims=[victim], fault=signal.SIGKILL, **arguments
    )
    assert judge_survivors(job, [victim], 10.0) == []


@pytest.mark.parametrize("victim", [0, 1])
def test_stopped_rank_is_named_by_every_survivor(zygote, tmp_path, victim):
    arguments = dict(schedule="zigzag", moment="forward", call=2, leave=True)
    job = zygote.run(
        "attend", 3, tmp_path, timeout=4.0, limit=14.0, victims=[victim], fault=signal.SIGSTOP, **arguments
    )
    assert judge_survivors(job, [victim], 4.0) == []


def test_interrupt_ends_a_rank_that_waits_in_a_handshake(zygote, tmp_path):
    job = zygote.run("interrupted", 2, tmp_path, timeout=30.0, limit=20.0, victims=[0], fault=signal.SIGINT, delay=1.0)
    assert job.report(0)["error"] == "KeyboardInterrupt"
    assert job.fired is not None
    assert job.times[0] - job.fired < 5.0  # 2 s to end, and time for the interpreter to exit on busy cores
