"""Traffic of the ring family: no more than in other implementations, and less under sparse masks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest

from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import Direction, Post, Program, Sizes
from meshflash.core.verify import verify_programs
from meshflash.schedules.registry import build, default_layout

RINGS = ("ring", "zigzag", "striped")
WORLDS = (2, 3, 4, 7, 8)
ROWS = 6  # rows of each rank; even, so that zigzag can halve them
HEADS, KV_HEADS = 4, 2
MASKS = {
    "full": Mask.full(),
    "causal": Mask.causal(),
    "window": Mask.window(4, 3),
    "causal window": Mask.causal() & Mask.window(10, 0),
    "sinks": Mask.causal() & (Mask.window(5, 0) | Mask.first(3)),
    "prefix": Mask.causal() | Mask.first(8),
}
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
SIZES = Sizes(dim=64, value_dim=64, input_bytes=2, reduce_bytes=4)
#: Bytes of one row of k (or of v), over all KV heads.
ROW_BYTES = KV_HEADS * 64 * 2


def problem_of(schedule: str, world: int, mask: Mask, rows: int = ROWS) -> Problem:
    held = default_layout(schedule)(rows * world, world).ranges
    return Problem(held, held, mask, HEADS, KV_HEADS)


def programs_of(schedule: str, problem: Problem, direction: Direction) -> list[Program]:
    return [build(schedule, problem, rank, direction) for rank in range(problem.world)]


def received(schedule: str, problem: Problem, direction: Direction, sizes: Sizes = SIZES) -> tuple[int, ...]:
    return verify_programs(programs_of(schedule, problem, direction), problem, sizes, tables=False).received_bytes


def posts(programs: list[Program]) -> list[Post]:
    return [step for program in programs for step in program.steps if isinstance(step, Post)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("schedule", RINGS)
def test_forward_receives_at_most_the_keys_and_values_of_all_other_ranks(schedule: str, mask: str) -> None:
    for world in WORLDS:
        got = received(schedule, problem_of(schedule, world, MASKS[mask]), "forward")
        assert max(got) <= 2 * (world - 1) * ROWS * ROW_BYTES
        if mask == "full":
            assert set(got) == {2 * (world - 1) * ROWS * ROW_BYTES}


@pytest.mark.parametrize("reduce_bytes", [4, 2])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("schedule", RINGS)
def test_backward_receives_keys_again_and_gradients_for_one_hop_less_than_ranks(
    schedule: str, mask: str, reduce_bytes: int
) -> None:
    sizes = replace(SIZES, reduce_bytes=reduce_bytes)
    for world in WORLDS:
        got = received(schedule, problem_of(schedule, world, MASKS[mask]), "backward", sizes)
        kv_bytes = 2 * (world - 1) * ROWS * ROW_BYTES
        max_bytes = kv_bytes + kv_bytes * reduce_bytes // 2
        assert max(got) <= max_bytes
        if mask == "full":
            assert set(got) == {max_bytes}


@pytest.mark.parametrize("world", WORLDS)
def test_causal_zigzag_moves_three_quarters_of_the_keys(world: int) -> None:
    """Half of the W(W - 1) hops move whole shards; the other half moves only the front halves."""
    got = received("zigzag", problem_of("zigzag", world, Mask.causal()), "forward")
    hops = world * (world - 1)
    assert sum(got) == hops // 2 * 2 * ROWS * ROW_BYTES + hops // 2 * 2 * (ROWS // 2) * ROW_BYTES
    assert 4 * sum(got) == 3 * world * 2 * (world - 1) * ROWS * ROW_BYTES


@pytest.mark.parametrize("world", WORLDS)
def test_causal_ring_moves_half_of_the_keys(world: int) -> None:
    """Keys travel to later ranks only."""
    got = received("ring", problem_of("ring", world, Mask.causal()), "forward")
    assert got == tuple(2 * rank * ROWS * ROW_BYTES for rank in range(world))


@pytest.mark.parametrize("left", [1, 3, ROWS, ROWS + 2, 2 * ROWS])
@pytest.mark.parametrize("world", [3, 5])
def test_causal_window_moves_only_the_rows_inside_the_window(world: int, left: int) -> None:
    problem = problem_of("ring", world, Mask.causal() & Mask.window(left, 0))
    assert received("ring", problem, "forward") == tuple(
        2 * min(left, rank * ROWS) * ROW_BYTES for rank in range(world)
    )


@pytest.mark.parametrize("reduce_bytes", [4, 2])
def test_gradients_of_a_window_go_straight_to_their_owner(reduce_bytes: int) -> None:
    world, left = 5, 2
    problem = problem_of("ring", world, Mask.causal() & Mask.window(left, 0))
    sizes = replace(SIZES, reduce_bytes=reduce_bytes)
    keys, shares = 2 * left * ROW_BYTES, 2 * left * ROW_BYTES * reduce_bytes // 2
    expected = [keys * (rank > 0) + shares * (rank < world - 1) for rank in range(world)]
    assert list(received("ring", problem, "backward", sizes)) == expected


def test_two_sided_window_sends_one_hop_in_each_direction() -> None:
    world = 5
    problem = problem_of("ring", world, Mask.window(2, 1))
    programs = programs_of("ring", problem, "forward")
    report = verify_programs(programs, problem, SIZES)
    assert report.received[2] == {1: 2 * 2 * ROW_BYTES, 3: 2 * 1 * ROW_BYTES}
    assert {post.name for post in posts(programs)} == {"kv+1 1", "kv-1 1"}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_documents_that_each_lie_on_one_rank_move_nothing(direction: Direction) -> None:
    world = 4
    for lengths in ([ROWS] * world, [2, ROWS - 2, *[ROWS] * (world - 1)]):
        problem = problem_of("ring", world, Mask.causal() & Mask.documents(lengths))
        programs = programs_of("ring", problem, direction)
        verify_programs(programs, problem)
        assert posts(programs) == []
        assert all(not b.becomes and b.role != "scratch" for p in programs for b in p.buffers), "no scratch is needed"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("schedule", ["ring", "zigzag"])
def test_mask_that_shows_only_own_keys_posts_nothing(schedule: str, direction: Direction) -> None:
    problem = problem_of(schedule, 4, Mask.window(0, 0))
    programs = programs_of(schedule, problem, direction)
    verify_programs(programs, problem)
    assert posts(programs) == []


@pytest.mark.parametrize("schedule", RINGS)
def test_single_device_posts_nothing(schedule: str) -> None:
    for mask, direction in product(MASKS.values(), DIRECTIONS):
        problem = problem_of(schedule, 1, mask)
        assert posts(programs_of(schedule, problem, direction)) == []


@pytest.mark.parametrize("schedule", RINGS)
def test_traffic_scales_with_key_heads_and_not_with_query_heads(schedule: str) -> None:
    problem = problem_of(schedule, 4, Mask.causal())
    for direction in DIRECTIONS:
        many = received(schedule, replace(problem, heads=32), direction)
        assert many == received(schedule, problem, direction)
        twice = received(schedule, replace(problem, heads=32, kv_heads=4), direction)
        assert twice == tuple(2 * n for n in many)


@pytest.mark.parametrize("schedule", RINGS)
def test_keys_are_double_buffered(schedule: str) -> None:
    for world in (4, 8):
        for program in programs_of(schedule, problem_of(schedule, world, Mask.full()), "forward"):
            buffers = [b for b in program.buffers if b.role == "scratch" and b.kind == "kv"]
            assert sum(b.rows for b in buffers) <= 2 * ROWS


def test_each_hop_overlaps_with_attention_over_the_previous_one() -> None:
    for program in programs_of("ring", problem_of("ring", 4, Mask.full()), "forward"):
        kinds = [str(step).split()[0] for step in program.steps]
        assert kinds == [
            "post",
            "attend",
            "wait",
            "post",
            "attend",
            "wait",
            "post",
            "attend",
            "wait",
            "attend",
            "finish",
        ]


@pytest.mark.parametrize("schedule", RINGS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_small_gaps_between_rows_travel_along_on_large_shards(schedule: str, direction: Direction) -> None:
    """Documents of 3 to 9 tokens leave gaps of a few rows on striped shards of 128 rows, which are filled."""
    world, rows = 4, 128
    lengths = [3 + n % 7 for n in range(85)]
    mask = Mask.causal() & Mask.documents([*lengths, world * rows - sum(lengths)])
    problem = problem_of(schedule, world, mask, rows)
    programs = programs_of(schedule, problem, direction)
    verify_programs(programs, problem)
    for post in posts(programs):
        assert len(post.sends) < rows // 4


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("schedule", RINGS)
def test_ranks_of_a_large_world_post_matching_messages(schedule: str, direction: Direction) -> None:
    """What one rank sends to the next in a hop, the next receives; documents leave most hops empty."""
    world = 300
    mask = Mask.causal() & Mask.documents([40] * 60)
    problem = problem_of(schedule, world, mask, rows=8)
    programs = [build(schedule, problem, rank, direction) for rank in range(140, 146)]
    for one, other in pairwise(programs):
        shapes = [
            [(post.name, part.slice.shape) for post in posts([program]) for part in side(post) if part.peer == peer]
            for program, side, peer in (
                (one, lambda post: post.sends, other.rank),
                (other, lambda post: post.recvs, one.rank),
            )
        ]
        assert shapes[0] == shapes[1]
