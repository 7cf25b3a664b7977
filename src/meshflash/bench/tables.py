"""Tables of the benchmarks that come with the package, readable at 80 columns.

`blank` is the one table style of all commands.
"""

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
    head = ("schedule", "right", "missed", "refused", "worst error", "of allowed", "recv (KB)")
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
    """Return an empty table in the style of all commands: words are left-aligned, numbers right-aligned.

    Cells that do not fit are folded onto the next line, never cut: a schedule shown as "ri..." could be any of six.
    """
    table = Table(
        title=head,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in columns:
        add_column(table, name)
    return table


#: Columns of words; all others hold numbers.
WORDS = ("pass", "kernel", "schedule", "mask", "")


def add_column(table: Table, name: str) -> None:
    """Add a column to a table of `blank`. Words may wrap; numbers stay on one line while there is room."""
    is_text = name in WORDS
    table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")


def _schedules(cell: dict[str, Any], rows: list[dict[str, Any]], beside: str) -> Table:
    world = max(row["world"] for row in rows)
    table = blank(f"{title(cell)}, {world} ranks", "pass", "schedule")
    simulated = any(row["simulated_ms"] is not None for row in rows)
    exposed = ("exposed\ncomm (ms)", "sim.\n(ms)") if simulated else ("exposed\ncomm (ms)",)
    shares_cores = cell["device"] == "cpu"  # so no rank has hardware of its own, and efficiency means nothing
    speeds = ("speedup",) if shares_cores else ("TFLOP/s", "eff.")
    for name in ("ms", "±", *speeds, *exposed, "recv\n(MB)", "error", "peak\nMiB"):
        add_column(table, name)
    rounds = rows[0]["rounds"]
    words = "speedup: over the single device (baseline)"
    if not shares_cores:
        words = "eff.: measured speed over that of the single device (baseline), for each rank's part of the hardware"
    table.caption = (
        f"ms: median of {rounds} interleaved round{'' if rounds == 1 else 's'}; ±: half of max - min, relative; "
        f"{words}; exposed comm: measured, of the rank that waits longest; recv: mean over ranks"
    )
    table.caption += "; sim.: exposed comm of the same programs, simulated" if simulated else ""
    table.caption += f"; kernels that ran: {_ran(rows)}"
    flagged = [row for row in rows if impossible(row)]
    if flagged:
        limit = max(row["speedup_limit"] for row in flagged)
        table.caption += (
            f"\n{FLAG} impossible: above {limit:g}, the most that these ranks and cores could give; "
            "the machine was busy, measure again"
        )
    for direction, own in groupby(rows, key=lambda row: row["pass"]):
        for n, row in enumerate(own):
            mark = FLAG if impossible(row) else ""
            table.add_row(
                ("forward" if direction == "forward" else "both") if n == 0 else "",
                SINGLE_DEVICE if row["schedule"] == beside else row["schedule"],
                _short(row["ms"]),
                spread(row),
                *(
                    [f"{row['speedup']:.2f}{mark}"]
                    if shares_cores
                    else [_tflops(row), f"{row['efficiency']:.3f}{mark}"]
                ),
                *([""] * len(exposed) if row["world"] == 1 else _exposed(row)[: len(exposed)]),
                "" if row["world"] == 1 else f"{row['received_mean'] / 1e6:.1f}",
                "" if row["world"] == 1 else f"{row['error']:.0e}",
                f"{row['peak_bytes'] / 2**20:.1f}",
            )
        table.add_section()
    return table


#: The baseline in tables of schedules: the same work on one rank.
SINGLE_DEVICE = "single device"
#: Marks an impossible figure.
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


def _exposed(row: dict[str, Any]) -> list[str]:
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
    table.caption = f"error: against {rows[0]['oracle']}"
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
    table = blank(f"{found.device}: TFLOP/s", "pass", "mask", "dim", "tokens", *names)
    rows: dict[tuple[str, bool, int, int], dict[str, float]] = {}
    for rate in found.rates:
        key = (rate.direction, rate.causal, rate.head_dim, rate.tokens)
        rows.setdefault(key, {})[rate.kernel] = rate.tflops
    for (direction, causal, dim, tokens), row in sorted(rows.items(), reverse=True):
        best = max(row.values())
        cells = [("" if x is None else f"[bold]{x:.0f}[/]" if x == best else f"{x:.0f}") for x in map(row.get, names)]
        table.add_row(direction, "causal" if causal else "full", str(dim), f"{tokens:,}", *cells)
    return table
