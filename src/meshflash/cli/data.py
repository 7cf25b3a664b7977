"""`meshflash data`: write a token file from texts, or show one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="INPUT...", help='UTF-8 texts, .jsonl files with a "text" in each line, or folders.'),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="The folder to write.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A folder with a Hugging Face tokenizer.json; bytes by default.")
    ] = None,
    show: Annotated[Path | None, typer.Option(help="Show the content of this token file, and write nothing.")] = None,
    sample: Annotated[int, typer.Option(min=0, help="With --show: the index of the sample.")] = 0,
    tokens: Annotated[int, typer.Option(min=1, help="With --show: the tokens of a sample.")] = 256,
    verify: Annotated[bool, typer.Option("--verify", help="With --show: check all digests.")] = False,
) -> None:
    """Write a token file from texts of any size, or show one."""
    try:
        if show is not None:
            if inputs or output or tokenizer:
                raise ValueError("--show takes no INPUT, --output or --tokenizer")
            _show(show, sample, tokens, verify)
        elif not inputs or output is None:
            raise ValueError("expected INPUT... and --output FOLDER, or --show FOLDER")
        else:
            _write(inputs, output, tokenizer)
    except (ValueError, IndexError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


def _write(inputs: list[Path], output: Path, tokenizer: Path | None) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from meshflash.core.files import OutputError
    from meshflash.train.texts import input_files
    from meshflash.train.tokenizer import ByteTokenizer, FolderTokenizer
    from meshflash.train.tokens import write_tokens

    files = input_files(inputs)
    using = ByteTokenizer() if tokenizer is None else FolderTokenizer(tokenizer)
    read = sum(path.stat().st_size for path in files)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(), transient=True) as progress:
        task = progress.add_task("encoding", total=read)
        try:
            written = write_tokens(files, output, using, lambda done: progress.update(task, completed=done))
        except OSError as error:
            if error.filename is not None:
                raise
            raise OutputError(f"{output}: it cannot be written ({error.strerror})") from error  # such as a full disk
    typer.echo(f"{len(written.ends):,} documents, {len(written.ids):,} tokens from {read:,} bytes")
    typer.echo(f"written: {output}")


def _show(folder: Path, number: int, tokens: int, verify: bool) -> None:
    from meshflash.parallel.loss import IGNORE_INDEX
    from meshflash.train.tokens import Packed, TokenFile

    file = TokenFile(folder)
    if verify:
        file.verify()
        typer.echo("every byte is as it was written")
    for name in ("documents", "tokens", "vocabulary", "tokenizer", "dtype", "version"):
        value = file.meta[name]
        typer.echo(f"{name:<11} {value:,}" if isinstance(value, int) else f"{name:<11} {value}")
    typer.echo(f"{'bytes':<11} {sum(path.stat().st_size for path in folder.iterdir()):,}")
    if not len(file.ids):
        return
    source, using = Packed(file, tokens), file.tokenizer()
    found = source[number]
    labels = int((found.labels != IGNORE_INDEX).sum())
    typer.echo(f"\nsample {number} of {len(source):,}: {tokens:,} tokens, {labels:,} with a label")
    begin = 0
    for length in found.documents:
        held = min(length, len(file.ids) - number * tokens - begin)  # behind the last document is padding
        text = using.decode(found.tokens[begin : begin + held].tolist()) if held > 0 else None
        typer.echo(f"\n[{length:,} tokens{'' if text is not None else ' of padding'}]" + (f"\n{text}" if text else ""))
        begin += length
