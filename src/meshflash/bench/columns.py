"""The table writer of all benchmarks: columns say what a row's cells are, for the terminal and for Markdown alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        header: The words above it, with the unit.
        cell: A function from a row to the text of its cell, or the key of the row.
        is_text: Whether cells are words, which stand on the left; numbers stand on the right.
        once: Whether a cell that repeats the one above it is left empty in the terminal.
    """

    header: str
    cell: Callable[[Row], str] | str
    is_text: bool = False
    once: bool = False

    def text(self, row: Row) -> str:
        """Return the text of a row's cell."""
        return str(row[self.cell]) if isinstance(self.cell, str) else self.cell(row)


def terminal(title: str, columns: Sequence[Column], rows: Sequence[Row], section: str = "") -> Table:
    """Return a table for the terminal, at most 80 columns wide where its cells allow it.

    Args:
        title: The line above the table.
        columns: The columns, from left to right.
        rows: The rows of a record.
        section: The key of the value that rows of one section share; sections are set apart. Empty is one section.
    """
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=box.SIMPLE_HEAD)
    table.pad_edge, table.padding = False, (0, 1, 0, 0)
    for column in columns:
        header = column.header.replace(", ", "\n")  # the unit on a line of its own keeps the table narrow
        table.add_column(header, justify="left" if column.is_text else "right", overflow="fold", no_wrap=column.is_text)
    for _, own in groupby(rows, key=lambda row: row[section] if section else None):
        above = [""] * len(columns)
        for row in own:
            cells = [column.text(row) for column in columns]
            shown = ["" if column.once and a == b else b for column, a, b in zip(columns, above, cells, strict=True)]
            table.add_row(*shown)
            above = cells
        table.add_section()
    return table


def markdown(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """Return the same table for a document."""
    lines = [[column.header for column in columns], ["---"] * len(columns)]
    lines += [[column.text(row) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
