"""Ways to call a kernel as tables: one beside the plain call, one of masks beside causal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group

from benchmarks import training
from benchmarks.variants import PLAIN
from meshflash.bench import plots, tables
from meshflash.bench.check import PASSES

Rows = list[dict[str, Any]]


def read(path: Path) -> dict[str, Any]:
    """A record of ways."""
    return training.read(path, {"way", "beside", "ratio", "pass"}, "bench ways")


def title(rows: Rows) -> str:
    """What was called."""
    ran = " and ".join(dict.fromkeys(tables.kernel_cell(row) for row in rows))
    return f"ways to call {ran}, {rows[0]['dtype']} on {rows[0]['device']}"


def table(rows: Rows) -> Group:
    """A table of ways and one of masks."""
    made = []
    for own in _by_beside(rows):
        one = tables.blank(_title(own))
        one.box, one.pad_edge, one.padding = box.SIMPLE_HEAD, False, (0, 1, 0, 0)
        for name in _head(own):
            one.add_column(name, justify="left" if name in ("mask", "way") else "right", no_wrap=True)
        for _, setting in groupby(_lines(own), key=lambda line: line[: 2 if own[0]["beside"] == PLAIN else 1]):
            for line in setting:
                one.add_row(*line)
            one.add_section()
        made.append(one)
    return Group(*made)


def markdown(rows: Rows) -> str:
    """The same for a document."""
    made = [(_title(own), training.in_markdown(_head(own), list(_lines(own)))) for own in _by_beside(rows)]
    return "\n\n".join(f"{words}:\n\n{lines}" for words, lines in made)


def draw(rows: Rows, title: str, path: Path) -> None:
    """Bars of TFLOP/s for each way, a group for each shape and mask; the masks are one."""
    plots.peers(
        [row | {"kernel": row["way"]} | ({} if row["beside"] == PLAIN else {"mask": "masks"}) for row in rows],
        *(title, path),
    )


def _by_beside(rows: Rows) -> Iterator[Rows]:
    """The rows of each table."""
    for beside in dict.fromkeys(row["beside"] for row in rows):
        yield [row for row in rows if row["beside"] == beside]


def _title(rows: Rows) -> str:
    """What was called, and the shape of one table's rows."""
    dims: dict[int, list[int]] = {}
    for heads, dim in dict.fromkeys((row["heads"], row["head_dim"]) for row in rows):
        dims.setdefault(heads, []).append(dim)
    of_dims = " or ".join(f"{heads} heads of {' or '.join(map(str, own))}" for heads, own in dims.items())
    return f"{title(rows)}, {rows[0]['tokens']:,} tokens, batch {rows[0]['batch']}, {of_dims}"


def _head(rows: Rows) -> list[str]:
    beside = rows[0]["beside"]
    masks = ["mask"] if beside == PLAIN else []
    figures = [name for short in ("fwd", "bwd") for name in (f"{short} ms", "TFLOP/s", f"x {beside}")]
    return ["dim", *masks, "way", *figures]


def _lines(rows: Rows) -> Iterator[list[str]]:
    """A line for each way of a setting: its backward, which all have, and its forward where it has one."""
    found = {(row["head_dim"], row["mask"], row["way"], row["pass"]): row for row in rows}
    for dim, mask, way in (key[:3] for key in found if key[3] == "backward"):
        masks = [mask] if rows[0]["beside"] == PLAIN else []
        passes = [_figures(found.get((dim, mask, way, direction))) for direction in PASSES]
        yield [str(dim), *masks, way, *passes[0], *passes[1]]


def _figures(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["", "", ""]
    if row["ms"] is None:
        return [tables.NO_MEMORY, "", ""]
    rate = f"{row['tflops']:.1f}" if row["tflops"] >= 1 else f"{row['tflops']:.2g}"
    return [tables.milliseconds(row["ms"]), rate, "" if row["ratio"] is None else f"{row['ratio']:.2f}"]
