"""Attention over 2, 3 and 4 ranks against the single-device oracle: every schedule, mask, dtype and feature.

Each case also compares the bytes that every rank received and held with the numbers of the verifier.
"""

import pytest
import torch

from cases import CASES, SCHEDULES
from mesh_cases import run_items
from meshflash import Layout, Mask
from meshflash.check.oracle import Case, check
from meshflash.check.spread import Item, check_moved, whole

CAUSAL = Mask.causal()

FAMILIES = {
    "full": Mask.full(),
    "causal": CAUSAL,
    "window": CAUSAL & Mask.window(9, 0),
    "bidirectional window": Mask.window(4, 6),
    "prefix": CAUSAL | Mask.first(11),
    "sink tokens": CAUSAL & (Mask.window(6, 0) | Mask.first(4)),
    "documents": CAUSAL & Mask.documents([5, 0, 20, 12]),
    "documents by row": Mask.documents([[5, 32], [37]]),
    "padding": CAUSAL & Mask.documents([[5, 20], [30]], pad=True),
    "image spans": CAUSAL | Mask.slices([(4, 9), (20, 31)], [(4, 9), (20, 31)]),
    "slices by row": Mask.slices(
        [[(0, 15), (18, 37)], [(3, 30), (0, 9)]],
        [[(0, 15), (5, 30)], [(0, 37), (10, 12)]],  # the last slice shows no pair
        [["causal", "bi_causal"], ["inv_causal", "bi_causal"]],
    ),
}
HEADS = ((4, 4), (4, 2), (3, 1))


def run(pool, items):
    """Run items on the pool; assert that results match the oracle and that traffic matches the verifier."""
    parts = pool.run(items[0].world, run_items, items, timeout=240.0)
    for n, item in enumerate(items):
        try:
            results = whole(item, [part[n][0] for part in parts])
            check(results, item.case, item.case.inputs(item.dtype))
            check_moved(item, [part[n][1] for part in parts])
        except AssertionError as error:
            raise AssertionError(f"{item}: {error}") from None


def half_of_cases(schedule, world, other=False):
    """Return one half of all cases, or the other half; the choice alternates with the world size and the schedule."""
    return list(CASES.values())[(SCHEDULES.index(schedule) + world + other) % 2 :: 2]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_case_matches_reference(pool, world, schedule):
    """Run all cases on two ranks, one half on three ranks, and the other half on four."""
    cases = CASES.values() if world == 2 else half_of_cases(schedule, world)
    run(pool, [Item(case, schedule, world) for case, _, _ in cases])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world", [3, 4])
def test_remaining_cases_match_reference(pool, world, schedule):
    run(pool, [Item(case, schedule, world) for case, _, _ in half_of_cases(schedule, world, other=True)])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_mask_dtype_and_gqa_ratio_matches_reference(pool, schedule):
    dtypes = (torch.float64, torch.bfloat16, torch.float16)
    items = []
    for n, mask in enumerate(FAMILIES.values()):
        for m, dtype in enumerate(dtypes):
            heads, kv_heads = HEADS[(n + m) % len(HEADS)]
            items.append(Item(Case(mask, heads=heads, kv_heads=kv_heads), schedule, 3, dtype))
    run(pool, items)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lengths_that_ranks_do_not_divide_match_reference(pool, schedule):
    cases = [Case(CAUSAL, batch=1 + tokens % 2, tokens=tokens) for tokens in (1, 2, 3, 5, 7, 11, 29)]
    run(pool, [Item(case, schedule, 4) for case in cases])


def test_every_schedule_matches_reference_on_every_layout(pool):
    tokens = 41
    irregular = Layout(((range(40, 41), range(3, 9, 2)), (), (range(9, 40), range(3), range(4, 9, 2))))
    layouts = [
        Layout.balanced(CAUSAL, tokens, 3),
        irregular,
        *(make(tokens, 3) for make in (Layout.zigzag, Layout.striped)),
    ]
    items = [
        Item(Case(mask, tokens=tokens, heads=4, kv_heads=2), schedule, 3, layout=layout, k_layout=k_layout)
        for schedule in ("ring", "allgather")
        for mask in (CAUSAL, CAUSAL & (Mask.window(7, 0) | Mask.first(3)), Mask.documents([20, 21]))
        for layout, k_layout in zip(layouts, [*layouts[1:], None], strict=True)
    ]
    run(pool, items)


def test_bfloat16_reduce_dtype_is_within_tolerance(pool):
    case = Case(CAUSAL, heads=4, kv_heads=2)
    items = [Item(case, schedule, 3, torch.bfloat16, reduce_dtype=torch.bfloat16) for schedule in SCHEDULES]
    run(pool, items)


def test_single_rank_matches_reference(pool):
    run(pool, [Item(case, "zigzag", 1) for case, _, _ in list(CASES.values())[::7]])
