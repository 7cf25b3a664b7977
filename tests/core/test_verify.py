"""The verifier accepts all schedules on any world size, mask, layout and number of heads, and counts their bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest

from cases import SCHEDULES
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import Ranges, Sizes
from meshflash.core.verify import verify_programs
from meshflash.schedules.registry import build, default_layout, verified

CAUSAL = Mask.causal()
#: Masks as functions of the number of tokens.
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
#: Up to this world size every mask is tested; beyond, each world size has some masks, and each mask some world sizes.
ALL_MASKS_UP_TO = 4
#: The cost of a proof grows faster than the world: most of these masks are tested on worlds up to this one.
FOUR_MASKS_UP_TO = 8
#: Worlds of several factors, whose ranks form groups in several ways.
TWO_MASKS = (9, 12, 16)
TABLES_UP_TO = 5


def masks_of(schedule: str, world: int) -> list[str]:
    """Return the masks to verify on a world size: all of them, four on larger worlds, one or two on the largest."""
    names = list(MASKS)
    if world <= ALL_MASKS_UP_TO:
        return names
    # consecutive worlds take consecutive masks
    first = sum(map(num_masks, range(ALL_MASKS_UP_TO + 1, world))) + SCHEDULES.index(schedule)
    return [names[(first + n) % len(names)] for n in range(num_masks(world))]


def num_masks(world: int) -> int:
    """Return how many masks are verified on a world above ALL_MASKS_UP_TO."""
    return 4 if world <= FOUR_MASKS_UP_TO else 2 if world in TWO_MASKS else 1


def verify_forward_and_backward(schedule: str, problem: Problem, tables: bool = True) -> None:
    verified(schedule, problem, tables=tables)


def default_ranges(schedule: str, tokens: int, world: int) -> tuple[Ranges, ...]:
    """Return the default layout of a schedule."""
    return default_layout(schedule)(tokens, world).ranges


def verify_masks(schedule: str, world: int, names: list[str]) -> None:
    """Verify a schedule on its default layout under the named masks."""
    held = default_ranges(schedule, 53, world)
    for name in names:
        problem = Problem(held, held, MASKS[name](53), 4, 2, lse=world % 2 == 0)
        verify_forward_and_backward(schedule, problem, tables=world <= TABLES_UP_TO)


@pytest.mark.parametrize("world", range(1, 17))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_verifies_on_every_world_size(schedule: str, world: int) -> None:
    verify_masks(schedule, world, masks_of(schedule, world))


@pytest.mark.slow
@pytest.mark.parametrize("world", range(ALL_MASKS_UP_TO + 1, 17))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_verifies_on_the_remaining_masks(schedule: str, world: int) -> None:
    verify_masks(schedule, world, [name for name in MASKS if name not in masks_of(schedule, world)])


def test_every_mask_is_tested_on_two_large_worlds_per_schedule() -> None:
    for schedule in SCHEDULES:
        tested = [name for world in range(ALL_MASKS_UP_TO + 1, 17) for name in masks_of(schedule, world)]
        assert all(tested.count(name) >= 2 for name in MASKS)
        largest = [name for world in range(FOUR_MASKS_UP_TO + 1, 17) for name in masks_of(schedule, world)]
        assert set(largest) == set(MASKS)


@pytest.mark.parametrize(("schedule", "mask"), list(zip(SCHEDULES, MASKS, strict=False)))
def test_tile_tables_verify_on_a_large_world(schedule: str, mask: str) -> None:
    held = default_ranges(schedule, 61, 11)
    verify_forward_and_backward(schedule, Problem(held, held, MASKS[mask](61), 2, 1))


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5, 11])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_verify_on_lengths_that_the_world_size_does_not_divide(schedule: str, tokens: int) -> None:
    for world, mask in product((3, 7), ("full", "causal", "two-sided window", "documents both ways", "padding")):
        held = default_ranges(schedule, tokens, world)
        verify_forward_and_backward(schedule, Problem(held, held, MASKS[mask](tokens), 2, 1))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (3, 3), (6, 2), (6, 3)])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "allgather(head_stride=2)"])
def test_schedules_verify_with_any_gqa_ratio(schedule: str, heads: int, kv_heads: int) -> None:
    for world, mask in product((2, 3), ("full", "causal", "documents of batch rows")):
        held = default_ranges(schedule, 12, world)
        verify_forward_and_backward(schedule, Problem(held, held, MASKS[mask](12), heads, kv_heads))


CROSS = {
    "full": Mask.full(),
    "causal": CAUSAL,
    "window": Mask.window(4, 2),
    "documents": Mask.documents([9, 0, 20], k_lengths=[3, 4, 10]),
    "documents of batch rows": Mask.documents([[9, 20], [29, 0]], k_lengths=[[10, 7], [12, 5]]),
}


@pytest.mark.parametrize("mask", CROSS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_verify_with_cross_attention(schedule: str, mask: str) -> None:
    for world in (1, 2, 4, 5):
        verify_forward_and_backward(
            schedule,
            Problem(default_ranges(schedule, 29, world), default_ranges(schedule, 17, world), CROSS[mask], 4, 2),
        )
    verify_forward_and_backward(
        schedule, Problem(Layout.zigzag(29, 3).ranges, Layout.striped(17, 3).ranges, CROSS[mask], 4, 2)
    )


def shuffled(tokens: int, world: int, seed: int) -> tuple[Ranges, ...]:
    """Draw contiguous and strided ranges of any size, on any rank, in any order."""
    rng = random.Random(seed)
    ranges, begin = [], 0
    while begin < tokens:
        end = min(tokens, begin + rng.randint(1, 9))
        step = rng.choice([1, 1, 2, 3])
        ranges += [range(begin + n, end, step) for n in range(min(step, end - begin))]
        begin = end
    rng.shuffle(ranges)
    held: list[list[range]] = [[] for _ in range(world)]
    for drawn in ranges:
        held[rng.randrange(world)].append(drawn)
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
    """Return every third mask, so that three consecutive world sizes have all of them."""
    return [*MASKS][first % 3 :: 3]


def verify_masks_on_layout(schedule: str, layout: str, world: int, names: list[str]) -> None:
    """Verify a schedule on a custom layout under the named masks."""
    held = CUSTOM[layout](31, world)
    for name in names:
        verify_forward_and_backward(schedule, Problem(held, held, MASKS[name](31), 2, 1), tables=world == 2)


@pytest.mark.parametrize("layout", CUSTOM)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_verify_on_any_layout(schedule: str, layout: str) -> None:
    verify_masks_on_layout(schedule, layout, 2, [*MASKS])
    verify_masks_on_layout(schedule, layout, 5, some_masks([*CUSTOM].index(layout) + SCHEDULES.index(schedule)))


@pytest.mark.slow
@pytest.mark.parametrize("layout", CUSTOM)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_verify_on_any_layout_with_five_ranks_and_all_masks(schedule: str, layout: str) -> None:
    verify_masks_on_layout(schedule, layout, 5, [*MASKS])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_verify_with_different_layouts_of_queries_and_keys(schedule: str) -> None:
    for n, (q, k) in enumerate(zip(CUSTOM, [*CUSTOM][1:] + [*CUSTOM][:1], strict=True)):
        for mask in some_masks(n + SCHEDULES.index(schedule)):
            verify_forward_and_backward(
                schedule, Problem(CUSTOM[q](23, 3), CUSTOM[k](23, 3), MASKS[mask](23), 2, 1), tables=False
            )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_verify_with_queries_that_begin_later_than_keys(schedule: str) -> None:
    """As in decoding, queries start at position 20 and keys at 0."""
    for world, mask in product((1, 2, 3), (Mask.full(), CAUSAL, CAUSAL & Mask.window(5, 0), Mask.documents([13, 16]))):
        q = tuple(
            tuple(range(r.start + 20, r.stop + 20, r.step) for r in held) for held in default_ranges(schedule, 9, world)
        )
        verify_forward_and_backward(schedule, Problem(q, default_ranges(schedule, 29, world), mask, 4, 2))


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
