"""Sizes and presets of `ViT`. Nothing here imports torch, so a command line can read and print them at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

#: The size of a patch in pixels: one number, or (height, width).
Patch = int | tuple[int, int]

#: The outputs of the model: one class for an image, or values for each of its pixels.
HEADS = ("classes", "pixels")


def pair(patch: Patch) -> tuple[int, int]:
    """Return height and width of a patch."""
    height, width = (patch, patch) if isinstance(patch, int) else patch
    if height < 1 or width < 1:
        raise ValueError(f"patch={patch}: expected a size, or (height, width), of at least 1")
    return height, width


@dataclass(frozen=True)
class ViTConfig:
    """The sizes of a ViT.

    Attributes:
        patch: The size of a patch in pixels: one number, or (height, width).
        channels: The channels of the images.
        layers: The number of blocks.
        dim: The size of the residual stream.
        heads: The number of heads; it divides `dim`.
        hidden: The hidden units of each MLP.
        head: "classes" for one class per image, or "pixels" for values of each pixel.
        outputs: The number of classes, or of values of each pixel.
        theta: The base of the frequencies of the positions.
        norm_eps: The epsilon of LayerNorm.
    """

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
    """Return a model for tests and demos."""
    return replace(ViTConfig(), **changes)


def vit_base(**changes: Any) -> ViTConfig:
    """Return ViT-B/16: 86 million parameters."""
    return replace(ViTConfig(16, 3, 12, 768, 12, 3072, outputs=1000), **changes)


def vit_2_6b(**changes: Any) -> ViTConfig:
    """Return 2.6 billion parameters for small patches of large images; 2 to 16 ranks can share its 16 heads of 128."""
    return replace(ViTConfig(4, 3, 52, 2048, 16, 8192, outputs=1000), **changes)


PRESETS = {"tiny": tiny, "base": vit_base, "2.6b": vit_2_6b}
