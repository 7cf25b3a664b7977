"""Show the rows of a benchmark: tables in the terminal, the name of the record, a plot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from meshflash.bench import record
from meshflash.core.files import naming

Plot = Callable[[list[dict[str, Any]], str, Path], None]


def report(
    console: Console,
    tables: list[Table],
    found: record.Recorder,
    plot: Path | None = None,
    draw: Plot | None = None,
    title: str = "",
) -> None:
    """Print the tables, name the record if one was written, and draw the plot if one is wanted.

    Args:
        console: The terminal.
        tables: The tables to print.
        found: The recorder of the run.
        plot: The file of the plot, or None.
        draw: The function that draws rows with a title to a file.
        title: The title of the plot.
    """
    console.print(*tables, sep="\n")
    if found.path is not None:
        console.print(f"written: {found.path}", soft_wrap=True)
    if plot is not None and draw is not None:
        picture(console, draw, found.rows, title, plot)


def picture(console: Console, draw: Plot, rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw rows to a file, or print why not."""
    try:
        with naming(path):
            draw(rows, title, path)
        console.print(f"written: {path}", soft_wrap=True)
    except RuntimeError as error:
        console.print(f"no picture: {error}")
