"""`meshflash bench`: time attention, kernels and GEMMs on this machine, beside peers.

Benchmarks that only feed the documentation are outside of the package: `python -m benchmarks NAME` in a checkout.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from meshflash.cli import bench_gemm
from meshflash.cli.bench_options import (
    DTYPES,
    MASKS,
    Batch,
    Deterministic,
    Device,
    Dim,
    Heads,
    Kernels,
    KvHeads,
    OneMask,
    Output,
    Plot,
    Rounds,
    explained,
)
from meshflash.cli.outputs import writable, writable_folder

app = typer.Typer(no_args_is_help=True, help="Time attention, kernels and GEMMs, beside peers.")


@app.command()
def kernels(
    tokens: Annotated[list[int], typer.Option(min=1, help="Sequence length; repeat for several.")] = [2048],  # noqa: B006 - typer copies it
    mask: Annotated[list[str], typer.Option(help=f"{MASKS}; repeat for several.")] = ["causal", "full"],  # noqa: B006
    dim: Annotated[list[int], typer.Option(min=1, help="Head dim; repeat for several.")] = [64],  # noqa: B006
    dtype: Annotated[list[str], typer.Option(help=f"{DTYPES}; repeat for several.")] = ["float32"],  # noqa: B006
    kernel: Kernels = ["auto", "tiled", "torch sdpa"],  # noqa: B006
    batch: Batch = 1,
    heads: Heads = 8,
    kv_heads: KvHeads = None,
    device: Device = None,
    deterministic: Deterministic = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Check against float64 above 4,096 tokens too, however long it takes.")
    ] = False,
    rounds: Rounds = 9,
    output: Output = None,
    plot: Plot = None,
) -> None:
    """Attention kernels, forward and backward: time, error and peak memory.

    All kernels of a case are interleaved in one process; a wrong result is an error, not a time.
    """
    from rich.console import Console
    from rich.progress import track

    from meshflash.bench import kernels as bench
    from meshflash.bench import plots, record, tables
    from meshflash.bench.candidates import SDPA
    from meshflash.bench.cases import Case, pick_device
    from meshflash.bench.report import report

    console = Console()
    with explained():
        device = pick_device(device)
        cases = [
            Case(t, batch, heads, kv_heads or heads, d, m, dt, device, deterministic)
            for dt, m, d, t in product(dtype, mask, dim, tokens)
        ]
        found = record.Recorder(writable(output, plot))
        for case in track(cases, "measuring", console=console, transient=True):
            found.add(bench.run(case, tuple(kernel), rounds, exact))
    title = f"attention kernels on {device}"
    report(console, tables.kernels(found.rows, SDPA), found, plot, plots.kernels, title)


@app.command()
def attention(
    schedule: Annotated[
        list[str],
        typer.Option(help='A schedule, with options as in "allgather(head_stride=2)", or "torch all-gather"; repeat.'),
    ] = ["zigzag", "ring", "striped", "allgather", "torch all-gather"],  # noqa: B006
    world: Annotated[int, typer.Option("--nproc", "-n", min=1, help="Ranks, one process of this machine each.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="Sequence length, over all ranks.")] = 8192,
    batch: Batch = 1,
    heads: Heads = 8,
    kv_heads: KvHeads = None,
    dim: Dim = 64,
    mask: OneMask = "causal",
    causal: Annotated[bool | None, typer.Option(help="In place of --mask: causal, or full.")] = None,
    dtype: Annotated[str, typer.Option(help=f"{DTYPES}.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="Threads of each rank, and of the single device.")] = 1,
    rounds: Annotated[
        int, typer.Option("--rounds", "--iters", min=1, help="Rounds that time every schedule once each.")
    ] = 7,
    device: Annotated[str, typer.Option(help="cpu or cuda; ranks share GPUs if there are more of them.")] = "cpu",
    transport: Annotated[
        str, typer.Option(help='As in attention: auto, symmetric, "throttled(auto, 50, 10)".')
    ] = "auto",
    kernel: Annotated[str, typer.Option(help="The kernel of all ranks and of the single device.")] = "auto",
    layout: Annotated[
        str, typer.Option(help='The layout of all schedules: contiguous, zigzag, striped, balanced, or "auto".')
    ] = "auto",
    forward_only: Annotated[bool, typer.Option(help="Time no backward.")] = False,
    mps: Annotated[bool, typer.Option(help="Start CUDA MPS, and give each rank its part of the GPU.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Have ranks write traces there, for `meshflash trace`.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Write a trace by torch's profiler there, of each schedule and rank.")
    ] = None,
    output: Output = None,
    plot: Plot = None,
) -> None:
    """Attention over ranks: time, bytes, exposed communication and memory of each schedule, beside a single device.

    Every schedule is checked against the single device before it is timed; a wrong result is an error, not a time.
    """
    from rich.console import Console

    from meshflash.bench import attention as bench
    from meshflash.bench import plots, record, tables
    from meshflash.bench.cases import Case, pick_device
    from meshflash.bench.report import report
    from meshflash.comm.transports.choice import check as check_transport
    from meshflash.runtime.mps import variables

    console = Console()
    found = record.Recorder(writable(output, plot))
    for folder in filter(None, (trace, profile)):
        writable_folder(folder)
    traced = {"MESHFLASH_TRACE": str(trace)} if trace else {}
    if causal is not None:
        mask = "causal" if causal else "full"
    with explained(), console.status("starting") as status, variables(**traced):
        case = Case(tokens, batch, heads, kv_heads or heads, dim, mask, dtype, pick_device(device))
        check_transport(transport)
        setup = bench.Setup(world, rounds, threads, transport, kernel, forward_only, mps, layout, str(profile or ""))
        listen = status.update if console.is_terminal else lambda text: typer.echo(text, err=True)
        found.add(bench.run(case, tuple(schedule), setup, listen).rows)
    title = f"{mask}, {tokens:,} tokens over {world} ranks on {device}"
    shown = [*tables.schedules(found.rows), *tables.missing_efficiency(found.rows)]
    report(console, shown, found, plot, plots.schedules, title)


app.command()(bench_gemm.gemm)
