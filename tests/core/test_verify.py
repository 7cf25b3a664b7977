"""The verifier passes every program of ours, whatever the world, mask and layout, and refuses each way to be wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from cases import SCHEDULES
from meshflash.core import symbols, verify
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
    Delta,
    Direction,
    Finish,
    Part,
    Post,
    Program,
    Ranges,
    Sizes,
    Slice,
    Step,
    Wait,
)
from meshflash.core.verify import Report, VerificationError, verify_programs
from meshflash.schedules.registry import build, home, verified

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
CAUSAL = Mask.causal()
#: For a sequence of n tokens.
MASKS: dict[str, Callable[[int], Mask]] = {
    "full": lambda n: Mask.full(),
    "causal": lambda n: CAUSAL,
    "causal window": lambda n: CAUSAL & Mask.window(7, 0),
    "two-sided window": lambda n: Mask.window(5, 3),
    "prefix": lambda n: CAUSAL | Mask.first(9),
    "sink tokens": lambda n: CAUSAL & (Mask.window(6, 0) | Mask.first(4)),
    "documents, causal": lambda n: CAUSAL & Mask.documents([n // 5, 0, n // 2, n - n // 5 - n // 2]),
    "documents both ways": lambda n: Mask.documents([n // 4, n // 3, n - n // 4 - n // 3]),
    "documents of batch rows": lambda n: CAUSAL & Mask.documents([[n // 3, n - n // 3], [n]]),
    "padding": lambda n: CAUSAL & Mask.documents([[n // 9, n // 3], [n // 2]], pad=True),
    "first of each document": lambda n: (
        CAUSAL & Mask.documents([n // 6, n - n // 6]) & (Mask.window(6, 0) | Mask.first(2, per_document=True))
    ),
}
#: Up to here every mask at every world; beyond, each world has some masks, and each mask some worlds.
ALL_MASKS_UP_TO = 4
TABLES_UP_TO = 5


def masks_of(schedule: str, world: int) -> list[str]:
    names = list(MASKS)
    if world <= ALL_MASKS_UP_TO:
        return names
    first = 2 * world + SCHEDULES.index(schedule)
    return [names[(first + n) % len(names)] for n in range(2)]


def check(schedule: str, problem: Problem, direction: Direction, tables: bool = True) -> Report:
    return verified(schedule, problem, tables=tables)[direction]


def check_both(schedule: str, problem: Problem, tables: bool = True) -> None:
    verified(schedule, problem, tables=tables)


def held_at_home(schedule: str, tokens: int, world: int) -> tuple[Ranges, ...]:
    """The layout that a schedule is at home on."""
    return home(schedule)(tokens, world).ranges


def solves(schedule: str, world: int, names: list[str]) -> None:
    held = held_at_home(schedule, 53, world)
    for name in names:
        problem = Problem(held, held, MASKS[name](53), 4, 2, lse=world % 2 == 0)
        check_both(schedule, problem, tables=world <= TABLES_UP_TO)


@pytest.mark.parametrize("world", range(1, 17))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_solves_masks_at_every_world(schedule: str, world: int) -> None:
    solves(schedule, world, masks_of(schedule, world))


@pytest.mark.slow
@pytest.mark.parametrize("world", range(ALL_MASKS_UP_TO + 1, 17))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_solves_every_other_mask_too(schedule: str, world: int) -> None:
    solves(schedule, world, [name for name in MASKS if name not in masks_of(schedule, world)])


def test_every_mask_meets_every_schedule_at_large_worlds() -> None:
    for schedule in SCHEDULES:
        met = [name for world in range(ALL_MASKS_UP_TO + 1, 17) for name in masks_of(schedule, world)]
        assert all(met.count(name) >= 2 for name in MASKS)


@pytest.mark.parametrize(("schedule", "mask"), list(zip(SCHEDULES, MASKS, strict=False)))
def test_tables_are_right_at_a_large_world(schedule: str, mask: str) -> None:
    held = held_at_home(schedule, 61, 11)
    check_both(schedule, Problem(held, held, MASKS[mask](61), 2, 1))


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5, 11])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lengths_that_divide_nothing(schedule: str, tokens: int) -> None:
    for world, mask in product((3, 7), ("full", "causal", "two-sided window", "documents both ways", "padding")):
        held = held_at_home(schedule, tokens, world)
        check_both(schedule, Problem(held, held, MASKS[mask](tokens), 2, 1))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (3, 3), (6, 2), (6, 3)])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "allgather(head_stride=2)"])
def test_any_groups_of_heads(schedule: str, heads: int, kv_heads: int) -> None:
    for world, mask in product((2, 3), ("full", "causal", "documents of batch rows")):
        held = held_at_home(schedule, 12, world)
        check_both(schedule, Problem(held, held, MASKS[mask](12), heads, kv_heads))


CROSS = {
    "full": Mask.full(),
    "causal": CAUSAL,
    "window": Mask.window(4, 2),
    "documents": Mask.documents([9, 0, 20], k_lengths=[3, 4, 10]),
    "documents of batch rows": Mask.documents([[9, 20], [29, 0]], k_lengths=[[10, 7], [12, 5]]),
}


@pytest.mark.parametrize("mask", CROSS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cross_attention(schedule: str, mask: str) -> None:
    for world in (1, 2, 4, 5):
        check_both(
            schedule, Problem(held_at_home(schedule, 29, world), held_at_home(schedule, 17, world), CROSS[mask], 4, 2)
        )
    check_both(schedule, Problem(Layout.zigzag(29, 3).ranges, Layout.striped(17, 3).ranges, CROSS[mask], 4, 2))


def shuffled(tokens: int, world: int, seed: int) -> tuple[Ranges, ...]:
    """Runs and stripes of any size, with any rank, in any order."""
    rng = random.Random(seed)
    pieces, begin = [], 0
    while begin < tokens:
        end = min(tokens, begin + rng.randint(1, 9))
        step = rng.choice([1, 1, 2, 3])
        pieces += [range(begin + n, end, step) for n in range(min(step, end - begin))]
        begin = end
    rng.shuffle(pieces)
    held: list[list[range]] = [[] for _ in range(world)]
    for piece in pieces:
        held[rng.randrange(world)].append(piece)
    return Layout(tuple(map(tuple, held))).ranges


CUSTOM: dict[str, Callable[[int, int], tuple[Ranges, ...]]] = {
    "contiguous": lambda n, world: Layout.contiguous(n, world).ranges,
    "zigzag": lambda n, world: Layout.zigzag(n, world).ranges,
    "striped": lambda n, world: Layout.striped(n, world).ranges,
    "balanced": lambda n, world: Layout.balanced(CAUSAL & Mask.window(9, 0), n, world).ranges,
    "shuffled": lambda n, world: shuffled(n, world, 1),
    "shuffled otherwise": lambda n, world: shuffled(n, world, 2),
    "all on one rank": lambda n, world: ((range(n),), *[()] * (world - 1)),
}


def some_masks(first: int) -> list[str]:
    """Every third, so that three in a row have all of them."""
    return [*MASKS][first % 3 :: 3]


def solves_on(schedule: str, layout: str, world: int, names: list[str]) -> None:
    held = CUSTOM[layout](31, world)
    for name in names:
        check_both(schedule, Problem(held, held, MASKS[name](31), 2, 1), tables=world == 2)


@pytest.mark.parametrize("layout", CUSTOM)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_layout(schedule: str, layout: str) -> None:
    solves_on(schedule, layout, 2, [*MASKS])
    solves_on(schedule, layout, 5, some_masks([*CUSTOM].index(layout) + SCHEDULES.index(schedule)))


@pytest.mark.slow
@pytest.mark.parametrize("layout", CUSTOM)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_layout_over_more_ranks(schedule: str, layout: str) -> None:
    solves_on(schedule, layout, 5, [*MASKS])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_queries_and_keys_of_different_layouts(schedule: str) -> None:
    for n, (q, k) in enumerate(zip(CUSTOM, [*CUSTOM][1:] + [*CUSTOM][:1], strict=True)):
        for mask in some_masks(n + SCHEDULES.index(schedule)):
            check_both(schedule, Problem(CUSTOM[q](23, 3), CUSTOM[k](23, 3), MASKS[mask](23), 2, 1), tables=False)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_queries_that_begin_later_than_keys(schedule: str) -> None:
    """As in decoding: queries from position 20 on, keys from 0 on."""
    for world, mask in product((1, 2, 3), (Mask.full(), CAUSAL, CAUSAL & Mask.window(5, 0), Mask.documents([13, 16]))):
        q = tuple(
            tuple(range(r.start + 20, r.stop + 20, r.step) for r in held) for held in held_at_home(schedule, 9, world)
        )
        check_both(schedule, Problem(q, held_at_home(schedule, 29, world), mask, 4, 2))


def test_bytes_are_counted_by_sender_and_with_the_sizes_given() -> None:
    held = Layout.contiguous(8, 2).ranges
    problem = Problem(held, held, CAUSAL, 4, 2)
    programs = [build("ring", problem, rank, "backward") for rank in range(2)]
    report = verify_programs(programs, problem, Sizes(batch=3, dim=8, value_dim=16, input_bytes=2, reduce_bytes=4))
    keys = 4 * 2 * 3 * (8 + 16)
    assert report.received == ({1: keys * 4}, {0: keys * 2})
    assert report.received_bytes == (keys * 4, keys * 2)
    sizes = Sizes(batch=3, dim=8, value_dim=16, input_bytes=2, reduce_bytes=4)
    assert report.scratch_bytes == tuple(program.scratch_bytes(sizes) for program in programs)


# What is wrong, and what is said of it. Two ranks, 3 tokens each, that see everything; 4 heads over 2 key heads.

HELD = Layout.contiguous(6, 2).ranges
PROBLEM = Problem(HELD, HELD, Mask.full(), 4, 2)
Edit = Callable[[Program], Program]


def programs_of(schedule: str, direction: Direction, problem: Problem = PROBLEM) -> list[Program]:
    return [build(schedule, problem, rank, direction) for rank in range(2)]


def s(name: str, rows: tuple[int, int] = (0, 3), heads: tuple[int, int] = (0, 4)) -> Slice:
    return Slice(name, rows, heads)


def k(name: str, rows: tuple[int, int] = (0, 3), heads: tuple[int, int] = (0, 2)) -> Slice:
    return Slice(name, rows, heads)


def bare(name: str, rows: tuple[int, int], heads: tuple[int, int]) -> Slice:
    return Slice(name, rows, heads, bare=True)


def put(n: int, *steps: Step) -> Edit:
    """Other steps for the n-th."""
    return lambda p: replace(p, steps=(*p.steps[:n], *steps, *p.steps[n + 1 :]))


def insert(n: int, *steps: Step) -> Edit:
    """More steps before the n-th."""
    return lambda p: replace(p, steps=(*p.steps[:n], *steps, *p.steps[n:]))


def change(n: int, **changes: Any) -> Edit:
    """The n-th step, with some of it changed."""
    return lambda p: put(n, replace(p.steps[n], **changes))(p)


def buffer(name: str, **changes: Any) -> Edit:
    """A buffer with some of it changed."""
    return lambda p: replace(p, buffers=tuple(replace(b, **changes) if b.name == name else b for b in p.buffers))


def room(*buffers: Buffer) -> Edit:
    """More buffers."""
    return lambda p: replace(p, buffers=(*p.buffers, *buffers))


def program(**changes: Any) -> Edit:
    return lambda p: replace(p, **changes)


def both(*edits: Edit) -> Edit:
    def edit(p: Program) -> Program:
        for one in edits:
            p = one(p)
        return p

    return edit


Made = tuple[str, Direction, Problem]
RING_F: Made = ("ring", "forward", PROBLEM)
RING_B: Made = ("ring", "backward", PROBLEM)
GATHER_F: Made = ("allgather", "forward", PROBLEM)
GATHER_B: Made = ("allgather", "backward", PROBLEM)
STRIDE_F: Made = ("allgather(head_stride=1)", "forward", PROBLEM)
HEADS_F: Made = ("ulysses", "forward", PROBLEM)
HEADS_B: Made = ("ulysses", "backward", PROBLEM)
BARE = replace(PROBLEM, lse=False)
BARE_F: Made = ("ulysses", "forward", BARE)
BARE_B: Made = ("ulysses", "backward", BARE)
OWN, OTHER = (range(3),), (range(3, 6),)
EXTRA_OUT = Buffer("more", "out", 3, 4, "partial")
#: Of rank 0 in ulysses: all rows, half of the heads.
ALL_ROWS = (range(6),)
HALF = Attend(s("q:0", (0, 6), (0, 2)), k("kv:0", (0, 6), (0, 1)), s("y", (0, 6), (0, 2)), ALL_ROWS, ALL_ROWS, (0, 2))


class Wrong(NamedTuple):
    """What is wrong, with which program, how it comes about on which ranks, and what is said of it."""

    name: str
    made: Made
    edit: Edit
    message: str
    ranks: tuple[int, ...] = (0,)


BOTH = (0, 1)
WRONG: list[Wrong] = [
    Wrong(*row)
    for row in (
        # the program as a whole
        ("another world", RING_F, program(world=3), "is written for 3 ranks, the problem has 2"),
        (
            "a group without itself",
            RING_F,
            program(groups=(("mesh", (1,)),)),
            "group mesh does not hold this rank, or",
        ),
        ("itself twice", RING_F, program(groups=(("mesh", (0, 0, 1)),)), "group mesh does not hold this rank, or"),
        ("a group twice", RING_F, program(groups=(("mesh", (0, 1)),) * 2), "two groups have the same name"),
        (
            "another order in the group",
            RING_F,
            program(groups=(("mesh", (1, 0)),)),
            "group mesh does not hold this rank, or not its ranks once and in order",
        ),
        (
            "a group of strangers",
            RING_F,
            program(groups=(("mesh", (0, 1)), ("x", (0, 7)))),
            "group x: rank 7 does not agree",
        ),
        ("a buffer twice", RING_F, room(Buffer("kv+1.1", "kv", 3, 2)), "two buffers have the same name"),
        ("an unknown kind", RING_F, room(Buffer("x", "x", 3, 2)), "x is of no known kind, or of no size"),
        ("no heads", RING_F, room(Buffer("x", "kv", 3, 0)), "x is of no known kind, or of no size"),
        ("an output more", RING_F, room(Buffer("o", "out", 3, 4, role="output")), "the caller's buffers are"),
        ("an input that is scratch", RING_F, buffer("q", role="scratch"), "the caller's buffers are"),
        (
            "an input of another dtype",
            RING_F,
            buffer("q", dtype="partial"),
            "not have the shape and dtype of the problem",
        ),
        ("an input of other rows", RING_F, buffer("kv", rows=4), "not have the shape and dtype of the problem"),
        ("an input of other heads", RING_F, buffer("q", heads=2), "not have the shape and dtype of the problem"),
        ("nothing saved", RING_F, program(saves=()), r"saves \(\), expected \['out'\]"),
        ("scratch saved", RING_F, program(saves=("q", "kv", "out", "out.sum")), "saves .*, expected"),
        ("a backward that saves", RING_B, program(saves=("q",)), r"saves \('q',\), expected \[\]"),
        (
            "saved and never written",
            HEADS_F,
            both(room(Buffer("x", "q", 3, 4, role="saved")), program(saves=("out", "q:0", "kv:0", "out:0", "x"))),
            "x is saved, and not all of it was written",
        ),
        (
            "half a result saved",
            HEADS_F,
            both(
                room(Buffer("x", "out", 6, 2, role="saved"), Buffer("y", "out", 6, 2, "partial")),
                program(saves=("out", "q:0", "kv:0", "out:0", "x")),
                insert(5, HALF),
                insert(6, Copy(s("y", (0, 6), (0, 2)), s("x", (0, 6), (0, 2)))),
            ),
            "x is saved, and is not the finished result of its rows",
        ),
        (
            "gradients saved",
            HEADS_F,
            both(room(Buffer("x", "dq", 3, 4, role="saved")), program(saves=("out", "q:0", "kv:0", "out:0", "x"))),
            "x cannot be saved",
        ),
        ("more rows than were saved", HEADS_B, buffer("q:0", rows=7), "reads q:0, of which no forward saved so many"),
        (
            "another kind than was saved",
            HEADS_B,
            buffer("q:0", kind="out"),
            "reads q:0 as out, which the forward saved as q",
        ),
        (
            "saved, then written",
            HEADS_B,
            insert(0, Clear(s("q:0", (0, 6), (0, 2)))),
            "was saved and may not be written",
        ),
        (
            "a result of some keys for that of all",
            RING_B,
            both(
                room(Buffer("x", "out", 3, 4)),
                insert(0, Attend(s("q"), k("kv"), s("x"), OWN, OWN, (0, 4), final=True)),
                change(2, out=s("x")),
            ),
            "what it takes for the results of its rows is not finished",
        ),
        ("q, which was not saved", HEADS_B, room(Buffer("q", "q", 3, 4, role="input")), "the caller's buffers are"),
        # results without their LSE, gradients without their delta
        (
            "an LSE that is wanted and does not come",
            HEADS_F,
            put(7, Copy(bare("out:0", (0, 3), (0, 2)), bare("out", (0, 3), (0, 2)))),
            "output out is without the LSE of some rows, and it is wanted",
        ),
        ("a delta that nobody makes", BARE_B, put(3), "read with its LSE or delta, which are not known"),
        (
            "a result that is saved without its LSE",
            BARE_F,
            both(
                room(Buffer("x", "out", 6, 2, role="saved")),
                program(saves=("out", "q:0", "kv:0", "out:0", "x")),
                insert(5, Copy(bare("out:0", (0, 6), (0, 2)), bare("x", (0, 6), (0, 2)))),
            ),
            "x is saved, and is not the finished result of its rows, with their LSE",
        ),
        (
            "an attention without LSE",
            BARE_F,
            change(4, out=bare("out:0", (0, 6), (0, 2))),
            "can be copied and sent bare, and nothing else",
        ),
        (
            "bare queries",
            BARE_F,
            put(0, Copy(bare("q", (0, 3), (0, 2)), bare("q:0", (0, 3), (0, 2)))),
            "can be copied and sent bare, and nothing else",
        ),
        (
            "an LSE from nowhere",
            BARE_F,
            change(8, dst=s("out", (0, 3), (2, 4))),
            "source and target differ in kind or shape",
        ),
        (
            "sent bare and received whole",
            BARE_F,
            change(5, sends=(Part(1, s("out:0", (3, 6), (0, 2))),)),
            "not the same shape, kind and dtype",
        ),
        (
            "a delta of keys",
            BARE_B,
            change(3, out=s("q:0", (0, 6), (0, 2))),
            r"takes q:0 \(q, input\) for out in the input's dtype",
        ),
        (
            "a delta of other rows",
            BARE_B,
            change(3, out=s("out:0", (0, 3), (0, 2)), dout=s("dout2.0", (3, 6), (0, 2))),
            "takes other rows, or what is not their finished result",
        ),
        (
            "a delta that forgets the gradient of the LSE",
            HEADS_B,
            insert(3, Delta(s("out:0", (0, 6), (0, 2)), s("dout2.0", (0, 6), (0, 2)))),
            "a gradient may come by way of the LSE, and only the caller's delta has it",
        ),
        ("saved twice", RING_F, program(saves=("q", "kv", "out", "out")), "saves a buffer twice"),
        # scratch that becomes an output
        ("becoming nothing known", RING_F, buffer("out.sum", becomes="x"), "out.sum cannot become x"),
        ("becoming an input", RING_F, buffer("kv+1.1", becomes="kv"), "cannot become kv"),
        (
            "becoming another kind",
            RING_B,
            both(buffer("dq.sum", becomes=""), buffer("kv+1.1", becomes="dq")),
            "cannot become dq",
        ),
        (
            "becoming from reductions",
            RING_B,
            both(buffer("dkv.sum", becomes=""), buffer("dkv.0", becomes="dkv")),
            "cannot",
        ),
        ("becoming another shape", RING_F, buffer("out.sum", rows=4), "out.sum becomes out and has another shape"),
        (
            "two that become one",
            RING_B,
            room(Buffer("dq.more", "dq", 3, 4, "partial", becomes="dq")),
            "two buffers become dq",
        ),
        ("written after it became", RING_F, insert(5, Clear(s("out.sum"))), "is written after it became out"),
        (
            "added to after it became",
            RING_B,
            insert(10, Add(k("dkv.0"), k("dkv.sum"))),
            "is written after it became dkv",
        ),
        (
            "added to after a part of it became",
            RING_B,
            put(
                9,
                Copy(k("dkv.sum", (0, 1)), k("dkv", (0, 1))),
                Add(k("dkv.0"), k("dkv.sum")),
                Copy(k("dkv.sum"), k("dkv")),
            ),
            "is written after it became dkv",
        ),
        (
            "read after it was finished",
            RING_F,
            both(room(EXTRA_OUT), insert(5, Copy(s("out.sum"), s("more")))),
            "after it was",
        ),
        (
            "an output written from elsewhere",
            RING_B,
            both(room(Buffer("dq.more", "dq", 3, 4)), insert(8, Clear(s("dq.more")), Copy(s("dq.more"), s("dq")))),
            "may be the memory of dq.sum",
        ),
        (
            "an output written from another place",
            RING_B,
            insert(8, Copy(s("dq.sum", (0, 1)), s("dq", (1, 2)))),
            "may be the memory of dq.sum",
        ),
        ("an output cleared", RING_B, insert(0, Clear(k("dkv"))), "may be the memory of dkv.sum"),
        (
            "finished while it is sent",
            RING_F,
            insert(4, Post("x", (Part(1, s("out.sum")),), ())),
            r"is touched while post x still sends out\.sum",
        ),
        (
            "copied while it is sent",
            RING_B,
            insert(9, Post("x", (Part(1, k("dkv.sum")),), ())),
            "while post x still sends",
        ),
        # steps and the places that they touch
        ("no step at all", RING_F, insert(0, s("q")), "this is no step"),  # type: ignore[arg-type]
        ("no such buffer", RING_F, insert(1, Clear(s("x"))), "there is no buffer x"),
        (
            "too many rows",
            RING_F,
            insert(1, Clear(s("out.sum", (0, 4)))),
            "lies outside its buffer of 3 rows and 4 heads",
        ),
        ("too many heads", RING_F, insert(1, Clear(s("out.sum", (0, 3), (0, 5)))), "lies outside its buffer"),
        ("rows before the first", RING_F, insert(1, Clear(s("out.sum", (-1, 3)))), "lies outside its buffer"),
        ("rows backwards", RING_F, insert(1, Clear(s("out.sum", (2, 1)))), "lies outside its buffer"),
        ("an input written", RING_F, insert(0, Clear(s("q"))), "is the caller's and may not be written"),
        (
            "an input received into",
            RING_F,
            change(0, recvs=(Part(1, k("kv")),)),
            "is the caller's and may not be written",
        ),
        ("a sum in an output", GATHER_B, change(2, add_dq=True), "is added to, where only results go"),
        (
            "read before it is written",
            RING_F,
            insert(0, Copy(k("kv+1.1", (0, 1)), k("kv+1.1", (1, 2)))),
            "read before it is",
        ),
        (
            "sent before it is written",
            RING_B,
            insert(0, Post("x", (Part(1, k("dkv.1")),), ())),
            "is read before it is written",
        ),
        ("carried before it is written", RING_F, change(1, carry=True), "is read before it is written"),
        ("attended while it arrives", RING_F, put(2), "is touched while post kv.1 1 still receives"),
        (
            "written while it is sent",
            RING_B,
            insert(6, Clear(k("dkv.1", (2, 3)))),
            "is touched while post dkv 1 still sends",
        ),
        ("read while it arrives", RING_B, insert(6, Copy(k("dkv.0", (0, 1)), k("dkv.part", (0, 1)))), "still receives"),
        (
            "received into twice at once",
            RING_B,
            insert(6, Post("x", (), (Part(1, k("dkv.0", (1, 3))),))),
            "is touched while post dkv 1 still receives",
        ),
        (
            "received into twice by one post",
            RING_B,
            change(5, recvs=(Part(1, k("dkv.0")), Part(1, k("dkv.0")))),
            "is written and used otherwise by the same step",
        ),
        ("sent and received into", RING_B, change(5, recvs=(Part(1, k("dkv.1")),)), "is written and used otherwise"),
        (
            "copied onto itself",
            RING_B,
            insert(5, Copy(k("dkv.1", (0, 2)), k("dkv.1", (1, 3)))),
            "is written and used otherwise",
        ),
        (
            "received into some heads",
            RING_F,
            change(0, recvs=(Part(1, k("kv+1.1", (0, 3), (0, 1))),)),
            "into some heads of kv",
        ),
        (
            "received into an output",
            RING_B,
            insert(6, Post("x", (), (Part(1, k("dkv")),))),
            "messages arrive in scratch",
        ),
        (
            "received into what becomes an output",
            RING_B,
            insert(6, Post("x", (), (Part(1, k("dkv.sum")),))),
            "messages arrive in scratch of their own",
        ),
        # copies and sums
        ("copied to another kind", RING_B, put(4, Copy(k("dkv.part"), k("kv+1.1"))), "differ in kind or shape"),
        ("copied to another shape", RING_B, put(4, Copy(k("dkv.part", (0, 2)), k("dkv.1"))), "differ in kind or shape"),
        ("keys added", RING_B, insert(3, Add(k("kv"), k("kv+1.1"))), "only gradients and partial results are added"),
        (
            "a finished result added",
            RING_F,
            both(room(EXTRA_OUT), insert(6, Copy(s("out"), s("more")), Add(s("out"), s("more")))),
            "only gradients and partial results are added",
        ),
        (
            "sums in the input's dtype",
            RING_B,
            both(room(Buffer("x", "dkv", 3, 2)), insert(4, Clear(k("x")), Add(k("dkv.part"), k("x")))),
            "only gradients and partial results are added, in their dtype or that of reductions",
        ),
        ("other rows added", RING_B, insert(4, Add(k("dkv.part"), k("dkv.sum"))), "adds rows to other rows"),
        ("finished twice", RING_F, insert(5, Finish(s("out.sum"), s("out"), (0, 4))), "is written after it became out"),
        (
            "finished from the output's dtype",
            RING_F,
            buffer("out.sum", dtype="input"),
            "any other in that of partial results",
        ),
        (
            "finished to a partial result",
            RING_F,
            both(room(EXTRA_OUT), put(4, Finish(s("out.sum"), s("more"), (0, 4)))),
            "finishes what is no partial result, or to where no result goes",
        ),
        (
            "gradients finished",
            RING_B,
            put(8, Finish(s("dq.sum"), s("dq"), (0, 4))),
            "finishes what is no partial result",
        ),
        ("finished under other heads", RING_F, change(4, heads=(1, 5)), "its heads are not those that it names"),
        ("finished under fewer heads", RING_F, change(4, heads=(0, 2)), "its heads are not those that it names"),
        # attention
        ("a final result in a partial buffer", RING_F, change(1, final=True), "a final result is in the input's dtype"),
        ("a partial result in the output", GATHER_F, change(2, final=False), "any other in that of partial results"),
        (
            "a result among gradients",
            RING_B,
            put(3, Attend(s("q"), k("kv"), s("dq.sum"), OWN, OWN, (0, 4))),
            "final result is",
        ),
        (
            "final and carried",
            RING_F,
            put(4, Attend(s("q"), k("kv"), s("out"), OWN, OWN, (0, 4), True, True)),
            "where only",
        ),
        (
            "final and carried in scratch",
            RING_F,
            both(
                room(Buffer("x", "out", 3, 4)),
                insert(1, Clear(s("x")), Attend(s("q"), k("kv"), s("x"), OWN, OWN, (0, 4), True, True)),
            ),
            "a final result carries on from nothing",
        ),
        (
            "carried on from what is finished",
            RING_F,
            both(
                room(EXTRA_OUT, Buffer("x", "out", 3, 4)),
                insert(1, Attend(s("q"), k("kv"), s("x"), OWN, OWN, (0, 4), final=True), Copy(s("x"), s("more"))),
                insert(3, Attend(s("q"), k("kv"), s("more"), OWN, OWN, (0, 4), carry=True)),
            ),
            "which is finished",
        ),
        (
            "rows of other queries",
            RING_B,
            change(1, dout=s("dout", (0, 2))),
            "q and what is known of its rows are not the same",
        ),
        (
            "q for what is known of it",
            RING_B,
            change(1, out=s("q")),
            "q and what is known of its rows are not the same rows",
        ),
        ("gradients among others", RING_B, change(1, dq=k("dkv.part")), "cannot take these gradients"),
        (
            "a sum in the dtype of reductions",
            RING_B,
            both(put(4), change(3, dkv=k("dkv.1"), add_dkv=True)),
            "cannot take",
        ),
        ("keys for queries", RING_F, change(1, q=k("kv")), r"takes kv \(kv, input\) for q in the input's dtype"),
        (
            "keys of another dtype",
            RING_F,
            both(room(Buffer("x", "kv", 3, 2, "reduce")), insert(1, Copy(k("kv"), k("x"))), change(2, kv=k("x"))),
            r"takes x \(kv, reduce\) for kv in the input's dtype",
        ),
        (
            "fewer positions than rows",
            RING_F,
            change(1, k_positions=(range(2),)),
            "names other rows or heads than it takes",
        ),
        ("fewer heads than it has", RING_F, change(1, heads=(0, 2)), "names other rows or heads than it takes"),
        (
            "a key twice",
            GATHER_F,
            both(
                insert(2, Copy(k("kv2.0", (0, 1)), k("kv2.0", (1, 2)))),
                change(3, k_positions=(range(1), range(1), range(2, 6))),
            ),
            "names a position twice",
        ),
        ("queries elsewhere", RING_F, change(1, q_positions=OTHER), "its queries are not at the positions and heads"),
        (
            "other heads",
            RING_F,
            change(1, heads=(1, 5)),
            "its queries are not at the positions and heads that it names",
        ),
        (
            "three heads over two",
            RING_F,
            change(1, q=s("q", heads=(0, 3)), heads=(0, 3)),
            "key heads do not divide its query",
        ),
        ("no key heads", RING_F, change(1, kv=k("kv", (0, 3), (0, 0))), "its key heads do not divide its query heads"),
        ("one key head for two groups", RING_F, change(1, kv=k("kv", (0, 3), (0, 1))), "are not of one group"),
        (
            "other key heads",
            STRIDE_F,
            change(3, kv=k("kv1.1", (0, 6), (0, 1))),
            "is touched while post kv 1 still receives",
        ),
        (
            "key heads of other queries",
            STRIDE_F,
            both(change(3, q=s("q", heads=(2, 4)), out=s("out", heads=(2, 4)), heads=(2, 4))),
            "its keys are not at the positions that it names, or their heads do not serve its queries",
        ),
        (
            "key heads without rows",
            RING_F,
            change(1, kv=k("kv", (0, 0), (0, 1)), k_positions=()),
            "its query heads of one key head are not of one group",
        ),
        ("keys elsewhere", RING_F, change(1, k_positions=OTHER), "its keys are not at the positions that it names"),
        (
            "keys in another order",
            RING_F,
            change(1, k_positions=(range(1, 3), range(1))),
            "keys are not at the positions",
        ),
        (
            "a result of another shape",
            RING_F,
            change(1, out=s("out.sum", (0, 2))),
            "does not have the shape of its source",
        ),
        (
            "carried on from other rows",
            RING_F,
            change(3, q=s("q", (0, 2)), q_positions=(range(2),), out=s("out.sum", (1, 3))),
            "adds to out.sum.*, which holds other rows",
        ),
        # posts
        ("a name twice", RING_B, change(5, name="kv+1 1"), r"two posts are called kv\+1 1"),
        ("an unknown group", RING_F, change(0, group="row"), "there is no group row"),
        ("a rank of no group", RING_F, change(0, sends=(Part(2, k("kv")),)), "rank 2 is not in group mesh"),
        ("an empty post", RING_F, change(0, sends=(), recvs=()), "moves nothing, or has parts that are empty"),
        (
            "an empty part",
            RING_F,
            change(0, sends=(Part(1, k("kv", (1, 1))),)),
            "moves nothing, or has parts that are empty",
        ),
        ("waiting for nothing", RING_F, insert(0, Wait("x")), "there is nothing to wait for"),
        ("waiting twice", RING_F, insert(3, Wait("kv+1 1")), "there is nothing to wait for"),
        (
            "other rows than are sent",
            RING_F,
            change(0, recvs=(Part(1, k("kv+1.1", (0, 2))),)),
            "not the same shape, kind and",
        ),
        ("another dtype than is sent", RING_F, buffer("kv+1.1", dtype="reduce"), "not the same shape, kind and dtype"),
        ("nothing to send", RING_F, change(0, sends=()), "deadlock: rank 1 at step 2"),
        (
            "a message to itself, kept",
            RING_F,
            change(0, sends=(Part(0, k("kv")),)),
            "deadlock: rank 0 at step 2.*rank 1 at",
        ),
        (
            "waited for before it is posted",
            RING_B,
            lambda p: put(5)(insert(7, p.steps[5])(p)),
            "there is nothing to wait for",
        ),
        # collectives
        (
            "an all_gather that others do not make",
            GATHER_F,
            change(0, collective="all_to_all"),
            "sends whole rows of scratch|is no",
        ),
        (
            "messages that others gather",
            GATHER_F,
            change(0, collective=""),
            "post kv 0 is no all_gather: the ranks or their",
        ),
        (
            "a collective in another order",
            GATHER_F,
            lambda p: change(0, sends=p.steps[0].sends[::-1])(p),
            "post kv 0 is no all_gather: the ranks or their parts differ",
        ),
        # what is left at the end
        ("an output without rows", RING_B, put(9), "output dkv: 6 cells are not the rows they should be"),
        (
            "an output that is not finished",
            RING_F,
            put(4, Copy(s("out.sum"), s("out"))),
            "output out is not the finished result",
        ),
        ("a hop forgotten", RING_F, put(3), "output out: 36 pairs are missing, 0 are repeated or not visible"),
        (
            "a hop twice",
            RING_F,
            lambda p: insert(3, p.steps[3])(p),
            "output out: 0 pairs are missing, 36 are repeated or not visible",
        ),
        ("gradients that stay away", RING_B, put(7), "output dkv: 36 pairs are missing, 0 are repeated or not visible"),
        # on both ranks at once
        (
            "an all_gather of several slices",
            GATHER_F,
            change(
                0,
                sends=(Part(0, k("kv", (0, 2))), Part(1, k("kv", (1, 3)))),
                recvs=(Part(0, k("kv2.0", (0, 2))), Part(1, k("kv2.0", (2, 4)))),
            ),
            "an all_gather sends one slice to all",
            BOTH,
        ),
        (
            "an all_gather of unequal parts",
            GATHER_F,
            lambda p: change(
                0,
                sends=tuple(Part(n, k("kv", (0, 3 - p.rank))) for n in range(2)),
                recvs=(Part(0, k("kv2.0", (0, 3))), Part(1, k("kv2.0", (3, 5)))),
            )(p),
            "post kv 0 is no all_gather: the ranks or their parts differ",
            BOTH,
        ),
        (
            "gathered in another order",
            GATHER_F,
            change(0, recvs=(Part(0, k("kv2.0", (3, 6))), Part(1, k("kv2.0", (0, 3))))),
            "an all_gather do not lie one after another",
            BOTH,
        ),
        (
            "spread in another order",
            GATHER_B,
            change(3, sends=(Part(0, k("dkv2.0", (3, 6))), Part(1, k("dkv2.0", (0, 3))))),
            "an all_to_all do not lie one after another",
            BOTH,
        ),
        (
            "an all_to_all of some heads",
            GATHER_B,
            both(
                room(Buffer("wide", "dkv", 6, 3, "reduce")),
                insert(3, Clear(k("wide", (0, 6), (0, 3)))),
                change(4, sends=tuple(Part(n, k("wide", (3 * n, 3 * n + 3))) for n in range(2))),
            ),
            "an all_to_all sends whole rows of scratch",
            BOTH,
        ),
        (
            "an all_to_all of the caller's rows",
            GATHER_F,
            change(
                0,
                sends=tuple(Part(n, k("kv", (n, n + 1))) for n in range(2)),
                recvs=tuple(Part(n, k("kv2.0", (n, n + 1))) for n in range(2)),
                collective="all_to_all",
            ),
            "an all_to_all sends whole rows of scratch",
            BOTH,
        ),
        (
            "a post that nobody waits for",
            RING_F,
            lambda p: insert(5, Post("x", (Part(1 - p.rank, k("kv")),), (Part(1 - p.rank, k("kv+1.1")),)))(p),
            "forward of rank 0: post x is never waited for",
            BOTH,
        ),
        (
            "queries that stand twice, so that keys get twice the gradient",
            RING_B,
            both(
                room(*(Buffer(f"{kind}2", kind, 6, 4) for kind in ("q", "out", "dout"))),
                room(Buffer("dq2", "dq", 6, 4, "partial")),
                insert(
                    1,
                    *(Copy(s(name), s(f"{name}2", (n, n + 3))) for name in ("q", "out", "dout") for n in (0, 3)),
                    AttendGrad(
                        s("q2", (0, 6)),
                        s("out2", (0, 6)),
                        s("dout2", (0, 6)),
                        k("kv"),
                        s("dq2", (0, 6)),
                        k("dkv.part"),
                        OWN * 2,
                        OWN,
                        (0, 4),
                    ),
                ),
            ),
            "names a position twice",
        ),
    )
]


def with_edit(wrong: Wrong) -> list[Program]:
    return [wrong.edit(p) if p.rank in wrong.ranks else p for p in programs_of(*wrong.made)]


def prove(programs: list[Program], made: Made) -> Report:
    """What is made of programs, after the forward if they are of a backward."""
    schedule, direction, problem = made
    after = verify_programs(programs_of(schedule, "forward", problem), problem) if direction == "backward" else None
    return verify_programs(programs, problem, after=after)


@pytest.mark.parametrize("wrong", WRONG, ids=[wrong.name for wrong in WRONG])
def test_what_is_wrong_is_refused(wrong: Wrong) -> None:
    prove(programs_of(*wrong.made), wrong.made)
    with pytest.raises(VerificationError, match=wrong.message):
        prove(with_edit(wrong), wrong.made)


def test_every_check_refuses_one_of_them() -> None:
    """A new check of the verifier wants a new row above."""
    files = {str(module.__file__): Path(str(module.__file__)).read_text().splitlines() for module in (symbols, verify)}
    checks = {
        (file, n)
        for file, lines in files.items()
        for n, line in enumerate(lines, 1)
        if ".fail(" in line and "tables" not in line
    }
    hit = set()
    for wrong in WRONG:
        with pytest.raises(VerificationError) as error:
            prove(with_edit(wrong), wrong.made)
        hit |= {(str(entry.path), entry.lineno + 1) for entry in error.traceback}
    assert [files[file][n - 1].strip() for file, n in sorted(checks - hit)] == []


def refused(programs: list[Program], problem: Problem, message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        verify_programs(programs, problem)


def test_a_backward_comes_after_a_forward_of_the_same_problem() -> None:
    report = verify_programs(programs_of("ulysses", "forward"), PROBLEM)
    held = Layout.contiguous(6, 3).ranges
    wider, causal = Problem(held, held, Mask.full(), 4, 2), replace(PROBLEM, mask=Mask.causal())
    with pytest.raises(VerificationError, match="the forward was one of 2 ranks, this is one of 3"):
        verify_programs([build("ring", wider, rank, "backward") for rank in range(3)], wider, after=report)
    programs = [build("ulysses", causal, rank, "backward") for rank in range(2)]
    with pytest.raises(VerificationError, match="not finished, or not of all keys"):
        verify_programs(programs, causal, after=report)


def test_one_program_for_each_rank_in_order() -> None:
    programs = programs_of("ring", "forward")
    for wrong in (programs[::-1], programs[:1], [*programs, programs[1]], [programs[0], programs[0]]):
        refused(wrong, PROBLEM, "expected one program for each of 2 ranks, in their order")


def test_all_programs_are_of_one_pass() -> None:
    refused([build("ring", PROBLEM, 0, "forward"), build("ring", PROBLEM, 1, "backward")], PROBLEM, "some backward")


def test_programs_of_another_problem_are_refused() -> None:
    zigzag = Layout.zigzag(6, 2).ranges
    refused(programs_of("ring", "forward"), replace(PROBLEM, q=zigzag, k=zigzag), "not at the positions")
    refused(programs_of("ring", "forward"), replace(PROBLEM, kv_heads=1), "shape and dtype of the problem")


def test_programs_for_a_narrower_mask_do_too_little() -> None:
    narrow = replace(PROBLEM, mask=Mask.window(1, 0))
    programs = [build("ring", narrow, rank, "forward") for rank in range(2)]
    verify_programs(programs, narrow)
    refused(programs, PROBLEM, r"output out: \d+ pairs are missing, 0 are repeated")
    verify_programs(programs_of("ring", "forward"), narrow)


def test_problems_that_hold_a_position_twice_are_refused() -> None:
    twice = (HELD[0], HELD[0])
    refused(programs_of("ring", "forward"), replace(PROBLEM, q=twice), "hold a position of the queries twice")
    refused(programs_of("ring", "forward"), replace(PROBLEM, k=twice), "hold a position of the keys twice")


def test_collectives_in_another_order_exchange_their_contents() -> None:
    first, second = programs_of("allgather(head_stride=1)", "forward")
    a, b, *rest = first.steps
    refused([replace(first, steps=(b, a, *rest)), second], PROBLEM, "their heads do not serve its queries")


def exchange_apart(p: Program, receive_first: bool, group_of_sender: Callable[[int], str]) -> Program:
    """One more exchange at the end of the first hop, sent and received in posts of their own."""
    peer = 1 - p.rank
    out = Post("out", (Part(peer, k("kv")),), (), group_of_sender(p.rank))
    into = Post("in", (), (Part(peer, k("kv+1.1")),), group_of_sender(peer))
    posts = (into, out) if receive_first else (out, into)
    p = replace(p, groups=(*p.groups, ("second", (0, 1))))
    return insert(4, *posts, *(Wait(post.name) for post in posts))(p)


def test_posts_of_a_group_move_one_after_another() -> None:
    def exchanges(first: bool, second: bool, group_of_sender: Callable[[int], str]) -> list[Program]:
        pairs = zip(programs_of("ring", "forward"), (first, second), strict=True)
        return [exchange_apart(p, receive_first, group_of_sender) for p, receive_first in pairs]

    verify_programs(exchanges(True, False, lambda rank: "mesh"), PROBLEM)
    refused(exchanges(True, True, lambda rank: "mesh"), PROBLEM, "deadlock: rank 0 at step 6 .*; rank 1 at step 6")
    refused(exchanges(False, False, lambda rank: "mesh"), PROBLEM, "deadlock: rank 0 at step 6 .*; rank 1 at step 6")
    verify_programs(exchanges(True, True, lambda rank: "mesh" if rank else "second"), PROBLEM)


def test_messages_between_collectives_are_allowed() -> None:
    """Ranks agree on the order of collectives; a message that only some ranks exchange may come in between."""
    held = Layout.contiguous(6, 3).ranges
    problem = Problem(held, held, Mask.full())
    gathering = [build("allgather", problem, rank, "forward") for rank in range(3)]
    rows = Slice("kv", (0, 2), (0, 1))
    room_of_two = room(Buffer("more", "kv", 2, 1))
    sends, recvs = Post("x", (Part(1, rows),), ()), Post("x", (), (Part(0, replace(rows, buffer="more")),))
    first = insert(0, sends, Wait("x"))(gathering[0])
    verify_programs([first, both(room_of_two, insert(0, recvs, Wait("x")))(gathering[1]), gathering[2]], problem)
    last = both(room_of_two, insert(1, recvs, Wait("x")))(gathering[1])
    refused([first, last, gathering[2]], problem, "post kv 0 is no all_gather")


def test_tables_that_are_wrong_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def table(mask: Mask, q: Ranges, k: Ranges, by_key: bool) -> Any:
        return np.full((1, 3, 3), 1 + by_key, np.int16)

    monkeypatch.setattr(symbols, "table_pairs", table)
    verify_programs(programs_of("ring", "forward"), PROBLEM)
    refused(programs_of("ring", "backward"), PROBLEM, "the tables for its rows do not hold each pair")
    verify_programs(programs_of("ring", "backward"), PROBLEM, tables=False)


def test_errors_name_the_rank_and_the_step() -> None:
    programs = programs_of("ring", "forward")
    message = r"^forward of rank 1, step 3 \(attend carry q.*\): its keys are not at the positions that it names"
    refused([programs[0], change(3, k_positions=OTHER)(programs[1])], PROBLEM, message)
