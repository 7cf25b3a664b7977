"""The command that times a kernel in the variants that schedules call, beside a plain call of as many FLOPs."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.options import Update, recorder
from meshflash.cli.bench_options import (
    MASKS,
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


def variants(
    kernel: Annotated[str | None, typer.Option(help="A kernel; triton on a GPU, tiled on a CPU by default.")] = None,
    tokens: Tokens = None,
    long_tokens: Annotated[
        int | None, typer.Option(min=1, help="Sequence length for masks; by default what suits the device.")
    ] = None,
    dim: Annotated[
        list[int] | None, typer.Option(min=1, help="Head dim; repeat. 64 and 128, on a CPU 16 and 32 by default.")
    ] = None,
    mask: Annotated[
        list[str] | None, typer.Option(help=f"Of the variants: {MASKS}; repeat. causal and full by default.")
    ] = None,
    dtype: OneDtype = None,
    device: Device = None,
    rounds: Rounds = 9,
    output: Output = None,
    update: Update = False,
    plot: Plot = None,
    markdown: Markdown = False,
    source: Source = None,
) -> None:
    """A kernel as schedules call it beside the plain call, and masks beside causal.

    plain writes the final dtype. step, as in a ring, carries results and
    adds to gradients in float32. deterministic is the backward with the same
    bits each time. gqa has 4 query heads for each key head. Masks are causal,
    a window and 32 packed documents, at a long length; rates are of visible
    pairs. All take turns in one process; a variant that is wrong is an error,
    not a time.
    """
    from rich.console import Console

    from benchmarks import variants as bench
    from benchmarks import variants_table
    from meshflash.bench.cases import pick_device

    console = Console()
    view = View(
        variants_table.read, variants_table.table, variants_table.markdown, variants_table.draw, variants_table.title
    )
    if source is not None:
        with explained():
            written, path = view.read(source), None
    else:
        with explained(), console.status("starting") as status:
            device = pick_device(device)
            settings = bench.settings(device, tokens, long_tokens, dim, mask, dtype)
            found = recorder(f"variants-{device}", output, update, plot)
            for n, setting in enumerate(settings):
                say = lambda text, n=n: status.update(f"{n + 1} of {len(settings)}: {text}")  # noqa: E731
                name = kernel or bench.default_kernel(device)
                found.add(bench.run(setting, name, rounds, say))
        written, path = found.made(), found.path
    show(console, written, view, path=path, markdown=markdown, plot=plot)
