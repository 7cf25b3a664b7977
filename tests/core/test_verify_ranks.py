"""The verifier on all ranks together: programs must match the problem, each other, and the forward before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from core.edits import HELD, OTHER, PROBLEM, both, change, extra_buffers, insert, k, programs_of
from meshflash.core import symbols
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import Buffer, Part, Post, Program, Ranges, Slice, Wait
from meshflash.core.verify import VerificationError, verify_programs
from meshflash.schedules.registry import build


def assert_refused(programs: list[Program], problem: Problem, message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        verify_programs(programs, problem)


def test_backward_refuses_the_forward_of_another_problem() -> None:
    report = verify_programs(programs_of("ulysses", "forward"), PROBLEM)
    held = Layout.contiguous(6, 3).ranges
    wider, causal = Problem(held, held, Mask.full(), 4, 2), replace(PROBLEM, mask=Mask.causal())
    with pytest.raises(VerificationError, match="the forward ran on 2 ranks, this backward on 3"):
        verify_programs([build("ring", wider, rank, "backward") for rank in range(3)], wider, after=report)
    programs = [build("ulysses", causal, rank, "backward") for rank in range(2)]
    with pytest.raises(VerificationError, match="not the finished result of its rows over all keys"):
        verify_programs(programs, causal, after=report)


def test_programs_must_be_one_per_rank_in_order() -> None:
    programs = programs_of("ring", "forward")
    for wrong in (programs[::-1], programs[:1], [*programs, programs[1]], [programs[0], programs[0]]):
        assert_refused(wrong, PROBLEM, "expected one for each of 2 ranks in rank order")


def test_programs_must_have_one_direction() -> None:
    assert_refused(
        [build("ring", PROBLEM, 0, "forward"), build("ring", PROBLEM, 1, "backward")], PROBLEM, "some are backward"
    )


def test_programs_of_another_problem_are_refused() -> None:
    zigzag = Layout.zigzag(6, 2).ranges
    assert_refused(programs_of("ring", "forward"), replace(PROBLEM, q=zigzag, k=zigzag), "not at the positions")
    assert_refused(programs_of("ring", "forward"), replace(PROBLEM, kv_heads=1), "shape and dtype of the problem")


def test_programs_of_a_narrower_mask_miss_pairs() -> None:
    narrow = replace(PROBLEM, mask=Mask.window(1, 0))
    programs = [build("ring", narrow, rank, "forward") for rank in range(2)]
    verify_programs(programs, narrow)
    assert_refused(programs, PROBLEM, r"output out: \d+ pairs are missing, 0 are repeated")
    verify_programs(programs_of("ring", "forward"), narrow)


def test_problems_that_hold_a_position_twice_are_refused() -> None:
    twice = (HELD[0], HELD[0])
    assert_refused(programs_of("ring", "forward"), replace(PROBLEM, q=twice), "hold a position of the queries twice")
    assert_refused(programs_of("ring", "forward"), replace(PROBLEM, k=twice), "hold a position of the keys twice")


def test_collectives_in_another_order_are_refused() -> None:
    first, second = programs_of("allgather(head_stride=1)", "forward")
    a, b, *rest = first.steps
    assert_refused([replace(first, steps=(b, a, *rest)), second], PROBLEM, "their heads do not serve its queries")


def add_separate_posts(p: Program, receive_first: bool, group_of_sender: Callable[[int], str]) -> Program:
    """Add an exchange after the first hop, with separate posts to send and to receive."""
    peer = 1 - p.rank
    out = Post("out", (Part(peer, k("kv")),), (), group_of_sender(p.rank))
    into = Post("in", (), (Part(peer, k("kv+1.1")),), group_of_sender(peer))
    posts = (into, out) if receive_first else (out, into)
    p = replace(p, groups=(*p.groups, ("second", (0, 1))))
    return insert(4, *posts, *(Wait(post.name) for post in posts))(p)


def test_posts_of_a_group_complete_in_order() -> None:
    def exchanges(first: bool, second: bool, group_of_sender: Callable[[int], str]) -> list[Program]:
        pairs = zip(programs_of("ring", "forward"), (first, second), strict=True)
        return [add_separate_posts(p, receive_first, group_of_sender) for p, receive_first in pairs]

    verify_programs(exchanges(True, False, lambda rank: "mesh"), PROBLEM)
    assert_refused(
        exchanges(True, True, lambda rank: "mesh"), PROBLEM, "deadlock: rank 0 at step 6 .*; rank 1 at step 6"
    )
    assert_refused(
        exchanges(False, False, lambda rank: "mesh"), PROBLEM, "deadlock: rank 0 at step 6 .*; rank 1 at step 6"
    )
    verify_programs(exchanges(True, True, lambda rank: "mesh" if rank else "second"), PROBLEM)


def test_messages_between_collectives_are_allowed() -> None:
    """Ranks agree on the order of collectives; messages of only some ranks may come in between."""
    held = Layout.contiguous(6, 3).ranges
    problem = Problem(held, held, Mask.full())
    gathering = [build("allgather", problem, rank, "forward") for rank in range(3)]
    rows = Slice("kv", (0, 2), (0, 1))
    receive_buffer = extra_buffers(Buffer("more", "kv", 2, 1))
    sends, recvs = Post("x", (Part(1, rows),), ()), Post("x", (), (Part(0, replace(rows, buffer="more")),))
    first = insert(0, sends, Wait("x"))(gathering[0])
    verify_programs([first, both(receive_buffer, insert(0, recvs, Wait("x")))(gathering[1]), gathering[2]], problem)
    last = both(receive_buffer, insert(1, recvs, Wait("x")))(gathering[1])
    assert_refused([first, last, gathering[2]], problem, "post kv 0 cannot be one all_gather")


def test_wrong_tile_tables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def table(mask: Mask, q: Ranges, k: Ranges, by_key: bool) -> Any:
        return np.full((1, 3, 3), 1 + by_key, np.int16)

    monkeypatch.setattr(symbols, "table_pairs", table)
    verify_programs(programs_of("ring", "forward"), PROBLEM)
    assert_refused(
        programs_of("ring", "backward"), PROBLEM, "the tile tables of its rows do not hold each visible pair"
    )
    verify_programs(programs_of("ring", "backward"), PROBLEM, tables=False)


def test_errors_name_the_rank_and_the_step() -> None:
    programs = programs_of("ring", "forward")
    message = r"^forward of rank 1, step 3 \(attend carry q.*\): its keys are not at the positions that it names"
    assert_refused([programs[0], change(3, k_positions=OTHER)(programs[1])], PROBLEM, message)
