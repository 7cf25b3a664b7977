"""Split images into patches (the tokens of a ViT) and back, and shard the patches over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.models.vit_config import Patch, pair
from meshflash.parallel.loss import IGNORE_INDEX
from meshflash.parallel.mesh import size as ranks_of
from meshflash.parallel.step import resolve_layout
from meshflash.sharding import shard


def patchify(images: Tensor, patch: Patch, fill: float = 0.0) -> Tensor:
    """Return the patches of images, row by row: `[batch, patches, channels * patch height * patch width]`.

    Images that the patch size does not divide are padded on the right and at the bottom.

    Args:
        images: The images, `[batch, channels, height, width]`.
        patch: The size of a patch: one number, or (height, width).
        fill: The value of padding.

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
    """Return images from all their patches, without the padding of `patchify`.

    Args:
        patches: The patches, `[batch, patches, values]`.
        patch: The size of a patch: one number, or (height, width).
        size: Height and width of the images.

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
    """Return the number of rows and columns of patches in images.

    Args:
        images: The images, `[batch, channels, height, width]`.
        patch: The size of a patch: one number, or (height, width).

    >>> grid_of(torch.empty(1, 3, 37, 53), (8, 16))
    (5, 4)
    """
    if images.ndim != 4:
        raise ValueError(f"images: expected [batch, channels, height, width]; got {list(images.shape)}")
    height, width = pair(patch)
    return -(-images.shape[2] // height), -(-images.shape[3] // width)


def shard_images(
    images: Tensor,
    mesh: DeviceMesh,
    *,
    patch: Patch,
    layout: Layout | str = "contiguous",
    labels: Tensor | None = None,
    targets: Tensor | None = None,
) -> dict[str, Any]:
    """Return the arguments of a ViT on this rank: its shard of the patches of whole images.

    All ranks of cp pass the same images.

    Args:
        images: The samples of this data rank, `[batch, channels, height, width]`.
        mesh: A mesh of `init_mesh`.
        patch: The patch size of the model.
        layout: Which patches each rank of cp gets: a `Layout`, or "contiguous", "striped", "zigzag" or "balanced".
        labels: Classes, `[batch]`. They stay on the first rank of cp and are ignored on the others, so that each counts
            once.
        targets: Values of pixels, `[batch, outputs, height, width]`. NaN and padding are ignored.
    """
    if labels is not None and targets is not None:
        raise ValueError("shard_images: labels are of classes, targets of pixels; give one of them")
    if targets is not None and (len(targets), targets.shape[2:]) != (len(images), images.shape[2:]):
        raise ValueError(f"targets: expected pixels like images of {list(images.shape)}; got {list(targets.shape)}")
    whole = patchify(images, patch)
    layout = resolve_layout(layout, Mask.full(), whole.shape[1], ranks_of(mesh, "cp"))
    found = {"patches": shard(whole, layout, mesh["cp"]), "layout": layout, "grid": grid_of(images, patch)}
    if labels is not None:
        found["labels"] = labels if mesh.get_local_rank("cp") == 0 else torch.full_like(labels, IGNORE_INDEX)
    if targets is not None:
        values = shard(patchify(targets, patch, float("nan")), layout, mesh["cp"])
        found |= {"targets": values, "labels": values.isnan().to(torch.int8) * IGNORE_INDEX}
    return found
