"""`meshflash train`: train a GPT or a ViT on any mesh, under any launcher."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from meshflash.cli.outputs import writable_folder
from meshflash.cli.ranks import Nproc, rerun


def command(
    kind: Annotated[str, typer.Argument(help="gpt or vit.")],
    preset: Annotated[
        str, typer.Option(help="gpt: tiny, 125m, llama3.2-1b, llama3-8b, llama3-8b-1m; vit: tiny, base, 2.6b.")
    ] = "tiny",
    data: Annotated[str | None, typer.Option(help="copy, needle, images, or what `meshflash data` wrote.")] = None,
    dp: Annotated[int | None, typer.Option(help="Ranks with other samples; by default all that are left.")] = None,
    fsdp: Annotated[int | None, typer.Option(help="Ranks that weights are spread over.")] = None,
    cp: Annotated[int | None, typer.Option(help="Ranks that share a sequence.")] = None,
    tp: Annotated[int | None, typer.Option(help="Ranks that share heads and hidden units.")] = None,
    order: Annotated[str | None, typer.Option(help="Which ranks are neighbours, as in cp-tp-dp.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Of the attention over cp.")] = None,
    steps: Annotated[int | None, typer.Option(min=0, help="Steps in all.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML with fields to change, by tables.")] = None,
    change: Annotated[list[str], typer.Option("--set", help="A field to change: data.tokens=4096; repeat.")] = [],  # noqa: B006
    output: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for numbers and checkpoints.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Put the checkpoints there aside, and begin anew.")] = False,
    from_step: Annotated[int | None, typer.Option(min=0, help="Go on from this checkpoint, not the latest.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the configuration as JSON, and end.")] = False,
    find_max_tokens: Annotated[
        bool, typer.Option("--find-max-tokens", help="Find the longest sequence that one step has the memory for.")
    ] = False,
    nproc: Nproc = 1,
) -> None:
    """Train a model: the losses are one device's, whatever the mesh. A folder's checkpoints are gone on from.

    Start it by torchrun, mpiexec or srun, or with --nproc on this machine. Under `torchrun --max-restarts` it comes
    back by itself.
    """
    from meshflash.train import config as configs

    try:
        built = configs.preset(kind, preset)
        if config is not None:
            built = configs.change(built, configs.read_toml(config))
        options: dict[str, dict[str, Any]] = {
            "mesh": {"dp": dp, "fsdp": fsdp, "cp": cp, "tp": tp, "order": order, "schedule": schedule},
            "data": {"source": data},
            "run": {"steps": steps},
        }
        said = {table: {k: v for k, v in fields.items() if v is not None} for table, fields in options.items()}
        built = configs.change(configs.change(built, said), configs.assignments(change))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if show:
        import json

        typer.echo(json.dumps(configs.as_dict(built), indent=1))
        return
    if output is not None:
        if from_step is not None and not output.is_dir():
            raise typer.BadParameter(
                f"--from-step {from_step}: the folder {output} does not exist; give a run's --output"
            )
        writable_folder(output)
    # lengths that change leave holes otherwise, and long sequences fill the memory; torch reads it when it starts
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    rerun(nproc)
    from meshflash.job import init
    from meshflash.train import loop

    with init() as here:
        try:
            if find_max_tokens:
                from meshflash.train.max_tokens import find_max_tokens

                say = typer.echo if here.rank == 0 else lambda _: None
                found = find_max_tokens(built, say)
                say(f"{found.tokens:,} tokens fit")
                return
            trained = loop.train(built, output, resume=not fresh, from_step=from_step)
        except (ValueError, OSError, loop.TrainingError) as error:
            typer.echo(f"[rank {here.rank}] {error}", err=True)
            raise typer.Exit(1) from error
        if here.rank == 0:
            words = [f"step {trained.step}"]
            words += [f"loss {trained.losses[-1]:.4f}"] if trained.losses else []
            words += [f"{name.replace('_', ' ')} {value:.4f}" for name, value in trained.valid.items()]
            typer.echo(", ".join(words) + (f"; {output}" if output else ""))
