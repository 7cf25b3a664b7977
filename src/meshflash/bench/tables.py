"""Tables of the benchmarks that come with the package, at most 80 columns wide."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table

from meshflash.kernels.rates import Rates

#: What tells one cell from another; its passes stand in one table.
CELL = ("mask", "tokens", "batch", "heads", "kv_heads", "head_dim", "dtype", "device", "deterministic")
NO_MEMORY = "out of memory"


def kernels(rows: list[dict[str, Any]], beside: str) -> list[Table]:
    """A table for each cell: kernels by pass, each with its speed as a multiple of the kernel `beside`."""
    return [
        _cell(dict(zip(CELL, cell, strict=True)), list(own), beside)
        for cell, own in groupby(rows, key=lambda row: tuple(row[key] for key in CELL))
    ]


def schedules(rows: list[dict[str, Any]], beside: str) -> list[Table]:
    """A table for each shape: schedules by pass, with their speed as a multiple of `beside`, and what they moved."""
    return [
        _schedules(dict(zip(CELL, cell, strict=True)), list(own), beside)
        for cell, own in groupby(rows, key=lambda row: tuple(row[key] for key in CELL))
    ]


#: More of them than this do not fit a terminal.
MANY_SCHEDULES = 24


def checks(rows: list[dict[str, Any]]) -> Table:
    """Schedules with how many checks were right, missed and refused, the worst error, and what they received.

    Where there are many they are one row for each name, whatever their options.
    """
    head = ("schedule", "right", "missed", "refused", "worst error", "of allowed", "KB in")
    table = blank(f"against float64, {rows[0]['world']} ranks", *head)
    many = len({row["schedule"] for row in rows}) > MANY_SCHEDULES
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["schedule"].partition("(")[0] if many else row["schedule"], []).append(row)
    for schedule, own in by_name.items():
        count = [sum(row["outcome"] == outcome for row in own) for outcome in ("right", "missed", "refused")]
        worst = max(own, key=lambda row: row["error"] / row["allowed"] if row["allowed"] else 0.0)
        share = f"{worst['error'] / worst['allowed']:.2f}" if worst["allowed"] else "-"
        moved = sum(row["forward_bytes"] + row["backward_bytes"] for row in own) / max(1, len(own)) / 1e3
        error = f"{worst['error']:.0e} {worst['worst'].removesuffix('_logits')}"
        table.add_row(schedule, *map(str, count), error, share, f"{moved:.1f}")
    return table


def kernel_cell(row: dict[str, Any]) -> str:
    """A kernel, and what ran where it chose."""
    return row["kernel"] if row["ran"] == row["kernel"] else f"{row['kernel']} ({row['ran']})"


def milliseconds(number: float | None, missing: str = NO_MEMORY) -> str:
    """A time in its cell."""
    return missing if number is None else f"{number:,.{2 if number < 1000 else 0}f}"


def mebibytes(number: int | None, missing: str = NO_MEMORY) -> str:
    """Memory in its cell."""
    return missing if number is None else f"{number / 2**20:,.1f}"


def _times(beside: str) -> str:
    return f"x {beside.split()[-1]}"


def blank(head: str, *columns: str) -> Table:
    """A table with words on the left of their columns and numbers on the right."""
    table = Table(title=head, title_justify="left", title_style="bold", header_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name in ("pass", "kernel") else "right", no_wrap=True)
    return table


def _schedules(cell: dict[str, Any], rows: list[dict[str, Any]], beside: str) -> Table:
    world = max(row["world"] for row in rows)
    table = blank(f"{title(cell)}, {world} ranks", "pass")
    table.box, table.pad_edge, table.padding = box.SIMPLE_HEAD, False, (0, 1, 0, 0)
    table.add_column("schedule")
    simulated = any(row["simulated_ms"] is not None for row in rows)
    waits = ("waits", "sim.") if simulated else ("waits",)
    shared = cell["device"] == "cpu"  # ranks share its cores: none has a part of the hardware
    speeds = ("speedup",) if shared else ("TF/s", "eff.")
    for name in ("ms", "±", *speeds, *waits, "MB in", "error", "MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    rounds = rows[0]["rounds"]
    words = "speedup: against one rank"
    if not shared:
        words = "eff.: measured speed against one rank, for each part of the hardware"
    table.caption = (
        f"ms: median of {rounds} interleaved round{'' if rounds == 1 else 's'}; ±: half of least to most; "
        f"{words}; waits: exposed communication, measured, ms of the rank that waits longest"
    )
    table.caption += "; sim.: the same, simulated, of the same programs" if simulated else ""
    table.caption += f"; kernels that ran: {_ran(rows)}"
    flagged = [row for row in rows if impossible(row)]
    if flagged:
        limit = max(row["speedup_limit"] for row in flagged)
        table.caption += (
            f"\n{FLAG} impossible: more than the {limit:g} times one rank's speed that ranks and cores could give; "
            "the machine was busy, measure again"
        )
    table.caption_justify = "left"
    for direction, own in groupby(rows, key=lambda row: row["pass"]):
        for n, row in enumerate(own):
            mark = FLAG if impossible(row) else ""
            table.add_row(
                ("forward" if direction == "forward" else "both") if n == 0 else "",
                row["schedule"],
                _short(row["ms"]),
                spread(row),
                *([f"{row['speedup']:.2f}{mark}"] if shared else [_tflops(row), f"{row['efficiency']:.3f}{mark}"]),
                *([""] * len(waits) if row["world"] == 1 else _waited(row)[: len(waits)]),
                "" if row["world"] == 1 else f"{row['received_mean'] / 1e6:.1f}",
                "" if row["world"] == 1 else f"{row['error']:.0e}",
                f"{row['peak_bytes'] / 2**20:.1f}",
            )
        table.add_section()
    return table


#: Stands behind a figure that cannot be.
FLAG = "!"


def impossible(row: dict[str, Any]) -> bool:
    """Whether a speedup is more than the ranks, and the cores that they share, could give.

    >>> impossible({"speedup": 13.59, "speedup_limit": 2.0}), impossible({"speedup": 1.9, "speedup_limit": 2.0})
    (True, False)
    """
    return bool(row["speedup"] > row["speedup_limit"])


def spread(row: dict[str, Any]) -> str:
    """Half of the distance from the fastest to the slowest round, as a part of the median.

    >>> spread({"ms": 100.0, "ms_low": 90.0, "ms_high": 120.0, "rounds": 3})
    '15%'
    """
    return f"{(row['ms_high'] - row['ms_low']) / 2 / row['ms']:.0%}" if row["rounds"] > 1 else "-"


def _ran(rows: list[dict[str, Any]]) -> str:
    """Which kernels ran in each pass, of all schedules."""
    words = []
    for direction in ("forward", "backward"):
        found = dict.fromkeys(name for row in rows for name in row[f"{direction}_ran"].split(", ") if name)
        words += [f"{direction} {', '.join(found)}"] if found else []
    return "; ".join(words)


def _tflops(row: dict[str, Any]) -> str:
    return f"{row['tflops']:.3g}"


def _waited(row: dict[str, Any]) -> list[str]:
    simulated = row["simulated_ms"]
    return [_short(row["exposed_ms"]), "" if simulated is None else _short(simulated)]


def _short(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.2f}"


def title(cell: dict[str, Any], tokens: bool = True) -> str:
    """A shape in words, with or without its length."""
    heads = f"{cell['heads']} heads"
    if cell["kv_heads"] != cell["heads"]:
        heads += f" on {cell['kv_heads']}"
    words = [cell["mask"], f"{cell['tokens']:,} tokens", f"batch {cell['batch']}", heads, f"dim {cell['head_dim']}"]
    if not tokens:
        del words[1]
    return ", ".join([*words, cell["dtype"], *(["deterministic"] if cell["deterministic"] else [])])


def _cell(cell: dict[str, Any], rows: list[dict[str, Any]], beside: str) -> Table:
    columns = ("pass", "kernel", "ms", "TFLOP/s", _times(beside), "error", "peak MiB")
    table = blank(f"{title(cell)} on {cell['device']}", *columns)
    table.caption, table.caption_justify = f"error: against {rows[0]['oracle']}", "left"
    for direction, own in groupby(rows, key=lambda row: row["pass"]):
        passes = list(own)
        peer = next((row["ms"] for row in passes if row["kernel"] == beside), None)
        for n, row in enumerate(passes):
            ms = row["ms"]
            table.add_row(
                direction if n == 0 else "",
                kernel_cell(row),
                milliseconds(ms),
                "" if ms is None else f"{row['tflops']:.3f}",
                "" if peer is None or ms is None else f"{peer / ms:.2f}",
                "" if row["error"] is None else f"{row['error']:.1e}",
                mebibytes(row["peak_bytes"], ""),
            )
        table.add_section()
    return table


def rates(found: Rates) -> Table:
    """Measured rates, TFLOP/s, kernels beside each other; the fastest of a row is bold."""
    names = list(dict.fromkeys(rate.kernel for rate in found.rates))
    table = Table("pass", "mask", title=f"{found.device}: TFLOP/s", title_justify="left", title_style="bold")
    for name in ("dim", "tokens", *names):
        table.add_column(name, justify="right")
    rows: dict[tuple[str, bool, int, int], dict[str, float]] = {}
    for rate in found.rates:
        key = (rate.direction, rate.causal, rate.head_dim, rate.tokens)
        rows.setdefault(key, {})[rate.kernel] = rate.tflops
    for (direction, causal, dim, tokens), row in sorted(rows.items(), reverse=True):
        best = max(row.values())
        cells = [("" if x is None else f"[bold]{x:.0f}[/]" if x == best else f"{x:.0f}") for x in map(row.get, names)]
        table.add_row(direction, "causal" if causal else "full", str(dim), f"{tokens:,}", *cells)
    return table
