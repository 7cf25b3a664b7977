"""The tables of fused GEMM + collectives over shapes, and the words below them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from benchmarks import plots
from benchmarks.protocol import Benchmark, Rows
from meshflash.bench.cases import on_cpu
from meshflash.bench.columns import Column, Row, optional, terminal
from meshflash.bench.columns import markdown as write_markdown
from meshflash.bench.fused_cases import INTERPRETED, title
from meshflash.gemm.distributed.plan import FusedConfig

#: Keys of a row whose values name a table: all shapes of a collective.
SWEEP = ("collective", "shots", "world", "dtype", "device", "heap")
SHAPE = ("m", "n", "k")


def tables(rows: Rows) -> Sequence[RenderableType]:
    """Return a table for each collective, and below them where fusing loses."""
    device = rows[0]["device"]
    below = [INTERPRETED] if on_cpu(device) else [*verdict(rows), "ranks that share a card also share its memory"]
    return [*sweep_tables(rows), *below]


def sweep_tables(rows: Rows) -> list[Table]:
    """Return a table for each collective: a row for each shape, with the time of each variant."""
    caption = "x unfused: the best fused time over the best unfused; auto: time of its choice over the best"
    return [terminal(head, columns, lines, caption=caption) for head, columns, lines in _sweeps(rows)]


def markdown(rows: Rows) -> str:
    """Return the tables and the verdict for a document."""
    found = [f"{head}:\n\n{write_markdown(columns, lines)}" for head, columns, lines in _sweeps(rows)]
    return "\n\n".join([*found, *verdict(rows)])


def verdict(rows: Rows) -> list[str]:
    """Return in how many cases fusing pays, and every case in which it loses."""
    cases: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        if row["fused"]:
            cases.setdefault(tuple(row[key] for key in (*SWEEP, *SHAPE)), []).append(row)
    best = [min(own, key=lambda row: row["ratio"]) for own in cases.values()]
    lost = [row for row in best if row["ratio"] > 1]
    return [f"fusing pays in {len(best) - len(lost)} of {len(best)} GEMMs"] + [
        f"it loses: {title(row)}, {_shape(row)}: {row['variant']} takes {row['ratio']:.3f} times the unfused time"
        for row in lost
    ]


def configurations(rows: Rows) -> list[str]:
    """Return the fastest configuration of each variant, in words."""
    return [
        f"{title(row)}, {_shape(row)}: {row['variant']} in {FusedConfig(*row['config'])}"
        for row in rows
        if row["config"]
    ]


def _sweeps(rows: Rows) -> list[tuple[str, list[Column], Rows]]:
    """Return the title, columns and rows of each table."""
    found = []
    for (*_, world, dtype, device, heap), group in itertools.groupby(rows, key=_values(SWEEP)):
        own = list(group)
        variants = list(dict.fromkeys(row["variant"] for row in own))
        lines: Rows = []
        for _, each in itertools.groupby(own, key=_values(SHAPE)):
            line = {row["variant"]: row for row in each}
            fused = min((row["ratio"] for row in line.values() if row["fused"]), default=None)
            auto = next((row["vs_best"] for row in line.values() if row["auto"]), None)
            first = next(iter(line.values()))
            lines.append({"shape": _shape(first), "fused": fused, "auto": auto, "variants": line})
        columns = [
            Column("shape", "shape", is_text=True),
            *(Column(name, partial(_milliseconds, name)) for name in variants),
            Column("x unfused", optional("fused", "{:.3f}")),
            Column("auto", optional("auto", "{:.3f}")),
        ]
        found.append((f"{title(own[0])}, {world} ranks, {heap}, {dtype} on {device}, ms", columns, lines))
    return found


def _values(keys: tuple[str, ...]) -> Callable[[Row], tuple[Any, ...]]:
    return lambda row: tuple(row[key] for key in keys)


def _shape(row: Row) -> str:
    return "x".join(str(row[key]) for key in SHAPE)


def _milliseconds(variant: str, line: Row) -> str:
    return f"{line['variants'][variant]['ms']:.4g}" if variant in line["variants"] else ""


BENCHMARK = Benchmark(
    name="fused",
    keys=frozenset({"collective", "variant", "vs_best"}),
    tables=tables,
    markdown=markdown,
    title=lambda rows: f"fused GEMM + collectives on {rows[0]['device']}, {rows[0]['world']} ranks",
    draw=lambda rows, title_of_plot, path: plots.over_k(rows, title, title_of_plot, path),
)
