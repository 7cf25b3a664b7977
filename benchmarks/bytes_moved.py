"""Bytes that ranks receive in each schedule, counted in its programs, beside those of peers' implementations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from benchmarks.protocol import Benchmark, Rows
from meshflash.bench.cases import Case
from meshflash.bench.columns import Column, Row
from meshflash.bench.columns import markdown as write_markdown
from meshflash.bench.peers import peer_bytes
from meshflash.core.problem import Problem
from meshflash.core.program import Sizes
from meshflash.schedules.registry import build, default_layout

PASSES = ("forward", "forward+backward")


@dataclass(frozen=True)
class BytesRow:
    """Bytes that a rank receives in a schedule on its default layout: mean and maximum over ranks, and peers'."""

    schedule: str
    direction: str
    world: int
    case: Case
    received_mean: float
    received_bytes: int
    peer_bytes: int | None


def run(case: Case, schedules: Sequence[str], world: int) -> Iterator[BytesRow]:
    """Yield the rows of one case; gradients are sent in float32."""
    sizes = Sizes(case.batch, case.head_dim, case.head_dim, case.torch_dtype.itemsize)
    for schedule in schedules:
        held = default_layout(schedule)(case.tokens, world).ranges
        problem = Problem(held, held, case.rule, case.heads, case.kv_heads, lse=False)
        forward, backward = (
            [sum(build(schedule, problem, rank, direction).received(sizes).values()) for rank in range(world)]
            for direction in ("forward", "backward")
        )
        both = [a + b for a, b in zip(forward, backward, strict=True)]
        for direction, received in zip(PASSES, (forward, both), strict=True):
            peers = peer_bytes(schedule, case, world, direction)
            yield BytesRow(schedule, direction, world, case, mean(received), max(received), peers)


def markdown(rows: Rows) -> str:
    """Return a line for each schedule and shape, for a document."""
    merged = [
        {**forward, "both": both, "forward": forward} for forward, both in zip(rows[::2], rows[1::2], strict=True)
    ]

    def received(key: str, header: str) -> tuple[Column, Column, Column]:
        return (
            Column(f"{header} (MB)", lambda row: f"{row[key]['received_mean'] / 1e6:.1f}"),
            Column("peers'", lambda row: f"{row[key]['peer_bytes'] / 1e6:.1f}" if row[key]["peer_bytes"] else "-"),
            Column("ratio", lambda row: _ratio(row[key])),
        )

    columns = (
        Column("heads", lambda row: f"{row['heads']}/{row['kv_heads']}"),
        Column("mask", "mask"),
        Column("schedule", lambda row: f"`{row['schedule']}`"),
        *received("forward", "forward"),
        *received("both", "with backward"),
    )
    return write_markdown(columns, merged)


def _ratio(row: Row) -> str:
    return f"{row['received_mean'] / row['peer_bytes']:.2f}" if row["peer_bytes"] else "-"


BENCHMARK = Benchmark(
    name="bytes",
    keys=frozenset({"received_mean", "peer_bytes"}),
    tables=lambda rows: [markdown(rows)],
    markdown=markdown,
    title=lambda rows: f"bytes received over {rows[0]['world']} ranks",
)
