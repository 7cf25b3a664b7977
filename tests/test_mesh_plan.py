"""`schedule="auto"`, `return_plan` and `verify` over a mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mesh_cases import CAUSAL, SCHEDULES, cut, default_layout, qkv
from meshflash import Layout, Mask, attention
from meshflash.engine.check import WrongResultError
from meshflash.engine.compile import make_plan
from meshflash.engine.executable import MeshExecutable, Results
from meshflash.engine.explain import Explanation
from meshflash.engine.group_context import group_context
from meshflash.engine.spec import AttentionSpec


def check_plan(rank, world, group):
    """Assert that the plan names schedule, layout, kernels and bytes of the call."""
    inputs = [cut(x, Layout.zigzag(32, world), rank) for x in qkv(32, dtype=torch.float32)]
    out, lse, ran = attention(
        *inputs, schedule="zigzag", mask=CAUSAL, kernel="tiled", return_lse=True, return_plan=True
    )
    assert isinstance(ran, Explanation)
    assert ran.program is not None
    assert out.shape == inputs[0].shape
    assert lse.shape == (2, 4, 16)
    assert (ran.schedule, ran.layout, ran.world, ran.transport) == ("zigzag", "zigzag", world, "gloo")
    assert (ran.reason, ran.kernels) == ("requested", ("tiled",))
    assert (ran.program.rank, ran.program.world, ran.program.direction) == (rank, world, "forward")
    transport = group_context(group.group_name).transport(torch.device("cpu"))
    transport.counters.clear()
    attention(*inputs, schedule="zigzag", mask=CAUSAL)
    assert ran.received_bytes == transport.counters.received_bytes > 0
    assert ran.scratch_bytes > 0
    text = f"zigzag (requested) over {world} ranks, layout zigzag, by gloo; kernels: tiled (requested); forward: "
    assert str(ran) == f"{text}{ran.received_bytes:,} bytes received, {ran.scratch_bytes:,} of scratch"
    ran = attention(*inputs, mask=CAUSAL, return_plan=True)[1]
    assert ran.schedule == "allgather"
    assert ran.reason == "auto: keys and values of the whole sequence take at most 64 MiB a rank"
    assert ran.kernels == ("vendor",)


def test_plan_names_schedule_kernels_and_bytes(pool):
    pool.run(2, check_plan)


def auto_schedules(rank, world, group, limit):
    """Return schedule and layout that auto selects with this size limit, with and without a layout."""
    inputs = [cut(x, Layout.zigzag(16, world), rank) for x in qkv(16, dtype=torch.float32)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshflash.engine.compile.GATHER_BYTES", limit)
        ran = attention(*inputs, layout=Layout.zigzag(16, world), mask=CAUSAL, return_plan=True)[1]
        other = attention(*inputs, mask=CAUSAL, return_plan=True)[1]
    return [(each.schedule, each.layout) for each in (ran, other)]


def test_auto_gathers_up_to_a_size_limit_and_keeps_the_layout(pool):
    gathered_bytes = 16 * 2 * 2 * (8 + 8) * 4  # tokens, batch, key heads, dims, bytes
    for limit, schedules in ((gathered_bytes, ["allgather", "allgather"]), (gathered_bytes - 1, ["zigzag", "ulysses"])):
        for ran in pool.run(2, auto_schedules, limit):
            assert ran == list(zip(schedules, ["zigzag", "contiguous"], strict=True))


UNEVEN = Layout(((range(3),), (range(3, 16),)), "custom")
DOCUMENTS = CAUSAL & Mask.documents([2, 14])


@pytest.mark.parametrize(
    ("options", "kv_heads", "schedule"),
    [
        (dict(mask=CAUSAL), 2, "ulysses"),
        (dict(mask=CAUSAL), 3, "ring"),
        (dict(mask=Mask.full()), 2, "ring"),
        (dict(mask=CAUSAL & Mask.window(1, 0)), 2, "ring"),
        (dict(mask=DOCUMENTS), 2, "ring"),
        (dict(mask=CAUSAL, layout=Layout.zigzag(16, 2)), 2, "zigzag"),
        (dict(mask=CAUSAL, layout=Layout.striped(16, 2)), 2, "striped"),
        (dict(mask=Mask.full(), layout=UNEVEN), 2, "ulysses"),
        (dict(mask=CAUSAL, k_layout=Layout.zigzag(16, 2)), 2, "ring"),
        (dict(mask=CAUSAL, q_offset=4), 2, "ring"),
    ],
)
def test_auto_exchanges_heads_where_a_ring_would_give_ranks_unequal_work(monkeypatch, options, kv_heads, schedule):
    monkeypatch.setattr("meshflash.engine.compile.GATHER_BYTES", 0)
    spec = AttentionSpec(scale=1.0, **options)
    plan = make_plan(spec, 8, 8, 64, kv_heads, 2)
    assert plan.schedule == schedule
    assert ("the busiest rank has 1.47 times" in plan.reason) == (schedule == "ulysses" and "layout" not in options)


def auto_schedule_on_uneven_shards(rank, world, group, limit):
    """Return the schedule that auto selects on shards of 3 and 4 tokens."""
    layout = Layout(((range(3),), (range(3, 7),)))
    inputs = [cut(x, layout, rank) for x in qkv(7, batch=1, kv_heads=4, dim=8, dtype=torch.float32)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshflash.engine.compile.GATHER_BYTES", limit * 4 * (8 + 8) * 4)  # tokens, heads, dims, bytes
        return attention(*inputs, layout=layout, mask=CAUSAL, return_plan=True)[1].schedule


@pytest.mark.parametrize(("limit", "schedule"), [(7, "allgather"), (6, "ulysses")])
def test_auto_selects_the_same_schedule_on_ranks_with_uneven_shards(pool, limit, schedule):
    assert pool.run(2, auto_schedule_on_uneven_shards, limit) == [schedule] * 2


def check_verify(rank, world, group):
    """Run verify=True with every schedule, feature and dtype."""
    whole = qkv(40, dtype=torch.float32)
    for schedule in SCHEDULES:
        layout = default_layout(schedule, 40, world)
        inputs = [cut(x, layout, rank) for x in whole]
        call: dict[str, Any] = dict(schedule=schedule, layout=layout, mask=CAUSAL, verify=True)
        features: dict[str, Any] = dict(
            sink_logits=torch.randn(4, generator=torch.Generator().manual_seed(0)), softcap=3.0
        )
        features |= dict(alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4]), dropout=0.3, seed=3, q_offset=2)
        attention(*inputs, **call)
        attention(*inputs, **(call | features))
        attention(*(x.bfloat16() for x in inputs), **call)
    short = Layout(((range(3),), *[()] * (world - 1)))
    attention(*(cut(x, short, rank) for x in whole), layout=short, mask=CAUSAL & Mask.window(1, 0), verify=True)


def test_verify_accepts_correct_results(pool):
    pool.run(3, check_verify)


def verify_tampered_result(rank, world, group, bad, how):
    """Return the message of a call that verifies, after one rank changed its result."""
    plain = MeshExecutable.forward

    def wrong(*arguments):
        out, lse, saved = plain(*arguments)
        if how == "out":
            out *= 1.01
        elif how == "row":
            out[:, -1] += 1
        elif how == "nan":
            out[0, 0, 0, 0] = torch.nan
        else:
            lse[..., 0] = -torch.inf
        return Results(out, lse, saved)

    inputs = [cut(x, Layout.zigzag(42, world), rank) for x in qkv(42, dtype=torch.float32)]
    with pytest.MonkeyPatch.context() as patch:
        if rank == bad:
            patch.setattr(MeshExecutable, "forward", wrong)
        with pytest.raises(WrongResultError) as error:
            attention(*inputs, schedule="zigzag", mask=CAUSAL, verify=True)
    attention(*inputs, schedule="zigzag", mask=CAUSAL, verify=True)
    return str(error.value)


@pytest.mark.parametrize(("bad", "how"), [(1, "out"), (0, "row"), (2, "nan"), (1, "lse")])
def test_verify_raises_on_every_rank_if_one_result_is_wrong(pool, bad, how):
    messages = pool.run(3, verify_tampered_result, bad, how)
    assert len(set(messages)) == 1
    assert f"verify: rank {bad} of the group is off by" in messages[0]
    assert "schedule zigzag, layout zigzag, mask causal" in messages[0]
