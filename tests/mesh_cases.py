"""Inputs and comparisons for tests over a mesh: whole sequences, their shards, and the single-device baseline."""

from __future__ import annotations

from functools import partial

import torch

from meshflash import Mask, attention, flash_attention
from meshflash.check.spread import run_item
from meshflash.schedules import registry

CAUSAL = Mask.causal()
SCHEDULES = ("ring", "zigzag", "striped", "allgather", "allgather(head_stride=1)")
#: Tolerance for each dtype, relative to the largest value: the most that another order of summation explains.
CLOSE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}


def qkv(tokens=25, k_tokens=None, batch=2, heads=4, kv_heads=2, dim=8, value_dim=None, dtype=torch.float64, seed=0):
    """Return q, k and v of the whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    keys = tokens if k_tokens is None else k_tokens
    shapes = (batch, tokens, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, value_dim or dim)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def cut(x, layout, rank, dim=1):
    """Return the tokens of a whole sequence that the layout gives to `rank`."""
    return x.index_select(dim, torch.from_numpy(layout.positions(rank)))


def leaves(*tensors):
    """Return copies of the tensors as leaves that require gradients."""
    return tuple(x.detach().clone().requires_grad_() for x in tensors)


def assert_close(got, want, share=None):
    """Assert equal shapes and dtypes, and values within the dtype's tolerance, or within `share` if given."""
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        allowed = (CLOSE[b.dtype] if share is None else share) * max(1.0, float(b.abs().max()) if b.numel() else 0.0)
        assert torch.allclose(a, b, rtol=0, atol=allowed), f"{float((a - b).abs().max()):.1e} > {allowed:.1e}"


def assert_equal(got, want):
    """Assert that both sequences hold the same tensors, bit for bit."""
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def run_items(rank, world, group, items):
    """Run items of `meshflash.check` one after another, as a job of the pool."""
    return [run_item(rank, group, item) for item in items]


def default_layout(schedule, tokens, world):
    """Return the layout that the schedule uses if the caller gives none."""
    return registry.default_layout(schedule)(tokens, world)


def gradients(call, *inputs):
    """Return the output and the gradients of all inputs; the upstream gradient is the output itself."""
    inputs = leaves(*inputs)
    out = call(*inputs)
    (out.square().sum() / 2).backward()
    return [out.detach(), *(x.grad for x in inputs)]


def compare(rank, world, whole, layout, k_layout=None, layouts=None, share=None, **call):
    """Assert that output and gradients of this rank match a single device; `call` holds the arguments of both calls."""
    k_layout = k_layout or layout
    own = {name: call.pop(name) for name in ("mesh", "schedule", "reduce_dtype", "transport", "verify") if name in call}
    layouts = dict(layout=layout, k_layout=None if k_layout is layout else k_layout) if layouts is None else layouts
    out, dq, dk, dv = gradients(partial(flash_attention, **call), *whole)
    want = [cut(out, layout, rank), cut(dq, layout, rank), cut(dk, k_layout, rank), cut(dv, k_layout, rank)]
    local = [cut(x, x_layout, rank) for x, x_layout in zip(whole, (layout, k_layout, k_layout), strict=True)]
    assert_close(gradients(partial(attention, **(layouts | own | call)), *local), want, share)
