"""Simulated timelines: the order of steps, the matching of posts, exposed communication, and total times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import (
    Attend,
    AttendGrad,
    Buffer,
    Direction,
    Finish,
    Interval,
    Part,
    Post,
    Program,
    Sizes,
    Slice,
    Step,
    Wait,
)
from meshflash.core.tiles import worklist
from meshflash.planner.simulator import Rates
from meshflash.planner.timeline import Event, Timeline
from meshflash.schedules.registry import build, default_layout
from planner.at_rates import simulate_at

CAUSAL = Mask.causal()
SCHEDULES = ("ring", "zigzag", "striped", "allgather", "allgather(head_stride=1)")
FREE, UNIT = Rates(1e6, inf), Rates(1.0, 1.0)


def build_all_ranks(
    schedule: str, tokens: int, world: int, mask: Mask = CAUSAL, direction: Direction = "forward"
) -> tuple[list[Program], Problem]:
    """Return the programs of all ranks on the default layout, and their problem."""
    layout = default_layout(schedule)(tokens, world)
    problem = Problem(layout.ranges, layout.ranges, mask, heads=4, kv_heads=2)
    return [build(schedule, problem, rank, direction) for rank in range(world)], problem


def row(n: int) -> Slice:
    return Slice("q", (0, n), (0, 1))


def attend(n: int) -> Attend:
    """Return an attend step over n pairs."""
    return Attend(row(n), row(1), row(n), (range(n),), (range(1),), (0, 1))


def post(name: str, to: dict[int, int], back: dict[int, int], group: str = "mesh") -> Post:
    """Return a post with some rows to and from some ranks; a row is one byte."""
    sends, recvs = (tuple(Part(peer, row(n)) for peer, n in side.items()) for side in (to, back))
    return Post(name, sends, recvs, group)


def simulate_steps(*steps: Sequence[Step], rates: Rates = UNIT) -> Timeline:
    """Simulate the given steps of each rank; one row is one byte, one pair one second by default."""
    world = len(steps)
    group = (("mesh", tuple(range(world))),)
    buffers = (Buffer("q", "q", 100, 1, role="input"),)
    programs = [Program("", "forward", r, world, buffers, tuple(s), group) for r, s in enumerate(steps)]
    problem = Problem(((),) * world, ((),) * world, Mask.full())
    return simulate_at(programs, problem, Sizes(dim=1, input_bytes=1), rates)


def times(timeline: Timeline, rank: int) -> dict[int, Interval]:
    return {event.step: (int(event.begin), int(event.end)) for event in timeline.events if event.rank == rank}


def test_communication_starts_when_both_sides_have_posted() -> None:
    there: list[Step] = [post("a", {1: 4}, {1: 6}), attend(3), Wait("a"), attend(1)]
    back: list[Step] = [attend(10), post("a", {0: 6}, {0: 4}), Wait("a")]
    timeline = simulate_steps(there, back, rates=Rates(1.0, 1.0, latency=2.0))
    # starts at 10, takes the latency and the larger of 4 and 6 bytes
    assert times(timeline, 0) == {0: (10, 18), 1: (0, 3), 2: (3, 18), 3: (18, 19)}
    assert times(timeline, 1) == {0: (0, 10), 1: (10, 18), 2: (10, 18)}
    assert timeline.total == 19
    assert [timeline.busy(rank) for rank in range(2)] == [4, 10]
    assert [timeline.exposed(rank) for rank in range(2)] == [15, 8]
    assert timeline.efficiency == 7 / 19
    assert timeline.events[0] == Event(0, "move", 10, 18, "a: 6 bytes in, 4 out", 0)


def test_posts_of_one_group_are_serial_and_of_different_groups_parallel() -> None:
    one: list[Step] = [
        post("a", {1: 5}, {}),
        post("b", {1: 5}, {}),
        post("c", {1: 3}, {}, "other"),
        Wait("b"),
        Wait("c"),
    ]
    other: list[Step] = [post("a", {}, {0: 5}), post("b", {}, {0: 5}), post("c", {}, {0: 3}, "other"), Wait("c")]
    timeline = simulate_steps(one, other)
    assert [times(timeline, 1)[step] for step in range(4)] == [(0, 5), (5, 10), (0, 3), (0, 3)]
    assert timeline.exposed(0) == 10


def test_sends_and_receives_match_in_the_order_of_their_posts() -> None:
    # the two parts of one post match two posts, and the second of these is late
    one: list[Step] = [post("both", {1: 2}, {1: 1}), Wait("both")]
    other: list[Step] = [post("in", {}, {0: 2}), attend(20), post("out", {0: 1}, {}), Wait("in"), Wait("out")]
    timeline = simulate_steps(one, other)
    assert times(timeline, 0)[0] == (20, 22)
    assert times(timeline, 1)[0] == (0, 2)
    assert times(timeline, 1)[2] == (20, 21)


def test_messages_of_a_rank_to_itself_take_no_time() -> None:
    timeline = simulate_steps([post("a", {0: 50}, {0: 50}), Wait("a"), attend(1)], rates=Rates(1.0, 1.0, latency=5.0))
    assert timeline.total == 1
    more = simulate_steps([post("a", {0: 50, 1: 2}, {0: 50}), Wait("a")], [post("a", {}, {0: 2}), Wait("a")])
    assert more.total == 2


def test_a_message_arrives_no_earlier_than_its_sender_has_sent_it() -> None:
    """Rank 0 sends 100 bytes to each of two ranks, which its link takes 200 s for."""
    timeline = simulate_steps(
        [post("a", {1: 100, 2: 100}, {}), Wait("a")],
        [post("a", {}, {0: 100}), Wait("a")],
        [post("a", {}, {0: 100}), Wait("a")],
    )
    assert [timeline.exposed(rank) for rank in range(3)] == [200, 200, 200]


def test_simulate_refuses_programs_that_do_not_match() -> None:
    with pytest.raises(ValueError, match="deadlock"):
        simulate_steps(
            [post("a", {}, {1: 1}), Wait("a"), post("b", {1: 1}, {})],
            [post("a", {}, {0: 1}), Wait("a"), post("b", {0: 1}, {})],
        )
    with pytest.raises(ValueError, match="rank 0 sends 1 parts to rank 1, which receives 0"):
        simulate_steps([post("a", {1: 1}, {})], [])
    for wrong in ((0.0, 1.0, 0.0), (1.0, -2.0, 0.0), (1.0, 1.0, -1.0), (float("nan"), 1.0, 0.0)):
        with pytest.raises(ValueError, match="expected a positive number"):
            Rates(*wrong)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("mask", "batch"), [(CAUSAL, 3), (CAUSAL & Mask.documents([[8, 32], [40], [20, 20]]), 3)])
def test_single_device_takes_time_in_proportion_to_its_pairs(schedule: str, mask: Mask, batch: int) -> None:
    whole = (range(40),)
    pairs = worklist(mask, whole, whole).pairs * 4 * (1 if mask.batch_rows else batch)
    costs: dict[Direction, float] = {"forward": 1.0, "backward": 2.5}
    for direction, cost in costs.items():
        programs, problem = build_all_ranks(schedule, 40, 1, mask, direction)
        timeline = simulate_at(programs, problem, Sizes(batch=batch), Rates(100.0, 1e-6, 1e3))
        assert timeline.total == pytest.approx(pairs * cost / 100.0)
        assert timeline.efficiency == pytest.approx(1.0)
        assert timeline.exposed(0) == 0


@settings(max_examples=40, deadline=None)
@given(
    schedule=st.sampled_from(SCHEDULES),
    tokens=st.integers(0, 60),
    world=st.integers(1, 6),
    mask=st.sampled_from([CAUSAL, Mask.full(), CAUSAL & Mask.window(7, 0), Mask.window(2, 3)]),
    direction=st.sampled_from(["forward", "backward"]),
    rates=st.builds(Rates, st.floats(1.0, 1e6), st.floats(1.0, 1e6), st.floats(0.0, 10.0)),
)
def test_simulated_steps_are_in_order_and_waits_last_until_their_transfers_end(
    schedule: str, tokens: int, world: int, mask: Mask, direction: Direction, rates: Rates
) -> None:
    programs, problem = build_all_ranks(schedule, tokens, world, mask, direction)
    timeline = simulate_at(programs, problem, Sizes(), rates)
    free = simulate_at(programs, problem, Sizes(), replace(rates, bytes_per_second=inf, latency=0.0))
    assert timeline.total >= max(timeline.busy(rank) for rank in range(world)) * (1 - 1e-9)
    assert timeline.total >= free.total * (1 - 1e-9)
    whole = (range(tokens),)
    cost = worklist(mask, whole, whole).pairs * 4 * (2.5 if direction == "backward" else 1.0)
    assert sum(map(timeline.busy, range(world))) == pytest.approx(cost / rates.pairs_per_second)
    for rank, program in enumerate(programs):
        own_events = [event for event in timeline.events if event.rank == rank]
        assert [event.step for event in own_events] == list(range(len(program.steps)))
        assert all(0 <= event.begin <= event.end <= timeline.total for event in own_events)
        local = [event for event in own_events if event.kind != "move"]
        assert all(a.end == b.begin for a, b in pairwise(local))
        kinds = [isinstance(step, Attend | AttendGrad) for step in program.steps]
        assert kinds == [event.kind == "attend" for event in own_events]
        assert not any(event.seconds for event in own_events if isinstance(program.steps[event.step], Finish))
        moves = timeline.of(rank, "move")
        assert all(a.end <= b.begin for a, b in pairwise(moves))
        both = zip(program.steps, own_events, strict=True)
        waits = {step.post: event.end for step, event in both if isinstance(step, Wait)}
        for event in moves:
            made_post = program.steps[event.step]
            assert isinstance(made_post, Post)
            assert event.end <= waits[made_post.name]


def test_causal_zigzag_is_balanced_and_causal_ring_is_not() -> None:
    world, tokens = 4, 4096
    even, uneven = (simulate_at(*build_all_ranks(name, tokens, world), Sizes(), FREE) for name in ("zigzag", "ring"))
    assert even.efficiency > 0.95
    busy = [uneven.busy(rank) for rank in range(world)]
    # in a causal matrix of W bands, the last band has 2 W - 1 times the pairs of the first
    assert busy[-1] / busy[0] == pytest.approx(2 * world - 1, rel=0.01)
    assert uneven.efficiency == pytest.approx(world / (2 * world - 1), rel=0.01)
    assert uneven.total > 1.7 * even.total


def test_total_time_on_slow_links_is_the_communication_time() -> None:
    programs, problem = build_all_ranks("ring", 64, 4, Mask.full())
    sizes = Sizes(batch=2, dim=32, value_dim=16, input_bytes=4)
    timeline = simulate_at(programs, problem, sizes, Rates(1e9, 1.0))
    # three hops of 16 rows of k and v
    moved = 3 * 16 * 2 * (32 + 16) * 4 * 2
    assert timeline.total == pytest.approx(moved, rel=1e-3)
    assert timeline.efficiency < 1e-3
    assert all(timeline.exposed(rank) == pytest.approx(moved, rel=1e-3) for rank in range(4))
    late = simulate_at(programs, problem, sizes, Rates(1e9, inf, latency=5.0))
    assert late.total == pytest.approx(15.0, rel=1e-3)


def test_ranks_without_tokens_take_no_time() -> None:
    timeline = simulate_at(*build_all_ranks("ring", 2, 5), Sizes(), Rates(1.0, 1.0))
    assert timeline.world == 5
    assert [bool(timeline.busy(rank)) for rank in range(5)] == [True, True, False, False, False]
    nothing = simulate_at(*build_all_ranks("ring", 0, 2), Sizes(), Rates(1.0, 1.0))
    assert (nothing.total, nothing.efficiency) == (0.0, 1.0)


def test_measured_step_times_replace_the_model():
    """Copies delay later steps but are not exposed communication; a wait lasts until the communication ends."""
    problem = Problem(((range(4),), (range(4, 8),)), ((range(4),), (range(4, 8),)), Mask.full())
    programs = [build("ring", problem, rank, "forward") for rank in range(2)]
    kinds = [type(step).__name__ for step in programs[0].steps]
    assert kinds == ["Post", "Attend", "Wait", "Attend", "Finish"]
    step_seconds = [[1.0, 4.0, 99.0, 8.0, 2.0], [3.0, 4.0, 99.0, 8.0, 2.0]]
    sizes = Sizes(dim=1, value_dim=1, input_bytes=1)
    timeline = simulate_at(programs, problem, sizes, Rates(1.0, 1.0, 0.5), step_seconds)
    moved = 3.0 + 0.5 + 8.0  # both ready, latency, 8 bytes at 1 byte per second
    assert [timeline.exposed(rank) for rank in range(2)] == [moved - 5.0, moved - 7.0]
    assert timeline.total == moved + 8.0 + 2.0
    assert timeline.busy(0) == 12.0
