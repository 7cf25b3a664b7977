"""Sampled verification: it accepts every schedule, refuses mutations of the ranks it looks at, and says what it saw."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest

from cases import SCHEDULES
from core.edits import Edit
from core.test_mutations import MUTATORS
from meshflash.core import sampled
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import (
    Add,
    Attend,
    AttendGrad,
    Buffer,
    Clear,
    Copy,
    Direction,
    Part,
    Post,
    Program,
    Sizes,
    Slice,
    Wait,
)
from meshflash.core.sampled import Build, partners, sample_ranks, verify_sampled
from meshflash.core.verify import VerificationError, verify_programs
from meshflash.schedules.registry import build, default_layout, verified, verified_sample

CAUSAL = Mask.causal()
MASKS = {
    "full": Mask.full(),
    "causal": CAUSAL,
    "window": CAUSAL & Mask.window(5, 0),
    "two-sided window": Mask.window(4, 2),
    "documents": CAUSAL & Mask.documents([7, 9, 0, 20]),
    "documents of batch rows": CAUSAL & Mask.documents([[16, 20], [36, 0]]),
    "sink tokens": CAUSAL & (Mask.window(3, 0) | Mask.first(2)),
}
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def problem_of(schedule: str, world: int, per_rank: int, mask: Mask, lse: bool = True) -> Problem:
    held = default_layout(schedule)(world * per_rank, world).ranges
    return Problem(held, held, mask, 4, 2, lse=lse)


def builder(schedule: str, problem: Problem) -> Build:
    return lambda rank, direction: build(schedule, problem, rank, direction)


def edited(build_right: Build, rank: int, direction: Direction, edit: Edit) -> Build:
    """Return a builder whose program of one rank and direction is edited."""

    def build_wrong(number: int, way: Direction) -> Program:
        program = build_right(number, way)
        return edit(program) if (number, way) == (rank, direction) else program

    return build_wrong


#: How many partners of a sampled rank are looked at: none up to all of them.
NUM_PARTNERS = (0, 1, 3, 12)


def accepts(schedule: str, mask: str, counts: Sequence[int]) -> None:
    problem = problem_of(schedule, 12, 3, MASKS[mask], lse=len(mask) % 2 == 0)
    for num_partners in counts:
        verify_sampled(builder(schedule, problem), problem, sample_ranks(12, 2), num_partners=num_partners)


def half_of_counts(schedule: str, mask: str, other: bool = False) -> Sequence[int]:
    """Return two of the numbers of partners, or the other two; the choice alternates with the schedule and the mask."""
    return NUM_PARTNERS[(SCHEDULES.index(schedule) + list(MASKS).index(mask) + other) % 2 :: 2]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sampled_verification_accepts_every_schedule_whatever_partners_it_sees(schedule: str, mask: str) -> None:
    accepts(schedule, mask, half_of_counts(schedule, mask))


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sampled_verification_accepts_the_remaining_numbers_of_partners(schedule: str, mask: str) -> None:
    accepts(schedule, mask, half_of_counts(schedule, mask, other=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_worlds_above_64_ranks_are_verified_by_samples(schedule: str) -> None:
    problem = problem_of(schedule, 72, 2, CAUSAL)
    reports = verified_sample(schedule, problem, (0, 37), proof_ranks=6, num_partners=2)
    assert reports["backward"].ranks == (0, 37)
    assert "of 72 ranks" in reports["forward"].sampled
    assert "6 ranks of the same layout are right as a world of their own" in reports["forward"].proved
    for direction in DIRECTIONS:
        programs = [build(schedule, problem, rank, direction) for rank in (0, 37)]
        assert reports[direction].scratch_bytes == tuple(program.scratch_bytes(Sizes()) for program in programs)


def test_a_schedule_above_64_ranks_is_sampled_and_up_to_64_is_proved() -> None:
    assert verified("ring", problem_of("ring", 65, 1, CAUSAL & Mask.window(2, 0)))["forward"].ranks == (0, 32, 54, 64)
    report = verified("ring", problem_of("ring", 64, 1, CAUSAL & Mask.window(2, 0)))["forward"]
    assert report.ranks == tuple(range(64))
    assert report.summary == "proved: all 64 ranks together; sampled: nothing"


#: schedule, mask; every partner of the sampled rank is looked at, all others are outside.
MUTATED = [
    ("ring", "causal"),
    ("ring", "two-sided window"),
    ("zigzag", "causal"),
    ("striped", "causal"),
    ("allgather", "full"),
    ("allgather(head_stride=1)", "causal"),
    ("double_ring(inner=2)", "causal"),
    ("hybrid(inner=2)", "causal"),
    ("ringx1", "causal"),
    ("ringx1", "full"),
    ("ringx4", "causal"),
    ("ulysses", "causal"),
]
MUTANTS_EACH = 24


@cache
def right_programs(schedule: str, mask: str) -> tuple[Problem, dict[tuple[int, Direction], Program]]:
    problem = problem_of(schedule, 8, 2, MASKS[mask], lse=schedule != "ulysses")
    return problem, {(rank, way): build(schedule, problem, rank, way) for rank in range(8) for way in DIRECTIONS}


def is_refused(verify: Callable[[], object]) -> bool:
    try:
        verify()
    except VerificationError:
        return True
    return False


def verify_all(programs: dict[tuple[int, Direction], Program], problem: Problem) -> None:
    report = None
    for way in DIRECTIONS:
        report = verify_programs([programs[rank, way] for rank in range(8)], problem, tables=False, after=report)


@pytest.mark.parametrize("name", MUTATORS)
def test_mutations_of_a_sampled_rank_are_refused_as_by_the_full_proof(name: str) -> None:
    """The mutated rank is sampled, or is a partner of the sampled rank and all of its own partners are looked at."""
    rng = random.Random(f"sampled {name}")
    num_wrong, survivors = 0, []
    for _ in range(MUTANTS_EACH):
        schedule, mask = rng.choice(MUTATED)
        problem, programs = right_programs(schedule, mask)
        rank, way = rng.randrange(8), rng.choice(DIRECTIONS)
        mutant = MUTATORS[name](rng, programs[rank, way])
        if mutant is None or mutant == programs[rank, way]:
            continue
        changed = programs | {(rank, way): mutant}
        if not is_refused(lambda: verify_all(changed, problem)):  # noqa: B023 - called at once
            continue
        num_wrong += 1
        look = lambda number, way: changed[number, way]  # noqa: B023, E731 - called at once
        if not is_refused(lambda: verify_sampled(look, problem, [rank], num_partners=8, tables=False)):  # noqa: B023
            survivors.append(f"{schedule}, {mask}, {way} of rank {rank}:\n{mutant.text()}")
    assert num_wrong or name == "delta moved", "none of these mutations is wrong"
    assert not survivors, "\n\n".join(survivors)


def put_step(kind: type, change: Callable[[Program, int], Program], first: bool = False) -> Edit:
    """Return an edit of the last step of a type, or of the first."""

    def edit(program: Program) -> Program:
        found = [n for n, step in enumerate(program.steps) if isinstance(step, kind)]
        return change(program, found[0 if first else -1])

    return edit


def without(program: Program, n: int) -> Program:
    return replace(program, steps=(*program.steps[:n], *program.steps[n + 1 :]))


def twice(program: Program, n: int) -> Program:
    return replace(program, steps=(*program.steps[: n + 1], *program.steps[n:]))


def other_rows(program: Program, n: int) -> Program:
    """Send fewer rows than the partner expects."""
    post = program.steps[n]
    assert isinstance(post, Post)
    part = post.sends[0]
    fewer = replace(part.slice, rows=(part.slice.rows[0], part.slice.rows[1] - 1))
    step = replace(post, sends=(replace(part, slice=fewer), *post.sends[1:]))
    return replace(program, steps=(*program.steps[:n], step, *program.steps[n + 1 :]))


def clear_sum(program: Program) -> Program:
    """Clear a sum that has arrived and is to be passed on."""
    n = program.steps.index(Wait("dkv 4"))
    rows = Slice("dkv.1", (0, 2), (0, 2))
    return replace(program, steps=(*program.steps[: n + 1], Clear(rows), *program.steps[n + 1 :]))


def other_peer(program: Program, n: int) -> Program:
    post = program.steps[n]
    assert isinstance(post, Post)
    part = Part((post.sends[0].peer + 7) % program.world, post.sends[0].slice)
    return replace(
        program, steps=(*program.steps[:n], replace(post, sends=(part, *post.sends[1:])), *program.steps[n + 1 :])
    )


#: What is done to the program of rank 40, or of its partner 39 that sends to it, and the error that it must raise.
FAULTS: dict[str, tuple[Direction, Edit, str]] = {
    "a dropped attend": ("forward", put_step(Attend, without), r"output out: \d+ pairs are missing, 0 are repeated"),
    "a repeated attend": ("forward", put_step(Attend, twice), r"0 pairs are missing, \d+ are repeated"),
    "a dropped gradient step": (
        "backward",
        put_step(AttendGrad, without),
        "read before it is written|adds rows|missing",
    ),
    "a sum that is not added": ("backward", put_step(Add, without), r"output dkv: \d+ pairs are missing"),
    "a share that is not added": (
        "backward",
        put_step(Add, without, first=True),
        "reach neither a message nor an output",
    ),
    "a received sum that is cleared": (
        "backward",
        lambda program: clear_sum(program),
        r"post dkv \d from rank \d+: 4 rows of dkv reach neither a message nor an output",
    ),
    "a share that is added twice": ("backward", put_step(Add, twice), "passed on more than once"),
    "a missing wait": ("forward", put_step(Wait, without), "is touched while post|is never waited for"),
    "other rows": ("backward", put_step(Post, other_rows), "shape, kind or dtype differ"),
    "another peer": ("forward", put_step(Post, other_peer), "deadlock"),
    "an output that is not written": ("backward", put_step(Copy, without), "cells do not hold the rows of this rank"),
}


@pytest.mark.parametrize("rank", [40, 39])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_sampled_rank_or_its_partner_are_found_in_a_world_of_80(fault: str, rank: int) -> None:
    direction, edit, message = FAULTS[fault]
    problem = problem_of("ring", 80, 2, CAUSAL)
    right = builder("ring", problem)
    assert {39, 41} <= set(partners([right(40, "forward"), right(40, "backward")]))
    with pytest.raises(VerificationError, match=message):
        verify_sampled(edited(right, rank, direction, edit), problem, [40])


def test_a_post_in_another_order_than_the_partners_deadlocks() -> None:
    """Both ranks post first what they send; that is the same order. One that posts its receive first is stuck."""
    problem = problem_of("ringx4", 70, 2, Mask.full())
    right = builder("ringx4", problem)

    def swap_first_posts(program: Program) -> Program:
        posts = [n for n, step in enumerate(program.steps) if isinstance(step, Post)][:2]
        steps = list(program.steps)
        steps[posts[0]], steps[posts[1]] = steps[posts[1]], steps[posts[0]]
        return replace(program, steps=tuple(steps))

    with pytest.raises(VerificationError):
        verify_sampled(edited(right, 35, "forward", swap_first_posts), problem, [35], num_partners=3)


def test_claims_of_two_ranks_about_a_third_ranks_rows_must_agree() -> None:
    """Ranks 4 and 5 attend rows that come from rank 6, which nobody looks at: they must say the same of them."""
    problem = problem_of("ring", 12, 2, Mask.full())
    right = builder("ring", problem)

    def rename(program: Program) -> Program:
        """Attend to the rows of each step as if they were those of another rank, in an order that covers all."""
        steps = [n for n, step in enumerate(program.steps) if isinstance(step, Attend) and step.carry]
        first, second = (program.steps[n] for n in steps[-2:])
        assert isinstance(first, Attend)
        assert isinstance(second, Attend)
        changed = list(program.steps)
        changed[steps[-2]] = replace(first, k_positions=second.k_positions)
        changed[steps[-1]] = replace(second, k_positions=first.k_positions)
        return replace(program, steps=tuple(changed))

    wrong = edited(right, 5, "forward", rename)
    verify_sampled(wrong, problem, [5], num_partners=0)  # nobody contradicts a rank that is looked at alone
    with pytest.raises(VerificationError, match="its keys are not at the positions"):
        verify_sampled(wrong, problem, [5], num_partners=2)


def test_results_in_the_inputs_dtype_must_be_complete_when_they_leave() -> None:
    problem = problem_of("ulysses", 8, 2, CAUSAL)
    right = builder("ulysses", problem)

    def miss_keys(program: Program) -> Program:
        n = next(n for n, step in enumerate(program.steps) if isinstance(step, Attend))
        step = program.steps[n]
        assert isinstance(step, Attend)
        fewer = replace(step, kv=replace(step.kv, rows=(2, 16)), k_positions=(range(2, 16),))
        return replace(program, steps=(*program.steps[:n], fewer, *program.steps[n + 1 :]))

    with pytest.raises(VerificationError, match="must hold all of their pairs, each once"):
        verify_sampled(edited(right, 7, "forward", miss_keys), problem, [7], num_partners=0)


def test_partial_results_do_not_travel_as_finished_ones() -> None:
    problem = problem_of("ringx1", 8, 2, Mask.full())
    right = builder("ringx1", problem)

    def finish(program: Program) -> Program:
        steps = tuple(
            replace(step, final=True) if isinstance(step, Attend) and "part" in step.out.buffer else step
            for step in program.steps
        )
        buffers = tuple(replace(b, dtype="input") if "out.part" in b.name else b for b in program.buffers)
        return replace(program, steps=steps, buffers=buffers)

    with pytest.raises(VerificationError, match="must hold all of their pairs, each once"):
        verify_sampled(edited(right, 3, "forward", finish), problem, [3], num_partners=0)


def test_received_shares_may_not_be_lost_together() -> None:
    problem = problem_of("allgather", 8, 2, CAUSAL)
    right = builder("allgather", problem)

    def clear_shares(program: Program) -> Program:
        n = max(n for n, step in enumerate(program.steps) if isinstance(step, Wait)) + 1
        buffer = program.buffer["dkv2.in.0"]
        clear = Clear(Slice(buffer.name, (0, buffer.rows), (0, buffer.heads)))
        return replace(program, steps=(*program.steps[:n], clear, *program.steps[n:]))

    with pytest.raises(VerificationError, match=r"output dkv: \d+ pairs are missing"):
        verify_sampled(edited(right, 3, "backward", clear_shares), problem, [3], num_partners=0)


def test_a_rank_that_skips_both_its_queries_and_its_keys_is_refused() -> None:
    """A helper of ringx1 that leaves a root out returns nothing to it, so only the count of its own keys can tell."""
    problem = problem_of("ringx1", 8, 2, Mask.full())
    right = builder("ringx1", problem)

    def skip_root(program: Program) -> Program:
        names = ("q 6", "out 6")
        steps = tuple(
            step
            for step in program.steps
            if not (isinstance(step, Post) and step.name in names)
            and not (isinstance(step, Wait) and step.post in names)
            and not (isinstance(step, Attend) and step.q_positions == problem.q[6])
        )
        return replace(program, steps=steps)

    with pytest.raises(VerificationError, match="of the keys that its steps attend, 4 pairs are missing"):
        verify_sampled(edited(right, 3, "forward", skip_root), problem, [3], num_partners=2)


def test_an_output_takes_its_sum_from_one_rank_if_queries_are_complete() -> None:
    """Rank 3 adds a result of rank 6 to its own, which holds all pairs already. Nobody sees what rank 6 computed."""
    problem = problem_of("ring", 8, 2, Mask.full())
    right = builder("ring", problem)

    def add_foreign_result(program: Program) -> Program:
        rows = Slice("extra", (0, 2), (0, 4))
        new = (Post("extra", (), (Part(6, rows),)), Wait("extra"), Add(rows, replace(rows, buffer="out.sum")))
        steps = (*program.steps[:-1], *new, program.steps[-1])
        return replace(program, steps=steps, buffers=(*program.buffers, Buffer("extra", "out", 2, 4, "partial")))

    with pytest.raises(VerificationError, match="output out takes sums of several ranks"):
        verify_sampled(edited(right, 3, "forward", add_foreign_result), problem, [3], num_partners=0)


def test_ranks_must_complete_the_same_side() -> None:
    """Rank 1 runs ring, which completes queries, and rank 6 runs ringx1, which completes keys."""
    problem = problem_of("ring", 8, 2, Mask.full())

    def mixed(rank: int, direction: Direction) -> Program:
        return build("ring" if rank < 4 or direction == "backward" else "ringx1", problem, rank, direction)

    with pytest.raises(VerificationError, match="some ranks complete their queries, others their keys"):
        verify_sampled(mixed, problem, [1, 6], num_partners=0)


def test_programs_equal_up_to_a_shift_are_one_class() -> None:
    held = Layout.contiguous(200, 100).ranges
    windowed = Problem(held, held, CAUSAL & Mask.window(2, 0))
    _, inner = verify_sampled(builder("ring", windowed), windowed, [30, 60], num_partners=2)
    assert (len(inner.ranks), inner.num_classes) == (2, 1)
    _, ends = verify_sampled(builder("ring", windowed), windowed, [0, 60], num_partners=0)
    assert ends.num_classes == 2


def test_large_steps_are_sampled_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "MAX_PAIRS", 100)
    monkeypatch.setattr(sampled, "MAX_TABLES", 2)
    problem = problem_of("ring", 16, 4, CAUSAL)
    reports, found = verify_sampled(builder("ring", problem), problem, [12], num_partners=0)
    assert (found.checked_rows, found.all_rows) == (4, 8)
    assert found.checked_tables < found.all_tables
    assert "4 of 8 query rows pair by pair" in reports["forward"].sampled
    assert "no proof for other ranks, or that more ranks do not deadlock" in reports["forward"].summary


def test_a_world_too_large_for_a_small_proof_says_why() -> None:
    held = Layout.contiguous(96, 96).ranges
    problem = Problem(held, held, CAUSAL, 4, 2)
    reports = verified_sample("double_ring(inner=48)", problem, [0], proof_ranks=16)
    assert "no small world was proved: groups of 48 ranks are too many" in reports["forward"].sampled


def test_wrong_ranks_and_problems_are_refused() -> None:
    problem = problem_of("ring", 4, 2, CAUSAL)
    right = builder("ring", problem)
    for ranks in ([], [4], [-1]):
        with pytest.raises(VerificationError, match="expected ranks from 0 to 3"):
            verify_sampled(right, problem, ranks)
    with pytest.raises(VerificationError, match="hold a position of the keys twice"):
        verify_sampled(right, replace(problem, k=problem.k[:1] * 4), [0])
    with pytest.raises(VerificationError, match="forward of rank 2: its builder returns another rank"):
        verify_sampled(lambda rank, way: right(1, way), problem, [2])


def test_sampled_ranks_are_first_last_middle_and_random() -> None:
    assert sample_ranks(2, 5) == (0, 1)
    assert sample_ranks(4096, 1) == (0,)
    chosen = sample_ranks(4096, 6, seed=1)
    assert {0, 2048, 4095} < set(chosen)
    assert len(chosen) == 6
    assert chosen == sample_ranks(4096, 6, seed=1) != sample_ranks(4096, 6, seed=2)
