"""Programs bound to memory, with all ranks as threads: results do not depend on the old content of scratch."""

from __future__ import annotations

import threading

import pytest
import torch

from cases import CASES, SCHEDULES
from hub import in_threads, prepare, run_item, run_rank
from meshflash import Layout, Mask
from meshflash.check.oracle import Case, check
from meshflash.check.spread import Item
from meshflash.comm.transports.loopback import HubTransport
from meshflash.core.program import Attend, Part, Post, Program, Slice, Wait
from meshflash.engine.binding import run_beside_messages
from meshflash.engine.memory import Arena, Pool
from meshflash.kernels.tiled import Tiled

CAUSAL = Mask.causal()
#: Small cases that cover all differences between programs.
WIDE = ("gqa", "no keys", "fewer keys", "everything")
SCRATCH: dict[str, Case] = {
    "batch 1": Case(CAUSAL, batch=1, heads=4, kv_heads=2),
    "batch 3": Case(CAUSAL, batch=3, heads=4, kv_heads=2),
    "window": Case(CAUSAL & Mask.window(5, 0), batch=3, tokens=50),
    "documents": Case(Mask.documents([1, 30, 6]), batch=1, value_dim=24),
    "empty rows": CASES["empty rows"][0],
    "sinks and empty rows": Case(Mask.first(4) & Mask.window(9, 0), sinks=True, lse_gradient=True),
    "everything": CASES["everything"][0],
}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill scratch with NaN, in every dtype, whenever a call takes it from the pool."""
    take = Pool.take

    def poison(self: Pool, wanted: int, used: int) -> Arena:
        arena = take(self, wanted, used)
        arena.memory.fill_(0xFF)
        return arena

    monkeypatch.setattr(Pool, "take", poison)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert torch.full((8,), 0xFF, dtype=torch.uint8).view(dtype).isnan().all()


def run_and_check(item: Item, calls: int = 1) -> None:
    """Run an item in `calls` consecutive calls and check the last result against the oracle."""
    leaves = item.case.inputs(item.dtype)
    check(run_item(item, leaves, calls), item.case, leaves)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", WIDE)
def test_eight_ranks_match_the_oracle(name, schedule):
    run_and_check(Item(CASES[name][0], schedule, 8))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world", [5, 8, 13])
def test_every_case_matches_the_oracle_on_5_to_13_ranks(world, schedule):
    for case, _, _ in CASES.values():
        run_and_check(Item(case, schedule, world))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", SCRATCH)
def test_nan_in_scratch_does_not_reach_results(poisoned, name, schedule):
    run_and_check(Item(SCRATCH[name], schedule, 3), calls=2)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("batch", [1, 3])
def test_nan_in_scratch_does_not_reach_half_precision_results(poisoned, batch, schedule):
    case = Case(CAUSAL, batch=batch, heads=4, kv_heads=2)
    for reduce_dtype in (None, torch.bfloat16):
        item = Item(case, schedule, 3, torch.bfloat16, reduce_dtype=reduce_dtype)
        got, leaves = run_item(item, times=2), case.inputs(torch.bfloat16)
        if reduce_dtype is None:
            check(got, case, leaves)
        assert not any(x.isnan().any() for x in got.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_uneven_and_empty_shards_match_the_oracle(poisoned, schedule):
    layout = Layout(((range(20, 21),), (), (range(1, 20, 2), range(21, 25)), (range(0, 20, 2),)))
    for mask in (CAUSAL, CAUSAL & Mask.window(3, 0)):
        run_and_check(Item(Case(mask, tokens=25), schedule, 4, layout=layout))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_that_see_nothing_are_0_and_their_lse_is_minus_infinity(poisoned, schedule):
    item = Item(Case(Mask.documents([[3], [0]], pad=True), tokens=9, lse_gradient=True), schedule, 3)
    got = run_item(item)
    assert (got["lse"][1] == -torch.inf).all()
    assert (got["lse"][0, :, 3:] == -torch.inf).all()
    assert (got["lse"][0, :, :3] > -torch.inf).all()
    for name, rows in (("out", 3), ("dq", 3), ("dk", 3), ("dv", 3)):
        assert not got[name][1].any()
        assert not got[name][0, rows:].any()


def test_every_attend_step_has_its_own_kernel():
    item = Item(Case(CAUSAL, tokens=64), "zigzag", 4)
    prepared = prepare(item, 0)
    kernels = prepared.kernels("forward", item.case.features(item.case.inputs(item.dtype)))
    assert list(kernels) == [step for step in prepared.program("forward").steps if type(step).__name__ == "Attend"]
    assert {choice.kernel.name for choice, _ in kernels.values()} <= {"vendor", "tiled"}


def test_kernel_that_does_not_support_a_step_is_refused():
    item = Item(Case(CAUSAL & Mask.window(3, 0), tokens=64), "ring", 2, kernel="vendor")
    features = item.case.features(item.case.inputs(item.dtype))
    with pytest.raises(ValueError, match=r'kernel="vendor" does not support .*; supported here: (triton, )?tiled'):
        prepare(item, 0).kernels("forward", features)


@pytest.mark.parametrize("schedule", ["ring", "zigzag", "double_ring(inner=2)", "allgather"])
def test_steps_beside_messages_leave_the_sms_that_the_transport_needs(schedule, monkeypatch):
    item = Item(Case(CAUSAL, tokens=64), schedule, 4, kernel="tiled")
    found: dict[int, list[int]] = {rank: [] for rank in range(4)}
    here, forward = threading.local(), Tiled.forward

    def noted(self, x, *more):
        found[here.rank].append(x.sm_margin)
        return forward(self, x, *more)

    monkeypatch.setattr(Tiled, "forward", noted)
    monkeypatch.setattr(HubTransport, "sm_margin", 3)
    leaves = item.case.inputs(item.dtype)

    def rank(me, hub):
        here.rank = me
        run_rank(item, leaves, me, hub)

    in_threads(4, rank)
    for me, margins in found.items():
        program = prepare(item, me).program("forward")
        steps = zip(program.steps, run_beside_messages(program), strict=True)
        assert margins == [3 * beside for step, beside in steps if isinstance(step, Attend)]
    assert found[3][-1] == 0, "the last step of the last rank has no messages beside it"
    assert (3 in found[0]) == (schedule != "allgather")


def test_steps_between_a_post_and_its_wait_run_beside_messages():
    place, at = Slice("kv", (0, 4), (0, 2)), (range(0, 8, 2),)
    first, second = Post("1", (Part(1, place),), (Part(2, place),)), Post("2", (), (Part(1, place),))
    own = Post("own", (Part(0, place),), (Part(0, place),))  # a copy in this rank's memory
    attend = Attend(place, place, place, at, at, (0, 2))
    steps = (attend, first, attend, second, Wait("1"), attend, Wait("2"), attend, own, attend, Wait("own"))
    beside = run_beside_messages(Program("", "forward", 0, 3, (), steps, ()))
    assert [run for step, run in zip(steps, beside, strict=True) if step is attend] == [False, True, True, False, False]
