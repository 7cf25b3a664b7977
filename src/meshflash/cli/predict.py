"""`meshflash predict`: labels or maps of images by a trained ViT."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshflash.cli.outputs import writable_folder
from meshflash.cli.ranks import Nproc, rerun


def command(
    images: Annotated[Path, typer.Argument(help="A folder of images, or an array as `meshflash train` takes it.")],
    checkpoint: Annotated[Path, typer.Option(exists=True, file_okay=False, help="A folder of `meshflash train vit`.")],
    output: Annotated[Path, typer.Option(help="JSON lines of labels, or a folder of .npy maps.")],
    preset: Annotated[str | None, typer.Option(help="Refuse a checkpoint of another preset's sizes.")] = None,
    cp: Annotated[int, typer.Option(min=1, help="Ranks that share an image.")] = 1,
    tp: Annotated[int, typer.Option(min=1, help="Ranks that share heads and hidden units.")] = 1,
    order: Annotated[str, typer.Option(help="Which ranks are neighbours.")] = "cp-tp-dp",
    nproc: Nproc = 1,
) -> None:
    """Label images, or map them, by a model that was trained: any number of ranks, whatever it was trained on."""
    writable_folder(output.parent)  # whether it is a file or a folder depends on the model
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
