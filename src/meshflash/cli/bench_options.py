"""What benchmarks' commands share: their options, how mistakes are told, and how a record is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

MASKS = "full, causal, window-N, documents-N or documents-lognormal-N"
DTYPES = "float32, bfloat16, float16 or float64"

Kernels = Annotated[list[str], typer.Option(help='A kernel, "auto", "torch sdpa", "flex" or "standard"; repeat.')]
MaybeKernels = Annotated[
    list[str] | None,
    typer.Option(
        help='A kernel, "auto", "torch sdpa", "flex" or "standard"; repeat. By default all that the table needs.'
    ),
]
Tokens = Annotated[int | None, typer.Option(min=1, help="Sequence length; by default what suits the device.")]
OneMask = Annotated[str, typer.Option(help=f"{MASKS}.")]
OneDtype = Annotated[str | None, typer.Option(help=f"{DTYPES}; bfloat16 on GPUs and float32 on CPUs by default.")]
Batch = Annotated[int, typer.Option(min=1, help="Batch size.")]
Heads = Annotated[int, typer.Option(min=1, help="Query heads.")]
KvHeads = Annotated[int | None, typer.Option(min=1, help="Key heads; as many as query heads by default.")]
Dim = Annotated[int, typer.Option(min=1, help="Head dim.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="Our kernels' deterministic mode.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds, in each of which every kernel takes its turn.")]
Output = Annotated[Path | None, typer.Option(help="JSON file to write the record to; by default none is written.")]
Plot = Annotated[Path | None, typer.Option(help="Picture to write.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")]
Source = Annotated[
    Path | None, typer.Option("--from", exists=True, help="Show this record again instead of measuring.")
]


@contextmanager
def explained() -> Iterator[None]:
    """A ValueError is the caller's mistake, and told without a traceback."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def given(context: typer.Context, names: tuple[str, ...]) -> list[str]:
    """Return those of `names` that the user gave as options."""
    return [name for name in names if (found := context.get_parameter_source(name)) and found.name == "COMMANDLINE"]


class View(NamedTuple):
    """How a command shows its record: read it, then its rows as a table, as Markdown, as a picture and in a title."""

    read: Callable[[Path], dict[str, Any]]
    table: Callable[[list[dict[str, Any]]], Any]
    markdown: Callable[[list[dict[str, Any]]], str]
    draw: Callable[[list[dict[str, Any]], str, Path], None]
    title: Callable[[list[dict[str, Any]]], str]


def show(
    console: Any, written: dict[str, Any], view: View, *, path: Path | None, markdown: bool, plot: Path | None
) -> None:
    """Print a record, name the file that it was written to, and draw it where a plot is wanted."""
    from meshflash.bench import record
    from meshflash.bench.report import picture

    rows = written["rows"]
    place = record.place(written["header"], rows[0]["device"])
    if markdown:
        typer.echo(f"`{written['header']['command']}` on {place}.\n\n{view.markdown(rows)}")
    else:
        console.print(view.table(rows))
    if path is not None:
        console.print(f"written: {path}", soft_wrap=True)
    if plot is not None:
        picture(console, view.draw, rows, f"{view.title(rows)}\n{place}", plot)
