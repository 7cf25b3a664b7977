"""`meshflash demo`: attention with every kernel that runs here, in under a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    tokens: Annotated[int, typer.Option(min=1, max=4096, help="Sequence length.")] = 1024,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
    folder: Annotated[Path, typer.Option(help="Where the plot and the figures go.")] = Path("meshflash-demo"),
) -> None:
    """Run attention with every kernel and three masks: error against float64, time, peak memory; tables and a plot."""
    from rich.console import Console
    from rich.progress import track

    from meshflash.bench import kernels as bench
    from meshflash.bench.report import report
    from meshflash.kernels import registry

    console = Console()
    try:
        device = bench.pick_device(device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    cells = [
        bench.Cell(tokens=tokens, heads=8, kv_heads=2, mask=mask, device=device)
        for mask in ("causal", f"window-{max(1, tokens // 8)}", f"documents-{min(4, tokens)}")
    ]
    console.print(
        f"One sequence of {tokens:,} tokens, 8 query heads on 2 key heads, on {device}: "
        "every kernel that runs here, checked against float64 before it is timed."
    )
    rows = []
    for cell in track(cells, "measuring", console=console, transient=True):
        able = tuple(kernel.name for kernel in registry.kernels() if bench.able(kernel, cell))
        rows += [row.flat() for row in bench.run(cell, ("auto", *able, bench.SDPA), rounds=3)]
    title = f"meshflash demo: {tokens:,} tokens on {device}"
    report(console, rows, folder / "kernels.json", folder / "kernels.png", title)
