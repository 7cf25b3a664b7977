"""`meshflash bench gemm`: products of matrices, each mode beside torch.mm, and the table that "auto" goes by.

With --fused, products of several ranks: see `bench_fused`.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from meshflash.cli import bench_fused
from meshflash.cli.bench_options import Device, Output, Plot, explained, given
from meshflash.cli.outputs import writable


def gemm(
    context: typer.Context,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="MxNxK; repeat for several. By default large ones on a GPU: six, or nine to calibrate."),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="stream_k, data_parallel, split_k, torch or auto; repeat. All on a GPU, torch on a CPU."),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="bfloat16, float16, float32 or tf32; repeat. bfloat16 on GPUs, float32 on CPUs."),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(help="nn, nt, tn or tt: a t for each operand that is a transpose in memory; repeat. nn."),
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Time the configurations of our kernel in each mode, and show the best.")
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="The same in layouts nn, nt and tn; write the table that auto goes by."),
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which every mode takes its turn.")] = 9,
    device: Device = None,
    output: Output = None,
    plot: Plot = None,
    fused: Annotated[
        bool, typer.Option("--fused", help="Products of several ranks instead, against the same ones unfused.")
    ] = False,
    collective: Annotated[
        list[str] | None,
        typer.Option("--collective", "-c", help="With --fused: all_scatter, all_reduce, ag_gemm or gemm_rs; repeat."),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option("--nproc", "--num-gpus", "-n", min=1, max=64, help="With --fused: ranks; 4, on a CPU 2."),
    ] = None,
    heap: Annotated[
        str, typer.Option(help="With --fused: local, one process plays all ranks; symmetric or shared, one each.")
    ] = "local",
    mps: Annotated[bool, typer.Option("--mps", help="With --fused: processes share the GPU by MPS.")] = False,
) -> None:
    """Products of matrices: time, TFLOP/s, and speed as a multiple of torch.mm's, each mode checked against float64.

    All modes of a product run in turns in a process of its own; one that is wrong is an error, not a time. On a CPU our
    kernel is interpreted, where TRITON_INTERPRET=1 is set: it is checked, and not timed.

    With --fused, C = A B with A or B in parts, over growing K: each variant's time, and the best fused one as a
    multiple of the best unfused one; losses are told. --tune has each variant in the best of its configurations, and
    --calibrate adds these to the table that auto goes by.
    """
    others = given(context, bench_fused.DECIDED if fused else bench_fused.OWN)
    if others:
        words = ", ".join("--nproc" if name == "world" else f"--{name}" for name in others)
        raise typer.BadParameter(f"{words}: not {'with' if fused else 'without'} --fused")
    if fused:
        cells = (shape, dtype, collective, world, heap, mps)
        bench_fused.fused(*cells, rounds, device, output, plot, tune, calibrate)
        return
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
        kinds = dtype or [pick_dtype(None, device)]
        shapes = [bench.parse(text) for text in shape or []] or list(bench.default_shapes(device, calibrate))
        record_of = record.Recorder(writable(output, plot))
        if calibrate and not on_cpu(device):
            writable(rates.file_of(identity(torch.device(device))[0]))
        if calibrate:
            layouts = layout or list(bench.LAYOUTS)
            found, measured = bench.calibrate(device, shapes, kinds, layouts, rounds, status.update)
            table_file = rates.add(found.rates, torch.device(device), found.measured_with)
            record_of.add(measured)
        else:
            for (m, n, k), kind, lies in product(shapes, kinds, layout or ["nn"]):
                case = bench.Case(m, n, k, kind, lies, device)
                say = lambda text, case=case: status.update(f"{case.m}x{case.n}x{case.k}: {text}")  # noqa: E731
                modes = tuple(mode or bench.default_modes(device))
                measure = bench.measure if on_cpu(device) else bench.measure_apart
                own = bench.trials(case, rounds, say) if tune else measure(case, modes, rounds, say)
                record_of.add(own)
    rows = record_of.rows
    console.print(*bench.table(rows, most), sep="\n")
    for line in [] if most else bench.verdict(rows):
        console.print(line, soft_wrap=True)
    if on_cpu(device):
        console.print("on a CPU only torch is timed: our kernel is interpreted there", soft_wrap=True)
    for written in filter(None, (record_of.path, table_file)):
        console.print(f"written: {written}", soft_wrap=True)
    if plot is not None:
        picture(console, bench.plot, rows, f"products on {device}", plot)
