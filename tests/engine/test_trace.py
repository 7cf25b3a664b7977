"""Traces of real runs: they hold every attend step and every transfer in order, and can be drawn."""

import json
import time

import pytest
import torch
from typer.testing import CliRunner

from meshflash import Layout, Mask, attention, build_program
from meshflash.cli import app
from meshflash.comm.transports.loopback import Loopback
from meshflash.engine import trace
from meshflash.engine.cache import cache
from meshflash.engine.group_context import group_context
from meshflash.viz import recorded

SLOW = "throttled(auto, 0.001, 1000)"


def trace_two_calls(rank, world, group, folder):
    """Trace two calls with gradients, one of them over a slow link."""
    made = trace.Trace()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHFLASH_TRACE", folder)
        patch.setenv("RANK", str(rank))
        patch.setattr(trace, "trace", made)
        x = [torch.randn(1, 8, 2, 16, requires_grad=True) for _ in range(3)]
        for transport in ("auto", SLOW):
            out = attention(*x, mesh=group, schedule="ring", transport=transport, mask=Mask.full())
            out.sum().backward()
        programs = cache.newest(group_context(group.group_name))
        made.write()
    attention(*x, mesh=group)  # no trace is wanted any more
    return made.calls, [
        len([s for s in programs.program(d).steps if "attend" in str(s)]) for d in ("forward", "backward")
    ]


@pytest.fixture(scope="module")
def events(pool, tmp_path_factory):
    """Return the folder of the traces of three ranks, and their events."""
    folder = tmp_path_factory.mktemp("traces")
    assert pool.run(3, trace_two_calls, str(folder)) == [(4, [3, 3])] * 3
    return folder, recorded.read(folder)


def test_trace_holds_every_attend_step_and_every_transfer(events):
    _, found = events
    calls = recorded.calls(found)
    assert [number for _, number in calls] == [0, 1, 2, 3]
    for call in calls:
        timeline = recorded.timeline(found, *call)
        for rank in range(3):
            attends, moves, waits = (timeline.of(rank, kind) for kind in ("attend", "move", "other"))
            assert len(attends) == 3
            assert len(moves) == len(waits) > 0
            ends = [event.end for event in attends]
            assert ends == sorted(ends)
            assert all(0 <= event.begin <= event.end <= timeline.total for event in (*attends, *moves, *waits))


def test_transfers_over_a_slow_link_take_their_time_in_the_trace(events):
    _, found = events
    slow = recorded.timeline(found, *recorded.calls(found)[2])
    seconds = 1e-3 + 2 * 8 * 2 * 16 * 4 / 1e6  # 8 rows of keys and values, at 1 MB/s
    moves = [event for rank in range(3) for event in slow.of(rank, "move")]
    assert all(event.seconds > 0.99 * seconds for event in moves)


def record_one_call(rank, world, group):
    """Record one of two calls; return its seconds of attention and of transfers."""
    x = torch.randn(1, 8, 2, 16)
    with trace.recording() as made:
        attention(x, x, x, mesh=group, schedule="ring", transport=SLOW)
    attention(x, x, x, mesh=group, schedule="ring")
    assert made.calls == 1
    assert made.write() is None
    return made.seconds("attend"), made.seconds("move")


def test_recording_context_measures_attention_and_transfers(pool):
    for attending, moving in pool.run(2, record_one_call):
        assert attending > 0
        assert moving > 1e-3


def test_trace_command_draws_and_merges_traces(events, tmp_path):
    folder, found = events
    svg, merged = tmp_path / "a.svg", tmp_path / "all.json"
    command = ["trace", str(folder), "--call", "2", "--svg", str(svg), "--merged", str(merged)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "call 2 of 4" in result.output
    assert "ring forward on 3 ranks, measured" in result.output
    assert svg.read_text().startswith("<svg")
    assert len(json.loads(merged.read_text())["traceEvents"]) == len(found)
    for arguments, message in (([str(folder), "--call", "9"], "4 calls were recorded"), ([str(tmp_path)], "no trace-")):
        result = CliRunner().invoke(app, ["trace", *arguments])
        assert result.exit_code == 2
        assert message in " ".join(result.output.replace("│", " ").split())


def test_trace_keeps_at_most_the_configured_number_of_calls(monkeypatch, tmp_path):
    monkeypatch.setattr(trace, "MOST_CALLS", 2)
    monkeypatch.setenv("MESHFLASH_TRACE", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    program = build_program("ring", Layout.contiguous(4, 1), Mask.causal(), 0)
    made = trace.Trace()
    monkeypatch.setattr(trace, "trace", made)
    for _ in range(5):
        made.run(program, "g", torch.device("cpu"), [(0, lambda: None)], Loopback(0, 1))
    assert made.write() == tmp_path / "trace-3.json"
    assert json.loads((tmp_path / "trace-3.json").read_text())["otherData"] == {"calls": 5, "recorded": 2}


def test_messages_last_as_long_as_the_transport_says():
    """From when they moved, not from the post to the end of the wait; without marks from the post to the wait."""
    program = build_program("ring", Layout.contiguous(8, 2), Mask.full(), 1)
    kinds = [type(step).__name__ for step in program.steps]
    (post,), (wait,) = ([n for n, kind in enumerate(kinds) if kind == name] for name in ("Post", "Wait"))
    transport, made = Loopback(0, 2), trace.Trace()

    def moving():
        assert transport.timer is not None
        for seconds in (0.02, 0.03):  # two messages of one post
            begin = transport.timer.mark()
            time.sleep(seconds)
            transport.timer.moved(begin, transport.timer.mark())

    for moves in (moving, lambda: None):
        steps = [(post, moves), (wait, lambda: time.sleep(0.2))]
        made.run(program, "g", torch.device("cpu"), steps, transport)
    assert transport.timer is None
    known, unknown = ([e["dur"] * 1e-6 for e in r.events(0) if e["cat"] == "move"] for r in made.records)
    assert known == [pytest.approx(0.05, abs=0.02)]
    assert unknown[0] >= 0.2


def test_a_step_that_fails_leaves_no_timer_in_the_transport():
    program = build_program("ring", Layout.contiguous(4, 1), Mask.causal(), 0)
    transport = Loopback(0, 1)

    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        trace.Trace().run(program, "g", torch.device("cpu"), [(0, fail)], transport)
    assert transport.timer is None
