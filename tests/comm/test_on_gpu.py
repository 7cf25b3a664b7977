"""Every schedule and transport between ranks that share a GPU: run with `-m gpu`."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import distributed as _distributed

from meshflash import Layout, Mask, attention, flash_attention
from meshflash.check import run, suite
from meshflash.comm.transports.loopback import Loopback
from meshflash.engine.executable import MeshExecutable, Plan
from meshflash.engine.local import rows_of
from meshflash.engine.placement import Setting
from meshflash.kernels.contract import Features, Grads, new_outputs
from meshflash.kernels.hopper.support import has_gluon
from meshflash.runtime.devices import take_device
from meshflash.runtime.mps import missing, mps
from meshflash.runtime.processes import RankError, run_ranks
from meshflash.schedules.registry import build, schedule_variants
from meshflash.sharding import shard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
dist = _distributed


@pytest.fixture(autouse=True)
def mps_if_installed():
    """Let ranks that share a GPU run at the same time by MPS, if it is installed; otherwise they are time-sliced."""
    with nullcontext() if missing() else mps():
        yield


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("transport", ["symmetric", "host_staged"])
def test_every_schedule_matches_reference(transport, world):
    checks = suite.everything(schedule_variants(world), world, quick=True, device="cuda", transport=transport)
    failed = [verdict for verdict in run.run(checks, world) if verdict.outcome != "right"]
    assert not failed, failed[:3]


def difference(tokens, seed, layout, **options):
    """Return the largest difference from a single device, over the output and all gradients."""
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v, dout = (torch.randn(1, tokens, heads, 64, device="cuda", generator=generator) for heads in (4, 2, 2, 4))
    whole = [x.requires_grad_() for x in (q, k, v)]
    own = [shard(x.detach(), layout).contiguous().requires_grad_() for x in whole]
    got = attention(*own, layout=layout, mask=Mask.causal(), **options)
    want = flash_attention(*whole, mask=Mask.causal())
    pairs = [(got, want)]
    got_grads, want_grads = torch.autograd.grad(got, own, shard(dout, layout)), torch.autograd.grad(want, whole, dout)
    pairs += zip(got_grads, want_grads, strict=True)
    return max(float((got - shard(want, layout)).abs().max()) for got, want in pairs)


def compare_changing_inputs(rank, world, report, transport):
    """Compare a hundred calls, each with new inputs, with a single device."""
    take_device("cuda", rank)
    layout = Layout.zigzag(515, world)
    return max(difference(515, n, layout, schedule="zigzag", transport=transport) for n in range(100))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("transport", ["symmetric", "host_staged"])
def test_a_hundred_calls_with_changing_inputs_match_reference(transport, world):
    assert max(run_ranks(world, compare_changing_inputs, transport)) < 1e-4


def compare_over_nccl(rank, world, report):
    """Compare all schedules over NCCL, which lets ranks share a GPU if NCCL_HOSTID puts them on separate hosts."""
    os.environ["NCCL_HOSTID"] = f"host{rank}"
    take_device("cuda", rank)
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    x = torch.randn(1, 8, 2, 64, device="cuda")
    assert attention(x, x, x, mesh=group, return_plan=True)[1].transport == "nccl"
    layout = Layout.zigzag(130, world)
    once = [difference(130, 0, layout, mesh=group, schedule=schedule) for schedule in schedule_variants(world)]
    repeated = [difference(130, n, layout, mesh=group, schedule="zigzag") for n in range(100)]
    return max(once + repeated)


@pytest.mark.parametrize("world", [2, 4])
def test_schedules_match_reference_over_nccl(world):
    assert max(run_ranks(world, compare_over_nccl, timeout=200)) < 1e-4


def skip_second_call_on_rank_1(rank, world, report, transport):
    """Skip the second call on rank 1; rank 0 reports its error and how long it waited."""
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
            report((type(error).__name__, time.monotonic() - begin))


@pytest.mark.parametrize("transport", ["host_staged", "symmetric"])
def test_absent_rank_ends_the_other_ranks(transport):
    reports: list[tuple[str, float]] = []
    with suppress(RankError):  # later work on a poisoned group or device may fail in any way
        run_ranks(2, skip_second_call_on_rank_1, transport, timeout=60, listen=reports.append)
    assert len(reports) == 1
    assert reports[0][1] < 8 + 10
    if transport == "host_staged":
        assert reports[0][0] == "TransportError"


def compare_captured_graph(rank, world, report, transport, schedule):
    """Compare a captured graph of forward and backward, replayed with other inputs, with eager calls."""
    device, layout = take_device("cuda", rank), Layout.zigzag(512, world)
    rows = layout.lengths[rank]
    q, k, v, dout = (torch.randn(1, rows, heads, 64, device=device) for heads in (4, 2, 2, 4))
    own = [x.requires_grad_() for x in (q, k, v)]

    def both():
        out = attention(*own, layout=layout, schedule=schedule, mask=Mask.causal(), transport=transport)
        return out, *torch.autograd.grad(out, own, dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured_outputs = both()
    worst = 0.0
    for _ in range(5):
        with torch.no_grad():
            for x in (*own, dout):
                x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        got = [x.clone() for x in captured_outputs]
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(got, both(), strict=True)))
    return worst


@pytest.mark.parametrize("schedule", ["zigzag", "ulysses", "allgather"])
def test_calls_over_symmetric_memory_can_be_captured_in_a_graph(schedule):
    assert max(run_ranks(2, compare_captured_graph, "symmetric", schedule, timeout=120)) < 1e-4


def test_transport_that_cannot_be_captured_is_refused():
    with pytest.raises(RankError, match="cannot be captured: it moves messages by threads of the host"):
        run_ranks(2, compare_captured_graph, "host_staged", "zigzag", timeout=60)


def test_peak_memory_of_zigzag_is_within_the_documented_buffers():
    """The extra memory is two KV buffers, two buffers of their gradients, and float32 sums of gradients.

    The sums are dQ, dK and dV of the own shard, and dK and dV of the shard that a step attends to. On Hopper the
    backward of a step accumulates dQ in tiles first, which takes another float32 dQ and a copy of each LSE and delta.
    """
    tokens, world, heads, kv_heads, dim = 65536, 8, 32, 8, 128
    layout = Layout.zigzag(tokens, world)
    rows = tokens // world
    q, dout = (torch.randn(1, rows, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, rows, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    plan = Plan("zigzag", layout, layout)
    kinds = (q.dtype, torch.float32, torch.device("cuda", 0))
    kernel = "hopper" if has_gluon(torch.device("cuda", 0)) else "triton"
    setting = Setting(1, dim, dim, *kinds, kernel, False)
    prepared = MeshExecutable(plan, Mask.causal(), heads, kv_heads, 3, setting, build)
    features, mover = Features(scale=dim**-0.5), Loopback(3, world)
    before = torch.cuda.memory_allocated()
    out, lse = new_outputs(q, v)
    grads = Grads.like(q, k, v)
    results = torch.cuda.memory_allocated() - before
    saved = q.new_empty(0, dtype=torch.uint8)
    torch.cuda.reset_peak_memory_stats()
    prepared.run("forward", [q, k, v, out, lse, saved], features, mover)
    backward_rows = rows_of(out, lse, dout, None)
    given = [q, k, v, out, lse, dout, backward_rows.delta_BHT, grads.dq_BTHD, grads.dk_BSKD, grads.dv_BSKE, saved]
    prepared.run("backward", given, features, mover)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - results
    kv_bytes = k.nbytes + v.nbytes
    dkv_bytes = 2 * kv_bytes  # in float32
    sum_bytes = 2 * q.nbytes + 2 * dkv_bytes
    row_bytes = 2 * lse.nbytes  # an LSE and a delta for each row
    workspace = 2 * q.nbytes + 2 * lse.nbytes if torch.cuda.get_device_capability() == (9, 0) else 0
    tables = 2**20
    assert extra <= 2 * kv_bytes + 2 * dkv_bytes + sum_bytes + workspace + row_bytes + tables, extra
