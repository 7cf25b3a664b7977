"""Attention over 2, 3 and 4 ranks against the oracle on one: every schedule, mask, dtype and feature."""

import pytest

from cases import CASES
from mesh import Item, run_items, whole
from oracle import check

SCHEDULES = ("ring", "zigzag", "striped", "allgather", "allgather(head_stride=1)")


def _run(pool, items):
    world = items[0].world
    parts = pool.run(world, run_items, items, timeout=240.0)
    for n, item in enumerate(items):
        try:
            check(whole(item, [results[n] for results in parts]), item.case, item.case.inputs(item.dtype))
        except AssertionError as error:
            raise AssertionError(f"{item}: {error}") from None


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_case_is_right(pool, world, schedule):
    _run(pool, [Item(case, schedule, world) for case, _, _ in CASES.values()])
