"""The columns of the tables that `python -m benchmarks` prints."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from meshflash.bench.columns import Column, Row, markdown, terminal
from meshflash.bench.tables import kernel_cell, mebibytes, milliseconds, title

KERNEL = Column("kernel", kernel_cell, is_text=True)
PASS = Column("pass", "pass", is_text=True, once=True)
SCHEDULE = Column("schedule", "schedule", is_text=True)


def _ratio(key: str, digits: int = 2, suffix: str = "") -> Any:
    """Return the cell of a ratio; empty where there is none."""
    return lambda row: "" if row[key] is None else f"{row[key]:.{digits}f}{suffix}"


LENGTHS = (
    Column("tokens", lambda row: f"{row['tokens']:,}", once=True),
    KERNEL,
    Column("forward, ms", lambda row: milliseconds(row["forward_ms"], "")),
    Column("backward, ms", lambda row: milliseconds(row["backward_ms"], "")),
    Column("both, ms", lambda row: milliseconds(row["ms"])),
    Column("speedup", _ratio("speedup", suffix="x")),
    Column("peak, MiB", lambda row: mebibytes(row["peak_bytes"], "")),
    Column("memory saved", lambda row: "" if row["saved"] is None else f"{row['saved']:.0%}"),
)
MEMORY = (
    KERNEL,
    Column("needed, MiB", lambda row: mebibytes(row["needed_bytes"])),
    Column("peak, MiB", lambda row: mebibytes(row["peak_bytes"])),
    Column("x needed", _ratio("ratio", 3)),
)
TILES = (
    Column("layout", "layout", is_text=True),
    Column("keys of one rank, ms", lambda row: f"{row['step_ms']:.2f}"),
    Column("spans", lambda row: f"{row['step_spans']:,}"),
    Column("all keys, ms", lambda row: f"{row['all_ms']:.2f}"),
    Column("spans", lambda row: f"{row['all_spans']:,}"),
)
RANK = (
    SCHEDULE,
    Column("kernel", "kernel", is_text=True),
    Column("pass", "pass", is_text=True),
    Column("ms", lambda row: f"{row['ms']:.3f}"),
    Column("its kernels, ms", lambda row: f"{row['attend_ms']:.3f}"),
    Column("one kernel, ms", lambda row: f"{row['one_ms']:.3f}"),
    Column("ratio", lambda row: f"{row['ratio']:.3f}"),
)
ENGINE = (
    SCHEDULE,
    Column("pass", "pass", is_text=True),
    Column("steps", "steps"),
    Column("us per step", lambda row: f"{row['microseconds']:.1f}"),
)


def lengths(rows: list[Row]) -> Table:
    """Return kernels by length, each with its speed and memory against standard attention."""
    return terminal(f"{title(rows[0], tokens=False)} on {rows[0]['device']}", LENGTHS, rows, section="tokens")


def lengths_markdown(rows: list[Row]) -> str:
    """Return the table of lengths for a document."""
    return markdown(LENGTHS, rows)


def host(rows: list[Row], beside: str) -> Table:
    """Return the host's microseconds for a call of each kernel, as a multiple of those of the kernel `beside`."""
    columns = (
        PASS,
        KERNEL,
        Column("us per call", lambda row: f"{row['microseconds']:.1f}"),
        Column("least", lambda row: f"{row['least']:.1f}"),
        Column(f"x {beside.split()[-1]}", _ratio("ratio")),
    )
    return terminal(f"{title(rows[0])} on {rows[0]['device']}", columns, rows, section="pass")


def memory(rows: list[Row]) -> Table:
    """Return peak memory as a multiple of the bytes of q, k, v, out and their gradients."""
    return terminal(f"{title(rows[0])} on {rows[0]['device']}", MEMORY, rows)


def step(found: Any, head: str) -> list[Table]:
    """Return a training step's kernels by their total time, and the step beside them."""
    parts: list[Row] = [
        {"name": part.name, "times": part.times, "each": part.ms, "ms": part.times * part.ms}
        for part in sorted(found.parts, key=lambda part: -part.times * part.ms)
    ]
    kernels = (
        Column("kernel", "name", is_text=True),
        Column("times", "times"),
        Column("ms each", lambda row: f"{row['each']:.3f}"),
        Column("ms", lambda row: f"{row['ms']:.1f}"),
    )
    totals: list[Row] = []
    if found.kernels_ms is not None:
        totals.append({"name": "its kernels", "ms": found.kernels_ms, "share": f"{found.ratio:.3f}"})
    peak = f"{found.tflops:.1f} TFLOP/s, peak {found.peak_bytes / 2**30:.2f} GiB"
    totals.append({"name": "the step", "ms": found.ms, "share": peak})
    if found.plain_ms is not None:
        totals.append({"name": "the plain model", "ms": found.plain_ms, "share": f"{found.plain_ms / found.ms:.3f}"})
    columns = (
        Column("", "name", is_text=True),
        Column("ms", lambda row: f"{row['ms']:.1f}"),
        Column("of the step", "share"),
    )
    total = terminal(f"{found.weights:,} weights, loss {found.loss:.3f}", columns, totals)
    return [terminal(head, kernels, parts), total] if parts else [total]


def bytes_markdown(rows: list[Row]) -> str:
    """Return the bytes that ranks receive, for a document: a line for each schedule and shape."""
    merged = [
        {**forward, "both": both, "forward": forward} for forward, both in zip(rows[::2], rows[1::2], strict=True)
    ]

    def received(key: str, header: str) -> tuple[Column, Column, Column]:
        return (
            Column(f"{header}, MB", lambda row: f"{row[key]['received_mean'] / 1e6:.1f}"),
            Column("peers'", lambda row: f"{row[key]['peer_bytes'] / 1e6:.1f}" if row[key]["peer_bytes"] else "-"),
            Column("ratio", lambda row: _share(row[key])),
        )

    columns = (
        Column("heads", lambda row: f"{row['heads']}/{row['kv_heads']}"),
        Column("mask", "mask"),
        Column("schedule", lambda row: f"`{row['schedule']}`"),
        *received("forward", "forward"),
        *received("both", "with backward"),
    )
    return markdown(columns, merged)


def _share(row: Row) -> str:
    return f"{row['received_mean'] / row['peer_bytes']:.2f}" if row["peer_bytes"] else "-"
