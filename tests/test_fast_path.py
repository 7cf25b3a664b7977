"""Eager fast path: repeated calls skip the argument checks, and give the same results and errors as first calls."""

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from meshflash import Mask, flash_attention
from meshflash.engine.cache import cache
from meshflash.kernels import registry

CAUSAL = Mask.causal()


@pytest.fixture(autouse=True)
def forgotten():
    cache.clear()


def leaves(dtype=torch.float32, grad=True, tokens=9):
    """Return random q, k and v."""
    return [torch.randn(2, tokens, 2, 8, dtype=dtype, requires_grad=grad) for _ in range(3)]


def untyped(value: Any) -> Any:
    """Return the value as `Any`, to pass what the type annotations forbid."""
    return value


def dense(q, k, v, scale=None):
    """Return causal attention as PyTorch computes it."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)


@pytest.mark.parametrize("grad", [True, False])
def test_repeated_shapes_with_new_values_match_first_call(grad):
    for _ in range(3):
        x = leaves(grad=grad)
        got, want = flash_attention(*x, mask=CAUSAL), dense(*x)
        assert torch.allclose(got, want, atol=1e-5)
        assert got.requires_grad == grad
        if grad:
            dout = torch.randn_like(got)
            for a, b in zip(torch.autograd.grad(got, x, dout), torch.autograd.grad(want, x, dout), strict=True):
                assert torch.allclose(a, b, atol=1e-5)
    assert cache.size() == 2  # by the arguments, and by the spec


def test_calls_with_and_without_gradients_may_alternate():
    x = leaves()
    with torch.no_grad():
        assert not flash_attention(*x, mask=CAUSAL).requires_grad
    assert flash_attention(*x, mask=CAUSAL).requires_grad
    with torch.inference_mode():
        assert not flash_attention(*x, mask=CAUSAL).requires_grad
    assert not flash_attention(*[y.detach() for y in x], mask=CAUSAL).requires_grad


def test_calls_with_different_arguments_do_not_share_an_entry():
    x = leaves(grad=False)
    plain = flash_attention(*x, mask=CAUSAL)
    others = [
        flash_attention(*x),
        flash_attention(*x, mask=Mask.causal() & Mask.window(2, 0)),
        flash_attention(*x, mask=CAUSAL, scale=2.0),
        flash_attention(*x, mask=CAUSAL, softcap=0.5),
        flash_attention(*x, mask=CAUSAL, q_offset=3),
        flash_attention(*x, mask=CAUSAL, sink_logits=torch.zeros(2)),
        flash_attention(*x, mask=CAUSAL, alibi_slopes=torch.ones(2)),
        flash_attention(*x, mask=CAUSAL, dropout=0.5, seed=1),
        flash_attention(*x, mask=CAUSAL & Mask.documents([4, 5])),
        flash_attention(*[y.double() for y in x], mask=CAUSAL, scale=2.0).float(),
    ]
    assert not any(torch.allclose(plain, other, atol=1e-6) for other in others)
    assert torch.equal(flash_attention(*x, mask=Mask.causal()), plain)
    out, lse = flash_attention(*x, mask=CAUSAL, return_lse=True)
    assert torch.equal(out, plain)
    assert lse.shape == (2, 2, 9)


def test_document_lengths_changed_in_place_take_effect():
    x, lengths = leaves(grad=False), torch.tensor([4, 5])
    mask = CAUSAL & Mask.documents(lengths)
    before = flash_attention(*x, mask=mask)
    lengths.copy_(torch.tensor([9, 0]))
    assert torch.allclose(flash_attention(*x, mask=CAUSAL & Mask.documents(lengths)), dense(*x), atol=1e-5)
    assert not torch.allclose(before, dense(*x), atol=1e-5)


def test_repeated_calls_with_other_strides_match_first_call():
    x = leaves(grad=False)
    want = flash_attention(*x, mask=CAUSAL)
    transposed = [y.transpose(1, 2).contiguous().transpose(1, 2) for y in x]
    assert torch.allclose(flash_attention(*transposed, mask=CAUSAL), want, atol=1e-6)
    odd = [torch.stack([y, y], -1)[..., 0] for y in x]
    assert torch.allclose(flash_attention(*odd, mask=CAUSAL), want, atol=1e-6)


def test_refused_arguments_stay_refused_after_valid_calls():
    x = leaves(grad=False)
    for _ in range(2):
        flash_attention(*x, mask=CAUSAL, q_offset=1)
        with pytest.raises(ValueError, match="q_offset=True"):
            flash_attention(*x, mask=CAUSAL, q_offset=True)
        with pytest.raises(ValueError, match="deterministic"):
            flash_attention(*x, mask=CAUSAL, q_offset=1, deterministic=untyped(0))
        with pytest.raises(ValueError, match="scale"):
            flash_attention(*x, mask=CAUSAL, scale=float("nan"))
        with pytest.raises(ValueError, match="mask"):
            flash_attention(*x, mask=untyped("causal"))
        with pytest.raises(ValueError, match="dropout"):
            flash_attention(*x, mask=CAUSAL, dropout=1.0)
        for invalid in map(untyped, (None, "", [], 0j, torch.zeros(2))):
            with pytest.raises(ValueError, match="dropout"):
                flash_attention(*x, mask=CAUSAL, dropout=invalid)
    flash_attention(*x, mask=CAUSAL)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="forward-mode"):
        flash_attention(forward_ad.make_dual(x[0], x[0]), *x[1:], mask=CAUSAL)


def test_autocast_applies_to_repeated_calls():
    x = leaves(grad=False)
    assert flash_attention(*x, mask=CAUSAL).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_attention(*x, mask=CAUSAL).dtype == torch.bfloat16
    assert flash_attention(*x, mask=CAUSAL).dtype == torch.float32


def test_dispatch_modes_and_meta_tensors_use_the_registered_op():
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    x = leaves(grad=False)
    flash_attention(*x, mask=CAUSAL)
    with Watch():
        flash_attention(*x, mask=CAUSAL)
    assert any("meshflash" in name for name in seen)
    meta = [y.to("meta") for y in x]
    for _ in range(2):
        assert flash_attention(*meta, mask=CAUSAL).is_meta


def test_kernel_is_selected_again_after_the_choice_is_cleared():
    x = leaves(grad=False)
    flash_attention(*x, mask=CAUSAL)
    registry.forget()
    with registry.record_kernels() as ran:
        flash_attention(*x, mask=CAUSAL)
        flash_attention(*x, mask=CAUSAL)
    assert [direction for _, direction in ran] == ["forward", "forward"]
    assert cache.size() == 2  # by the arguments, and by the spec


def test_symbolic_shapes_bypass_the_fast_path():
    x = leaves(grad=False)
    flash_attention(*x, mask=CAUSAL)
    traced = make_fx(torch.func.functionalize(lambda q: flash_attention(q, q, q, mask=CAUSAL)), tracing_mode="symbolic")
    assert "meshflash" in traced(x[0]).code


def test_number_of_entries_is_bounded(monkeypatch):
    monkeypatch.setattr("meshflash.engine.cache.MAX_ENTRIES", 3)
    for tokens in range(1, 9):
        flash_attention(*leaves(grad=False, tokens=tokens), mask=CAUSAL)
        assert cache.size() <= 3


def test_call_under_autocast_does_not_serve_mixed_dtypes_outside_of_it():
    q, k, v = torch.randn(1, 9, 2, 8).bfloat16(), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            flash_attention(q, k, v)
        with pytest.raises(ValueError, match="must share one of the dtypes"):
            flash_attention(q, k, v)


def test_dtype_of_sink_logits_and_slopes_is_part_of_what_identifies_a_call():
    q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
    logits = torch.tensor([0.5, -1.25])
    want = flash_attention(q, k, v, sink_logits=logits, alibi_slopes=logits.abs(), kernel="tiled")
    before = cache.size()
    for dtype in (torch.float64, torch.bfloat16):
        more: dict[str, Any] = dict(sink_logits=logits.to(dtype), alibi_slopes=logits.abs().to(dtype))
        torch.testing.assert_close(flash_attention(q, k, v, kernel="tiled", **more), want)
    assert cache.size() == before + 2


@pytest.mark.parametrize("scale", [([],), [1.0]])
def test_arguments_without_a_hash_are_refused_by_name(scale):
    q = torch.randn(1, 9, 2, 8)
    with pytest.raises(ValueError, match="scale="):
        flash_attention(q, q, q, scale=scale)
