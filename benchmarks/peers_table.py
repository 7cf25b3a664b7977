"""The tables of the headline set: TFLOP/s of every kernel, ours over peers, and in how many cells ours leads.

One table has the time of the device, the other that of calls in a plain loop, in which the host's time counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import RenderableType
from rich.text import Text

from benchmarks import plots
from benchmarks.protocol import Benchmark, Rows
from meshflash.bench.candidates import SDPA, own_among
from meshflash.bench.columns import Column, Row, terminal
from meshflash.bench.columns import markdown as write_markdown
from meshflash.bench.tables import ratio_header

#: The peers that ours is compared with, and the speedups for which cells are counted.
FLOORS = {"cudnn": (1.0,), "fa4": (0.95, 1.0), SDPA: (1.0,)}


@dataclass(frozen=True)
class Cell:
    """One case and pass: the milliseconds of each kernel, and its TFLOP/s or a word if there are none."""

    batch: int
    tokens: int
    dim: int
    mask: str
    direction: str
    ms: dict[str, float]
    shown: dict[str, str]

    def speedup(self, ours: str, peer: str) -> float | None:
        """Return the speed of ours over that of a peer; None unless both have figures."""
        return self.ms[peer] / self.ms[ours] if {ours, peer} <= self.ms.keys() else None

    @property
    def words(self) -> str:
        """The cell in words."""
        return f"{self.tokens:,} tokens, dim {self.dim}, {self.mask}, {self.direction}"


def title(rows: Rows) -> str:
    """Return what was measured, in words."""
    heads = {row["head_dim"]: row["heads"] for row in rows}
    of_dims = " or ".join(f"{count} heads of {dim}" for dim, count in sorted(heads.items()))
    return f"TFLOP/s, {rows[0]['dtype']}, {of_dims}, on {rows[0]['device']}"


def tables(rows: Rows) -> Sequence[RenderableType]:
    """Return the tables, below each its summary, and at the end why figures are missing."""
    found: list[RenderableType] = []
    for words, timed in timings(rows):
        found += [terminal(f"{title(rows)}, {words}", _columns(timed), _lines(timed), dense=True)]
        found += map(Text, summary(timed))
    return [*found, *map(Text, notes(rows))]


def markdown(rows: Rows) -> str:
    """Return the same for a document."""
    parts = []
    for words, timed in timings(rows):
        listed = "\n".join(f"- {line}" for line in summary(timed))
        parts.append(f"{words.capitalize()}:\n\n{write_markdown(_columns(timed), _lines(timed))}\n\n{listed}")
    return "\n\n".join([*parts, *(f"- {line}" for line in notes(rows))])


def timings(rows: Rows) -> list[tuple[str, Rows]]:
    """Return how calls were timed, in words, each with the rows of those times; older records have no loops."""
    found = [("kernel time", rows)]
    if any("loop_ms" in row for row in rows):
        loops = [row | {"ms": row["loop_ms"], "tflops": _loop_tflops(row)} for row in rows]
        found.append(("plain loops, host time included", loops))
    return found


def cells(rows: Rows) -> list[Cell]:
    """Return the cells of a record, each with all its kernels."""
    out = []
    keys = ("batch", "tokens", "head_dim", "mask", "pass")
    for (batch, tokens, dim, mask, direction), group in groupby(rows, key=lambda row: tuple(map(row.get, keys))):
        own = list(group)
        ms = {row["kernel"]: row["ms"] for row in own if row["ms"] is not None}
        shown = {row["kernel"]: _word(row["note"]) if row["note"] else _rate(row["tflops"]) for row in own}
        out.append(Cell(batch, tokens, dim, mask, direction, ms, shown))
    return out


def summary(rows: Rows) -> list[str]:
    """Return for each peer in how many cells ours reaches which speedup, the median and the smallest speedup."""
    ours, out = _ours(rows), []
    for peer in _peers(rows):
        found = [(speedup, cell) for cell in cells(rows) if (speedup := cell.speedup(ours, peer)) is not None]
        if not found:
            out.append(f"{ours} against {peer}: no cell has both")
            continue
        counts = ", ".join(
            f"at least {floor:.2f}x in {sum(speedup >= floor for speedup, _ in found)} of {len(found)} cells"
            for floor in FLOORS[peer]
        )
        smallest, where = min(found, key=lambda pair: pair[0])
        median = statistics.median(speedup for speedup, _ in found)
        out.append(f"{ours} against {peer}: {counts}; median {median:.3f}x; smallest {smallest:.3f}x: {where.words}")
    return out


def notes(rows: Rows) -> list[str]:
    """Return why figures are missing, each reason once."""
    count: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["note"]:
            key = (row["kernel"], row["note"])
            count[key] = count.get(key, 0) + 1
    return [f"{kernel}, {n} of {len(cells(rows))} cells: {note}" for (kernel, note), n in count.items()]


def _columns(rows: Rows) -> list[Column]:
    return [
        Column("tokens", "tokens"),
        Column("dim", "dim"),
        Column("mask", "mask", is_text=True),
        Column("pass", "pass", is_text=True),
        *(Column(name.removeprefix("torch "), name) for name in _names(rows)),
        *(Column(header, header) for header in map(ratio_header, _peers(rows))),
    ]


def _lines(rows: Rows) -> list[Row]:
    """Return a row for each cell, with the text of each column."""
    names, ours, peers = _names(rows), _ours(rows), _peers(rows)
    lines = []
    for cell in cells(rows):
        speedups = {ratio_header(peer): cell.speedup(ours, peer) for peer in peers}
        line = {"tokens": f"{cell.batch}x{cell.tokens:,}", "dim": cell.dim, "mask": cell.mask, "pass": cell.direction}
        line |= {name: cell.shown.get(name, "") for name in names}
        lines.append(line | {key: "" if speedup is None else f"{speedup:.2f}" for key, speedup in speedups.items()})
    return lines


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["kernel"] for row in rows))


def _ours(rows: Rows) -> str:
    return own_among(_names(rows))


def _peers(rows: Rows) -> list[str]:
    return [name for name in FLOORS if name in _names(rows) and name != _ours(rows)]


def _loop_tflops(row: Row) -> float | None:
    return None if row["loop_ms"] is None else row["tflops"] * row["ms"] / row["loop_ms"]


def _rate(tflops: float) -> str:
    return f"{tflops:.{0 if tflops >= 100 else 1}f}" if tflops >= 1 else f"{tflops:.2g}"


def _word(note: str) -> str:
    return note.partition(":")[0]


BENCHMARK = Benchmark(
    name="peers",
    keys=frozenset({"note", "check_s", "version"}),
    tables=tables,
    markdown=markdown,
    title=title,
    draw=plots.peers,
)
