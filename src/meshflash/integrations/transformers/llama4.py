"""Llama 4 scales queries by their positions, which its attention counts from the first token that it holds.

Held tokens are a part of the sequence here, so queries are scaled anew by their positions in the whole one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshflash.core.layout import Layout

#: The attention whose queries are scaled so.
ATTENTION = "Llama4TextAttention"


def scale_queries(module: nn.Module, query: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return the queries of a rank with the scale of their positions in the whole sequence.

    Args:
        module: The attention module.
        query: The queries, `[batch, heads, tokens, dim]`, as the module scaled them.
        layout: The layout of the sequence.
        rank: The rank.
    """
    if ATTENTION not in {kind.__name__ for kind in type(module).__mro__} or not _is_scaled(module):
        return query
    whole = torch.from_numpy(layout.positions(rank))
    factor = _scale(module, whole) / _scale(module, torch.arange(query.shape[2]))
    return query * factor[:, None].to(query)


def _is_scaled(module: Any) -> bool:
    return bool(module.attn_temperature_tuning) and not module.use_rope


def _scale(module: Any, positions: Tensor) -> Tensor:
    steps = torch.floor((positions.double() + 1.0) / module.floor_scale)
    return torch.log1p(steps) * module.attn_scale + 1.0
