"""How the host's own time for a call is shown; `meshflash.bench.host`, which calibration needs too, measures it."""

from __future__ import annotations

from benchmarks.protocol import Benchmark, in_markdown
from meshflash.bench.candidates import SDPA
from meshflash.bench.columns import Column, optional, terminal
from meshflash.bench.tables import KERNEL, PASS, ratio_header, title

COLUMNS = (
    PASS,
    KERNEL,
    Column("us per call", lambda row: f"{row['microseconds']:.1f}"),
    Column("min", lambda row: f"{row['min_microseconds']:.1f}"),
    Column(ratio_header(SDPA), optional("ratio", "{:.2f}")),
)
BENCHMARK = Benchmark(
    name="host",
    keys=frozenset({"microseconds", "min_microseconds"}),
    tables=lambda rows: [terminal(f"{title(rows[0])} on {rows[0]['device']}", COLUMNS, rows, "pass")],
    markdown=in_markdown(COLUMNS),
    title=lambda rows: title(rows[0]),
)
