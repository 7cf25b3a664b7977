"""The table writer of all benchmarks: columns say what a row's cells are, for the terminal and for Markdown alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table

Row = dict[str, Any]
NO_MEMORY = "out of memory"


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        header: The words above it, with the unit. A line break keeps the table narrow; Markdown shows a space instead.
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


def terminal(
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Row],
    section: str | Callable[[Row], Any] = "",
    caption: str = "",
    dense: bool = False,
) -> Table:
    """Return a table for the terminal.

    Numbers stay on one line. Words that do not fit are folded onto the next line, never cut: a schedule shown as
    "ri..." could be any of six.

    Args:
        title: The line above the table.
        columns: The columns, from left to right.
        rows: The rows of a record.
        section: The key, or a function of a row, whose value rows of one section share. Empty is one section.
        caption: The words below the table.
        dense: Whether columns are one space apart instead of two.
    """
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        caption=caption or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 0 if dense else 1, 0, 0),
    )
    for column in columns:
        justify = "left" if column.is_text else "right"
        table.add_column(column.header, justify=justify, no_wrap=not column.is_text, overflow="fold")  # type: ignore[arg-type]
    key = section if callable(section) else lambda row: row[section] if section else None
    for _, own in groupby(rows, key=key):
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
    lines = [[column.header.replace("\n", " ") for column in columns], ["---"] * len(columns)]
    lines += [[column.text(row) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def milliseconds(number: float | None, missing: str = NO_MEMORY) -> str:
    """Return a time in milliseconds as a cell; `missing` stands for None."""
    return missing if number is None else f"{number:,.{2 if number < 1000 else 0}f}"


def mebibytes(number: int | None, missing: str = NO_MEMORY) -> str:
    """Return bytes in MiB as a cell; `missing` stands for None."""
    return missing if number is None else f"{number / 2**20:,.1f}"


def optional(key: str, form: str) -> Callable[[Row], str]:
    """Return the cell of a number in this format, such as "{:.2f}x"; empty if the row has None.

    >>> optional("speedup", "{:.2f}x")({"speedup": 2}), optional("speedup", "{:.2f}x")({"speedup": None})
    ('2.00x', '')
    """
    return lambda row: "" if row[key] is None else form.format(row[key])
