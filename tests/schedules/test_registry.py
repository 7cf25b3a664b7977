"""The registry: names, options, user-defined schedules, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import Program
from meshflash.core.verify import verify_programs
from meshflash.schedules import allgather, double_ring, ring
from meshflash.schedules.registry import (
    build,
    build_program,
    canonical,
    find,
    names,
    parse,
    register_schedule,
    schedules,
    unregister_schedule,
    verified,
)

HELD = Layout.contiguous(8, 2).ranges
PROBLEM = Problem(HELD, HELD, Mask.causal(), 2, 1)


@pytest.fixture
def mine() -> Iterator[str]:
    """Register a schedule named "mine" with an option of every type; return its name."""
    register_schedule(
        "mine",
        ring.forward,
        ring.backward,
        layout=Layout.striped,
        summary="ring by another name",
        options={"count": 2, "share": 0.5, "early": False, "form": "flat"},
    )
    yield "mine"
    unregister_schedule("mine")


def test_names_lists_all_schedules() -> None:
    assert {"ring", "zigzag", "striped", "allgather", "ringx1", "ringx2", "ringx3", "ringx4"} <= set(names())
    assert names() == tuple(schedule.name for schedule in schedules())
    assert all(schedule.summary for schedule in schedules())
    assert len(set(names())) == len(names())


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("ring", "contiguous"),
        ("zigzag", "zigzag"),
        ("striped", "striped"),
        ("allgather", "contiguous"),
        ("ringx1", "contiguous"),
        ("ringx2", "contiguous"),
        ("ringx3", "zigzag"),
        ("ringx4", "zigzag"),
    ],
)
def test_schedules_have_their_documented_default_layout(name: str, layout: str) -> None:
    assert find(name).layout(13, 3).name == layout


def test_registered_schedule_builds_and_verifies(mine: str) -> None:
    assert mine in names()
    assert find(mine).layout(5, 2) == Layout.striped(5, 2)
    assert find(mine).summary == "ring by another name"
    programs = [build(mine, PROBLEM, rank, "forward") for rank in range(2)]
    assert {program.name for program in programs} == {"mine"}
    assert [p.steps for p in programs] == [build("ring", PROBLEM, rank, "forward").steps for rank in range(2)]
    verify_programs(programs, PROBLEM)


def test_unregistered_schedule_is_unknown() -> None:
    register_schedule("brief", ring.forward, ring.backward)
    assert find("brief").layout is Layout.contiguous
    build("brief", PROBLEM, 0, "forward")
    unregister_schedule("brief")
    assert "brief" not in names()
    with pytest.raises(ValueError, match=r"schedule='brief': expected one of auto, allgather, "):
        build("brief", PROBLEM, 0, "forward")
    with pytest.raises(ValueError, match="schedule='brief': expected one of auto"):
        unregister_schedule("brief")


def test_reregistered_name_does_not_return_cached_programs() -> None:
    def other(problem: Problem, rank: int, name: str) -> Program:
        return Program("other", "forward", rank, problem.world, (), (), ())

    register_schedule("again", ring.forward, ring.backward)
    first = build("again", PROBLEM, 0, "forward")
    unregister_schedule("again")
    register_schedule("again", other, ring.backward)
    assert build("again", PROBLEM, 0, "forward") != first
    unregister_schedule("again")


@pytest.mark.parametrize("name", ["auto", "", "Ring", "my-ring", "2d", "ring ", "_x"])
def test_invalid_schedule_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected a lower-case identifier other than auto"):
        register_schedule(name, ring.forward, ring.backward)
    assert name not in names()


@pytest.mark.parametrize("name", ["ring", "allgather"])
def test_duplicate_schedule_names_are_refused(name: str) -> None:
    before = find(name)
    with pytest.raises(ValueError, match=f"schedule '{name}' is registered already"):
        register_schedule(name, ring.backward, ring.forward)
    assert find(name) is before


@pytest.mark.parametrize("text", ["zigzag", " zigzag ", "zigzag()", "zigzag( )"])
def test_parse_accepts_a_name_without_options(text: str) -> None:
    assert parse(text) == (find("zigzag"), ())


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("mine", {}),
        ("mine(count=0)", {"count": 0}),
        ("mine( count = 3 , early=True )", {"count": 3, "early": True}),
        ("mine(share=0.25,form=tall)", {"share": 0.25, "form": "tall"}),
        ("mine(early=False)", {}),
    ],
)
def test_parsed_options_have_the_types_of_their_defaults(mine: str, text: str, given: dict[str, Any]) -> None:
    schedule, options = parse(text)
    assert schedule.name == mine
    assert dict(options) == {"count": 2, "share": 0.5, "early": False, "form": "flat"} | given
    assert [type(value) for _, value in options] == [int, float, bool, str]


def test_builders_read_options_from_the_problem() -> None:
    seen = []

    def forward(problem: Problem, rank: int, name: str) -> Program:
        seen.append(problem.option)
        return ring.forward(problem, rank, name)

    register_schedule("mine", forward, ring.backward, options={"count": 2})
    build("mine", PROBLEM, 0, "forward")
    build("mine(count=5)", PROBLEM, 0, "forward")
    unregister_schedule("mine")
    assert seen == [{"count": 2}, {"count": 5}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rign", r"schedule='rign': expected one of auto, allgather, "),
        ("", "schedule='': expected a name, or name"),
        ("ring zigzag", "expected a name, or name"),
        ("ring(", "expected a name, or name"),
        ("ring[1]", "expected a name, or name"),
        (3, "schedule=3: expected a name, or name"),
        (None, "schedule=None: expected a name, or name"),
        ("ring(head_stride=1)", "ring has no option 'head_stride'; it has: none"),
        ("allgather(stride=1)", "allgather has no option 'stride'; it has: head_stride"),
        ("allgather(head_stride)", "head_stride='', expected a number >= 0"),
        ("allgather(head_stride=two)", "head_stride='two', expected a number >= 0"),
        ("allgather(head_stride=-1)", "head_stride='-1', expected a number >= 0"),
        ("allgather(head_stride=1.5)", "head_stride='1.5', expected a number >= 0"),
        ("mine(early=yes)", "early='yes', expected True or False"),
        ("mine(share=much)", "share='much', expected a number >= 0"),
    ],
)
def test_parse_refuses_texts_that_name_no_schedule(mine: str, text: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_build_caches_programs() -> None:
    assert build("ring", PROBLEM, 0, "forward") is build("ring", Problem(HELD, HELD, Mask.causal(), 2, 1), 0, "forward")


def test_needs_are_computed_once_for_all_ranks_and_both_passes() -> None:
    seen = []

    def record(problem: Problem, rank: int, name: str) -> Program:
        seen.append(problem)
        return ring.forward(problem, rank, name)

    register_schedule("mine", record, record)
    for rank in range(2):
        build("mine", PROBLEM, rank, "forward")
        build("mine", PROBLEM, rank, "backward")
    unregister_schedule("mine")
    assert len({id(problem) for problem in seen}) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "hybrid(ring=auto)",
            r"schedule='hybrid\(ring=auto\)', ring='auto': auto .* expected one of allgather, ",
        ),
        ("hybrid(ring=nope)", r"schedule='hybrid\(ring=nope\)', ring='nope': .* expected one of"),
        ("hybrid(ring=zigzag(x=1))", r"ring='zigzag\(x=1\)': .*zigzag has no option 'x'"),
        ("hybrid(inner=2, inner=4)", r"inner is given twice"),
    ],
)
def test_errors_of_nested_schedules_quote_the_whole_text(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_canonical_orders_options_and_drops_defaults():
    options = dict(parse("hybrid(ring=allgather(head_stride=1, chunks=2), inner=3)")[1])
    assert (options["inner"], options["ring"]) == (3, "allgather(head_stride=1, chunks=2)")
    assert canonical("hybrid( ring = zigzag , inner=2 )") == "hybrid(inner=2)"
    assert canonical("allgather(chunks=1)") == "allgather"


def test_hybrid_of_a_reregistered_schedule_is_built_again():
    held = Layout.contiguous(8, 4).ranges
    problem = Problem(held, held, Mask.full(), 4, 4)
    for stride, steps in ((0, 1), (1, 2)):
        register_schedule("mine", allgather.forward, allgather.backward, options={"head_stride": stride})
        try:
            program = build("hybrid(inner=2, ring=mine)", problem, 0, "forward")
            assert sum("attend" in str(step) for step in program.steps) == steps
        finally:
            unregister_schedule("mine")


def test_composed_schedule_must_declare_its_groups():
    held = Layout.contiguous(8, 4).ranges
    problem = Problem(held, held, Mask.full(), 4, 4)
    for groups in ((), ("far",)):
        register_schedule("mine", double_ring.forward, double_ring.backward, options={"inner": 0}, groups=groups)
        try:
            if groups:
                verified("hybrid(inner=2, ring=mine)", problem)
            else:
                with pytest.raises(ValueError, match=r"'mine' posts to groups .*; register it with groups=\['far'\]"):
                    build("hybrid(inner=2, ring=mine)", problem, 0, "forward")
        finally:
            unregister_schedule("mine")


@pytest.mark.parametrize("rank", [-1, 2])
def test_build_program_refuses_ranks_outside_the_layout(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank={rank}: the layout has ranks 0 to 1"):
        build_program("ring", Layout.contiguous(8, 2), Mask.causal(), rank=rank)
