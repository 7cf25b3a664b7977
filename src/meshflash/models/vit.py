"""A Vision Transformer for images of any size on any mesh: patches are tokens with full attention.

Shapes in names: B batch, T patches of this rank, P values of a patch, E dim of the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.engine.group_context import group_context
from meshflash.models.layers import (
    Attention,
    Context,
    check_divisible,
    init_weights,
    rotary_frequencies,
    sequence_group,
)
from meshflash.models.patches import grid_of, patchify
from meshflash.models.vit_config import HEADS, PRESETS, ViTConfig, pair, tiny, vit_2_6b, vit_base
from meshflash.parallel.loss import IGNORE_INDEX
from meshflash.parallel.tiled_mlp import TiledMLP, tiled_mlp

__all__ = ["HEADS", "MLP", "PRESETS", "Block", "ViT", "ViTConfig", "tiny", "vit_2_6b", "vit_base"]


class MLP(TiledMLP):
    """A plain MLP: `down(gelu(up(x)))`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(dim, hidden)
        self.down_proj = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        if self.tiles > 1:
            return tiled_mlp(x, (self.up_proj,), self.down_proj, functional.gelu, self.tiles)
        return self.down_proj(functional.gelu(self.up_proj(x)))


class Block(nn.Module):
    """A pre-norm Transformer block: attention, then the MLP."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config.dim, config.heads, config.heads, config.dim // config.heads, bias=True)
        self.mlp_norm = nn.LayerNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config.dim, config.hidden)

    def forward(self, x_BTE: Tensor, context: Context) -> Tensor:
        x_BTE = x_BTE + self.self_attn(self.attention_norm(x_BTE), context)
        return x_BTE + self.mlp(self.mlp_norm(x_BTE))


class ViT(nn.Module):
    """An encoder over patches with sinusoidal embeddings of rows and columns.

    `head="classes"` pools the mean of all patches over all ranks; `head="pixels"` returns values for each patch. If one
    rank cannot hold the model, build it under `torch.device("meta")`, then call `parallelize`, `to_empty(device=...)`
    and `init_weights()`.

    Args:
        config: The sizes of the model.
        seed: The seed of the initial weights.

    >>> images = torch.randn(2, 3, 37, 53)
    >>> ViT(tiny())(images).shape
    torch.Size([2, 10])
    >>> ViT(tiny(head="pixels", outputs=1))(images).shape
    torch.Size([2, 35, 64])
    """

    #: Tells `shard` that the model casts its inputs itself: patches to the compute dtype, targets not.
    casts_inputs = True

    def __init__(self, config: ViTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        height, width = pair(config.patch)
        pixels = height * width
        self.patch_embed = nn.Linear(config.channels * pixels, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.outputs * (pixels if config.head == "pixels" else 1))
        if not self.patch_embed.weight.is_meta:
            self.init_weights(seed)

    def forward(
        self,
        patches: Tensor,
        labels: Tensor | None = None,
        *,
        targets: Tensor | None = None,
        mask: Mask | None = None,
        layout: Layout | None = None,
        grid: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return logits `[batch, classes]`, or values `[batch, patches, outputs * patch]`.

        With labels, return the *sum* of their losses instead.

        The sum covers the labels of this rank. Gradients are reduced over cp as over dp, so each label must count on
        one rank of cp only. Pixels are sharded, so each is on one rank. The logits of an image are the same on all
        ranks of cp, so its label goes to the first rank, and the others get IGNORE_INDEX, as `shard_images` does. The
        losses of all ranks then add up to the loss of a single device. The backward of the pooled mean sums the
        gradients of all ranks.

        Args:
            patches: The patches of this rank, `[batch, patches, channels * patch]`, or whole images `[batch, channels,
                height, width]`; each rank then takes its own patches.
            labels: Classes, `[batch]`. For pixels: integers in the shape of the targets, where IGNORE_INDEX marks
                values without a loss.
            targets: The wanted values of pixels, as patches of this rank, or as whole images where cp is 1. The loss is
                the squared error. Ignored values may be anything, even NaN.
            mask: The mask over the whole sequence of patches in row order; full by default.
            layout: Which patches each rank holds; for whole images contiguous by default.
            grid: The rows and columns of patches; required unless whole images are given.
        """
        if self.config.head == "classes" and targets is not None:
            raise ValueError('targets: they are of pixels; build the model with head="pixels", or give labels')
        own, grid, layout = self._own(patches, grid, layout)
        if patches.ndim == 4:
            patches = patchify(patches, self.config.patch)[:, own]
        x_BTE = self.patch_embed(patches.to(self.patch_embed.weight.dtype))
        x_BTE = x_BTE + _position_embeddings(own, grid, self.config.dim, self.config.theta, x_BTE.dtype)
        context = Context(Mask.full() if mask is None else mask, layout)
        for block in self.layers:
            x_BTE = block(x_BTE, context)
        x_BTE = self.norm(x_BTE)
        if self.config.head == "classes":
            return self._classes(x_BTE, labels, grid[0] * grid[1])
        out_BTP: Tensor = self.head(x_BTE)
        if labels is None:
            return out_BTP
        if targets is None:
            raise ValueError('head="pixels": labels only say which values count; give targets=, the wanted values')
        return self._pixels(out_BTP, *(self._as_patches(x, own) for x in (labels, targets)))

    def init_weights(self, seed: int = 0) -> None:
        """Initialize all weights; the values are the same on any mesh.

        Standard deviation 0.02; projections into the residual stream are scaled by 1 / sqrt(2 layers), as in GPT-2.

        Args:
            seed: The seed of the random values.
        """
        residual_std = 0.02 / (2 * self.config.layers) ** 0.5

        def std(name: str, shape: torch.Size) -> float | None:
            if name.endswith("bias"):
                return 0.0
            if len(shape) == 1:
                return None
            if name == "patch_embed.weight":  # 1 / sqrt(fan in): a patch has few or thousands of values
                return float(shape[1] ** -0.5)
            return residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02

        init_weights(self, seed, std)

    def tensor_plan(self, tp: int) -> dict[str, ParallelStyle]:
        """Return the plan for `parallelize_module` over `tp` ranks: heads and hidden units are sharded.

        The embedding and the head are replicated.

        Args:
            tp: The number of tensor-parallel ranks.
        """
        check_divisible("heads", self.config.heads, tp)
        check_divisible("hidden units", self.config.hidden, tp)
        plan: dict[str, ParallelStyle] = {}
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj"):
            plan[f"layers.*.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"layers.*.{name}"] = RowwiseParallel()
        return plan

    def _own(
        self, x: Tensor, grid: tuple[int, int] | None, layout: Layout | None
    ) -> tuple[Tensor, tuple[int, int], Layout | None]:
        """Return (indices of this rank's patches in the sequence, grid of patches, layout)."""
        _, rank, world = sequence_group(self)
        if x.ndim == 4:
            grid = grid_of(x, self.config.patch)
            layout = layout or Layout.contiguous(grid[0] * grid[1], world)
        elif x.ndim != 3:
            raise ValueError(
                "patches: expected [batch, patches, values], or images [batch, channels, height, width]; "
                f"got {list(x.shape)}"
            )
        if grid is None:
            raise ValueError("patches: give grid=(rows, columns) with them; shard_images does")
        if layout is None and world > 1:
            raise ValueError(f"patches: give the layout= by which {world} ranks share them; shard_images does")
        layout = layout or Layout.contiguous(grid[0] * grid[1], 1)
        if (layout.tokens, layout.world) != (grid[0] * grid[1], world):
            raise ValueError(
                f"layout: it has {layout.tokens} patches on {layout.world} ranks; expected {grid[0]} x {grid[1]} on "
                f"{world}"
            )
        if x.ndim == 3 and x.shape[1] != layout.lengths[rank]:
            raise ValueError(f"patches: the layout gives rank {rank} {layout.lengths[rank]}; got {x.shape[1]}")
        own = torch.from_numpy(np.ascontiguousarray(layout.positions(rank))).to(x.device)
        return own, grid, layout

    def _as_patches(self, x: Tensor, own: Tensor) -> Tensor:
        """Return labels or targets as patches; whole images are accepted only where one rank has all patches."""
        if x.ndim != 4:
            return x
        if sequence_group(self)[2] > 1:
            raise ValueError(
                "labels, targets: with whole images each rank of cp would count all pixels; give this rank's patches "
                "of them, as shard_images does"
            )
        return patchify(x, self.config.patch, IGNORE_INDEX)[:, own]

    def _classes(self, x_BTE: Tensor, labels: Tensor | None, tokens: int) -> Tensor:
        name, _, world = sequence_group(self)
        wide = torch.promote_types(x_BTE.dtype, torch.float32)
        sums_BE = x_BTE.sum(1, dtype=wide)
        if world > 1:
            sums_BE = _AllReduceSum.apply(sums_BE, name)
        logits: Tensor = self.head((sums_BE / tokens).to(x_BTE.dtype))
        if labels is None:
            return logits
        if labels.shape != logits.shape[:1]:
            raise ValueError(f"labels: expected one class for each of {len(logits)} images; got {list(labels.shape)}")
        return functional.cross_entropy(logits.to(wide), labels, ignore_index=IGNORE_INDEX, reduction="sum")

    def _pixels(self, out_BTP: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
        for name, x in (("labels", labels), ("targets", targets)):
            if x.shape != out_BTP.shape:
                raise ValueError(f"{name}: expected {list(out_BTP.shape)}, the head's output; got {list(x.shape)}")
        wide = torch.promote_types(out_BTP.dtype, torch.float32)
        # mask before squaring: the gradient of an ignored NaN would be NaN otherwise
        return (out_BTP.to(wide) - targets.to(wide)).where(labels != IGNORE_INDEX, 0.0).square().sum()


class _AllReduceSum(torch.autograd.Function):
    """An all-reduce whose backward is an all-reduce too: every rank's loss depends on the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return _all_reduce(x, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.name), None


def _all_reduce(x: Tensor, name: str) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group_context(name).group)
    return x


def _position_embeddings(own: Tensor, grid: tuple[int, int], dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Return sinusoidal embeddings of the row and the column of patches, `[patches, dim]`; angles are in float64."""
    frequencies = rotary_frequencies(dim // 2, theta).to(own.device)
    halves = []
    for length, index in zip(grid, (own // grid[1], own % grid[1]), strict=True):
        angles = torch.arange(length, device=own.device).double()[:, None] * frequencies
        halves.append(torch.cat((angles.sin(), angles.cos()), dim=-1).to(dtype)[index])
    return torch.cat(halves, dim=-1)
