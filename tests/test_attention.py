"""FlashAttention of the CS336 course: the course's own tests by their names, on tensors `[..., tokens, dim]`."""

import pytest
import torch

from meshflash.integrations.compat import cs336
from meshflash.integrations.compat.cs336 import (
    FlashAttentionFunction,
    FlashAttentionTorch,
    FlashAttentionTriton,
    flash_attention_forward,
    standard_attention,
)


def _inputs(*shape):
    """Return q, k, v and an upstream gradient of this shape."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=generator).requires_grad_() for _ in range(4))


def _attention_and_lse(q, k, v, is_causal):
    """Return dense attention and the log-sum-exp of its scores."""
    scores = torch.einsum("...qd,...kd->...qk", q, k) / q.shape[-1] ** 0.5
    if is_causal:
        visible = torch.arange(q.shape[-2], device=q.device)[:, None] >= torch.arange(k.shape[-2], device=q.device)
        scores = scores.masked_fill(~visible, -torch.inf)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(4, 128, 64), (2, 3, 37, 16)])
def test_flash_forward_pass_pytorch(shape, is_causal):
    q, k, v, _ = _inputs(*shape)
    out = FlashAttentionTorch.apply(q, k, v, is_causal)
    want, want_lse = _attention_and_lse(q, k, v, is_causal)
    saved = [x for x in out.grad_fn.saved_tensors if x.shape == q.shape[:-1]]
    assert len(saved) == 1
    assert torch.allclose(out, want, atol=1e-5)
    assert torch.allclose(saved[0], want_lse, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(4, 128, 64), (2, 3, 37, 16)])
def test_flash_backward_pytorch(shape, is_causal):
    q, k, v, dout = _inputs(*shape)
    got = torch.autograd.grad(FlashAttentionTorch.apply(q, k, v, is_causal), (q, k, v), dout)
    want = torch.autograd.grad(_attention_and_lse(q, k, v, is_causal)[0], (q, k, v), dout)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("is_causal", [False, True])
def test_flash_forward_and_backward_triton(is_causal):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v, dout = (x.detach().to(device).requires_grad_() for x in _inputs(2, 3, 37, 16))
    out = FlashAttentionTriton.apply(q, k, v, is_causal)
    want, want_lse = _attention_and_lse(q, k, v, is_causal)
    saved = [x for x in out.grad_fn.saved_tensors if x.shape == q.shape[:-1]]
    assert len(saved) == 1
    assert torch.allclose(saved[0], want_lse, atol=1e-5)
    assert torch.allclose(out, want, atol=1e-5)
    got, wanted = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, want))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, wanted, strict=True))


def test_deterministic_mode_reaches_the_kernel():
    q, k, v, _ = _inputs(2, 9, 8)
    torch.use_deterministic_algorithms(True)
    try:
        assert FlashAttentionTriton.apply(q, k, v).grad_fn is not None
        assert cs336._spec(q, k, v, True, "triton")[0].deterministic
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_flash_attention_forward_matches_reference(is_causal, block_size):
    q, k, v, _ = _inputs(2, 3, 37, 16)
    out, lse = flash_attention_forward(q, k, v, is_causal, block_size)
    want, want_lse = _attention_and_lse(q, k, v, is_causal)
    assert torch.allclose(out, want, atol=1e-5)
    assert torch.allclose(lse, want_lse, atol=1e-5)


def test_is_causal_defaults_to_false_and_aliases_are_equal():
    q, k, v, _ = _inputs(2, 9, 8)
    assert FlashAttentionFunction is FlashAttentionTorch
    assert torch.equal(FlashAttentionTorch.apply(q, k, v), FlashAttentionTorch.apply(q, k, v, False))


@pytest.mark.parametrize("is_causal", [False, True])
def test_causal_mask_aligns_first_query_with_first_key(is_causal):
    q, k, v, _ = _inputs(2, 9, 8)
    for queries, keys in ((q[:, :4], k), (q, k[:, :4])):
        values = v[:, : keys.shape[1]]
        want = _attention_and_lse(queries, keys, values, is_causal)[0]
        assert torch.allclose(FlashAttentionTorch.apply(queries, keys, values, is_causal), want, atol=1e-5)
        assert torch.allclose(standard_attention(queries, keys, values, is_causal), want, atol=1e-5)


def test_autocast_keeps_float32_accumulators():
    q, k, v, _ = _inputs(2, 65, 16)
    plain, wanted = FlashAttentionTorch.apply(q, k, v, True), flash_attention_forward(q, k, v, True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(FlashAttentionTorch.apply(q, k, v, True), plain)
        assert all(torch.equal(a, b) for a, b in zip(flash_attention_forward(q, k, v, True), wanted, strict=True))


def test_double_backward_is_refused():
    q, k, v, _ = _inputs(2, 9, 8)
    grad = torch.autograd.grad(FlashAttentionTorch.apply(q, k, v).sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()


@pytest.mark.parametrize("shape", [(2, 0, 8), (0, 9, 8)])
def test_empty_inputs_give_zero_outputs_and_gradients(shape):
    q, k, v, _ = _inputs(*shape)
    out = FlashAttentionTorch.apply(q, k, v, True)
    out.sum().backward()
    assert out.shape == shape
    assert q.grad.shape == shape


def test_autograd_function_runs_inside_compiled_code():
    torch._dynamo.reset()
    q, k, v, dout = _inputs(2, 9, 8)
    compiled = torch.compile(
        lambda q, k, v: FlashAttentionTorch.apply(q, k, v, True), backend="aot_eager", fullgraph=True
    )
    got = torch.autograd.grad(compiled(q, k, v), (q, k, v), dout)
    want = torch.autograd.grad(FlashAttentionTorch.apply(q, k, v, True), (q, k, v), dout)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want, strict=True))


def test_forward_function_records_no_graph():
    q, k, v, _ = _inputs(2, 9, 8)
    out, lse = flash_attention_forward(q, k, v, True)
    assert not out.requires_grad
    assert not lse.requires_grad


def test_errors_name_the_expected_shapes():
    q, k, v, _ = _inputs(2, 9, 8)
    with pytest.raises(ValueError, match=r"same leading dimensions; got \[2, 9, 8\], \[1, 9, 8\]"):
        FlashAttentionTorch.apply(q, k[:1], v)
    with pytest.raises(ValueError, match="same dim in q and k"):
        FlashAttentionTorch.apply(q, k[..., :4], v)
    with pytest.raises(ValueError, match=r"one floating-point dtype; got torch.int64"):
        FlashAttentionTorch.apply(q.long(), k.long(), v.long())
    with pytest.raises(ValueError, match="block_size=0: expected at least 1"):
        flash_attention_forward(q, k, v, True, block_size=0)
