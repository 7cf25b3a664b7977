"""Tables of records for the terminal, no wider than 80 columns."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.table import Table

#: What tells one cell from another; its passes stand in one table.
CELL = ("mask", "tokens", "batch", "heads", "kv_heads", "head_dim", "dtype", "device")


def kernels(rows: list[dict[str, Any]], beside: str) -> list[Table]:
    """A table for each cell: kernels by pass, each with its speed as a multiple of the kernel `beside`."""
    return [
        _cell(dict(zip(CELL, cell, strict=True)), list(own), beside)
        for cell, own in groupby(rows, key=lambda row: tuple(row[key] for key in CELL))
    ]


def schedules(rows: list[dict[str, Any]], beside: str) -> list[Table]:
    """A table for each shape: schedules by pass, with their speed as a multiple of `beside`, and what they moved."""
    shape = tuple(key for key in CELL if key != "device")
    return [
        _schedules(dict(zip(shape, cell, strict=True)), list(own), beside)
        for cell, own in groupby(rows, key=lambda row: tuple(row[key] for key in shape))
    ]


def _schedules(cell: dict[str, Any], rows: list[dict[str, Any]], beside: str) -> Table:
    world = max(row["world"] for row in rows)
    table = Table(title=f"{_title(cell)}, {world} ranks", title_justify="left", title_style="bold", header_style="bold")
    table.add_column("pass", no_wrap=True)
    table.add_column("schedule")
    for name in ("ms", f"x {beside.split()[0]}", "error", "MB in", "peers'", "peak MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for direction, own in groupby(rows, key=lambda row: row["pass"]):
        for n, row in enumerate(own):
            table.add_row(
                ("forward" if direction == "forward" else "both") if n == 0 else "",
                row["schedule"],
                f"{row['ms']:.0f}",
                f"{row['speedup']:.2f}",
                "" if row["schedule"] == beside else f"{row['error']:.0e}",
                "" if row["schedule"] == beside else f"{row['received_mean'] / 1e6:.1f}",
                "" if row["peer_bytes"] is None else f"{row['peer_bytes'] / 1e6:.1f}",
                f"{row['peak_bytes'] / 2**20:.1f}",
            )
        table.add_section()
    return table


def _title(cell: dict[str, Any]) -> str:
    heads = f"{cell['heads']} heads"
    if cell["kv_heads"] != cell["heads"]:
        heads += f" on {cell['kv_heads']}"
    return (
        f"{cell['mask']}, {cell['tokens']:,} tokens, batch {cell['batch']}, {heads}, dim {cell['head_dim']}, "
        f"{cell['dtype']}"
    )


def _cell(cell: dict[str, Any], rows: list[dict[str, Any]], beside: str) -> Table:
    title = f"{_title(cell)} on {cell['device']}"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    table.add_column("pass")
    table.add_column("kernel", no_wrap=True)
    for name in ("ms", "TFLOP/s", f"x {beside.split()[-1]}", "error", "peak MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for direction, own in groupby(rows, key=lambda row: row["pass"]):
        passes = list(own)
        peer = next((row["ms"] for row in passes if row["kernel"] == beside), None)
        for n, row in enumerate(passes):
            ran = "" if row["ran"] == row["kernel"] else f" ({row['ran']})"
            table.add_row(
                direction if n == 0 else "",
                row["kernel"] + ran,
                f"{row['ms']:.2f}",
                f"{row['tflops']:.3f}",
                "" if peer is None else f"{peer / row['ms']:.2f}",
                f"{row['error']:.1e}",
                f"{row['peak_bytes'] / 2**20:.1f}",
            )
        table.add_section()
    return table
