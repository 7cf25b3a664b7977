"""`meshflash bench gemm --fused`: products of several ranks, fused against unfused, over growing K."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshflash.cli.bench_options import explained
from meshflash.cli.gemm import interpret
from meshflash.cli.outputs import writable

#: Options of `bench gemm` that have no meaning here.
DECIDED = ("mode", "layout")
#: Options of `bench gemm` that are only for this.
OWN = ("collective", "world", "heap", "mps")


def fused(
    shape: list[str] | None,
    dtype: list[str] | None,
    collective: list[str] | None,
    world: int | None,
    heap: str,
    mps: bool,
    rounds: int,
    device: str | None,
    output: Path | None,
    plot: Path | None,
    tune: bool,
    calibrate: bool,
) -> None:
    """Measure all cells, write them after each, and print tables and losses; with `calibrate`, write rates too."""
    from rich.console import Console

    from meshflash.bench.cases import on_cpu, pick_device, pick_dtype

    with explained():
        device = pick_device(device)
    if on_cpu(device):
        interpret()
    from meshflash.bench import fused_cases, fused_sweep, fused_tables, fused_tune, record
    from meshflash.bench.fused import LOCAL
    from meshflash.bench.gemm import parse
    from meshflash.bench.report import picture

    console = Console()
    tune = tune or calibrate
    found = record.Recorder(writable(output, plot))
    left_out: list[str] = []
    table_file: Path | None = None
    with explained(), console.status("starting") as status:
        fused_cases.check_heap(heap, device)
        if calibrate and on_cpu(device):
            raise ValueError("--calibrate: on a CPU kernels are interpreted, and have no rates; --tune shows an order")
        setup = fused_cases.Setup(rounds=rounds, local=heap == LOCAL, mps=mps)
        shapes = [parse(text) for text in shape or []]
        ranks = world or (2 if on_cpu(device) else 4)
        kinds = dtype or [pick_dtype(None, device)]

        def hear(told: Any) -> None:
            nonlocal table_file
            if isinstance(told, str):
                status.update(told)
                left_out.extend([told] * (fused_tune.FAILED in told))
                return
            if isinstance(told, Path):
                table_file = told
                return
            found.add(told)

        cases = [x for kind in kinds for x in fused_sweep.cases(device, ranks, kind, shapes, collective or [])]
        fused_sweep.run(cases, setup, hear, tune, calibrate)
    rows = found.rows
    console.print(*fused_tables.sweep(rows), sep="\n")
    for line in [*(fused_tables.configurations(rows) if tune else []), *left_out]:
        console.print(line, soft_wrap=True)
    for line in [] if on_cpu(device) else fused_tables.verdict(rows):
        console.print(line, soft_wrap=True)
    note = (
        fused_tables.INTERPRETED if on_cpu(device) else "memory of peers is that of the same card where they share it"
    )
    console.print(note, soft_wrap=True)
    for written in filter(None, (found.path, table_file)):
        console.print(f"written: {written}", soft_wrap=True)
    if plot is not None:
        picture(console, fused_sweep.plot, rows, f"fused products on {device}, {ranks} ranks", plot)
