"""One protocol for all benchmarks: measure cases or read their record, then print the table and draw the plot.

A benchmark's module has a function `run` that checks candidates before it times them and gives rows, and a `Benchmark`
that says how rows of its record are shown. A command calls `show` with both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.status import Status
from rich.table import Table

from benchmarks.options import RecordOptions
from meshflash.bench import record
from meshflash.bench.columns import Column, Row, markdown, terminal
from meshflash.bench.record import Recorder
from meshflash.bench.report import Plot, picture
from meshflash.cli.bench_options import explained

Rows = list[Row]


@dataclass(frozen=True)
class Benchmark:
    """How the record of a benchmark is told from others and shown. Each module of a benchmark makes one.

    Attributes:
        name: Its name, as in `python -m benchmarks NAME`.
        keys: Keys that every row of its record has.
        tables: A function from rows to what the terminal shows; a string is printed as it is.
        markdown: A function from rows to the text for a document.
        title: A function from rows to the title of the plot.
        draw: A function that draws rows with a title to a file; None for a benchmark without a plot.
    """

    name: str
    keys: frozenset[str]
    tables: Callable[[Rows], Sequence[RenderableType]]
    markdown: Callable[[Rows], str]
    title: Callable[[Rows], str]
    draw: Plot | None = None

    def read(self, path: Path) -> dict[str, Any]:
        """Return a record of this benchmark; ValueError, which names the file, for anything else."""
        written = record.read(path)
        if not all(self.keys <= row.keys() for row in written["rows"] or [{}]):
            raise ValueError(f"{path} is not a record of `python -m benchmarks {self.name}`")
        return written


def one_table(
    name: str,
    keys: set[str],
    columns: Sequence[Column],
    title: Callable[[Rows], str],
    section: str = "",
    caption: str = "",
    draw: Plot | None = None,
) -> Benchmark:
    """Return a benchmark whose rows are one table.

    Args:
        name: Its name, as in `python -m benchmarks NAME`.
        keys: Keys that every row of its record has.
        columns: The columns of the table.
        title: A function from rows to the title of table and plot.
        section: The key of the value that rows of one section share.
        caption: The words below the table.
        draw: The function that draws the plot, or None.
    """

    def tables(rows: Rows) -> Sequence[RenderableType]:
        return [terminal(title(rows), columns, rows, section, caption)]

    return Benchmark(name, frozenset(keys), tables, lambda rows: markdown(columns, rows), title, draw)


def show(benchmark: Benchmark, options: RecordOptions, measure: Callable[[Status], Recorder]) -> None:
    """Read the record that --from names, or measure; then print it, name the files written, and draw the plot.

    Args:
        benchmark: How rows are shown.
        options: Where the record is read from and written to.
        measure: A function that measures and returns the recorder; it updates the status with its progress. Its
            ValueErrors are mistakes of the user and printed without a traceback.
    """
    console = Console()
    with explained():
        if options.source is not None:
            written, path = benchmark.read(options.source), None
        else:
            with console.status("starting") as status:
                found = measure(status)
            written, path = found.as_record(), found.path
    rows = written["rows"]
    place = record.place(written["header"], rows[0].get("device") or rows[0].get("setup", {}).get("device", "cpu"))
    if options.markdown:
        typer.echo(f"`{written['header']['command']}` on {place}.\n\n{benchmark.markdown(rows)}")
    else:
        for number, table in enumerate(benchmark.tables(rows)):
            if isinstance(table, str):
                typer.echo(table)  # rich would fold long lines
            else:
                console.print(*[""] * (number > 0 and isinstance(table, Table)), table, sep="\n")
    if path is not None:
        console.print(f"written: {path}", soft_wrap=True)
    if options.picture is not None and benchmark.draw is not None:
        picture(console, benchmark.draw, rows, f"{benchmark.title(rows)}\n{place}", options.picture)
