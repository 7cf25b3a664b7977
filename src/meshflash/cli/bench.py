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
    report(console, rows, path, plot, f"attention kernels on {device}")


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
