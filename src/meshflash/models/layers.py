"""What GPT and ViT are made of: attention with rotary positions, gated and plain MLPs, and their initial weights.

Shapes in names: B batch, T tokens of this rank, H heads, K key heads, D dim of a head, E dim of the model.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.groups import group_of
from meshflash.models.cache import Cache
from meshflash.parallel.context import MeshAttention
from meshflash.parallel.tiles import TiledMLP, tiled_mlp


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of rotary frequencies for sequences longer than those of the first training."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_tokens: int = 8192


@dataclass(frozen=True)
class Context:
    """What all layers of a call share: who sees whom, which tokens these are, and their rotations, if any."""

    mask: Mask | None
    layout: Layout | None
    cos: Tensor | None = None
    sin: Tensor | None = None
    cache: Cache | None = None


def frequencies(dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Radians by position of each pair of a head's dims, in float64.

    >>> frequencies(4, 10000.0).tolist()
    [1.0, 0.01]
    """
    found = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if scaling is None:
        return found
    turns = scaling.original_tokens * found / (2 * math.pi)  # over the sequences of the first training
    width = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / width).clamp(0.0, 1.0)
    return found * kept + found / scaling.factor * (1.0 - kept)


def rotations(positions: Tensor, turning: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) of `[tokens]` or `[batch, tokens]` positions, for every head: `[(batch,) tokens, 1, dim / 2]`.

    Angles are computed in float64: at a million tokens those of float32 are wrong in the second digit.
    """
    angles = positions.double()[..., None] * turning.to(positions.device)
    return angles.cos()[..., None, :].to(dtype), angles.sin()[..., None, :].to(dtype)


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of dims, the first half with the second, as Llama's weights expect."""
    a, b = x_BTHD.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def token_positions(tokens: int, mask: Mask | None, layout: Layout | None, rank: int, device: torch.device) -> Tensor:
    """The positions of this rank's tokens, counted within their documents: `[tokens]`, or `[rows, tokens]`."""
    whole = layout.tokens if layout is not None else tokens
    if mask is None or not mask.documents_nodes:
        if layout is None:
            return torch.arange(tokens, device=device)
        return torch.from_numpy(np.ascontiguousarray(layout.positions(rank))).to(device)
    places = mask.positions_in_document(whole)
    if layout is not None:
        places = places[..., layout.positions(rank)]
    return torch.from_numpy(np.ascontiguousarray(places)).to(device)


class Attention(nn.Module):
    """Projections of queries, keys and values, rotary positions where given, attention over the mesh, and back."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, bias: bool = False) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=bias)
        self.attend = MeshAttention()

    def forward(self, x_BTE: Tensor, context: Context) -> Tensor:
        q, k, v = (
            project(x_BTE).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if context.cos is not None and context.sin is not None:
            q, k = (rotate(x, context.cos, context.sin).to(v.dtype) for x in (q, k))
        if context.cache is not None and context.cache.tokens:
            out_BTHD = context.cache.attend(self, q, k, v, context.mask)
        else:
            if context.cache is not None:
                context.cache.keep(self, k, v)
            out_BTHD = self.attend(q, k, v, mask=context.mask, layout=context.layout)
        out: Tensor = self.o_proj(out_BTHD.flatten(-2))
        return out


class GatedMLP(TiledMLP):
    """SwiGLU: one projection gates the other."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.tiles > 1:
            return tiled_mlp(x, (self.gate_proj, self.up_proj), self.down_proj, _gated, self.tiles)
        out: Tensor = self.down_proj(_gated(self.gate_proj(x), self.up_proj(x)))
        return out


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def sharing_ranks(model: nn.Module) -> tuple[str, int, int]:
    """(group, rank, number) of the ranks that share a model's sequence."""
    mesh = next(part.mesh for part in model.modules() if isinstance(part, MeshAttention))
    return ("", 0, 1) if mesh is None else group_of(mesh)


def check_division(what: str, number: int, tp: int) -> None:
    """ValueError unless tensor-parallel ranks get equal parts."""
    if number % tp:
        raise ValueError(f"tp={tp}: it does not divide the {number} {what}; take one that does")


#: Standard deviation of a weight by its name and shape; None for ones.
Spread = Callable[[str, torch.Size], float | None]


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, spread: Spread) -> None:
    """Draw all weights: a weight's values depend on the seed and its name, not on the ranks that it is spread over.

    Each rank draws the whole of one weight at a time and keeps its own part.
    """
    for name, weight in model.named_parameters():
        deviation = spread(name, weight.shape)
        if deviation is None:
            weight.fill_(1.0)
        elif deviation == 0.0:
            weight.zero_()
        else:
            key = zlib.crc32(name.encode()) + (seed << 32)
            part = weight.to_local() if isinstance(weight, DTensor) else weight
            generator = torch.Generator(part.device).manual_seed(key)
            whole = torch.empty(weight.shape, dtype=torch.float32, device=part.device)
            whole.normal_(0.0, deviation, generator=generator)
            part.copy_(whole[own_part(weight)])


def own_part(weight: Tensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole of a weight."""
    if not isinstance(weight, DTensor):
        return tuple(slice(0, n) for n in weight.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
