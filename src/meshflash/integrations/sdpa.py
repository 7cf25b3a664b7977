"""`scaled_dot_product_attention` with torch's signature and its order of axes, `[batch, heads, tokens, dim]`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Unpack

from torch import Tensor

from meshflash.api import FlashFeatures, flash_attention
from meshflash.core.mask import Mask


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **features: Unpack[FlashFeatures],
) -> Tensor:
    """Compute what `torch.nn.functional.scaled_dot_product_attention` does, with a `Mask` in place of a matrix.

    Args:
        query: The queries, `[..., heads, tokens, dim]`, or `[tokens, dim]`.
        key: The keys, `[..., kv_heads, key_tokens, dim]`.
        value: The values, `[..., kv_heads, key_tokens, value_dim]`.
        attn_mask: The keys that each query may attend to. None means all keys. A tensor is refused.
        dropout_p: The probability of dropping a (query, key) pair.
        is_causal: Whether the mask is causal. The first query is aligned with the first key, as in torch.
        scale: The factor that multiplies all scores. None means `dim ** -0.5`.
        enable_gqa: Whether `kv_heads` may be smaller than `heads`.
        features: Further arguments of `meshflash.flash_attention`, such as softcap, sink_logits, alibi_slopes, seed
            and kernel.

    Returns:
        The output, `[..., heads, tokens, value_dim]`.

    >>> import torch
    >>> x = torch.randn(1, 2, 5, 8)
    >>> ours = scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> theirs = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> torch.allclose(ours, theirs, atol=1e-6)
    True
    """
    if isinstance(attn_mask, Tensor):
        raise ValueError(
            "attn_mask: expected a meshflash.Mask, such as Mask.causal() & Mask.documents(lengths); got a tensor. "
            "Masks are rules on positions here, so that no matrix of all pairs is stored"
        )
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal=True with attn_mask: pass one of them; Mask.causal() & other combines two")
    unknown = features.keys() - FlashFeatures.__annotations__.keys()
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: expected only {', '.join(FlashFeatures.__annotations__)}")
    mask = Mask.causal() if is_causal else attn_mask

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, mask=mask, dropout=dropout_p, scale=scale, **features)

    check_shapes(query, key, value, enable_gqa)
    return call_with_tokens_first(compute, query, key, value)


def check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Raise ValueError unless the numbers of dimensions and heads and the batches fit together, as torch requires.

    Args:
        query: The queries, `[..., heads, tokens, dim]`, or `[tokens, dim]`.
        key: The keys.
        value: The values.
        enable_gqa: Whether there may be fewer key heads than query heads.
    """
    if query.ndim < 2 or not query.ndim == key.ndim == value.ndim:
        raise ValueError(
            f"query, key and value must have the same number of dimensions, at least [tokens, dim]; got "
            f"{list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        )
    if query.ndim > 2 and not enable_gqa and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"{query.shape[-3]} heads in query, {key.shape[-3]} in key: pass enable_gqa=True to share key heads"
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            f"query, key and value must have the same batch; got "
            f"{list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        )


def call_with_tokens_first(
    compute: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Call an attention of `[batch, tokens, heads, dim]` on tensors with torch's order of axes.

    Args:
        compute: The attention, a function of q, k and v.
        query: The queries, `[..., heads, tokens, dim]`, or `[tokens, dim]`.
        key: The keys.
        value: The values.

    Returns:
        The output in torch's order of axes.
    """
    is_single_head = query.ndim == 2
    if is_single_head:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    batch = math.prod(query.shape[:-3])
    out = compute(*(x.reshape(batch, *x.shape[-3:]).transpose(1, 2) for x in (query, key, value)))
    out = out.transpose(1, 2).reshape(*query.shape[:-1], value.shape[-1])
    return out.squeeze(0) if is_single_head else out
