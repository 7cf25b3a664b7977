"""The tables of variants of a kernel call: one over the plain call, one of masks over causal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import plots
from benchmarks.protocol import Benchmark, Rows
from benchmarks.variants import PLAIN
from meshflash.bench.check import PASSES
from meshflash.bench.columns import NO_MEMORY, Column, Row, milliseconds, terminal
from meshflash.bench.columns import markdown as write_markdown
from meshflash.bench.tables import kernel_cell


def title(rows: Rows) -> str:
    """Return what was called, in words."""
    ran = " and ".join(dict.fromkeys(kernel_cell(row) for row in rows))
    return f"variants of calls of {ran}, {rows[0]['dtype']} on {rows[0]['device']}"


def tables(rows: Rows) -> list[Table]:
    """Return a table of variants and one of masks."""
    return [terminal(_title(own), _columns(own), _lines(own), "section", dense=True) for own in _by_baseline(rows)]


def markdown(rows: Rows) -> str:
    """Return the same for a document."""
    found = [(_title(own), write_markdown(_columns(own), _lines(own))) for own in _by_baseline(rows)]
    return "\n\n".join(f"{words}:\n\n{table}" for words, table in found)


def draw(rows: Rows, title: str, path: Path) -> None:
    """Draw bars of TFLOP/s for each variant, a group for each shape and mask; all masks are one group."""
    named = [row | {"kernel": row["variant"]} | ({} if _is_call(row) else {"mask": "masks"}) for row in rows]
    plots.peers(named, title, path)


def _is_call(row: Row) -> bool:
    """Return whether a row is a variant of a call, and not a mask."""
    return bool(row["baseline"] == PLAIN)


def _by_baseline(rows: Rows) -> list[Rows]:
    baselines = dict.fromkeys(row["baseline"] for row in rows)
    return [[row for row in rows if row["baseline"] == baseline] for baseline in baselines]


def _title(rows: Rows) -> str:
    """Return the calls and the shape of one table's rows."""
    dims: dict[int, list[int]] = {}
    for heads, dim in dict.fromkeys((row["heads"], row["head_dim"]) for row in rows):
        dims.setdefault(heads, []).append(dim)
    of_dims = " or ".join(f"{heads} heads of {' or '.join(map(str, own))}" for heads, own in dims.items())
    return f"{title(rows)}, {rows[0]['tokens']:,} tokens, batch {rows[0]['batch']}, {of_dims}"


def _columns(rows: Rows) -> list[Column]:
    def figure(direction: str, place: int) -> Any:
        return lambda line: line[direction][place]

    columns = [Column("dim", "dim"), Column("variant", "variant", is_text=True)]
    if _is_call(rows[0]):
        columns.insert(1, Column("mask", "mask", is_text=True))
    for direction, short in zip(PASSES, ("fwd", "bwd"), strict=True):
        headers = (f"{short} ms", "TFLOP/s", f"x {rows[0]['baseline']}")
        columns += [Column(header, figure(direction, place)) for place, header in enumerate(headers)]
    return columns


def _lines(rows: Rows) -> list[Row]:
    """Return a row for each variant of a case: its backward, which all have, and its forward if it has one."""
    found = {(row["head_dim"], row["mask"], row["variant"], row["pass"]): row for row in rows}
    lines = []
    for dim, mask, variant in (key[:3] for key in found if key[3] == "backward"):
        figures: Row = {direction: _figures(found.get((dim, mask, variant, direction))) for direction in PASSES}
        section = (dim, mask) if _is_call(rows[0]) else dim
        lines.append({"dim": dim, "mask": mask, "variant": variant, "section": section, **figures})
    return lines


def _figures(row: Row | None) -> tuple[str, str, str]:
    if row is None:
        return "", "", ""
    if row["ms"] is None:
        return NO_MEMORY, "", ""
    rate = f"{row['tflops']:.1f}" if row["tflops"] >= 1 else f"{row['tflops']:.2g}"
    return milliseconds(row["ms"]), rate, "" if row["ratio"] is None else f"{row['ratio']:.2f}"


BENCHMARK = Benchmark(
    name="variants",
    keys=frozenset({"variant", "baseline", "ratio", "pass"}),
    tables=tables,
    markdown=markdown,
    title=title,
    draw=draw,
)
