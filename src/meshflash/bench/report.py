"""What a benchmark does with its rows: tables in the terminal, a record, a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from meshflash.bench import kernels, plots, record, tables


def report(console: Console, rows: list[dict[str, Any]], output: Path, plot: Path | None, title: str) -> None:
    """Print the tables, write the record, and the plot where one is wanted and can be made."""
    console.print(*tables.kernels(rows, beside=kernels.SDPA), sep="\n")
    record.write(output, rows, record.command_line())
    console.print(f"written: {output}")
    if plot is None:
        return
    try:
        plots.kernels(rows, title, plot)
        console.print(f"written: {plot}")
    except RuntimeError as error:
        console.print(f"no picture: {error}")
