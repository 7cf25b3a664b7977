"""Calls captured in a CUDA graph: they use separate memory, and unsupported captures are refused.

A CPU has no graphs, so the tests replace the check for a running capture.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from meshflash import Layout, Mask, attention, shutdown
from meshflash.comm.transports.contract import Transport
from meshflash.engine import binding, compile, executable
from meshflash.engine.group_context import group_context, open_contexts
from meshflash.engine.memory import pool

CPU = torch.device("cpu")


@contextmanager
def capturing():
    """Make the engine believe that a graph is being captured."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (compile, executable, binding):
            patch.setattr(module, "capturing", lambda device: True)
        yield patch


def call(world, **options):
    """Run attention forward and backward on this rank's shard; return output and gradient."""
    x = torch.randn(1, 6, 2, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    out = attention(x, x, x, layout=Layout.zigzag(6 * world, world), schedule="zigzag", mask=Mask.causal(), **options)
    return out, torch.autograd.grad(out.sum(), x)[0]


def compare_captured_with_eager(rank, world, group):
    """Compare a captured call with an eager one; the free arenas stay as they were."""
    want = call(world)
    with capturing():
        before = pool(CPU).usage.allocations, len(pool(CPU)._free)
        for arena in pool(CPU)._free:
            arena.memory.fill_(0xFF)
        got = call(world)
        assert before == (pool(CPU).usage.allocations, len(pool(CPU)._free))
        assert all((arena.memory == 0xFF).all() for arena in pool(CPU)._free)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_captured_call_leaves_the_scratch_pool_untouched(pool):
    pool.run(2, compare_captured_with_eager)


def capture_unsupported_calls(rank, world, group):
    """Capture a call that ranks have not agreed on, and one over a transport without support."""
    call(world)
    with capturing(), pytest.raises(RuntimeError, match="agree on this call first: make it once before the capture"):
        call(world, scale=0.3)
    with capturing() as patch:
        patch.setattr(Transport, "capture_unsupported_reason", "it is slow")
        with pytest.raises(RuntimeError, match=r"attention over gloo cannot be captured: it is slow. Take another"):
            call(world)


def test_capture_of_a_new_call_or_over_an_unsupported_transport_is_refused(pool):
    pool.run(2, capture_unsupported_calls)


def call_after_shutdown(rank, world, group):
    """Shut down between two calls; all memory is freed and a new handshake is made."""
    call(world)
    assert pool(CPU)._free
    shutdown()
    assert not pool(CPU)._free
    assert not open_contexts()
    call(world)  # makes a new handshake
    assert group_context(group.group_name).handshakes == 1
    assert pool(CPU).usage.live == 0


def test_shutdown_frees_scratch_and_the_next_call_makes_a_new_handshake(pool):
    pool.run(2, call_after_shutdown)
