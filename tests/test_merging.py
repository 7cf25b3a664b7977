"""`merge_partials`: split keys against all keys, gradients through output and LSE, compilation, and every error."""

import os
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.autograd import forward_ad

from meshflash import Mask, flash_attention, merge_partials
from meshflash.kernels import merge as kernels
from meshflash.merging import merge_backward_op, merge_op

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def interpreted(monkeypatch):
    """Run the fused GPU kernels in Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("tests marked gpu run these kernels on a GPU")
    monkeypatch.setattr(kernels, "_fused", lambda *_: True)


def qkv(tokens, prefix, dtype=torch.float64, device="cpu", dim=8):
    """Return q of `tokens` tokens, and k and v of these tokens after a prefix."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, tokens, 4, dim)] + [(2, prefix + tokens, 2, dim)] * 2
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]


def merge_parts(q, k, v, *cuts):
    """Merge attention over key ranges that end at `cuts`.

    Every query sees the cached prefix; the last range holds the new tokens under a causal mask.
    """
    parts = []
    for begin, end in zip((0, *cuts), (*cuts, k.shape[1]), strict=True):
        mask = Mask.causal() if end == k.shape[1] else Mask.full()
        parts.append(flash_attention(q, k[:, begin:end], v[:, begin:end], mask=mask, return_lse=True))
    return merge_partials(parts)


def results(outputs, leaves):
    """Return output, LSE and the gradients of the leaves, for fixed upstream gradients of output and LSE."""
    generator = torch.Generator().manual_seed(7)
    upstream = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]


def check_parts(dtype, cuts, tolerance, tokens=9, prefix=14, **more):
    """Assert that merged parts match float64 attention over all keys, with all gradients."""
    leaves = qkv(tokens, prefix, dtype, **more)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    whole = flash_attention(*exact, mask=Mask.causal(), q_offset=prefix, return_lse=True)
    got = results(merge_parts(*leaves, *cuts), leaves)
    assert [x.dtype for x in got[:2]] == [dtype, torch.float64 if dtype == torch.float64 else torch.float32]
    for value, want in zip(got, results(whole, exact), strict=True):
        torch.testing.assert_close(value.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("cuts", [(14,), (5, 14)], ids=["2 parts", "3 parts"])
def test_merged_parts_match_attention_over_all_keys(cuts):
    check_parts(torch.float64, cuts, 1e-12)
    check_parts(torch.float32, cuts, 1e-5)
    check_parts(torch.bfloat16, cuts, 6e-2)


@pytest.mark.parametrize("cuts", [(14,), (5, 14)], ids=["2 parts", "3 parts"])
def test_merged_parts_match_attention_over_all_keys_in_interpreted_triton(interpreted, cuts):
    check_parts(torch.float32, cuts, 1e-5)
    check_parts(torch.float16, cuts, 1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cuts", [(700,), (300, 700)], ids=["2 parts", "3 parts"])
def test_merged_parts_match_attention_over_all_keys_on_a_gpu(cuts):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 6e-2)):
        check_parts(dtype, cuts, tolerance, tokens=333, prefix=700, device="cuda", dim=64)


def random_parts(count, batch=1, tokens=3, heads=2, dim=2, dtype=torch.float64):
    """Return random leaves, and the `count` pairs of output and LSE that they form."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(batch, tokens, heads, dim), (batch, heads, tokens)] * count
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    return leaves, list(zip(leaves[::2], leaves[1::2], strict=True))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_gradients_pass_gradcheck(count):
    leaves, _ = random_parts(count)
    assert torch.autograd.gradcheck(lambda *x: merge_partials(list(zip(x[::2], x[1::2], strict=True))), leaves)


@pytest.mark.parametrize("result", [0, 1], ids=["out", "lse"])
def test_gradients_of_one_result_pass_gradcheck(result):
    leaves, _ = random_parts(2)
    merged = lambda *x: merge_partials(list(zip(x[::2], x[1::2], strict=True)))[result]  # noqa: E731
    assert torch.autograd.gradcheck(merged, leaves)


def test_single_part_is_returned_as_an_equal_copy():
    (out, lse), parts = random_parts(1)
    merged = merge_partials(parts)
    assert all(torch.equal(a, b) and a is not b for a, b in zip(merged, (out, lse), strict=True))
    assert all(
        torch.equal(g, torch.ones_like(g)) for g in torch.autograd.grad([x.sum() for x in merged], (out, lse))[1:]
    )


def test_part_without_visible_keys_has_weight_zero_in_that_row():
    q, k, v = qkv(5, 4)
    later = Mask.documents([2, 3], k_lengths=[0, 5])
    parts = [
        flash_attention(q, k[:, :4], v[:, :4], return_lse=True),
        flash_attention(q, k[:, 4:], v[:, 4:], mask=later, return_lse=True),
    ]
    out, _ = merge_partials(parts)
    prefix_only = flash_attention(q[:, :2], k[:, :4], v[:, :4])
    want = torch.cat([prefix_only, flash_attention(q[:, 2:], k, v)], dim=1)
    torch.testing.assert_close(out, want)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), dout)
    for g, w in zip(got, torch.autograd.grad(want, (q, k, v), dout), strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_without_visible_keys_in_any_part_are_zero(count):
    leaves, parts = random_parts(count, dtype=torch.float32)
    with torch.no_grad():
        for out, lse in parts:
            out[:, 1], lse[..., 1] = NAN, -INF
    out, lse = merge_partials(parts)
    assert (out[:, 1] == 0).all()
    assert (lse[..., 1] == -INF).all()
    assert not out.isnan().any()
    grads = torch.autograd.grad([out.sum(), lse.exp().sum()], leaves)
    assert all((g[:, 1] if g.ndim == 4 else g[..., 1]).eq(0).all() for g in grads)
    assert not any(g.isnan().any() for g in grads)


def test_packed_parts_match_a_batch_of_one():
    _, parts = random_parts(2)
    out, lse = merge_partials([(out[0], lse[0]) for out, lse in parts])
    want = merge_partials(parts)
    assert torch.equal(out, want[0][0])
    assert torch.equal(lse, want[1][0])


def test_backward_skips_parts_that_require_no_gradient(monkeypatch):
    leaves, parts = random_parts(3)
    want = torch.autograd.grad(merge_partials(parts)[0].sum(), leaves)
    for x in leaves[:2]:
        x.requires_grad_(False)
    gradient = Mock(side_effect=kernels.merge_gradient)
    monkeypatch.setattr("meshflash.merging.merge_gradient", gradient)
    got = torch.autograd.grad(merge_partials(parts)[0].sum(), leaves[2:])
    assert gradient.call_count == 2
    assert all(map(torch.equal, got, want[2:]))


def test_inputs_are_not_modified():
    leaves, parts = random_parts(3, dtype=torch.float32)
    before = [x.detach().clone() for x in leaves]
    merge_partials(parts)[0].sum().backward()
    assert all(map(torch.equal, leaves, before))


def test_merge_compiles_as_one_graph():
    torch._dynamo.reset()
    q, k, v = qkv(5, 6, torch.float32)
    compiled = torch.compile(merge_parts, backend="aot_eager", fullgraph=True)
    got, want = (results(f(q, k, v, 2, 6), (q, k, v)) for f in (compiled, merge_parts))
    assert all(map(torch.equal, got, want))


@pytest.mark.slow
def test_inductor_matches_eager():
    torch._dynamo.reset()
    leaves, _ = random_parts(2, dtype=torch.float32)

    def plain(*x):
        out, lse = merge_partials(list(zip(x[::2], x[1::2], strict=True)))
        return out * 2, lse + 1

    got, want = (results(f(*leaves), leaves) for f in (torch.compile(plain, fullgraph=True), plain))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_ops_pass_opcheck():
    leaves, _ = random_parts(2, dtype=torch.float32)
    outs, lses = leaves[::2], leaves[1::2]
    torch.library.opcheck(merge_op, (outs, lses))
    outs, lses = [x.detach() for x in outs], [x.detach() for x in lses]
    out, lse = merge_op(outs, lses)
    for dout, dlse in ((out, lse), (out, None), (None, lse)):
        torch.library.opcheck(merge_backward_op, (dout, dlse, out, lse, outs, lses))


def test_double_backward_is_refused():
    leaves, parts = random_parts(2)
    (grad,) = torch.autograd.grad(merge_partials(parts)[0].square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()


def test_forward_mode_is_refused():
    (out, lse), _ = random_parts(1)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="no forward-mode derivative"):
        merge_partials([(forward_ad.make_dual(out, out.detach()), lse)])


OUT, LSE = torch.zeros(2, 5, 4, 8), torch.zeros(2, 4, 5)
ERRORS: dict[str, tuple[Any, str]] = {
    "no parts": ([], r"parts: expected a list of \(out, lse\), at least one; got none"),
    "not a list": (OUT, r"parts: expected a list of \(out, lse\), at least one; got Tensor"),
    "one pair alone": ((OUT, LSE), r"parts\[0\]: expected \(out, lse\), as flash_attention.*got Tensor"),
    "no lse": ([(OUT,)], r"parts\[0\]: expected \(out, lse\), .*got tuple"),
    "not tensors": ([(OUT, LSE), (OUT, None)], r"parts\[1\]: expected \(out, lse\)"),
    "dimensions": ([(OUT[0, 0], LSE)], r"parts\[0\]: expected out \[batch, .*got out \[4, 8\], lse \[2, 4, 5\]"),
    "lse by tokens": ([(OUT, LSE.mT)], r"lse \[batch, heads, tokens\].*got out \[2, 5, 4, 8\], lse \[2, 5, 4\]"),
    "packed lse": ([(OUT[0], LSE)], r"packed \[tokens, heads, dim\] and .*got out \[5, 4, 8\], lse \[2, 4, 5\]"),
    "no dim": ([(OUT[..., :0], LSE)], r"got out \[2, 5, 4, 0\]"),
    "other queries": (
        [(OUT, LSE), (OUT[:, :3], LSE[..., :3])],
        r"parts\[1\]: parts are results of the same queries; got out \[2, 3, 4, 8\], .*parts\[0\] is \[2, 5, 4, 8\]",
    ),
    "dtypes": (
        [(OUT, LSE), (OUT.half(), LSE)],
        r"parts\[1\]: outs must share one of .*got out torch.float16",
    ),
    "integers": ([(OUT.int(), LSE)], r"parts\[0\]: outs must share .*got out torch.int32"),
    "half lse": ([(OUT.half(), LSE.half())], r"with an LSE in float32, .*lse torch.float16"),
    "float32 lse": ([(OUT.double(), LSE)], r"float64 for float64; got out torch.float64, lse torch.float32"),
    "devices": ([(OUT, LSE), (OUT.to("meta"), LSE)], r"parts\[1\]: parts must be on one device; got out meta, lse cpu"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_part_and_the_expected_value(name):
    parts, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        merge_partials(parts)
