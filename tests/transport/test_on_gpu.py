"""Transports between ranks that share a GPU, every schedule: run with `-m gpu`."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import pytest
import torch
from torch import distributed as _distributed

from meshflash import Layout, Mask, attention, flash_attention
from meshflash.check import run, suite
from meshflash.launch.processes import RankError, run_ranks, take_device
from meshflash.schedules.registry import over_lines
from meshflash.sharding import shard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
dist = _distributed


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("transport", ["symmetric", "host_staged"])
def test_every_schedule_is_right(transport, world):
    checks = suite.everything(over_lines(world), world, quick=True, device="cuda", transport=transport)
    missed = [verdict for verdict in run.run(checks, world) if verdict.outcome != "right"]
    assert not missed, missed[:3]


def changing(rank, world, tell, transport):
    """A hundred calls of the same kind with other inputs each time, against one device."""
    take_device("cuda", rank)
    layout, worst = Layout.zigzag(515, world), 0.0
    for n in range(100):
        generator = torch.Generator("cuda").manual_seed(n)
        whole = [torch.randn(1, 515, heads, 64, device="cuda", generator=generator) for heads in (4, 2, 2)]
        own = [shard(x, layout).contiguous() for x in whole]
        got = attention(*own, layout=layout, schedule="zigzag", mask=Mask.causal(), transport=transport)
        want = flash_attention(*whole, mask=Mask.causal())
        worst = max(worst, float((got - shard(want, layout)).abs().max()))
    return worst


@pytest.mark.parametrize("transport", ["symmetric", "host_staged"])
def test_a_hundred_calls_with_changing_inputs(transport):
    assert max(run_ranks(2, changing, transport)) < 1e-4


def over_nccl(rank, world, tell):
    """NCCL between ranks of one GPU takes them for ranks of several hosts, if told so."""
    os.environ["NCCL_HOSTID"] = f"host{rank}"
    take_device("cuda", rank)
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    layout = Layout.zigzag(130, world)
    generator = torch.Generator("cuda").manual_seed(0)
    whole = [torch.randn(1, 130, heads, 64, device="cuda", generator=generator) for heads in (4, 2, 2)]
    worst = 0.0
    for schedule in ("zigzag", "allgather", "ringx4", "ulysses", "double_ring"):
        own = [shard(x, layout).contiguous() for x in whole]
        got, plan = attention(*own, mesh=group, layout=layout, schedule=schedule, mask=Mask.causal(), return_plan=True)
        assert plan.transport == "nccl"
        want = flash_attention(*whole, mask=Mask.causal())
        worst = max(worst, float((got - shard(want, layout)).abs().max()))
    return worst


def test_nccl():
    assert max(run_ranks(2, over_nccl, timeout=200)) < 1e-4


def stops(rank, world, tell, transport):
    """One rank does not come to the second call."""
    os.environ["MESHFLASH_TIMEOUT"] = "8"
    take_device("cuda", rank)
    x = torch.randn(1, 64, 2, 64, device="cuda")
    attention(x, x, x, schedule="ring", transport=transport)
    torch.cuda.synchronize()
    if rank == 0:
        begin = time.monotonic()
        try:
            attention(x, x, x, schedule="ring", transport=transport)
            torch.cuda.synchronize()
        except RuntimeError as error:
            tell((type(error).__name__, time.monotonic() - begin))


@pytest.mark.parametrize("transport", ["host_staged", "symmetric"])
def test_a_rank_that_stops_coming_ends_the_others(transport):
    told: list[tuple[str, float]] = []
    with suppress(RankError):  # what follows on a group or a device that was left may fail as it likes
        run_ranks(2, stops, transport, timeout=60, listen=told.append)
    assert len(told) == 1
    assert told[0][1] < 8 + 10
    if transport == "host_staged":
        assert told[0][0] == "TransportError"
