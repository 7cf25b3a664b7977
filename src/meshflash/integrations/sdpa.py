"""`scaled_dot_product_attention` with torch's signature and `[batch, heads, tokens, dim]`, by meshflash."""

from __future__ import annotations

import math
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
    """`torch.nn.functional.scaled_dot_product_attention`, with a `Mask` where that takes a matrix.

    `is_causal` aligns the first query with the first key, as torch does. `features` are those of
    `meshflash.flash_attention` (softcap, sink_logits, alibi_slopes, seed, kernel, ...).

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
            "A matrix of the whole mask is what this library avoids"
        )
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal=True with attn_mask: give one of them; Mask.causal() & other combines two")
    unknown = features.keys() - FlashFeatures.__annotations__.keys()
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: expected only {', '.join(FlashFeatures.__annotations__)}")
    if query.ndim < 2 or not query.ndim == key.ndim == value.ndim:
        raise ValueError(
            f"query, key and value must have the same number of dimensions, at least [tokens, dim]; got "
            f"{list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        )
    alone = query.ndim == 2
    if alone:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"{query.shape[-3]} heads in query, {key.shape[-3]} in key: enable_gqa=True if they are to be shared"
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            f"query, key and value must have the same batch; got "
            f"{list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
        )
    batch = math.prod(query.shape[:-3])
    out = flash_attention(
        *(x.reshape(batch, *x.shape[-3:]).transpose(1, 2) for x in (query, key, value)),
        mask=Mask.causal() if is_causal else attn_mask,
        dropout=dropout_p,
        scale=scale,
        **features,
    )
    out = out.transpose(1, 2).reshape(*query.shape[:-1], value.shape[-1])
    return out.squeeze(0) if alone else out
