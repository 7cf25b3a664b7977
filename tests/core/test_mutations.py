"""Mutation tests of the verifier: it must refuse every mutated program that computes wrong values."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest

from core.interpreter import DenseProblem, find_error, run_forward
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import (
    SAVES,
    Add,
    Attend,
    AttendGrad,
    Clear,
    Copy,
    Delta,
    Direction,
    Part,
    Post,
    Program,
    Slice,
    Step,
    Wait,
)
from meshflash.core.verify import VerificationError, verify_programs
from meshflash.schedules.registry import build, default_layout

CAUSAL = Mask.causal()
#: schedule, tokens, ranks, mask, query heads, KV heads
CASES: dict[str, tuple[str, int, int, Mask, int, int]] = {
    "ring, causal": ("ring", 11, 3, CAUSAL, 4, 2),
    "ring, window: gradients go straight to the owner": ("ring", 13, 4, CAUSAL & Mask.window(1, 0), 4, 2),
    "ring, two-sided window: both directions": ("ring", 14, 4, Mask.window(3, 3), 2, 1),
    "ring, documents of batch rows": ("ring", 10, 3, CAUSAL & Mask.documents([[4, 6], [10]]), 2, 2),
    "ring, a rank without tokens": ("ring", 2, 3, Mask.full(), 2, 1),
    "zigzag, causal": ("zigzag", 16, 3, CAUSAL, 4, 2),
    "zigzag, sink tokens": ("zigzag", 17, 4, CAUSAL & (Mask.window(3, 0) | Mask.first(2)), 2, 1),
    "striped, causal": ("striped", 12, 4, CAUSAL, 2, 1),
    "striped, window": ("striped", 13, 3, Mask.window(2, 1), 4, 2),
    "allgather, even: collectives": ("allgather", 12, 3, Mask.full(), 4, 2),
    "allgather, even, head by head": ("allgather(head_stride=1)", 8, 4, Mask.full(), 4, 2),
    "allgather, uneven": ("allgather", 11, 3, CAUSAL, 4, 2),
    "allgather, even, in chunks: collectives": ("allgather(chunks=2)", 12, 3, Mask.full(), 4, 2),
    "allgather, in chunks, head by head": ("allgather(head_stride=1, chunks=2)", 13, 3, CAUSAL, 4, 2),
    "allgather, documents, head by head": ("allgather(head_stride=1)", 12, 3, Mask.documents([5, 7]), 6, 3),
    "ringx1, broadcast of queries": ("ringx1", 9, 3, Mask.full(), 2, 2),
    "ringx2, backward broadcasts keys": ("ringx2", 11, 4, CAUSAL, 4, 1),
    "ringx3, causal": ("ringx3", 12, 3, CAUSAL, 2, 1),
    "ringx4, causal": ("ringx4", 13, 3, CAUSAL, 4, 2),
    "ringx4, window": ("ringx4", 13, 4, Mask.window(2, 1), 2, 1),
    "ulysses, as many heads as ranks": ("ulysses", 9, 2, CAUSAL, 4, 2),
    "ulysses, key heads on several ranks": ("ulysses", 10, 3, Mask.full(), 8, 2),
    "ulysses, a rank without heads": ("ulysses", 7, 3, CAUSAL, 2, 1),
    "ulysses, in rounds": ("ulysses(rounds=2)", 9, 2, CAUSAL & Mask.window(2, 0), 6, 3),
    "double ring, causal": ("double_ring(inner=2)", 13, 4, CAUSAL, 4, 2),
    "double ring, window": ("double_ring(inner=2)", 15, 6, Mask.window(3, 2), 2, 1),
    "ulysses, without LSE": ("ulysses", 9, 3, CAUSAL, 6, 2),
    "ulysses, without LSE, in rounds": ("ulysses(rounds=2)", 9, 2, Mask.full(), 6, 3),
    "hybrid, without LSE": ("hybrid(inner=2)", 11, 4, CAUSAL, 4, 2),
    "hybrid, 2 x 2": ("hybrid(inner=2)", 13, 4, CAUSAL, 2, 2),
    "hybrid, 2 x 3, transposed": ("hybrid(inner=3, ring=ring, transposed=True)", 13, 6, CAUSAL, 3, 3),
    "hybrid, broadcast of queries": ("hybrid(inner=2, ring=ringx1)", 11, 4, Mask.full(), 4, 1),
    "allgather, padding": ("allgather", 9, 2, CAUSAL & Mask.documents([2, 4], pad=True), 2, 1),
}
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@cache
def build_case(case: str) -> tuple[Problem, DenseProblem, dict[Direction, list[Program]]]:
    """Return the problem of a case, its dense result, and its programs of all ranks by direction."""
    schedule, tokens, world, mask, heads, kv_heads = CASES[case]
    layout: Layout = default_layout(schedule)(tokens, world)
    problem = Problem(layout.ranges, layout.ranges, mask, heads, kv_heads, lse="without LSE" not in case)
    programs = {d: [build(schedule, problem, rank, d) for rank in range(world)] for d in DIRECTIONS}
    return problem, DenseProblem(problem), programs


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("case", CASES)
def test_unmutated_programs_match_dense_attention(case: str, direction: Direction) -> None:
    problem, dense, programs = build_case(case)
    both = [programs["forward"], programs["backward"]]
    after = run_forward(both[0], dense) if direction == "backward" else None
    assert find_error(programs[direction], dense, after) == ""
    assert not refused(both, problem)


def test_cases_have_the_collectives_and_directions_that_their_names_say() -> None:
    def posts(case: str, direction: Direction) -> list[Post]:
        return [s for program in build_case(case)[2][direction] for s in program.steps if isinstance(s, Post)]

    assert {p.collective for p in posts("allgather, even: collectives", "backward")} == {"all_gather", "all_to_all"}
    assert {p.collective for p in posts("allgather, uneven", "backward")} == {""}
    assert any(
        p.name.startswith("dkv-1") for p in posts("ring, window: gradients go straight to the owner", "backward")
    )
    assert {p.name[:4] for p in posts("ring, two-sided window: both directions", "forward")} == {"kv+1", "kv-1"}
    assert any(p.name == "dkv 1" for p in posts("zigzag, causal", "backward"))
    assert {p.name[0] for p in posts("ringx1, broadcast of queries", "backward")} == {"q", "d"}
    assert {p.name[0] for p in posts("ringx2, backward broadcasts keys", "backward")} == {"k", "d"}


def with_steps(program: Program, steps: list[Step]) -> Program:
    return replace(program, steps=tuple(steps))


def with_step(program: Program, n: int, step: Step) -> Program:
    return with_steps(program, [*program.steps[:n], step, *program.steps[n + 1 :]])


def slices_of(step: Any) -> Iterator[tuple[Slice, Callable[[Slice], Step]]]:
    """Yield the slices of a step, each with a function that replaces it."""

    def replace_field(name: str) -> Callable[[Slice], Step]:
        return lambda new: replace(step, **{name: new})

    def replace_part(name: str, n: int) -> Callable[[Slice], Step]:
        parts = getattr(step, name)
        return lambda new: replace(step, **{name: (*parts[:n], replace(parts[n], slice=new), *parts[n + 1 :])})

    for field in fields(step):
        value = getattr(step, field.name)
        if isinstance(value, Slice):
            yield value, replace_field(field.name)
        if field.name in ("sends", "recvs"):
            yield from ((part.slice, replace_part(field.name, n)) for n, part in enumerate(value))


def pick(rng: random.Random, program: Program, *kinds: type[Step]) -> tuple[int, Any] | None:
    """Pick a random step of the given types, with its index; None if there is none."""
    found = [(n, step) for n, step in enumerate(program.steps) if not kinds or isinstance(step, kinds)]
    return rng.choice(found) if found else None


def drop(rng: random.Random, program: Program) -> Program | None:
    """Drop a step."""
    n = rng.randrange(len(program.steps))
    return with_steps(program, [*program.steps[:n], *program.steps[n + 1 :]])


def duplicate(rng: random.Random, program: Program) -> Program | None:
    """Repeat a step later."""
    n = rng.randrange(len(program.steps))
    again = rng.randint(n, len(program.steps))
    return with_steps(program, [*program.steps[:again], program.steps[n], *program.steps[again:]])


def swap(rng: random.Random, program: Program) -> Program | None:
    """Swap two neighbouring steps."""
    if len(program.steps) < 2:
        return None
    n = rng.randrange(len(program.steps) - 1)
    return with_steps(program, [*program.steps[:n], program.steps[n + 1], program.steps[n], *program.steps[n + 2 :]])


def change_peer(rng: random.Random, program: Program) -> Program | None:
    """Send a part to another rank, or receive it from another rank."""
    found = pick(rng, program, Post)
    if found is None:
        return None
    n, step = found
    side = rng.choice([name for name in ("sends", "recvs") if getattr(step, name)])
    parts: list[Part] = list(getattr(step, side))
    index = rng.randrange(len(parts))
    peer = rng.choice([rank for rank in range(program.world) if rank != parts[index].peer])
    parts[index] = replace(parts[index], peer=peer)
    return with_step(program, n, replace(step, **{side: tuple(parts)}))


def swap_parts(rng: random.Random, program: Program) -> Program | None:
    """Swap the slices of two parts of a post."""
    found = pick(rng, program, Post)
    if found is None:
        return None
    n, step = found
    side = rng.choice(["sends", "recvs"])
    parts: list[Part] = list(getattr(step, side))
    if len(parts) < 2:
        return None
    a, b = rng.sample(range(len(parts)), 2)
    parts[a], parts[b] = replace(parts[a], slice=parts[b].slice), replace(parts[b], slice=parts[a].slice)
    return with_step(program, n, replace(step, **{side: tuple(parts)}))


def drop_part(rng: random.Random, program: Program) -> Program | None:
    """Drop one part of a post."""
    found = pick(rng, program, Post)
    if found is None:
        return None
    n, step = found
    side = rng.choice([name for name in ("sends", "recvs") if getattr(step, name)])
    parts: list[Part] = list(getattr(step, side))
    del parts[rng.randrange(len(parts))]
    return with_step(program, n, replace(step, **{side: tuple(parts)}))


def shift_interval(rng: random.Random, interval: tuple[int, int]) -> tuple[int, int]:
    """Shift, shrink or extend an interval by one."""
    begin, end = interval
    return rng.choice(
        [
            (begin + 1, end + 1),
            (begin - 1, end - 1),
            (begin + 1, end),
            (begin, end - 1),
            (begin - 1, end),
            (begin, end + 1),
        ]
    )


def change_rows(rng: random.Random, program: Program) -> Program | None:
    """Shift the rows of one slice."""
    found = pick(rng, program)
    slices = list(slices_of(found[1])) if found else []
    if found is None or not slices:
        return None
    place, exchange = rng.choice(slices)
    return with_step(program, found[0], exchange(replace(place, rows=shift_interval(rng, place.rows))))


def shift_all_rows(rng: random.Random, program: Program) -> Program | None:
    """Shift all slices of a step together, so that their shapes still agree."""
    found = pick(rng, program)
    if found is None:
        return None
    n, step = found
    by = rng.choice([-1, 1])
    for index in range(len(list(slices_of(step)))):
        place, exchange = list(slices_of(step))[index]
        step = exchange(replace(place, rows=(place.rows[0] + by, place.rows[1] + by)))
    return with_step(program, n, step)


def change_heads(rng: random.Random, program: Program) -> Program | None:
    """Change the heads of a step or of one slice."""
    found = pick(rng, program)
    slices = list(slices_of(found[1])) if found else []
    if found is None or not slices:
        return None
    n, step = found
    if hasattr(step, "heads") and rng.random() < 0.3:
        return with_step(program, n, replace(step, heads=shift_interval(rng, step.heads)))
    place, exchange = rng.choice(slices)
    heads = program.buffer[place.buffer].heads
    choices = [(a, b) for a in range(heads) for b in range(a + 1, heads + 1) if (a, b) != place.heads]
    return with_step(program, n, exchange(replace(place, heads=rng.choice(choices)))) if choices else None


def change_positions(rng: random.Random, program: Program) -> Program | None:
    """Shift, stretch, drop or reverse the positions of an attend step."""
    found = pick(rng, program, Attend, AttendGrad)
    if found is None:
        return None
    n, step = found
    name = rng.choice(["q_positions", "k_positions"])
    ranges = list(getattr(step, name))
    if not ranges:
        return None
    index = rng.randrange(len(ranges))
    r = ranges[index]
    changes = [
        [*ranges[:index], range(r.start + 1, r.stop + 1, r.step), *ranges[index + 1 :]],
        [*ranges[:index], range(r.start, r.start + (r.step + 1) * len(r), r.step + 1), *ranges[index + 1 :]],
        [*ranges[:index], *ranges[index + 1 :]],
        ranges[::-1],
    ]
    if r.start:
        changes.append([*ranges[:index], range(r.start - 1, r.stop - 1, r.step), *ranges[index + 1 :]])
    return with_step(program, n, replace(step, **{name: tuple(rng.choice(changes))}))


def change_buffer(rng: random.Random, program: Program) -> Program | None:
    """Let one step, or every step from some point on, use another buffer of the same kind."""
    kinds = [
        (b.name, c.name) for b in program.buffers for c in program.buffers if b.kind == c.kind and b.name != c.name
    ]
    if not kinds:
        return None
    old, new = rng.choice(kinds)
    users = [n for n, step in enumerate(program.steps) if any(place.buffer == old for place, _ in slices_of(step))]
    if not users:
        return None
    first = rng.choice(users)
    steps = list(program.steps)
    for n in users if rng.random() < 0.3 else [first]:
        if n < first:
            continue
        for index in range(len(list(slices_of(steps[n])))):
            place, exchange = list(slices_of(steps[n]))[index]
            if place.buffer == old:
                steps[n] = exchange(replace(place, buffer=new))
    return with_steps(program, steps)


def drop_wait(rng: random.Random, program: Program) -> Program | None:
    """Drop a wait."""
    found = pick(rng, program, Wait)
    return None if found is None else with_steps(program, [s for s in program.steps if s is not found[1]])


def move_step(kind: type[Step]) -> Callable[[random.Random, Program], Program | None]:
    """Return a mutator that moves a step of a type to another place."""

    def mutate(rng: random.Random, program: Program) -> Program | None:
        found = pick(rng, program, kind)
        if found is None:
            return None
        n, step = found
        rest = [*program.steps[:n], *program.steps[n + 1 :]]
        to = rng.randint(0, len(rest))
        return with_steps(program, [*rest[:to], step, *rest[to:]])

    return mutate


def change_group(rng: random.Random, program: Program) -> Program | None:
    """Let a post use another group, or remove a rank from the group."""
    found = pick(rng, program, Post)
    if found is None:
        return None
    members = tuple(range(program.world))
    change = rng.randrange(3)
    if change == 0:
        return with_step(program, found[0], replace(found[1], group="other"))
    if change == 1:
        return replace(program, groups=(("mesh", members[:-1] if program.rank < program.world - 1 else members[1:]),))
    other = with_step(program, found[0], replace(found[1], group="other"))
    return replace(other, groups=(*program.groups, ("other", members)))


def flip_flag(rng: random.Random, program: Program) -> Program | None:
    """Flip one flag of an attend step."""
    found = pick(rng, program, Attend, AttendGrad)
    if found is None:
        return None
    n, step = found
    name = rng.choice(["carry", "final"] if isinstance(step, Attend) else ["add_dq", "add_dkv"])
    return with_step(program, n, replace(step, **{name: not getattr(step, name)}))


def change_collective(rng: random.Random, program: Program) -> Program | None:
    """Turn a post into another collective, or into plain messages."""
    found = pick(rng, program, Post)
    if found is None:
        return None
    form = rng.choice([form for form in ("", "all_gather", "all_to_all") if form != found[1].collective])
    return with_step(program, found[0], replace(found[1], collective=form))


def toggle_lse(rng: random.Random, program: Program) -> Program | None:
    """Toggle `without_lse` of one slice, or of all slices of a step."""
    found = pick(rng, program, Copy, Post)
    if found is None:
        return None
    n, step = found
    every = range(len(list(slices_of(step))))
    for index in every if rng.random() < 0.5 else [rng.choice(every)]:
        place, exchange = list(slices_of(step))[index]
        step = exchange(replace(place, without_lse=not place.without_lse))
    return with_step(program, n, step)


def swap_copy_and_add(rng: random.Random, program: Program) -> Program | None:
    """Turn a copy into an add, or an add into a copy."""
    found = pick(rng, program, Add, Copy)
    if found is None:
        return None
    n, step = found
    return with_step(program, n, (Copy if isinstance(step, Add) else Add)(step.src, step.dst))


def change_becomes(rng: random.Random, program: Program) -> Program | None:
    """Let scratch become an output, or stop becoming one."""
    outputs = {b.kind: b.name for b in program.buffers if b.role == "output"}
    candidates = [n for n, b in enumerate(program.buffers) if b.role == "scratch" and b.kind in outputs]
    if not candidates:
        return None
    n = rng.choice(candidates)
    b = program.buffers[n]
    new = replace(b, becomes="" if b.becomes else outputs[b.kind])
    return replace(program, buffers=(*program.buffers[:n], new, *program.buffers[n + 1 :]))


def clear_rows(rng: random.Random, program: Program) -> Program | None:
    """Clear some rows at some point."""
    candidates = [b for b in program.buffers if b.role != "input" and b.rows]
    if not candidates:
        return None
    b, n = rng.choice(candidates), rng.randint(0, len(program.steps))
    begin = rng.randrange(b.rows)
    place = Slice(b.name, (begin, rng.randint(begin + 1, b.rows)), (0, b.heads))
    return with_steps(program, [*program.steps[:n], Clear(place), *program.steps[n:]])


#: Each name also seeds the mutants of its mutator: another name gives other mutants.
MUTATORS: dict[str, Callable[[random.Random, Program], Program | None]] = {
    "drop": drop,
    "duplicate": duplicate,
    "swap": swap,
    "peer": change_peer,
    "parts exchanged": swap_parts,
    "a part less": drop_part,
    "rows": change_rows,
    "rows throughout": shift_all_rows,
    "heads": change_heads,
    "positions": change_positions,
    "buffer": change_buffer,
    "no wait": drop_wait,
    "wait moved": move_step(Wait),
    "post moved": move_step(Post),
    "group": change_group,
    "flag": flip_flag,
    "form": change_collective,
    "copy for add": swap_copy_and_add,
    "becomes": change_becomes,
    "cleared": clear_rows,
    "bareness": toggle_lse,
    "delta moved": move_step(Delta),
}
MUTANTS_EACH = 34


def mutants(name: str, count: int) -> Iterator[tuple[str, Direction, int, Program]]:
    """Yield mutants of random programs, with their case, direction and rank."""
    rng = random.Random(f"mutants of {name}")
    seen: set[tuple[str, Program]] = set()
    for _ in range(50 * count):
        if len(seen) == count:
            break
        case, direction = rng.choice(list(CASES)), rng.choice(DIRECTIONS)
        program = rng.choice(build_case(case)[2][direction])
        mutant = MUTATORS[name](rng, program) if program.steps else None
        if mutant is not None and mutant != program and (case, mutant) not in seen:
            seen.add((case, mutant))
            yield case, direction, program.rank, mutant


def refused(passes: list[list[Program]], problem: Problem) -> bool:
    """Return whether the verifier refuses a forward, or a backward after it."""
    report = None
    try:
        for programs in passes:
            report = verify_programs(programs, problem, after=report)
    except VerificationError:
        return True
    return False


def find_error_in_passes(passes: list[list[Program]], dense: DenseProblem) -> str:
    """Return the error of a forward, or of a backward after it, or ""."""
    error = find_error(passes[0], dense)
    return error or (find_error(passes[1], dense, run_forward(passes[0], dense)) if len(passes) > 1 else "")


@pytest.mark.parametrize("name", MUTATORS)
def test_verifier_refuses_every_mutation_that_changes_results(name: str) -> None:
    num_effective, survivors = 0, []
    for case, direction, rank, mutant in mutants(name, MUTANTS_EACH):
        problem, dense, programs = build_case(case)
        changed = [*programs[direction]]
        changed[rank] = mutant
        passes = [changed] if direction == "forward" else [programs["forward"], changed]
        if direction == "forward" and mutant.saves != SAVES:  # the backward may read a wrong saved buffer
            passes.append(programs["backward"])
        error = find_error_in_passes(passes, dense)
        num_effective += bool(error)
        if error and not refused(passes, problem):
            survivors.append(f"{case}, {direction} of rank {rank} ({error}):\n{mutant.text()}")
    assert num_effective >= MUTANTS_EACH // 4, "too few of these mutations change a result"
    assert not survivors, "\n\n".join(survivors)
