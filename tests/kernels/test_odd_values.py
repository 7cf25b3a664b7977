"""Extreme values and odd strides: every kernel computes the right result, or the call is refused."""

from __future__ import annotations

import math
import os
import re
from typing import Any

import pytest
import torch

from meshflash import Mask, attention, flash_attention

INF = math.inf
KERNELS = ("tiled", "vendor", "triton", "auto")
SHAPES = (1, 9, 4, 16), (1, 9, 2, 16), (1, 9, 2, 16)


def random_qkv(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def results(kernel, inputs, dout=None, **given):
    """Return (out, lse) and all gradients by a kernel, or None if it does not support the call."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    if "sink_logits" in given:
        given["sink_logits"] = given["sink_logits"].clone().requires_grad_()
        leaves.append(given["sink_logits"])
    if kernel == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    if kernel == "vendor" and (given.keys() - {"scale", "sink_logits"} or given.get("scale", 1.0) < 1e-30):
        with pytest.raises(ValueError, match='kernel="vendor" does not support'):
            flash_attention(*leaves[:3], mask=Mask.causal(), kernel=kernel, **given)
        return None
    out, lse = flash_attention(*leaves[:3], mask=Mask.causal(), kernel=kernel, return_lse=True, **given)
    dout = torch.linspace(-1, 1, out.numel()).view_as(out) if dout is None else dout
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_close(got, want):
    """Check that tensors are finite and close."""
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all()
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5), float((a - b).abs().max())


#: Values that the interpreted kernel runs in every test run; each takes a second, so the others are marked slow.
NOT_SLOW = ("softcap 1e-30", "sink inf")
VALUES: dict[str, dict[str, Any]] = {
    "softcap 1e30": dict(softcap=1e30),
    "softcap 1e-30": dict(softcap=1e-30),
    "scale 0": dict(scale=0.0),
    "scale 1e-30": dict(scale=1e-30),
    "scale 1e-300": dict(scale=1e-300),
    "scale -1": dict(scale=-1.0),
    "sink inf": dict(sink_logits=torch.tensor([INF, -INF, 0.0, 3e38])),
    "slope inf": dict(alibi_slopes=torch.tensor([INF, 0.0, 1.0, 3e38])),
}


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        pytest.param(kernel, name, marks=pytest.mark.slow if kernel == "triton" and name not in NOT_SLOW else ())
        for kernel in KERNELS
        for name in VALUES
    ],
)
def test_extreme_scales_softcaps_sinks_and_slopes_match_the_reference(kernel, name):
    got = results(kernel, random_qkv(), **VALUES[name])
    want = results("reference", random_qkv(), **VALUES[name])
    assert want is not None
    if got is not None:
        assert_close(got, want)


@pytest.mark.parametrize("kernel", ["reference", "tiled", "vendor", "auto"])
def test_infinite_sink_takes_all_weight(kernel):
    made = results(kernel, random_qkv(), sink_logits=torch.tensor([INF, 0.0, 0.0, 0.0]))
    if made is not None:
        out, lse, dq, *_, dsink = made
        assert not out[:, :, 0].any()
        assert (lse[:, 0] == 1e30).all()
        assert not dq[:, :, 0].any()
        assert dsink[0] == 0


def test_infinite_alibi_slope_leaves_only_the_own_position_visible():
    q, k, v = random_qkv()
    out = flash_attention(q, k, v, alibi_slopes=torch.full((4,), INF), mask=Mask.causal())
    assert torch.allclose(out, v.repeat_interleave(2, dim=2))


@pytest.mark.parametrize("call", [flash_attention, attention])
@pytest.mark.parametrize("given", [dict(softcap=1e308), dict(softcap=1e-40), dict(scale=1e39), dict(scale=-1e300)])
def test_values_beyond_float32_are_refused(call, given):
    ((name, value),) = given.items()
    message = re.escape(f"{name}={value}: float32 cannot compute with it; expected ")
    with pytest.raises(ValueError, match=message + r".*1e[-+]30 to 1e\+30"):
        call(*random_qkv(), **given)


def odd_strides(shape, generator):
    """Yield tensors of a shape that are expanded, permuted, or have gaps in memory."""
    batch, tokens, heads, dim = shape
    whole = torch.randn(shape, generator=generator)
    for axis in range(4):
        yield whole.narrow(axis, 0, 1).expand(shape)
    yield whole[:1, :1, :1, :1].expand(shape)
    yield torch.randn(batch, heads, tokens, dim, generator=generator).transpose(1, 2)
    yield torch.randn(batch, dim, tokens, heads, generator=generator).permute(0, 2, 3, 1)
    yield torch.randn(batch, 2 * tokens, heads, 2 * dim, generator=generator)[:, ::2, :, 1::2]


@pytest.mark.parametrize("kernel", ["tiled", "vendor", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("argument", ["q", "k", "v", "dout"])
def test_odd_strides_match_contiguous_copies(kernel, argument):
    index = ("q", "k", "v", "dout").index(argument)
    generator = torch.Generator().manual_seed(1)
    for odd in odd_strides(SHAPES[index % 3], generator):
        given = [*random_qkv(), torch.ones(SHAPES[0])]
        given[index] = odd
        *inputs, dout = given
        got = results(kernel, inputs, dout)
        want = results(kernel, [x.contiguous() for x in inputs], dout.contiguous())
        assert (got is None) == (want is None)
        if got is not None:
            assert_close(got, want)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_expanded_queries_give_the_same_bits_as_their_contiguous_copy(axis):
    q, kv = torch.randn(2, 300, 4, 64, generator=torch.Generator().manual_seed(0)), torch.randn(2, 300, 1, 64)
    q = q.narrow(axis, 0, 1).expand(2, 300, 4, 64)
    leaves, copies = ([x.detach().requires_grad_() for x in (y, kv, kv)] for y in (q, q.contiguous()))
    for made, want in zip(
        torch.autograd.grad(flash_attention(*leaves).sum(), leaves),
        torch.autograd.grad(flash_attention(*copies).sum(), copies),
        strict=True,
    ):
        assert torch.equal(made, want)


def compare_strides_over_ranks(rank, world, group):
    """Compare odd strides with contiguous copies on two ranks, with an infinite sink."""
    for schedule in ("ring", "ulysses"):
        generator = torch.Generator().manual_seed(rank)
        for x in odd_strides((1, 6, 2, 8), generator):
            odd, plain = x.detach().requires_grad_(), x.contiguous().detach().requires_grad_()
            sink = torch.tensor([INF, 0.0])
            given: dict[str, Any] = dict(schedule=schedule, mask=Mask.causal(), sink_logits=sink)
            a, b = attention(odd, odd, odd, **given), attention(plain, plain, plain, **given)
            assert not a[:, :, 0].any()
            assert torch.equal(a, b)
            grads = torch.autograd.grad(a.sum(), odd)  # an expanded gradient
            assert_close(grads, torch.autograd.grad(b, plain, torch.ones_like(b)))


def test_odd_strides_and_infinite_sinks_over_ranks_match_contiguous_copies(pool):
    pool.run(2, compare_strides_over_ranks)
