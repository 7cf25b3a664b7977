"""The headline set as a table: TFLOP/s of every kernel, ours as a multiple of peers, and in how many cells it leads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from benchmarks.peers import Rows
from benchmarks.training import in_markdown
from meshflash.bench.candidates import SDPA, own_among

#: What ours is shown as a multiple of, and the multiples for which cells are counted.
FLOORS = {"cudnn": (1.0,), "fa4": (0.97, 1.03), SDPA: (1.0,)}


@dataclass(frozen=True)
class Cell:
    """One setting and pass: the milliseconds and TFLOP/s of each kernel, or a word where there are none."""

    batch: int
    tokens: int
    dim: int
    mask: str
    direction: str
    ms: dict[str, float]
    shown: dict[str, str]

    def ratio(self, ours: str, beside: str) -> float | None:
        """How many times as fast ours is."""
        return self.ms[beside] / self.ms[ours] if {ours, beside} <= self.ms.keys() else None

    @property
    def words(self) -> str:
        """Which cell it is."""
        return f"{self.tokens:,} tokens, dim {self.dim}, {self.mask}, {self.direction}"


def title(rows: Rows) -> str:
    """What was measured."""
    heads = {row["head_dim"]: row["heads"] for row in rows}
    of_dims = " or ".join(f"{count} heads of {dim}" for dim, count in sorted(heads.items()))
    return f"TFLOP/s, {rows[0]['dtype']}, {of_dims}, on {rows[0]['device']}"


def table(rows: Rows) -> Group:
    """The table, and below it what it comes to and why figures are missing."""
    made = Table(title=title(rows), title_justify="left", title_style="bold", header_style="bold", box=box.SIMPLE_HEAD)
    made.pad_edge, made.padding = False, (0, 0)
    for name in _head(rows):
        made.add_column(name, justify="left" if name in ("mask", "pass") else "right", no_wrap=True)
    for cell in cells(rows):
        made.add_row(*_line(cell, rows))
    return Group(made, *map(Text, (*summary(rows), *notes(rows))))


def markdown(rows: Rows) -> str:
    """The same for a document."""
    lines = [_line(cell, rows) for cell in cells(rows)]
    below = "\n".join(f"- {line}" for line in (*summary(rows), *notes(rows)))
    return f"{in_markdown(_head(rows), lines)}\n\n{below}"


def cells(rows: Rows) -> list[Cell]:
    """The cells of a record, each with all its kernels."""
    out = []
    keys = ("batch", "tokens", "head_dim", "mask", "pass")
    for (batch, tokens, dim, mask, direction), group in groupby(rows, key=lambda row: tuple(map(row.get, keys))):
        own = list(group)
        ms = {row["kernel"]: row["ms"] for row in own if row["ms"] is not None}
        shown = {row["kernel"]: _word(row["note"]) if row["note"] else _rate(row["tflops"]) for row in own}
        out.append(Cell(batch, tokens, dim, mask, direction, ms, shown))
    return out


def summary(rows: Rows) -> list[str]:
    """For each kernel that ours is compared with: in how many cells it reaches which multiple, and the smallest."""
    ours, out = _ours(rows), []
    for beside in _beside(rows):
        ratios = [(ratio, cell) for cell in cells(rows) if (ratio := cell.ratio(ours, beside)) is not None]
        if not ratios:
            out.append(f"{ours} against {beside}: no cell has both")
            continue
        counts = ", ".join(
            f"at least {floor:.2f}x in {sum(ratio >= floor for ratio, _ in ratios)} of {len(ratios)} cells"
            for floor in FLOORS[beside]
        )
        least, where = min(ratios, key=lambda pair: pair[0])
        out.append(f"{ours} against {beside}: {counts}; smallest {least:.3f}x: {where.words}")
    return out


def notes(rows: Rows) -> list[str]:
    """Why figures are missing, each reason once."""
    count: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["note"]:
            key = (row["kernel"], row["note"])
            count[key] = count.get(key, 0) + 1
    return [f"{kernel}, {n} of {len(cells(rows))} cells: {note}" for (kernel, note), n in count.items()]


def _head(rows: Rows) -> list[str]:
    besides = [f"x {name.split()[-1]}" for name in _beside(rows)]
    return ["tokens", "dim", "mask", "pass", *(name.removeprefix("torch ") for name in _names(rows)), *besides]


def _line(cell: Cell, rows: Rows) -> list[str]:
    ratios = [cell.ratio(_ours(rows), beside) for beside in _beside(rows)]
    return [
        f"{cell.batch}x{cell.tokens:,}",
        str(cell.dim),
        cell.mask,
        cell.direction,
        *(cell.shown.get(name, "") for name in _names(rows)),
        *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
    ]


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["kernel"] for row in rows))


def _ours(rows: Rows) -> str:
    return own_among(_names(rows))


def _beside(rows: Rows) -> list[str]:
    return [name for name in FLOORS if name in _names(rows) and name != _ours(rows)]


def _rate(tflops: float) -> str:
    return f"{tflops:.{0 if tflops >= 100 else 1}f}" if tflops >= 1 else f"{tflops:.2g}"


def _word(note: str) -> str:
    return note.partition(":")[0]
