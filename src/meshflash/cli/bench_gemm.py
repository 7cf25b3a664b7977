"""`meshflash bench gemm`: GEMMs on a single device, each mode beside torch.mm, and the table that mode="auto" reads.

GEMMs fused with collectives are timed by `python -m benchmarks fused` in a checkout.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from meshflash.cli.bench_options import Device, GemmDtypes, Output, Plot, Shapes, explained
from meshflash.cli.outputs import writable


def gemm(
    shape: Shapes = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="stream_k, data_parallel, split_k, torch or auto; repeat. All on a GPU, torch on a CPU."),
    ] = None,
    dtype: GemmDtypes = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(help="nn, nt, tn or tt: a t for each operand that is a transpose in memory; repeat. nn."),
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Time the configurations of our kernel in each mode, and show the best.")
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="The same in layouts nn, nt and tn; write the table that mode=auto reads."),
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that time every mode once each.")] = 9,
    device: Device = None,
    output: Output = None,
    plot: Plot = None,
) -> None:
    """GEMMs on a single device: time, TFLOP/s and speed over torch.mm, each mode checked against float64.

    All modes of a GEMM are interleaved in a process of its own; a wrong result is an error, not a time. On a CPU our
    kernel is interpreted if TRITON_INTERPRET=1 is set: it is checked, and not timed.
    """
    import torch
    from rich.console import Console

    from meshflash.bench import gemm as bench
    from meshflash.bench import record
    from meshflash.bench.cases import on_cpu, pick_device, pick_dtype
    from meshflash.bench.report import picture
    from meshflash.gemm import rates
    from meshflash.kernels.rates import identity

    console = Console()
    most = 8 if tune or calibrate else None
    table_file: Path | None = None
    with explained(), console.status("starting") as status:
        device = pick_device(device)
        dtypes = dtype or [pick_dtype(None, device)]
        shapes = [bench.parse_shape(text) for text in shape or []] or list(bench.default_shapes(device, calibrate))
        found = record.Recorder(writable(output, plot))
        if calibrate and not on_cpu(device):
            writable(rates.file_of(identity(torch.device(device))[0]))
        if calibrate:
            layouts = layout or list(bench.LAYOUTS)
            table, rows = bench.calibrate(device, shapes, dtypes, layouts, rounds, status.update)
            table_file = rates.add(table.rates, torch.device(device), table.measured_with)
            found.add(rows)
        else:
            for (m, n, k), name, order in product(shapes, dtypes, layout or ["nn"]):
                case = bench.Case(m, n, k, name, order, device)
                say = lambda text, case=case: status.update(f"{case.m}x{case.n}x{case.k}: {text}")  # noqa: E731
                modes = tuple(mode or bench.default_modes(device))
                measure = bench.measure if on_cpu(device) else bench.measure_in_process
                found.add(bench.time_configs(case, rounds, say) if tune else measure(case, modes, rounds, say))
    console.print(*bench.tables(found.rows, most), sep="\n")
    for line in [] if most else bench.summary(found.rows):
        console.print(line, soft_wrap=True)
    if on_cpu(device):
        console.print("on a CPU only torch is timed: our kernel is interpreted there", soft_wrap=True)
    for written in filter(None, (found.path, table_file)):
        console.print(f"written: {written}", soft_wrap=True)
    if plot is not None:
        picture(console, bench.plot, found.rows, f"GEMMs on {device}", plot)
