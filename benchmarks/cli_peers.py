"""The command that times our kernels beside FlashAttention and cuDNN in 24 cells; it continues an earlier record."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.options import Update, recorder
from meshflash.cli.bench_options import MASKS, Device, Markdown, Output, Plot, Rounds, Source, View, explained, show


def peers(
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Sequence length; repeat. All by default.")] = None,
    mask: Annotated[list[str] | None, typer.Option(help=f"{MASKS}; repeat. All by default.")] = None,
    dim: Annotated[list[int] | None, typer.Option(min=1, help="Head dim; repeat. All by default.")] = None,
    kernel: Annotated[list[str] | None, typer.Option(help="A kernel; repeat. All peers by default.")] = None,
    device: Device = None,
    rounds: Rounds = 9,
    minutes: Annotated[float, typer.Option(min=0, help="Time for all of it; slow peers are left out first.")] = 10.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew what the record has.")] = False,
    output: Output = None,
    update: Update = False,
    plot: Plot = None,
    markdown: Markdown = False,
    source: Source = None,
) -> None:
    """Our kernels beside their peers in 24 cells: lengths, head dims, masks, forward and backward.

    A peer that fails is named. Cells that the record has already are not measured again.
    """
    from rich.console import Console

    from benchmarks import peers as bench
    from benchmarks import peers_table
    from meshflash.bench import plots, record
    from meshflash.bench.cases import pick_device

    console = Console()
    view = View(bench.read, peers_table.table, peers_table.markdown, plots.peers, peers_table.title)
    if source is not None:
        with explained():
            written, path = view.read(source), None
    else:
        with explained(), console.status("starting") as status:
            budget = bench.Budget(minutes)
            device = pick_device(device)
            cases = bench.settings(device, tokens, dim, mask)
            names = tuple(dict.fromkeys(kernel or bench.default_kernels(device)))
            found = recorder(f"peers-{device}", output, update, plot)
            path = found.path
            before = bench.read(path) if path and path.exists() and not fresh else None
            known = bench.still_true(before) if before else []
            if before and len(known) < len(before["rows"]):
                console.print(f"{path}: rows of other code, versions or machines are dropped")
            if skipped := [case for case in cases if bench.holds(known, case, names, rounds)]:
                console.print(f"skipped: {len(skipped)} of {len(cases)} settings, measured before; --fresh to repeat")
            for rows in bench.run(cases, names, rounds, budget, known, status.update):
                found.rows = rows
                if path and (before is None or rows != before["rows"]):  # else its date and command stay
                    record.write(path, rows, record.command_line())
        written = bench.read(path) if path else found.made()
    show(console, written, view, path=path, markdown=markdown, plot=plot)
