"""`meshflash demo`: attention with every kernel that runs here, in under a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    tokens: Annotated[int, typer.Option(help="Sequence length.")] = 1024,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
    folder: Annotated[Path, typer.Option(help="Where the plot and the figures go.")] = Path("meshflash-demo"),
) -> None:
    """Run causal attention with every kernel: error against float64, time and peak memory, as table and plot."""
    from rich.console import Console
    from rich.progress import track
    from torch import cuda

    from meshflash.bench import kernels as bench
    from meshflash.bench import plots, record, tables
    from meshflash.kernels import registry

    console = Console()
    device = device or ("cuda" if cuda.is_available() else "cpu")
    cells = [
        bench.Cell(tokens=tokens, heads=8, kv_heads=2, mask=mask, device=device)
        for mask in ("causal", f"window-{max(1, tokens // 8)}", "documents-4")
    ]
    console.print(
        f"One sequence of {tokens:,} tokens, 8 query heads on 2 key heads, on {device}: "
        "every kernel that runs here, checked against float64 before it is timed."
    )
    rows = []
    for cell in track(cells, "measuring", console=console, transient=True):
        able = tuple(kernel.name for kernel in registry.kernels() if bench.able(kernel, cell))
        rows += [row.flat() for row in bench.run(cell, ("auto", *able, bench.SDPA), rounds=3)]
    console.print(*tables.kernels(rows, beside=bench.SDPA), sep="\n")
    figures, picture = folder / "kernels.json", folder / "kernels.png"
    record.write(figures, rows, record.command_line())
    console.print(f"written: {figures}")
    try:
        plots.kernels(rows, f"meshflash demo: {tokens:,} tokens on {device}", picture)
        console.print(f"written: {picture}")
    except RuntimeError as error:
        console.print(f"no picture: {error}")
