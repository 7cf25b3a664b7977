"""Traffic and scratch of all-gather: no more than in other implementations, and less under sparse masks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import Direction, Post, Program, Sizes
from meshflash.core.verify import verify_programs
from meshflash.schedules.registry import build, verified

GATHERS = ("allgather", "allgather(head_stride=1)", "allgather(head_stride=3)", "allgather(chunks=3)")
WORLDS = (2, 3, 4, 7, 8)
ROWS = 6
HEADS, KV_HEADS = 8, 4
MASKS = {
    "full": Mask.full(),
    "causal": Mask.causal(),
    "window": Mask.window(4, 3),
    "sinks": Mask.causal() & (Mask.window(5, 0) | Mask.first(3)),
}
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
SIZES = Sizes(dim=64, value_dim=64, input_bytes=2, reduce_bytes=4)
#: Bytes of one row of k (or of v), over all KV heads.
ROW_BYTES = KV_HEADS * 64 * 2


def problem_of(world: int, mask: Mask, tokens: int = 0) -> Problem:
    held = Layout.contiguous(tokens or ROWS * world, world).ranges
    return Problem(held, held, mask, HEADS, KV_HEADS)


def programs_of(schedule: str, problem: Problem, direction: Direction) -> list[Program]:
    return [build(schedule, problem, rank, direction) for rank in range(problem.world)]


def received(schedule: str, problem: Problem, direction: Direction, sizes: Sizes = SIZES) -> tuple[int, ...]:
    return verify_programs(programs_of(schedule, problem, direction), problem, sizes, tables=False).received_bytes


def posts(programs: list[Program]) -> list[Post]:
    return [step for program in programs for step in program.steps if isinstance(step, Post)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("schedule", GATHERS)
def test_forward_receives_at_most_the_keys_and_values_of_all_other_ranks(schedule: str, mask: str) -> None:
    for world in WORLDS:
        got = received(schedule, problem_of(world, MASKS[mask]), "forward")
        assert max(got) <= 2 * (world - 1) * ROWS * ROW_BYTES
        if mask == "full":
            assert set(got) == {2 * (world - 1) * ROWS * ROW_BYTES}


@pytest.mark.parametrize("reduce_bytes", [4, 2])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("schedule", GATHERS)
def test_backward_receives_keys_again_and_one_gradient_share_per_other_rank(
    schedule: str, mask: str, reduce_bytes: int
) -> None:
    sizes = replace(SIZES, reduce_bytes=reduce_bytes)
    for world in WORLDS:
        got = received(schedule, problem_of(world, MASKS[mask]), "backward", sizes)
        kv_bytes = 2 * (world - 1) * ROWS * ROW_BYTES
        max_bytes = kv_bytes + kv_bytes * reduce_bytes // 2
        assert max(got) <= max_bytes
        if mask == "full":
            assert set(got) == {max_bytes}


@pytest.mark.parametrize("schedule", GATHERS)
def test_causal_mask_moves_half_of_the_keys(schedule: str) -> None:
    for world in WORLDS:
        problem = problem_of(world, Mask.causal())
        keys = [2 * rank * ROWS * ROW_BYTES for rank in range(world)]
        shares = [2 * (world - 1 - rank) * ROWS * ROW_BYTES * 2 for rank in range(world)]
        assert list(received(schedule, problem, "forward")) == keys
        assert list(received(schedule, problem, "backward")) == [a + b for a, b in zip(keys, shares, strict=True)]


@pytest.mark.parametrize("left", [1, 4, ROWS, ROWS + 2])
def test_causal_window_moves_only_the_rows_inside_the_window(left: int) -> None:
    problem = problem_of(4, Mask.causal() & Mask.window(left, 0))
    assert list(received("allgather", problem, "forward")) == [
        2 * min(left, rank * ROWS) * ROW_BYTES for rank in range(4)
    ]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("schedule", GATHERS)
def test_documents_that_each_lie_on_one_rank_move_nothing(schedule: str, direction: Direction) -> None:
    for mask in (Mask.documents([ROWS] * 4), Mask.window(0, 0), Mask.causal() & Mask.documents([2, 4, *[ROWS] * 3])):
        problem = problem_of(4, mask)
        programs = programs_of(schedule, problem, direction)
        verify_programs(programs, problem)
        assert posts(programs) == []
        assert all(b.role != "scratch" for program in programs for b in program.buffers), "no scratch is needed"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rank_that_sees_only_its_own_keys_gathers_nothing(direction: Direction) -> None:
    problem = problem_of(3, Mask.documents([ROWS, 2 * ROWS]))
    programs = programs_of("allgather", problem, direction)
    report = verify_programs(programs, problem, SIZES)
    assert posts(programs[:1]) == []
    assert set(report.received[1]) == {2}
    assert set(report.received[2]) == {1}


@pytest.mark.parametrize("schedule", GATHERS)
def test_traffic_scales_with_key_heads_and_not_with_query_heads(schedule: str) -> None:
    problem = problem_of(4, Mask.causal())
    for direction in DIRECTIONS:
        many = received(schedule, replace(problem, heads=32), direction)
        assert many == received(schedule, problem, direction)
        assert received(schedule, replace(problem, kv_heads=8), direction) == tuple(2 * n for n in many)


@pytest.mark.parametrize("schedule", GATHERS)
def test_even_shards_under_a_full_mask_use_collectives(schedule: str) -> None:
    def forms(problem: Problem, direction: Direction) -> set[str]:
        return {post.collective for post in posts(programs_of(schedule, problem, direction))}

    assert forms(problem_of(4, Mask.full()), "forward") == {"all_gather"}
    assert forms(problem_of(4, Mask.full()), "backward") == {"all_gather", "all_to_all"}
    for uneven in (problem_of(4, Mask.full(), 25), problem_of(4, Mask.causal())):
        assert forms(uneven, "backward") == {""}


@pytest.mark.parametrize(
    ("schedule", "strides"),
    [("allgather", [4]), ("allgather(head_stride=1)", [1] * 4), ("allgather(head_stride=3)", [3, 1])],
)
def test_head_stride_sets_how_many_key_heads_are_gathered_at_a_time(schedule: str, strides: list[int]) -> None:
    for program in programs_of(schedule, problem_of(3, Mask.full()), "forward"):
        taken = [post.sends[0].slice.heads for post in posts([program])]
        assert [end - begin for begin, end in taken] == strides


def test_head_stride_larger_than_the_key_heads_gathers_all_of_them() -> None:
    problem = problem_of(3, Mask.causal())
    for direction in DIRECTIONS:
        all_heads = programs_of("allgather", problem, direction)
        assert [p.steps for p in programs_of("allgather(head_stride=99)", problem, direction)] == [
            p.steps for p in all_heads
        ]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_smaller_head_stride_takes_less_scratch(direction: Direction) -> None:
    problem = replace(problem_of(4, Mask.full()), heads=8, kv_heads=8)

    def scratch(schedule: str) -> int:
        programs = programs_of(schedule, problem, direction)
        return max(sum(b.bytes(SIZES) for b in p.buffers if b.role == "scratch") for p in programs)

    assert scratch("allgather(head_stride=1)") < scratch("allgather(head_stride=2)") < scratch("allgather")


def test_gather_of_the_next_heads_overlaps_with_attention() -> None:
    problem = replace(problem_of(2, Mask.full()), heads=3, kv_heads=3)
    for program in programs_of("allgather(head_stride=1)", problem, "forward"):
        kinds = [str(step).split()[0] for step in program.steps]
        assert kinds == ["post", "post", "wait", "attend", "post", "wait", "attend", "wait", "attend"]


def test_gather_of_the_next_chunk_overlaps_with_attention() -> None:
    problem = problem_of(2, Mask.full())
    words = [str(step).split()[0] for step in build("allgather(chunks=3)", problem, 0, "forward").steps]
    assert words == ["post", "post", "wait", "attend", "post", "wait", "attend", "wait", "attend", "finish"]
    whole, chunked = (verified(name, problem, SIZES)["forward"] for name in ("allgather", "allgather(chunks=3)"))
    assert max(chunked.received_bytes) == max(whole.received_bytes)
    gathered = 2 * 2 * ROWS * ROW_BYTES
    partial = ROWS * HEADS * (64 * 4 + 4)
    assert max(chunked.scratch_bytes) <= 2 * gathered // 3 + partial < gathered + partial
