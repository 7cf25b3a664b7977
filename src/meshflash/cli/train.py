"""`meshflash train`: train a GPT or a ViT on any mesh, under any launcher."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshflash.cli.bench_options import explained
from meshflash.cli.outputs import writable_folder
from meshflash.cli.ranks import Nproc, rerun

if TYPE_CHECKING:
    from meshflash.train.config import Config
    from meshflash.train.report import ProgressLine

#: The exit code of a shell for a command that Ctrl-C ended.
INTERRUPTED = 130


def command(
    kind: Annotated[
        str | None, typer.Argument(help="gpt or vit.", show_default="that of --config, else gpt", metavar="[KIND]")
    ] = None,
    preset: Annotated[
        str, typer.Option(help="gpt: tiny, 125m, llama3.2-1b, llama3-8b, llama3-8b-1m; vit: tiny, base, 2.6b.")
    ] = "tiny",
    data: Annotated[str | None, typer.Option(help="copy, needle, images, or a path of `meshflash data`.")] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel ranks; by default all that are left.")] = None,
    fsdp: Annotated[int | None, typer.Option(help="Sharded data-parallel ranks (FSDP).")] = None,
    cp: Annotated[int | None, typer.Option(help="Context-parallel ranks, which share a sequence.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks, which share heads and hidden units.")] = None,
    order: Annotated[str | None, typer.Option(help="Order of the mesh axes, fastest first, as in cp-tp-dp.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Schedule of attention over cp.")] = None,
    steps: Annotated[int | None, typer.Option(min=0, help="The last step.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with fields to change, as --show prints it.")] = None,
    change: Annotated[list[str], typer.Option("--set", help="A field to change: data.tokens=4096; repeatable.")] = [],  # noqa: B006
    output: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for metrics and checkpoints.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Set its checkpoints aside and start from step 1.")] = False,
    from_step: Annotated[int | None, typer.Option(min=0, help="Resume from this checkpoint, not the latest.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the configuration as --config takes it.")] = False,
    find_max_tokens: Annotated[
        bool, typer.Option("--find-max-tokens", help="Find the longest sequence whose training step fits in memory.")
    ] = False,
    nproc: Nproc = 1,
) -> None:
    """Train a model; losses match a single device on any mesh. A run resumes from the checkpoints in --output.

    Start it with torchrun, mpiexec or srun, or with --nproc on this machine. Under `torchrun --max-restarts` it
    resumes after a failure by itself.
    """
    options: dict[str, dict[str, Any]] = {
        "mesh": {"dp": dp, "fsdp": fsdp, "cp": cp, "tp": tp, "order": order, "schedule": schedule},
        "data": {"source": data},
        "run": {"steps": steps},
    }
    built = _configure(kind, preset, config, options, change)
    if show:
        from meshflash.train.config import to_toml

        typer.echo(to_toml(built), nl=False)
        return
    if output is not None:
        if from_step is not None and not output.is_dir():
            raise typer.BadParameter(
                f"--from-step {from_step}: the folder {output} does not exist; give a run's --output"
            )
        writable_folder(output)
    # Sequences of changing lengths fragment the allocator's segments, and long ones then run out of memory. torch
    # reads this when it is imported.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    _run(built, output, fresh, from_step, find_max_tokens, nproc)


def _configure(
    kind: str | None, preset: str, file: Path | None, options: dict[str, dict[str, Any]], assigned: list[str]
) -> Config:
    """Return the configuration: the preset, changed by the file, then by options, then by --set. It needs no torch."""
    from meshflash.core.reading import read_toml
    from meshflash.train import config as configs

    with explained():
        changes = {} if file is None else read_toml(file)
        named = changes.pop("kind", None)
        if named is not None and kind is not None and named != kind:
            raise ValueError(f"{file}: kind={named!r}, and the command says {kind!r}; leave one out")
        built = configs.change(configs.preset(kind or named or "gpt", preset), changes)
        given = {table: {k: v for k, v in fields.items() if v is not None} for table, fields in options.items()}
        return configs.change(configs.change(built, given), configs.assignments(assigned))


def _run(
    config: Config, output: Path | None, fresh: bool, from_step: int | None, find_max_tokens: bool, nproc: int
) -> None:
    """Train on the ranks of this job; every error ends as one line on stderr, and Ctrl-C as exit code 130."""
    from meshflash.runtime.launchers import detect
    from meshflash.train.report import ProgressLine

    place = detect()
    starts_ranks = nproc > 1 and place.world_size == 1
    # shown before torch is imported, which takes seconds; ranks that this process starts show their own
    progress = None
    if place.rank == 0 and not find_max_tokens and not starts_ranks:
        progress = ProgressLine(config.run.steps)
    if starts_ranks:
        typer.echo(f"starting {nproc} ranks", err=True)
    try:
        rerun(nproc)
        _train(config, output, fresh, from_step, find_max_tokens, progress)
    except KeyboardInterrupt:
        if progress is not None:
            progress.close()
        if place.rank == 0:
            resume = "; the same command resumes from the last checkpoint" if output else ""
            typer.echo(f"interrupted{resume}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        if progress is not None:
            progress.close()


def _train(
    config: Config,
    output: Path | None,
    fresh: bool,
    from_step: int | None,
    find_max_tokens: bool,
    progress: ProgressLine | None,
) -> None:
    from meshflash.job import init
    from meshflash.runtime.log import log
    from meshflash.train import loop

    with init() as here:
        try:
            if find_max_tokens:
                from meshflash.train.max_tokens import find_max_tokens as search

                say = typer.echo if here.rank == 0 else lambda _: None
                found = search(config, say)
                say(f"{found.tokens:,} tokens fit")
                return
            trained = loop.train(config, output, resume=not fresh, from_step=from_step, progress=progress)
        except Exception as error:
            if progress is not None:
                progress.close()
            log.debug("%s", traceback.format_exc())
            expected = isinstance(error, ValueError | OSError | loop.TrainingError)
            kind = "" if expected else f"{type(error).__name__}: "
            more = "" if expected else " (MESHFLASH_LOG=debug shows where)"
            typer.echo(f"[rank {here.rank}] {kind}{error}{more}", err=True)
            raise typer.Exit(1) from error
        if here.rank == 0:
            parts = [f"step {trained.step}"]
            parts += [f"loss {trained.losses[-1]:.4f}"] if trained.losses else []
            parts += [f"{name.replace('_', ' ')} {value:.4f}" for name, value in trained.valid.items()]
            typer.echo(", ".join(parts) + (f"; {output}" if output else ""))
