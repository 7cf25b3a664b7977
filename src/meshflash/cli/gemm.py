"""`meshflash gemm`: a fused GEMM + collective over several ranks, checked against float64, timed and drawn."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from meshflash.cli.bench_options import Device, explained
from meshflash.cli.outputs import writable


def command(
    world: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            "--num-gpus",
            "-n",
            min=1,
            max=64,
            help="Number of ranks, which may share GPUs; by default the number of GPUs, at least 2.",
        ),
    ] = None,
    collective: Annotated[
        str,
        typer.Option(
            "--collective",
            "-c",
            help="all_scatter (GEMM + all-gather of output columns), all_reduce, ag_gemm (all-gather + GEMM) or "
            "gemm_rs (GEMM + reduce-scatter).",
        ),
    ] = "all_scatter",
    m: Annotated[int | None, typer.Option(min=1, help="Rows of C; by default few on a CPU, many on a GPU.")] = None,
    n_cols: Annotated[int | None, typer.Option(min=1, help="Columns of C.")] = None,
    k: Annotated[int | None, typer.Option(min=1, help="Contracted size, over all ranks together.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16, float32 or tf32; bfloat16 on GPUs, float32 on CPUs.")
    ] = None,
    variant: Annotated[str, typer.Option(help="auto, epilogue, producer_consumer or bulk.")] = "auto",
    shots: Annotated[int | None, typer.Option(min=1, max=2, help="Shots of an all_reduce: 1 or 2.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples; the table shows their median.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random A and B.")] = 0,
    device: Device = None,
    heap: Annotated[
        str | None,
        typer.Option(
            help="local: one process emulates all ranks; symmetric (GPUs) or shared (CPUs): one process each."
        ),
    ] = None,
    mps: Annotated[bool, typer.Option("--mps", help="Let processes share a GPU by NVIDIA's MPS.")] = False,
    reference: Annotated[
        bool, typer.Option("--reference", help="Also time the GEMM followed by the collective of a process group.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--json", help="Write a record to this file.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Draw when tiles were computed, sent and received to this SVG file.")
    ] = None,
) -> None:
    """Run a GEMM fused with a collective over several ranks, and check every rank's result against float64.

    Exits with 1, naming rank and error, if a result is wrong or its bits differ between ranks. Under torchrun, mpiexec
    or srun, the ranks are those of the job.
    """
    from rich.console import Console

    from meshflash.bench.cases import on_cpu, pick_device, pick_dtype
    from meshflash.core.files import write_whole
    from meshflash.job import init, shutdown
    from meshflash.runtime.launchers import detect
    from meshflash.runtime.processes import RankError

    for path in filter(None, (output, timeline)):
        writable(path)
    with explained():
        device = pick_device(device)
    if on_cpu(device):
        interpret()
    from meshflash.bench import fused, fused_cases, record
    from meshflash.viz.tile_timeline import picture

    here = init() if detect().world_size > 1 else None
    console = Console(quiet=bool(here and here.rank))
    with explained(), console.status("starting") as status:
        fused_cases.check_heap(heap, device)
        if here and (heap == fused.LOCAL or mps):
            raise ValueError("--heap local and --mps are for ranks that this command starts, not a launcher")
        usual = fused_cases.default_shape(device)
        sizes = m or usual[0], n_cols or usual[1], k or usual[2]
        ranks = here.world_size if here else world or fused_cases.default_world(device)
        case = fused_cases.Case(collective, *sizes, ranks, pick_dtype(dtype, device), device, shots, seed)
        setup = fused_cases.Setup(variant, rounds, heap == fused.LOCAL, mps, reference, timeline is not None)
        try:
            found = fused.run_here(case, setup, here) if here else fused.run(case, setup, status.update)
        except RankError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from error
    if here:
        shutdown()
    if found is None:
        return
    rows = [record.flat(row) for row in found.rows]
    console.print(fused_cases.table(rows))
    for plan in dict.fromkeys(found.plans.values()):
        own = [str(rank) for rank, other in found.plans.items() if other == plan]
        console.print(f"rank {', '.join(own)}: {plan}", soft_wrap=True)
    if on_cpu(device):
        console.print(fused_cases.INTERPRETED, soft_wrap=True)
    if output is not None:
        record.write(output, rows, record.command_line())
        console.print(f"written: {output}", soft_wrap=True)
    if timeline is not None:
        head = f"{fused_cases.title(rows[0])}, {rows[0]['variant']}: {'x'.join(map(str, sizes))} on {ranks} ranks"
        try:
            drawn = picture(found.times, head, fused_cases.INTERPRETED if on_cpu(device) else "")
        except ValueError as error:  # the bulk variant of ag_gemm records no tiles
            console.print(f"no picture: {error}; try --variant epilogue", soft_wrap=True)
        else:
            write_whole(timeline, drawn)
            console.print(f"written: {timeline}", soft_wrap=True)
    wrong = fused_cases.find_failures(found.rows)
    for line in wrong:
        typer.echo(f"wrong: {line}", err=True)
    if wrong:
        raise typer.Exit(1)


def interpret() -> None:
    """Make Triton interpret kernels, here and in child processes; Triton reads the variable on import."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
