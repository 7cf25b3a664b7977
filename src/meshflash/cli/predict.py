"""`meshflash predict`: labels or dense predictions of images with a trained ViT."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshflash.cli.outputs import writable_folder
from meshflash.cli.ranks import Nproc, rerun


def command(
    images: Annotated[Path, typer.Argument(help="A folder of images, or an array file, as for `meshflash train`.")],
    checkpoint: Annotated[Path, typer.Option(exists=True, file_okay=False, help="A folder of `meshflash train vit`.")],
    output: Annotated[Path, typer.Option(help="File of JSON lines for labels, or folder of .npy files.")],
    preset: Annotated[str | None, typer.Option(help="Refuse a checkpoint with other sizes than this preset.")] = None,
    cp: Annotated[int, typer.Option(min=1, help="Context-parallel ranks, which share an image.")] = 1,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks, which share heads and hidden units.")] = 1,
    order: Annotated[str, typer.Option(help="Order of the mesh axes, fastest first.")] = "cp-tp-dp",
    nproc: Nproc = 1,
) -> None:
    """Predict labels of images, or values of their pixels, on any number of ranks."""
    writable_folder(output.parent)  # the model decides whether it is a file or a folder
    rerun(nproc)
    from meshflash.job import init
    from meshflash.train import inference

    with init() as here:
        try:
            number = inference.images(checkpoint, images, output, dict(cp=cp, tp=tp, order=order), preset)
        except (ValueError, OSError) as error:
            typer.echo(f"[rank {here.rank}] {error}", err=True)
            raise typer.Exit(1) from error
        if here.rank == 0:
            typer.echo(f"{number} images: {output}")
