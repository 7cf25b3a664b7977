"""The layers of GPT and ViT: attention with rotary positions, MLPs, and weight initialization.

Shapes in names: B batch, T tokens of this rank, H heads, D dim of a head, E dim of the model.
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
from meshflash.models.gpt_config import RopeScaling
from meshflash.models.kv_cache import KVCache
from meshflash.parallel.context import MeshAttention
from meshflash.parallel.tiled_mlp import TiledMLP, tiled_mlp


@dataclass(frozen=True)
class Context:
    """The inputs that all layers share: mask, layout, rotary cos and sin (if any), and KV cache (if any)."""

    mask: Mask | None
    layout: Layout | None
    cos: Tensor | None = None
    sin: Tensor | None = None
    cache: KVCache | None = None


def rotary_frequencies(dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Return the rotary frequency (radians per position) of each pair of dims of a head, in float64.

    Args:
        dim: The size of a head.
        theta: The base of the frequencies.
        scaling: How frequencies are scaled for long sequences.

    >>> rotary_frequencies(4, 10000.0).tolist()
    [1.0, 0.01]
    """
    found = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if scaling is None:
        return found
    num_rotations = scaling.original_tokens * found / (2 * math.pi)  # over a sequence of pretraining
    width = scaling.high_freq_factor - scaling.low_freq_factor
    unscaled = ((num_rotations - scaling.low_freq_factor) / width).clamp(0.0, 1.0)
    return found * unscaled + found / scaling.factor * (1.0 - unscaled)


def rotary_cos_sin(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of positions, `[(batch,) tokens, 1, dim / 2]`, to broadcast over heads.

    Angles are computed in float64: at a million tokens float32 angles are wrong in the second digit.

    Args:
        positions: The positions, `[tokens]` or `[batch, tokens]`.
        frequencies: The result of `rotary_frequencies`.
        dtype: The dtype of the result.
    """
    angles = positions.double()[..., None] * frequencies.to(positions.device)
    return angles.cos()[..., None, :].to(dtype), angles.sin()[..., None, :].to(dtype)


def apply_rotary(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of dims, one of the first half with one of the second, as Hugging Face's Llama weights expect.

    Args:
        x_BTHD: Queries or keys.
        cos: The cosines of `rotary_cos_sin`.
        sin: The sines of `rotary_cos_sin`.
    """
    a, b = x_BTHD.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def token_positions(tokens: int, mask: Mask | None, layout: Layout | None, rank: int, device: torch.device) -> Tensor:
    """Return the positions of this rank's tokens within their documents: `[tokens]`, or `[rows, tokens]`.

    Args:
        tokens: The number of tokens of this rank.
        mask: The mask, whose documents restart positions.
        layout: Which tokens each rank holds; None for the whole sequence.
        rank: This rank among those that share the sequence.
        device: The device of the result.
    """
    num_tokens = layout.tokens if layout is not None else tokens
    if mask is None or not mask.documents_nodes:
        if layout is None:
            return torch.arange(tokens, device=device)
        return torch.from_numpy(np.ascontiguousarray(layout.positions(rank))).to(device)
    positions = mask.positions_in_document(num_tokens)
    if layout is not None:
        positions = positions[..., layout.positions(rank)]
    return torch.from_numpy(np.ascontiguousarray(positions)).to(device)


class Attention(nn.Module):
    """Multi-head attention: QKV projections, RoPE if the context has it, attention over the mesh, output projection."""

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
            q, k = (apply_rotary(x, context.cos, context.sin).to(v.dtype) for x in (q, k))
        if context.cache is not None and context.cache.tokens:
            out_BTHD = context.cache.attend(self, q, k, v, context.mask)
        else:
            if context.cache is not None:
                context.cache.store(self, k, v)
            out_BTHD = self.attend(q, k, v, mask=context.mask, layout=context.layout)
        return self.o_proj(out_BTHD.flatten(-2))


class GatedMLP(TiledMLP):
    """A SwiGLU MLP: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.tiles > 1:
            return tiled_mlp(x, (self.gate_proj, self.up_proj), self.down_proj, _gated, self.tiles)
        return self.down_proj(_gated(self.gate_proj(x), self.up_proj(x)))


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def sequence_group(model: nn.Module) -> tuple[str, int, int]:
    """Return (group name, rank, world size) of the ranks that share the sequence of a model."""
    mesh = next(part.mesh for part in model.modules() if isinstance(part, MeshAttention))
    return ("", 0, 1) if mesh is None else group_of(mesh)


def check_divisible(what: str, number: int, tp: int) -> None:
    """Raise ValueError unless `tp` ranks get equal shares of `number`.

    Args:
        what: The name of the number, for the error.
        number: The number to divide, such as that of heads.
        tp: The number of tensor-parallel ranks.
    """
    if number % tp:
        raise ValueError(f"tp={tp}: it does not divide the {number} {what}; take one that does")


#: Returns the standard deviation of a weight by its name and shape; None fills it with ones.
WeightStd = Callable[[str, torch.Size], float | None]


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, weight_std: WeightStd) -> None:
    """Initialize all weights; values depend on the seed and the weight's name, not on how it is sharded.

    Each rank draws one whole weight at a time and keeps its own shard.

    Args:
        model: The model, with memory for its weights.
        seed: The seed of all weights.
        weight_std: The standard deviation of each weight; None fills it with ones, and 0 with zeros.
    """
    for name, weight in model.named_parameters():
        std = weight_std(name, weight.shape)
        if std is None:
            weight.fill_(1.0)
        elif std == 0.0:
            weight.zero_()
        else:
            key = zlib.crc32(name.encode()) + (seed << 32)
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            generator = torch.Generator(local.device).manual_seed(key)
            full = torch.empty(weight.shape, dtype=torch.float32, device=local.device)
            full.normal_(0.0, std, generator=generator)
            local.copy_(full[local_slices(weight)])


def local_slices(weight: Tensor) -> tuple[slice, ...]:
    """Return the slices of the full weight that this rank's shard covers."""
    if not isinstance(weight, DTensor):
        return tuple(slice(0, n) for n in weight.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
