"""A Vision Transformer for images of any size on any mesh: patches are tokens, and every patch sees every other.

Shapes in names: B batch, T patches of this rank, P values of a patch, E dim of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as _distributed
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.engine.group_context import group_context
from meshflash.models.layers import Attention, Context, check_division, frequencies, init_weights, sharing_ranks
from meshflash.models.patches import Patch, grid_of, pair, patchify
from meshflash.parallel.loss import IGNORED
from meshflash.parallel.tiles import TiledMLP, tiled_mlp

dist: Any = _distributed  # torch does not declare all that it exports here

#: What the model says: one class for an image, or values for each of its pixels.
HEADS = ("classes", "pixels")


@dataclass(frozen=True)
class ViTConfig:
    """Sizes of a ViT. `outputs` is the number of classes, or of channels that each pixel gets."""

    patch: Patch = 8
    channels: int = 3
    layers: int = 2
    dim: int = 64
    heads: int = 4
    hidden: int = 128
    head: str = "classes"
    outputs: int = 10
    theta: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        object.__setattr__(self, "patch", pair(self.patch))
        if self.dim % self.heads:
            raise ValueError(f"dim={self.dim}: {self.heads} heads do not divide it; take a dim that they divide")
        if self.dim % 4:
            raise ValueError(f"dim={self.dim}: rows and columns get sines and cosines each; take a multiple of 4")
        if self.head not in HEADS:
            raise ValueError(f"head={self.head!r}: expected one of {', '.join(HEADS)}")


def tiny(**changes: Any) -> ViTConfig:
    """A model for tests and demos."""
    return replace(ViTConfig(), **changes)


def vit_base(**changes: Any) -> ViTConfig:
    """ViT-B/16, of 86 million weights."""
    return replace(ViTConfig(16, 3, 12, 768, 12, 3072, outputs=1000), **changes)


def vit_2_6b(**changes: Any) -> ViTConfig:
    """2.6 billion weights, for small patches of large images; its 16 heads of 128 can be shared by 2 to 16 ranks."""
    return replace(ViTConfig(4, 3, 52, 2048, 16, 8192, outputs=1000), **changes)


PRESETS = {"tiny": tiny, "base": vit_base, "2.6b": vit_2_6b}


class MLP(TiledMLP):
    """Two projections with a GELU between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(dim, hidden)
        self.down_proj = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        if self.tiles > 1:
            return tiled_mlp(x, (self.up_proj,), self.down_proj, functional.gelu, self.tiles)
        out: Tensor = self.down_proj(functional.gelu(self.up_proj(x)))
        return out


class Block(nn.Module):
    """Attention, then the MLP, each on a norm of what it adds to."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config.dim, config.heads, config.heads, config.dim // config.heads, bias=True)
        self.mlp_norm = nn.LayerNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config.dim, config.hidden)

    def forward(self, x_BTE: Tensor, context: Context) -> Tensor:
        x_BTE = x_BTE + self.self_attn(self.attention_norm(x_BTE), context)
        out: Tensor = x_BTE + self.mlp(self.mlp_norm(x_BTE))
        return out


class ViT(nn.Module):
    """An encoder over patches, with sines and cosines of rows and columns as positions.

    `head="classes"` pools the mean of all patches, on whatever ranks they are; `head="pixels"` gives each patch values
    of its own. Where one rank cannot hold the model: build it under `torch.device("meta")`, `parallelize` it,
    `to_empty(device=...)` and `init_weights()`.

    >>> images = torch.randn(2, 3, 37, 53)
    >>> ViT(tiny())(images).shape
    torch.Size([2, 10])
    >>> ViT(tiny(head="pixels", outputs=1))(images).shape
    torch.Size([2, 35, 64])
    """

    #: Patches are cast here; targets are not.
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
        """Logits `[batch, classes]`, or values `[batch, patches, outputs * patch]`; with labels the *sum* of losses.

        The sum is of this rank's labels. Gradients are added over the ranks of cp as over those of dp, so what counts
        must be on one of them. For pixels that is so of itself. Logits of an image are the same on all ranks of cp, so
        its label is on the first and `IGNORED` on the others, as `spread_images` has it: the losses of all ranks add up
        to one device's and `count_tokens` counts each image once. (The mean of `accumulate` is the same if all of them
        have the label, for loss and count grow alike.) The pooled mean sends to each rank the gradients of all.

        Args:
            patches: this rank's, `[batch, patches, channels * patch]`, or whole images `[batch, channels, height,
                width]`, of which it takes its own.
            labels: of classes `[batch]`. Of pixels any integers in the shape of the targets: what is not `IGNORED`
                counts, so that a mean is over values, not over patches.
            targets: of pixels what they should be, as patches of this rank, or whole images where cp is 1; where labels
                say `IGNORED` anything, NaN too. The loss is the squared error.
            mask: over the whole sequence of patches, row by row; all see all by default.
            layout: which patches of the sequence these are, where ranks share it; of whole images contiguous ones by
                default.
            grid: rows and columns of patches; whole images say it themselves.
        """
        if self.config.head == "classes" and targets is not None:
            raise ValueError('targets: they are of pixels; build the model with head="pixels", or give labels')
        own, grid, layout = self._own(patches, grid, layout)
        if patches.ndim == 4:
            patches = patchify(patches, self.config.patch)[:, own]
        x_BTE = self.patch_embed(patches.to(self.patch_embed.weight.dtype))
        x_BTE = x_BTE + _places(own, grid, self.config.dim, self.config.theta, x_BTE.dtype)
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
            raise ValueError('head="pixels": labels only say which values count; give targets=, what they should be')
        return self._pixels(out_BTP, *(self._taken(x, own) for x in (labels, targets)))

    def init_weights(self, seed: int = 0) -> None:
        """Draw all weights, the same on any mesh."""
        deep = 0.02 / (2 * self.config.layers) ** 0.5

        def spread(name: str, shape: torch.Size) -> float | None:
            if name.endswith("bias"):
                return 0.0
            if len(shape) == 1:
                return None
            if name == "patch_embed.weight":  # its inputs are as many as a patch has values, few or thousands
                return float(shape[1] ** -0.5)
            return deep if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02

        init_weights(self, seed, spread)

    def tensor_plan(self, tp: int) -> dict[str, ParallelStyle]:
        """How torch divides the model over `tp` ranks: heads and hidden units; embedding and head are on all."""
        check_division("heads", self.config.heads, tp)
        check_division("hidden units", self.config.hidden, tp)
        plan: dict[str, ParallelStyle] = {}
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj"):
            plan[f"layers.*.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"layers.*.{name}"] = RowwiseParallel()
        return plan

    def _own(
        self, x: Tensor, grid: tuple[int, int] | None, layout: Layout | None
    ) -> tuple[Tensor, tuple[int, int], Layout | None]:
        """Where this rank's patches are in the sequence, of which grid, and in which layout."""
        _, rank, world = sharing_ranks(self)
        if x.ndim == 4:
            grid = grid_of(x, self.config.patch)
            layout = layout or Layout.contiguous(grid[0] * grid[1], world)
        elif x.ndim != 3:
            raise ValueError(
                "patches: expected [batch, patches, values], or images [batch, channels, height, width]; "
                f"got {list(x.shape)}"
            )
        if grid is None:
            raise ValueError("patches: give grid=(rows, columns) with them; spread_images does")
        if layout is None and world > 1:
            raise ValueError(f"patches: give the layout= by which {world} ranks share them; spread_images does")
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

    def _taken(self, x: Tensor, own: Tensor) -> Tensor:
        """Patches of whole images, where one rank has all of them; patches as they are."""
        if x.ndim != 4:
            return x
        if sharing_ranks(self)[2] > 1:
            raise ValueError(
                "labels, targets: of whole images each rank of cp would count all pixels; give this rank's patches of "
                "them, as spread_images does"
            )
        return patchify(x, self.config.patch, IGNORED)[:, own]

    def _classes(self, x_BTE: Tensor, labels: Tensor | None, tokens: int) -> Tensor:
        name, _, world = sharing_ranks(self)
        wide = torch.promote_types(x_BTE.dtype, torch.float32)
        sums_BE = x_BTE.sum(1, dtype=wide)
        if world > 1:
            sums_BE = _Sum.apply(sums_BE, name)
        logits: Tensor = self.head((sums_BE / tokens).to(x_BTE.dtype))
        if labels is None:
            return logits
        if labels.shape != logits.shape[:1]:
            raise ValueError(f"labels: expected one class for each of {len(logits)} images; got {list(labels.shape)}")
        return functional.cross_entropy(logits.to(wide), labels, ignore_index=IGNORED, reduction="sum")

    def _pixels(self, out_BTP: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
        for name, x in (("labels", labels), ("targets", targets)):
            if x.shape != out_BTP.shape:
                raise ValueError(f"{name}: expected {list(out_BTP.shape)}, as the head has values; got {list(x.shape)}")
        wide = torch.promote_types(out_BTP.dtype, torch.float32)
        # chosen before it is squared: the gradient of what does not count is 0, not NaN
        return (out_BTP.to(wide) - targets.to(wide)).where(labels != IGNORED, 0.0).square().sum()


class _Sum(torch.autograd.Function):
    """The sum over ranks, on each of them; its gradient is the sum of what all ranks' losses say of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return _summed(x, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.name), None


def _summed(x: Tensor, name: str) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group_context(name).group)
    return x


def _places(own: Tensor, grid: tuple[int, int], dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Sines and cosines of the row and the column of patches: `[patches, dim]`, each angle computed in float64."""
    turning = frequencies(dim // 2, theta).to(own.device)
    sides = []
    for number, place in zip(grid, (own // grid[1], own % grid[1]), strict=True):
        angles = torch.arange(number, device=own.device).double()[:, None] * turning
        sides.append(torch.cat((angles.sin(), angles.cos()), dim=-1).to(dtype)[place])
    return torch.cat(sides, dim=-1)
