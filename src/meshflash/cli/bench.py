"""`meshflash bench`: benchmarks that print the peers beside us and write what they measured."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Measure, with the peers beside us.")


@app.command()
def kernels(
    tokens: Annotated[list[int], typer.Option(min=1, help="Sequence length; repeat for several.")] = [2048],  # noqa: B006 - typer copies it
    mask: Annotated[list[str], typer.Option(help="full, causal, window-N or documents-N; repeat for several.")] = [  # noqa: B006
        "causal",
        "full",
    ],
    dim: Annotated[list[int], typer.Option(min=1, help="Head dim; repeat for several.")] = [64],  # noqa: B006
    dtype: Annotated[list[str], typer.Option(help="float32, bfloat16, float16 or float64; repeat for several.")] = [  # noqa: B006
        "float32"
    ],
    kernel: Annotated[list[str], typer.Option(help='A kernel, "auto" or "torch sdpa"; repeat for several.')] = [  # noqa: B006
        "auto",
        "tiled",
        "torch sdpa",
    ],
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key heads; as many as query heads by default.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which every kernel takes its turn.")] = 9,
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Picture to write.")] = None,
) -> None:
    """Attention kernels, forward and backward: time, error against float64 and peak memory.

    All kernels of a cell run in turns in one process; one that is wrong is an error, not a time.
    """
    from rich.console import Console
    from rich.progress import track

    from meshflash.bench import kernels as bench
    from meshflash.bench import plots, tables
    from meshflash.bench.report import report

    console = Console()
    rows = []
    try:
        device = bench.pick_device(device)
        cells = [
            bench.Cell(t, batch, heads, kv_heads or heads, d, m, dt, device)
            for dt, m, d, t in product(dtype, mask, dim, tokens)
        ]
        for cell in track(cells, "measuring", console=console, transient=True):
            rows += [row.flat() for row in bench.run(cell, tuple(kernel), rounds)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    path = output or Path("benchmarks/results") / f"kernels-{device}.json"
    title = f"attention kernels on {device}"
    report(console, tables.kernels(rows, beside=bench.SDPA), rows, path, plot, plots.kernels, title)


@app.command()
def tiles(
    tokens: Annotated[int, typer.Option(min=1, help="Sequence length.")] = 131072,
    documents: Annotated[int, typer.Option(min=1, help="Documents packed into it.")] = 256,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks that share it.")] = 64,
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("benchmarks/results/tiles.json"),
) -> None:
    """Worklists: how long one rank's table takes to build, against one rank's keys and against all of them."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from meshflash.bench import record
    from meshflash.bench import tiles as bench

    try:
        rows = [asdict(row) for row in bench.run(tokens, documents, ranks)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    title = f"{documents} documents, {ranks} ranks, {tokens:,} tokens"
    table = Table("layout", title=title, title_justify="left", title_style="bold")
    for name in ("one rank's keys, ms", "spans", "all keys, ms", "spans"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = (f"{row['step_ms']:.2f}", f"{row['step_spans']:,}", f"{row['all_ms']:.2f}", f"{row['all_spans']:,}")
        table.add_row(row["layout"], *numbers)
    Console().print(table)
    record.write(output, rows, record.command_line())
    typer.echo(f"written: {output}")


@app.command()
def attention(
    schedule: Annotated[
        list[str],
        typer.Option(help='A schedule, with options as in "allgather(head_stride=2)", or "torch all-gather"; repeat.'),
    ] = ["zigzag", "ring", "striped", "allgather", "torch all-gather"],  # noqa: B006
    world: Annotated[int, typer.Option("--world", "-n", min=1, help="Ranks, each a process of this machine.")] = 2,
    tokens: Annotated[int, typer.Option(min=1, help="Sequence length, over all ranks.")] = 8192,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key heads; as many as query heads by default.")] = None,
    dim: Annotated[int, typer.Option(min=1, help="Head dim.")] = 64,
    mask: Annotated[str, typer.Option(help="full, causal, window-N or documents-N.")] = "causal",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="Threads of each rank, and of the one rank beside them.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which every schedule takes its turn.")] = 7,
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("benchmarks/results/attention-cpu.json"),
    plot: Annotated[Path | None, typer.Option(help="Picture to write.")] = None,
) -> None:
    """Attention over ranks: each schedule's time beside one rank on the same total work, bytes and memory.

    Every schedule is checked against one rank before it is timed; one that is wrong is an error, not a time.
    """
    from rich.console import Console

    from meshflash.bench import attention as bench
    from meshflash.bench import plots, tables
    from meshflash.bench.report import report

    console = Console()
    shape = bench.Shape(tokens, batch, heads, kv_heads or heads, dim, mask, dtype)
    try:
        with console.status("starting") as status:
            listen = lambda text: status.update(str(text))  # noqa: E731
            rows = [row.flat() for row in bench.run(shape, tuple(schedule), world, rounds, threads, listen)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    title = f"{mask}, {tokens:,} tokens over {world} ranks of {threads} threads"
    report(console, tables.schedules(rows, bench.ONE), rows, output, plot, plots.schedules, title)


@app.command()
def engine(
    schedule: Annotated[list[str], typer.Option(help="A schedule; repeat for several.")] = [  # noqa: B006
        "ring",
        "zigzag",
        "striped",
        "allgather",
    ],
    world: Annotated[int, typer.Option("--world", "-n", min=2, help="Ranks, of which rank 0 is played.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 21,
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("benchmarks/results/engine.json"),
) -> None:
    """The engine's own time for each step of a program: kernels and transport do nothing."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from meshflash.bench import engine as bench
    from meshflash.bench import record

    try:
        rows = [asdict(row) for row in bench.run(tuple(schedule), world, rounds)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    title = f"the engine's own time, {world} ranks"
    table = Table("schedule", "pass", title=title, title_justify="left", title_style="bold")
    for name in ("steps", "us a step"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row["schedule"], row["direction"], str(row["steps"]), f"{row['microseconds']:.1f}")
    Console().print(table)
    record.write(output, rows, record.command_line())
    typer.echo(f"written: {output}")
