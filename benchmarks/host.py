"""How the host's own time for a call is shown; `meshflash.bench.host`, which calibration needs too, measures it."""

from __future__ import annotations

from benchmarks.protocol import one_table
from meshflash.bench.candidates import SDPA
from meshflash.bench.columns import Column, optional
from meshflash.bench.tables import KERNEL, PASS, ratio_header, title_on_device

COLUMNS = (
    PASS,
    KERNEL,
    Column("us per call", lambda row: f"{row['microseconds']:.1f}"),
    Column("min", lambda row: f"{row['min_microseconds']:.1f}"),
    Column(ratio_header(SDPA), optional("ratio", "{:.2f}")),
)
BENCHMARK = one_table("host", {"microseconds", "min_microseconds"}, COLUMNS, title_on_device, section="pass")
