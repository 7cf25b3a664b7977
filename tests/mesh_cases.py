"""Inputs and comparisons for tests over a mesh: whole sequences, their shards, and results of one device."""

from __future__ import annotations

from functools import partial

import torch

from meshflash import Mask, attention, flash_attention
from meshflash.check.spread import run_item
from meshflash.schedules import registry

CAUSAL = Mask.causal()
SCHEDULES = ("ring", "zigzag", "striped", "allgather", "allgather(head_stride=1)")
#: The largest difference, as a share of the largest value, that another order of sums explains.
CLOSE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}


def qkv(tokens=25, k_tokens=None, batch=2, heads=4, kv_heads=2, dim=8, value_dim=None, dtype=torch.float64, seed=0):
    """Return q, k and v of the whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    keys = tokens if k_tokens is None else k_tokens
    shapes = (batch, tokens, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, value_dim or dim)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def cut(x, layout, rank, dim=1):
    """Return a rank's tokens of a whole sequence."""
    return x.index_select(dim, torch.from_numpy(layout.positions(rank)))


def leaves(*tensors):
    return tuple(x.detach().clone().requires_grad_() for x in tensors)


def assert_close(got, want, share=None):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        allowed = (CLOSE[b.dtype] if share is None else share) * max(1.0, float(b.abs().max()) if b.numel() else 0.0)
        assert torch.allclose(a, b, rtol=0, atol=allowed), f"{float((a - b).abs().max()):.1e} > {allowed:.1e}"


def assert_equal(got, want):
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def run_items(rank, world, group, items):
    """Run items of `meshflash.check` one after another, as a job of the pool."""
    return [run_item(rank, group, item) for item in items]


def default_layout(schedule, tokens, world):
    return registry.default_layout(schedule)(tokens, world)


def gradients(call, *inputs):
    """Return out and the gradients of all inputs; the upstream gradient is out itself."""
    inputs = leaves(*inputs)
    out = call(*inputs)
    (out.square().sum() / 2).backward()
    return [out.detach(), *(x.grad for x in inputs)]


def compare(rank, world, whole, layout, k_layout=None, given=None, share=None, **call):
    """Assert that output and gradients of this rank's tokens match one device; `call` holds the arguments of both."""
    k_layout = k_layout or layout
    own = {name: call.pop(name) for name in ("mesh", "schedule", "reduce_dtype", "transport", "verify") if name in call}
    given = dict(layout=layout, k_layout=None if k_layout is layout else k_layout) if given is None else given
    out, dq, dk, dv = gradients(partial(flash_attention, **call), *whole)
    want = [cut(out, layout, rank), cut(dq, layout, rank), cut(dk, k_layout, rank), cut(dv, k_layout, rank)]
    local = [cut(x, held, rank) for x, held in zip(whole, (layout, k_layout, k_layout), strict=True)]
    assert_close(gradients(partial(attention, **(given | own | call)), *local), want, share)
