"""`scaled_dot_product_attention` with PyTorch's signature: results match PyTorch, unsupported arguments raise."""

import pytest
import torch
from torch.nn import functional

from meshflash import Mask
from meshflash.integrations.sdpa import scaled_dot_product_attention


def _qkv(*shape):
    """Return random q, k and v of one shape."""
    return tuple(torch.randn(*shape, requires_grad=True) for _ in range(3))


@pytest.mark.parametrize("shape", [(2, 3, 17, 8), (3, 17, 8), (2, 2, 3, 17, 8), (17, 8), (2, 3, 0, 8)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_matches_torch_sdpa(shape, is_causal):
    q, k, v = _qkv(*shape)
    ours = scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3)
    theirs = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3)
    assert torch.allclose(ours, theirs, atol=1e-6)
    dout = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), dout) for x in (ours, theirs)), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_gqa_and_cross_attention_match_torch_sdpa():
    q, (k, v, _) = torch.randn(2, 4, 5, 8), _qkv(2, 2, 17, 8)
    ours = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert torch.allclose(ours, functional.scaled_dot_product_attention(q, k, v, enable_gqa=True), atol=1e-6)


def test_masks_match_torch_sdpa_and_features_are_accepted():
    q, k, v = _qkv(1, 2, 17, 8)
    documents = Mask.causal() & Mask.documents([5, 12])
    i, j = torch.arange(17)[:, None].numpy(), torch.arange(17).numpy()
    visible = torch.from_numpy(documents.visible(i, j))
    ours = scaled_dot_product_attention(q, k, v, documents)
    assert torch.allclose(ours, functional.scaled_dot_product_attention(q, k, v, visible), atol=1e-6)
    assert scaled_dot_product_attention(q, k, v, dropout_p=0.5, seed=3, softcap=1.0).shape == ours.shape


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(attn_mask=torch.ones(17, 17)), "attn_mask: expected a meshflash.Mask"),
        (dict(attn_mask=Mask.full(), is_causal=True), "is_causal=True with attn_mask: pass one of them"),
        (dict(key=torch.zeros(1, 1, 17, 8)), "2 heads in query, 1 in key: pass enable_gqa=True"),
        (dict(key=torch.zeros(3, 2, 17, 8)), "must have the same batch"),
        (dict(query=torch.zeros(17, 8)), "the same number of dimensions, at least"),
        (dict(return_lse=True), "return_lse: expected only softcap, sink_logits"),
        (dict(mask=Mask.causal()), "mask: expected only softcap, sink_logits"),
    ],
)
def test_errors_name_the_argument_and_a_remedy(arguments, message):
    x = torch.zeros(1, 2, 17, 8)
    with pytest.raises(ValueError, match=message):
        scaled_dot_product_attention(**{"query": x, "key": x, "value": x, **arguments})
