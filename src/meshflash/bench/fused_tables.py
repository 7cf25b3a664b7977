"""Tables of fused products for the terminal, and the words below them."""

from __future__ import annotations

import itertools
from typing import Any

from rich import box
from rich.table import Table

from meshflash.bench import tables
from meshflash.bench.fused_cases import GROUP
from meshflash.gemm.distributed.plan import FusedConfig
from meshflash.gemm.distributed.tiles import collective_name

#: What tells one product from another in a sweep over K.
CELL = ("collective", "shots", "world", "numbers", "device", "heap")
INTERPRETED = "on a CPU the kernels of a heap are interpreted: their times show an order, not a speed"


def ranks(rows: list[dict[str, Any]]) -> Table:
    """A line for each rank, and for each by the process group."""
    one = rows[0]
    table = _narrow(f"{title(one)}, {one['m']} x {one['n']} x {one['k']}, {one['numbers']} on {one['device']}")
    table.add_column("rank", justify="right")
    table.add_column("variant")
    names = ["ms", "TFLOP/s", "GB/s", "error"]
    beside = any(row["by"] == GROUP for row in rows)
    for name in [*names, *(["x group"] if beside else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        variant = f"{row['variant']}, {row['means']}"
        figures = [f"{row['ms']:.4g}", f"{row['tflops']:.3g}", f"{row['gb_s']:.3g}", f"{row['error']:.1e}"]
        table.add_row(str(row["rank"]), variant, *figures, *([f"{row['ratio']:.3f}"] if beside else []))
    table.caption = "TFLOP/s and GB/s (sent to others) of one rank; error: relative, against float64"
    if beside:
        table.caption += "; x group: time as a multiple of the process group's"
    return table


def sweep(rows: list[dict[str, Any]]) -> list[Table]:
    """A table for each collective: a line for each shape, with the time of each variant and what fusing brings."""
    made = []
    for cell, group in itertools.groupby(rows, key=lambda row: tuple(row[key] for key in CELL)):
        own = list(group)
        variants = list(dict.fromkeys(row["variant"] for row in own))
        _, _, world, numbers, device, heap = cell
        table = _narrow(f"{title(own[0])}, {world} ranks, {heap}, {numbers} on {device}, ms")
        table.add_column("shape", no_wrap=True)
        for name in (*variants, "x unfused", "auto"):
            table.add_column(name, justify="right")
        for shape, each in itertools.groupby(own, key=lambda row: (row["m"], row["n"], row["k"])):
            line = {row["variant"]: row for row in each}
            fused = min((row["ratio"] for row in line.values() if row["fused"]), default=None)
            auto = next((f"{row['behind']:.3f}" for row in line.values() if row["auto"]), "")
            table.add_row(
                "x".join(map(str, shape)),
                *(f"{line[name]['ms']:.4g}" if name in line else "" for name in variants),
                "" if fused is None else f"{fused:.3f}",
                auto,
            )
        table.caption = "x unfused: the best fused time over the best unfused; auto: that of its choice over the best"
        made.append(table)
    return made


def verdict(rows: list[dict[str, Any]]) -> list[str]:
    """How often fusing pays, and every cell in which it loses."""
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["fused"]:
            cells.setdefault((*(row[key] for key in CELL), row["m"], row["n"], row["k"]), []).append(row)
    best = [min(own, key=lambda row: row["ratio"]) for own in cells.values()]
    lost = [row for row in best if row["ratio"] > 1]
    out = [f"fusing pays in {len(best) - len(lost)} of {len(best)} products"]
    for row in lost:
        shape = f"{row['m']}x{row['n']}x{row['k']}"
        out.append(f"it loses: {title(row)}, {shape}: {row['variant']} takes {row['ratio']:.3f} times the unfused time")
    return out


def configurations(rows: list[dict[str, Any]]) -> list[str]:
    """In which configuration each variant was the fastest."""
    return [
        f"{title(row)}, {row['m']}x{row['n']}x{row['k']}: {row['variant']} in {FusedConfig(*row['config'])}"
        for row in rows
        if row["config"]
    ]


def title(row: dict[str, Any]) -> str:
    """What a row is of."""
    return collective_name(row["collective"], row["shots"])


def _narrow(head: str) -> Table:
    table = tables.blank(head)
    table.box, table.pad_edge, table.padding, table.caption_justify = box.SIMPLE_HEAD, False, (0, 1, 0, 0), "left"
    return table
