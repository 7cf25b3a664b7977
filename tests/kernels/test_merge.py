"""Merging of (out, LSE), its gradient, and delta match float64: interpreted Triton kernels and plain torch."""

import os

import pytest
import torch

from meshflash.kernels import merge as module
from meshflash.kernels.merge import add_sinks_, delta, merge, merge_, merge_gradient

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NAN, INF = float("nan"), float("inf")
DIMS = [1, 8, 40, 64, 80]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ON_GPUS = [pytest.param(dim, dtype, id=f"{dim}-{dtype}") for dim in (40, 64, 128, 256) for dtype in DTYPES]


@pytest.fixture(params=["torch", "triton"])
def backend(request, monkeypatch):
    """Run a test with plain torch and with the interpreted Triton kernels."""
    if request.param == "triton" and not INTERPRETED:
        pytest.skip("the tests marked gpu run them on a GPU")
    monkeypatch.setattr(module, "_fused", lambda *_: request.param == "triton")
    return request.param


def make_partials(dim, dtype, count=2, batch=2, tokens=23, heads=2, device="cpu"):
    """Return partial (out, lse) with empty rows, where out is NaN; every eleventh row is empty in all of them."""
    generator = torch.Generator().manual_seed(dim)
    row = torch.arange(tokens)
    partials = []
    for n in range(count):
        out = torch.randn(batch, tokens, heads, dim, generator=generator)
        lse = 3 * torch.randn(batch, heads, tokens, generator=generator)
        empty = (row % 11 == 0) | ((row + n) % 5 == 0)
        out[:, empty] = NAN
        lse[:, :, empty] = -INF
        partials.append((out.to(device, dtype), lse.to(device)))
    return partials


def merge_in_float64(partials):
    """Return the merged (out, lse) in float64, differentiable."""
    lses = torch.stack([lse.double() for _, lse in partials])
    outs = torch.stack([out.double() for out, _ in partials])
    empty = lses == -INF
    filled = lses.masked_fill(empty, -1e300)
    weights = torch.softmax(filled, dim=0).masked_fill(empty, 0.0)
    values = outs.masked_fill(per_row(empty), 0.0)
    lse = torch.logsumexp(filled, dim=0).masked_fill(empty.all(dim=0), -INF)
    return (per_row(weights) * values).sum(dim=0), lse


def per_row(x):
    return x.transpose(-1, -2).unsqueeze(-1)


def assert_near(got, want, units=32):
    """Allow `units` float32 roundings of the largest value, and one rounding of each value to its own dtype."""
    finite = want[want.isfinite()].abs()
    unit = torch.finfo(torch.float32).eps * max(1.0, float(finite.max()) if finite.numel() else 0.0)
    rtol = 0.0 if got.dtype == torch.float32 else torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=units * unit)


def other_strides(x):
    """Return the tensor with its dimensions in another order in memory, and with gaps between rows."""
    order = (2, 0, 1, 3) if x.ndim == 4 else (2, 1, 0)
    permuted = x.permute(order)
    wide = permuted.new_full([n + 3 for n in permuted.shape], NAN)
    view = wide[tuple(slice(1, 1 + n) for n in permuted.shape)]
    view.copy_(permuted)
    strided = view.permute([order.index(n) for n in range(x.ndim)])
    assert not strided.is_contiguous()
    return strided


def check_merge(dim, dtype, **shape):
    """Compare `merge` and `merge_` with float64."""
    (out, lse), (other, other_lse) = make_partials(dim, dtype, **shape)
    want = merge_in_float64([(out, lse), (other, other_lse)])
    final = torch.full_like(out, NAN), torch.full_like(lse, NAN)
    before = lse.clone()
    merge((out, lse), (other, other_lse), final)
    assert torch.equal(lse, before)
    sums = out.float()
    merge_(sums, lse, other, other_lse)
    for got in (final, (sums, lse)):
        assert_near(got[0], want[0])
        assert_near(got[1], want[1])
        assert (got[0][per_row(got[1] == -INF).expand_as(out)] == 0).all()


def check_gradient(dim, dtype, has_dout=True, has_dlse=True, **shape):
    """Compare the gradient of a merge with float64 autograd."""
    partials = make_partials(dim, dtype, **shape)
    leaves = [x.double().requires_grad_() for partial in partials for x in partial]
    merged = merge_in_float64(list(zip(leaves[::2], leaves[1::2], strict=True)))
    out, lse = merged[0].detach().to(dtype), merged[1].detach().float()
    generator = torch.Generator().manual_seed(7)
    dout = torch.randn(out.shape, generator=generator).to(out) if has_dout else None
    dlse = torch.randn(lse.shape, generator=generator).to(lse) if has_dlse else None
    upstream = [(y, dy.double()) for y, dy in zip(merged, (dout, dlse), strict=True) if dy is not None]
    want = torch.autograd.grad([y for y, _ in upstream], leaves, [dy for _, dy in upstream], allow_unused=True)
    empty = lse == -INF
    for dy in (dout, dlse):  # the incoming gradient of an empty row has no meaning and must be ignored
        if dy is not None:
            dy.masked_fill_(empty if dy is dlse else per_row(empty), NAN)
    # the gradient of an LSE reads the merged out, which is rounded to its dtype
    rounding = 0 if dtype == torch.float32 else dim**0.5 * 2 * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    for n, partial in enumerate(partials):
        dpartial, dpartial_lse = merge_gradient(dout, dlse, partial, (out, lse))
        assert (dpartial is None) == (not has_dout)
        if dpartial is not None:
            assert_near(dpartial, want[2 * n])
        assert_near(dpartial_lse, want[2 * n + 1], 32 + rounding)


def check_delta(dim, dtype, has_dlse=True, **shape):
    """Compare delta with float64."""
    (_, lse), (dout, _) = make_partials(dim, dtype, **shape)
    out = torch.randn(dout.shape, generator=torch.Generator().manual_seed(1)).to(dout)
    dout, dlse = dout.nan_to_num(nan=0.5), 2 * torch.ones_like(lse)
    want = (dout.double() * out.double()).sum(dim=-1).transpose(1, 2)
    if has_dlse:
        want = (want - 2).masked_fill(lse == -INF, 0.0)
        dlse.masked_fill_(lse == -INF, NAN)
    got = delta(out, dout, lse, dlse if has_dlse else None)
    assert got.is_contiguous()
    assert got.dtype == lse.dtype
    assert_near(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_merge_matches_float64(backend, dim, dtype):
    check_merge(dim, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_gradient_of_merge_matches_float64(backend, dim, dtype):
    check_gradient(dim, dtype)


@pytest.mark.parametrize(("has_dout", "has_dlse"), [(True, False), (False, True)])
def test_gradient_of_merge_with_only_dout_or_only_dlse_matches_float64(backend, has_dout, has_dlse):
    check_gradient(40, torch.float32, has_dout, has_dlse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_delta_matches_float64(backend, dim, dtype):
    check_delta(dim, dtype)


def test_delta_without_a_gradient_of_the_lse_matches_float64(backend):
    check_delta(40, torch.bfloat16, has_dlse=False)


@pytest.mark.parametrize("tokens", [1, 16])
def test_few_rows_match_float64(backend, tokens):
    check_merge(8, torch.float32, tokens=tokens)
    check_gradient(8, torch.float32, tokens=tokens)
    check_delta(8, torch.float32, tokens=tokens)


@pytest.mark.parametrize("shape", [dict(batch=0), dict(tokens=0), dict(heads=0)], ids=str)
def test_empty_tensors_are_accepted(backend, shape):
    check_merge(8, torch.float32, **shape)
    check_delta(8, torch.float32, **shape)


def test_any_strides_match_contiguous_tensors(backend):
    (out, lse), (other, other_lse) = make_partials(40, torch.float32)
    strided = [other_strides(x) for x in (out, lse, other.bfloat16().float(), other_lse)]
    want = merge_in_float64([(strided[0], strided[1]), (strided[2], strided[3])])
    final = other_strides(torch.zeros_like(out, dtype=torch.float16)), other_strides(torch.zeros_like(lse))
    merge((strided[0], strided[1]), (strided[2].bfloat16(), strided[3]), final)
    merge_(*strided)
    for result in (final, strided[:2]):
        assert_near(result[0], want[0])
        assert_near(result[1], want[1])
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    merged = want[0].float(), want[1].float()
    plain = merge_gradient(dout, dlse, (other, other_lse), merged)
    dy, dl, x, x_lse, out, lse = (other_strides(y) for y in (dout, dlse, other, other_lse, *merged))
    for got, expected in zip(merge_gradient(dy, dl, (x, x_lse), (out, lse)), plain, strict=True):
        assert got is not None
        assert expected is not None
        assert torch.equal(got, expected)
    assert torch.equal(delta(out, dy, lse, dl), delta(merged[0], dout, merged[1], dlse))


def test_rows_with_strided_elements_match_float64(backend):
    (out, lse), (other, other_lse) = make_partials(8, torch.float32)
    want = merge_in_float64([(out, lse), (other, other_lse)])
    strided = torch.stack([out, out], dim=-1)[..., 0]
    merge_(strided, lse, torch.stack([other, other], dim=-1)[..., 1], other_lse)
    assert_near(strided, want[0])
    one = torch.ones(()).expand(out.shape)
    assert_near(delta(strided, one, lse, None), want[0].sum(dim=-1).transpose(1, 2))


def test_nan_of_an_empty_partial_is_ignored(backend):
    """A row may be empty in either partial result, or in both, where the merged row is empty."""
    out, other = torch.full((1, 3, 1, 2), NAN), torch.full((1, 3, 1, 2), NAN)
    lse, other_lse = torch.tensor([[[-INF, 0.5, -INF]]]), torch.tensor([[[0.25, -INF, -INF]]])
    out[0, 1], other[0, 0] = 3.0, 2.0
    merge_(out, lse, other, other_lse)
    assert out[0, :, 0, 0].tolist() == [2.0, 3.0, 0.0]
    assert lse.flatten().tolist() == [0.25, 0.5, -INF]


def test_nan_of_a_partial_with_weight_is_kept(backend):
    out, lse = torch.ones(1, 4, 1, 2), torch.zeros(1, 1, 4)
    other, other_lse = torch.ones(1, 4, 1, 2), torch.zeros(1, 1, 4)
    out[0, 0], other[0, 1], lse[..., 2], other_lse[..., 3] = NAN, NAN, NAN, NAN
    merge_(out, lse, other, other_lse)
    assert out.isnan().all()
    assert lse.isnan().flatten().tolist() == [False, False, True, True]


def test_sinks_match_float64(backend):
    ((out, lse),) = make_partials(40, torch.float32, count=1, heads=3)
    sinks = torch.tensor([0.5, -INF, 30.0])
    want = merge_in_float64([(out, lse), (torch.zeros_like(out), sinks[None, :, None].expand_as(lse))])
    add_sinks_(out, lse, sinks)
    assert_near(out, want[0])
    assert_near(lse, want[1])


def test_large_and_distant_lses_neither_overflow_nor_lose_weight(backend):
    out, lse = torch.full((1, 3, 1, 2), 5.0), torch.tensor([[[1e4, -1e4, 1e4]]])
    other, other_lse = torch.full((1, 3, 1, 2), 7.0), torch.tensor([[[1e4, -1e4, -1e4]]])
    merge_(out, lse, other, other_lse)
    assert out[0, :, 0, 0].tolist() == pytest.approx([6.0, 6.0, 5.0], rel=1e-3)  # float32 LSEs of that size
    assert lse.flatten().tolist() == pytest.approx([1e4 + 0.693, -1e4 + 0.693, 1e4])


def test_float64_and_cpu_tensors_use_plain_torch():
    assert not module._fused(torch.zeros(1))
    out, lse = torch.zeros(1, 2, 1, 4, dtype=torch.float64), torch.zeros(1, 1, 2, dtype=torch.float64)
    merge_(out, lse, out.clone(), lse.clone())
    assert torch.equal(lse, torch.full_like(lse, 2.0).log())


@gpu
@needs_gpu
@pytest.mark.parametrize(("dim", "dtype"), ON_GPUS)
def test_merge_gradient_and_delta_on_a_gpu_match_float64(dim, dtype):
    shape = dict(batch=2, tokens=1003, heads=6, device="cuda")
    assert module._fused(*make_partials(dim, dtype, **shape)[0])
    check_merge(dim, dtype, **shape)
    check_gradient(dim, dtype, **shape)
    check_delta(dim, dtype, **shape)


@gpu
@needs_gpu
@pytest.mark.parametrize("tokens", [1, 3, 64])
def test_few_rows_on_a_gpu_match_float64(tokens):
    shape = dict(batch=40, tokens=tokens, heads=8, device="cuda")
    check_merge(64, torch.bfloat16, **shape)
    check_delta(64, torch.bfloat16, **shape)


@gpu
@needs_gpu
def test_tensors_of_more_than_2_to_the_31_elements_on_a_gpu():
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB")
    out = torch.ones(1, 140_000, 128, 128, device="cuda", dtype=torch.bfloat16)
    other, into = out.mul(3.0), torch.empty_like(out)
    assert out.numel() > 2**31
    lse = torch.zeros(1, 128, 140_000, device="cuda")
    into_lse = torch.empty_like(lse)
    merge((out, lse), (other, lse), (into, into_lse))
    assert all((block == 2.0).all() for block in into.split(10_000, dim=1))
    assert torch.allclose(into_lse, torch.full_like(lse, 2.0).log())
    assert (delta(into, other, lse, None) == 128 * 6.0).all()
