"""Images as patches, which are a ViT's tokens, and back; and how ranks that share an image get theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.parallel.loss import IGNORED
from meshflash.parallel.mesh import size as ranks_of
from meshflash.parallel.step import named_layout
from meshflash.sharding import shard

Patch = int | tuple[int, int]


def patchify(images: Tensor, patch: Patch, fill: float = 0.0) -> Tensor:
    """Patches of images, row by row: `[batch, patches, channels * patch height * patch width]`.

    Images that patches do not divide are filled up on the right and below.

    >>> patchify(torch.arange(6.0).reshape(1, 1, 2, 3), 2).tolist()
    [[[0.0, 1.0, 3.0, 4.0], [2.0, 0.0, 5.0, 0.0]]]
    """
    (height, width), (rows, columns) = pair(patch), grid_of(images, patch)
    below, right = rows * height - images.shape[2], columns * width - images.shape[3]
    if below or right:
        images = functional.pad(images, (0, right, 0, below), value=fill)
    blocks = images.unflatten(3, (columns, width)).unflatten(2, (rows, height))
    return blocks.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpatchify(patches: Tensor, patch: Patch, size: tuple[int, int]) -> Tensor:
    """Images of `size` (height, width) from all their patches, without what `patchify` filled up.

    >>> images = torch.randn(2, 3, 5, 7)
    >>> torch.equal(unpatchify(patchify(images, 4), 4, (5, 7)), images)
    True
    """
    height, width = pair(patch)
    rows, columns = -(-size[0] // height), -(-size[1] // width)
    if patches.shape[1] != rows * columns:
        raise ValueError(
            f"patches: {size[0]} x {size[1]} are {rows} x {columns} of {height} x {width}; got {patches.shape[1]}"
        )
    blocks = patches.unflatten(2, (-1, height, width)).unflatten(1, (rows, columns))
    return blocks.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)[..., : size[0], : size[1]]


def grid_of(images: Tensor, patch: Patch) -> tuple[int, int]:
    """How many rows and columns of patches images have.

    >>> grid_of(torch.empty(1, 3, 37, 53), (8, 16))
    (5, 4)
    """
    if images.ndim != 4:
        raise ValueError(f"images: expected [batch, channels, height, width]; got {list(images.shape)}")
    height, width = pair(patch)
    return -(-images.shape[2] // height), -(-images.shape[3] // width)


def spread_images(
    images: Tensor,
    mesh: DeviceMesh,
    *,
    patch: Patch,
    layout: Layout | str = "contiguous",
    labels: Tensor | None = None,
    targets: Tensor | None = None,
) -> dict[str, Any]:
    """What a ViT is called with on this rank, from whole images that all ranks of cp have.

    Args:
        images: `[batch, channels, height, width]`, this data rank's samples.
        mesh: of `init_mesh`.
        patch: the model's.
        layout: which patches each rank of cp gets, or the name of one: "contiguous", "striped", "zigzag", "balanced".
        labels: of classes `[batch]`: they count on the first rank of cp, and are ignored on the others.
        targets: of pixels `[batch, outputs, height, width]`; those of NaN do not count, nor does what fills up patches.
    """
    if labels is not None and targets is not None:
        raise ValueError("spread_images: labels are of classes, targets of pixels; give one of them")
    if targets is not None and (len(targets), targets.shape[2:]) != (len(images), images.shape[2:]):
        raise ValueError(f"targets: expected pixels like images of {list(images.shape)}; got {list(targets.shape)}")
    whole = patchify(images, patch)
    layout = named_layout(layout, Mask.full(), whole.shape[1], ranks_of(mesh, "cp"))
    found = {"patches": shard(whole, layout, mesh["cp"]), "layout": layout, "grid": grid_of(images, patch)}
    if labels is not None:
        found["labels"] = labels if mesh.get_local_rank("cp") == 0 else torch.full_like(labels, IGNORED)
    if targets is not None:
        values = shard(patchify(targets, patch, float("nan")), layout, mesh["cp"])
        found |= {"targets": values, "labels": values.isnan().to(torch.int8) * IGNORED}
    return found


def pair(patch: Patch) -> tuple[int, int]:
    """Height and width of a patch."""
    height, width = (patch, patch) if isinstance(patch, int) else patch
    if height < 1 or width < 1:
        raise ValueError(f"patch={patch}: expected a size, or (height, width), of at least 1")
    return height, width
