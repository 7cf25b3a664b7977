"""The command that times fused GEMM + collectives against the same GEMMs unfused, over growing K."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.status import Status

from benchmarks.options import RECORD_AND_PLOT, PlotOptions, with_options
from meshflash.bench.record import Recorder
from meshflash.cli.bench_options import Device, GemmDtypes, Shapes, explained


@with_options
def fused(
    shape: Shapes = None,
    dtype: GemmDtypes = None,
    collective: Annotated[
        list[str] | None,
        typer.Option("--collective", "-c", help="all_scatter, all_reduce, ag_gemm or gemm_rs; repeat. All by default."),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option("--nproc", "--num-gpus", "-n", min=1, max=64, help="Ranks; by default 4, on a CPU 2."),
    ] = None,
    heap: Annotated[
        str, typer.Option(help="local: one process emulates all ranks; symmetric or shared: one process each.")
    ] = "local",
    mps: Annotated[bool, typer.Option("--mps", help="Let processes share the GPU by MPS.")] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="Time each variant in the best of its configurations, and name them.")
    ] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="The same; add the rates to the table that variant=auto reads.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that time every variant once each.")] = 9,
    device: Device = None,
    options: PlotOptions = RECORD_AND_PLOT,
) -> None:
    """Fused GEMM + collectives over growing K: each variant's time, and the best over the best unfused one.

    C = A B with A or B sharded over ranks, as in `meshflash gemm`. Every result is checked against float64 before it is
    timed. Cases in which fusing loses are listed.
    """
    from meshflash.bench.cases import on_cpu, pick_device, pick_dtype
    from meshflash.cli.gemm import interpret

    with explained():
        device = pick_device(device)
    if on_cpu(device):
        interpret()
    from benchmarks import fused as bench
    from benchmarks import fused_tables, fused_tune
    from benchmarks.protocol import show
    from meshflash.bench.fused import LOCAL
    from meshflash.bench.fused_cases import Setup, check_heap
    from meshflash.bench.gemm import parse_shape

    below: list[str] = []

    def measure(status: Status) -> Recorder:
        check_heap(heap, device)
        if calibrate and on_cpu(device):
            raise ValueError("--calibrate: on a CPU kernels are interpreted, and have no rates; --tune shows an order")
        found = options.recorder(f"gemm-fused-{device}")
        shapes = [parse_shape(text) for text in shape or []]
        ranks = world or (2 if on_cpu(device) else 4)
        cases = [
            case
            for name in dtype or [pick_dtype(None, device)]
            for case in bench.cases_of(device, ranks, name, shapes, collective or [])
        ]
        left_out: list[str] = []
        tables: set[Path] = set()

        def hear(told: Any) -> None:
            """Take a progress message, the path of the rate table, or the rows of a case."""
            if isinstance(told, str):
                status.update(told)
                left_out.extend([told] * (fused_tune.FAILED in told))
            elif isinstance(told, Path):
                tables.add(told)
            else:
                found.add(told)

        bench.run(cases, Setup(rounds=rounds, local=heap == LOCAL, mps=mps), hear, tune or calibrate, calibrate)
        below.extend(fused_tables.configurations(found.rows) if tune or calibrate else [])
        below.extend([*left_out, *(f"written: {path}" for path in tables)])
        return found

    show(fused_tables.BENCHMARK, options, measure)
    for line in below:
        typer.echo(line)
