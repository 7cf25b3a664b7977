"""Predicted costs of schedules: kernels, links by level, memory, and the order and reason that follow."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf

import pytest

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import AttendGrad, Post, Sizes
from meshflash.kernels.rate_curves import BACKWARD, Rate, RateCurves
from meshflash.planner.costs import FreeLinks, MachineCosts
from meshflash.planner.hardware import PUBLISHED, Link, Machine, load
from meshflash.planner.ranking import PlannedCall, Prediction, explain_ranking, rank_schedules
from meshflash.planner.simulator import RateCosts, Rates, moved_bytes, simulate
from meshflash.schedules import registry

SIZES = Sizes(batch=2, dim=64, value_dim=64)
TFLOPS = 100.0
CAUSAL = Mask.causal()
WIRE = Link("wire", None, 1e9, 1e-6, "made up")


def machine(links=(WIRE,), memory_rate=inf, overhead=0.0):
    """A machine whose kernels have one rate for everything."""
    rates = [Rate(PUBLISHED, way, False, 64, 1024, TFLOPS) for way in ("forward", "backward")]
    return Machine("made-up", "made up", 1e12, memory_rate, overhead, links, {PUBLISHED: ()}, RateCurves(rates), {})


def programs(name, tokens, world, direction, mask):
    layout = registry.default_layout(name)(tokens, world)
    problem = Problem(layout.ranges, layout.ranges, mask, 4, 2)
    return problem, [registry.build(name, problem, rank, direction) for rank in range(world)]


@pytest.mark.parametrize("name", ["ring", "zigzag", "ulysses", "ringx3", "double_ring(inner=2)", "hybrid(inner=2)"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_one_rate_and_one_link_predict_what_rates_predict(name, direction):
    """Lengths from 1,024 tokens on have the one measured rate, so both models agree."""
    problem, built = programs(name, 16384, 4, direction, Mask.full())
    pairs_per_second = TFLOPS * 1e12 / (4 * 64)
    rates = Rates(pairs_per_second, 1e9, 1e-6)
    predicted = simulate(built, MachineCosts(machine(), problem, SIZES))
    assert predicted.total == pytest.approx(simulate(built, RateCosts(problem, SIZES, rates)).total)


def test_attention_takes_its_flops_over_the_rate_of_its_length():
    rates = [Rate(PUBLISHED, "forward", causal, 64, t, x) for causal, t, x in
             ((True, 1024, 50.0), (True, 4096, 100.0), (False, 1024, 150.0), (False, 4096, 300.0))]  # fmt: skip
    made = replace(machine(), curves=RateCurves(rates))
    problem, (program,) = programs("ring", 4096, 1, "forward", Mask.causal())
    pairs = 4096 * 4097 // 2
    seconds = MachineCosts(made, problem, SIZES).step_seconds(program, 0)
    assert seconds == pytest.approx(4 * 64 * pairs * 2 * 4 / 100e12, rel=1e-3)
    window = Mask.causal() & Mask.window(511, 0)  # as much work for each query as 1,024 causal tokens
    problem, (program,) = programs("ring", 4096, 1, "forward", window)
    pairs = 4096 * 512 - 511 * 512 // 2
    seconds = MachineCosts(made, problem, SIZES).step_seconds(program, 0)
    assert seconds == pytest.approx(4 * 64 * pairs * 2 * 4 / 50e12, rel=0.1)


def test_a_backward_takes_its_own_rate_and_more_flops():
    rates = [Rate(PUBLISHED, "forward", False, 64, 1024, 100.0), Rate(PUBLISHED, "backward", False, 64, 1024, 50.0)]
    made = replace(machine(), curves=RateCurves(rates))
    seconds = []
    for direction in ("forward", "backward"):
        problem, built = programs("ring", 4096, 1, direction, Mask.full())
        seconds.append(simulate(built, MachineCosts(made, problem, SIZES)).total)
    assert seconds[1] == pytest.approx(seconds[0] * 2 * BACKWARD)


def test_the_slowest_level_of_links_counts():
    inside, outside = Link("inside", 2, 4e9, 1e-6, ""), Link("outside", None, 1e9, 5e-6, "")
    problem, built = programs("ulysses", 4096, 4, "forward", Mask.full())
    costs = MachineCosts(machine((inside, outside)), problem, SIZES)
    program = built[0]
    post = next(step for step in program.steps if isinstance(step, Post) and max(moved_bytes(program, step, SIZES)))
    by_peer: dict[int, list[int]] = {}
    for side, parts in enumerate((post.recvs, post.sends)):
        for part in parts:
            by_peer.setdefault(part.peer, [0, 0])[side] += program.slice_bytes(part.slice, SIZES)
    near = 1e-6 + max(by_peer[1]) / 4e9
    far = 5e-6 + max(sum(by_peer[peer][side] for peer in (2, 3)) for side in (0, 1)) / 1e9
    assert costs.post_seconds(program, post) == pytest.approx(max(near, far))
    assert FreeLinks(costs).post_seconds(program, post) == 0.0


def test_partial_results_and_launches_take_time():
    problem, built = programs("ring", 4096, 4, "forward", Mask.full())
    bare, slow = (
        simulate(built, FreeLinks(MachineCosts(machine(memory_rate=rate, overhead=step), problem, SIZES))).total
        for rate, step in ((inf, 0.0), (1e9, 1e-3))
    )
    partial = SIZES.row_bytes("out", "partial") * 1024 * 4 / 1e9
    final = SIZES.row_bytes("out", "input", without_lse=True) * 1024 * 4 / 1e9
    touched = 3 * 2 * partial + 2 * partial + final  # three attends continue a partial result, and `finish` ends it
    assert slow - bare == pytest.approx(touched + 5 * 1e-3)


def case(mask=CAUSAL, tokens=65536, world=8, **more):
    return PlannedCall(tokens, world, mask, 32, 8, Sizes(dim=128, value_dim=128), **more)


def test_balanced_layouts_win_causal_training_and_the_reason_says_so():
    ranked = rank_schedules(case(), load("h200"), names=["ring", "zigzag", "allgather"])
    assert [each.schedule for each in ranked] == ["zigzag", "ring", "allgather"]
    first, second, _ = ranked
    assert 0.9 < first.efficiency < 1.05
    assert 0.5 < second.efficiency < 0.6, "contiguous causal shards: the last rank has 15/8 of the mean work"
    assert second.imbalance / second.seconds == pytest.approx(1 - 8 / 15, abs=0.03)
    for each in ranked:
        parts = each.kernels + each.steps + each.imbalance + each.communication
        assert each.seconds * (1 - each.efficiency) == pytest.approx(parts)
    assert re.search(r"which loses 4\d percentage points more to load imbalance\.", explain_ranking(ranked))


def test_slow_links_favour_what_moves_less():
    cable = Link("cable", None, 1e9, 1e-5, "made up")
    slow = replace(load("h200"), links=(cable,))
    ranked = rank_schedules(case(), slow, names=["zigzag", "ulysses"])
    assert [each.schedule for each in ranked] == ["ulysses", "zigzag"]
    assert "more to waits for messages" in explain_ranking(ranked)
    assert ranked[0].received_bytes < ranked[1].received_bytes


def test_received_bytes_are_those_that_the_verifier_counts():
    (found,) = rank_schedules(case(world=4, directions=("forward",)), load("h200"), names=["zigzag"])
    layout = Layout.zigzag(65536, 4)
    problem = Problem(layout.ranges, layout.ranges, Mask.causal(), 32, 8, lse=False)
    built = [registry.build("zigzag", problem, rank, "forward") for rank in range(4)]
    sizes = Sizes(dim=128, value_dim=128)
    assert found.received_bytes == max(sum(program.received(sizes).values()) for program in built)
    q = out = 65536 // 4 * 32 * 128 * 2
    kv = 2 * 65536 // 4 * 8 * 128 * 2
    lse = 65536 // 4 * 32 * 4
    assert found.memory_bytes == q + out + kv + lse + max(program.scratch_bytes(sizes) for program in built)


def test_memory_and_impossible_schedules_are_refused_with_the_reason():
    ranked = rank_schedules(case(), load("h200"), 0.9e9, names=["zigzag", "hybrid(inner=2)", "hybrid(inner=3)"])
    assert [bool(each.unsupported_reason) for each in ranked] == [False, True, True]
    refused = {each.schedule: each.unsupported_reason for each in ranked}
    assert refused["hybrid(inner=2)"].endswith("GB a rank, and there are 0.9")
    assert "inner=3" in refused["hybrid(inner=3)"]
    assert explain_ranking(ranked) == "zigzag is the only one that can run."
    assert explain_ranking([each for each in ranked if each.unsupported_reason]) == "No schedule can run."


def test_packed_documents_are_planned_on_balanced_layouts_too():
    mask = Mask.causal() & Mask.documents([40000, 500, 20000, 5036])
    ranked = rank_schedules(case(mask, world=4), load("h200"))
    assert {each.text for each in ranked} >= {"ring on balanced", "allgather on balanced", "zigzag"}
    seconds = {each.text: each.seconds for each in ranked}
    assert seconds["ring on balanced"] < seconds["ring"]
    named = rank_schedules(case(mask, world=4), load("h200"), names=["ring", "ring", " ring"])
    assert sorted(each.text for each in named) == ["ring", "ring on balanced"]


def test_times_that_are_close_are_said_to_be_equal():
    one, two, three = (Prediction(name, "", seconds, 0.9, communication=0.01 * seconds) for name, seconds in
                       (("a", 1.0), ("b", 1.04), ("c", 1.5)))  # fmt: skip
    assert explain_ranking([one, two]).startswith("a and b are within 5% of each other")
    assert "a is 1.50x as fast as c" in explain_ranking([one, two, three])


def test_one_rank_has_the_efficiency_of_the_call_that_it_is_compared_with():
    for tokens in (512, 65536):
        (found,) = rank_schedules(case(tokens=tokens, world=1), load("h200"), names=["ring"])
        assert found.efficiency == pytest.approx(1.0)
        assert explain_ranking([found]) == ""


def test_steps_that_do_not_attend_are_no_imbalance():
    mask = Mask.causal() & Mask.documents([2048] * 32)
    ranked = rank_schedules(case(mask, world=4), load("h200"), names=["ulysses"])
    (found,) = (each for each in ranked if each.layout == "contiguous")
    assert found.steps / found.seconds > 0.05
    assert abs(found.imbalance) < 1e-3 * found.seconds, "every rank has the same heads of all documents"


def test_gradients_that_are_added_cost_their_bytes():
    problem, (program, *_) = programs("ring", 4096, 4, "backward", Mask.full())
    attends = [n for n, step in enumerate(program.steps) if isinstance(step, AttendGrad)]
    bare, slow = (MachineCosts(machine(memory_rate=rate), problem, SIZES) for rate in (inf, 1e9))
    for n in attends:
        step = program.steps[n]
        sums = [step.dq] * step.add_dq + [step.dkv] * step.add_dkv
        added = 2 * sum(program.slice_bytes(part, SIZES) for part in sums) / 1e9
        assert slow.step_seconds(program, n) - bare.step_seconds(program, n) == pytest.approx(added)
    assert any(program.steps[n].add_dq for n in attends)


def test_bad_cases_are_errors():
    with pytest.raises(ValueError, match="schedule 'auto': the plan compares schedules"):
        rank_schedules(case(), load("h200"), names=["auto"])
    with pytest.raises(ValueError, match="nproc=65: expected 1 to 64 ranks"):
        case(world=65)
    with pytest.raises(ValueError, match="tokens=0"):
        case(tokens=0)
