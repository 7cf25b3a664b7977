"""`meshflash bench ways`: a kernel in the ways that schedules call it, beside a plain call of as many FLOPs."""

from __future__ import annotations

from typing import Annotated

import typer

from meshflash.cli.bench_options import (
    MASKS,
    RESULTS,
    Device,
    Markdown,
    OneDtype,
    Output,
    Plot,
    Rounds,
    Source,
    Tokens,
    View,
    explained,
    show,
)
from meshflash.cli.outputs import writable


def ways(
    kernel: Annotated[str | None, typer.Option(help="A kernel; triton on a GPU, tiled on a CPU by default.")] = None,
    tokens: Tokens = None,
    long_tokens: Annotated[
        int | None, typer.Option(min=1, help="Sequence length for masks; by default what suits the device.")
    ] = None,
    dim: Annotated[
        list[int] | None, typer.Option(min=1, help="Head dim; repeat. 64 and 128, on a CPU 16 and 32 by default.")
    ] = None,
    mask: Annotated[
        list[str] | None, typer.Option(help=f"Of the ways to call: {MASKS}; repeat. causal and full by default.")
    ] = None,
    dtype: OneDtype = None,
    device: Device = None,
    rounds: Rounds = 9,
    output: Output = None,
    plot: Plot = None,
    markdown: Markdown = False,
    source: Source = None,
) -> None:
    """A kernel as schedules call it beside the plain call, and masks beside causal.

    plain writes the final dtype. step, as in a ring, carries results and
    adds to gradients in float32. deterministic is the backward with the same
    bits each time. gqa has 4 query heads for each key head. Masks are causal,
    a window and 32 packed documents, at a long length; rates are of visible
    pairs. All take turns in one process; a way that is wrong is an error,
    not a time.
    """
    from rich.console import Console

    from meshflash.bench import record, ways_table
    from meshflash.bench import ways as bench
    from meshflash.bench.cases import pick_device

    console = Console()
    path = source
    if path is None:
        with explained(), console.status("starting") as status:
            device = pick_device(device)
            found = bench.settings(device, tokens, long_tokens, dim, mask, dtype)
            path, rows = writable(output or RESULTS / f"ways-{device}.json", plot), []
            for n, setting in enumerate(found):
                say = lambda text, n=n: status.update(f"{n + 1} of {len(found)}: {text}")  # noqa: E731
                name = kernel or bench.default_kernel(device)
                rows += [record.flat(row) for row in bench.run(setting, name, rounds, say)]
                record.write(path, rows, record.command_line())  # what is done stays if the rest is cut short
    view = View(ways_table.read, ways_table.table, ways_table.markdown, ways_table.draw, ways_table.title)
    show(console, path, view, measured=source is None, markdown=markdown, plot=plot)
