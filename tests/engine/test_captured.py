"""Calls that go into a graph: what they run in, and what is refused. On a CPU there are no graphs: we pretend."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from meshflash import Layout, Mask, attention, shutdown
from meshflash.comm.transports.contract import Transport
from meshflash.engine import binding, mesh
from meshflash.engine.group_context import _contexts, group_context
from meshflash.engine.memory import _pools, pool

CPU = torch.device("cpu")


@contextmanager
def capturing():
    with pytest.MonkeyPatch.context() as patch:
        for module in (mesh, binding):
            patch.setattr(module, "capturing", lambda device: True)
        yield patch


def call(world, **options):
    x = torch.randn(1, 6, 2, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    out = attention(x, x, x, layout=Layout.zigzag(6 * world, world), schedule="zigzag", mask=Mask.causal(), **options)
    return out, torch.autograd.grad(out.sum(), x)[0]


def in_memory_of_its_own(rank, world, group):
    want = call(world)
    with capturing():
        before = pool(CPU).usage.allocations, len(pool(CPU)._free)
        for arena in pool(CPU)._free:
            arena.memory.fill_(0xFF)
        got = call(world)
        assert before == (pool(CPU).usage.allocations, len(pool(CPU)._free))
        assert all((arena.memory == 0xFF).all() for arena in pool(CPU)._free)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_it_runs_in_memory_of_the_graphs_own(pool):
    pool.run(2, in_memory_of_its_own)


def refused(rank, world, group):
    call(world)
    with capturing(), pytest.raises(RuntimeError, match="agree on this call first: make it once before the capture"):
        call(world, scale=0.3)
    with capturing() as patch:
        patch.setattr(Transport, "capture_unsupported_reason", "it is slow")
        with pytest.raises(RuntimeError, match=r"attention over gloo cannot be captured: it is slow. Take another"):
            call(world)


def test_what_cannot_be_captured_is_refused(pool):
    pool.run(2, refused)


def ended(rank, world, group):
    call(world)
    assert any(found._free for found in _pools.values())
    shutdown()
    assert not any(found._free for found in _pools.values())
    assert not _contexts
    call(world)  # afresh
    assert group_context(group.group_name).handshakes == 1
    assert all(found.usage.live == 0 for found in _pools.values())


def test_shutdown_frees_what_was_kept_and_calls_begin_afresh(pool):
    pool.run(2, ended)
