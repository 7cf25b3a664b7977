"""`meshflash draw`: verify a schedule's programs and draw them, as text and as SVG. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshflash.cli.bench_options import explained
from meshflash.cli.outputs import writable


def command(
    schedule: Annotated[str, typer.Argument(help='A schedule, with options as in "allgather(head_stride=1)".')],
    tokens: Annotated[int, typer.Option(min=1, max=1024, help="Sequence length.")] = 256,
    nproc: Annotated[int, typer.Option("--nproc", "-n", min=1, max=16, help="Ranks.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 2,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key heads; default: the number of query heads.")] = None,
    mask: Annotated[str, typer.Option(help="full, causal, window-N or documents-N.")] = "causal",
    backward: Annotated[bool, typer.Option(help="Draw the backward pass instead of the forward.")] = False,
    steps: Annotated[bool, typer.Option(help="Also print the steps of every rank.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Also write the pictures to this SVG file.")] = None,
) -> None:
    """Verify a schedule's programs, then draw which rank attends to which keys in which step, and when bytes move."""
    from meshflash.bench.masks import parse_mask
    from meshflash.bench.pictures import draw, prove
    from meshflash.core.files import write_whole

    if svg is not None:
        writable(svg)
    with explained():
        rule = parse_mask(mask, tokens)
        proved = prove(schedule, tokens, nproc, heads, kv_heads or heads, rule, "backward" if backward else "forward")
    drawn = draw(proved, f"{schedule}: {tokens:,} tokens over {nproc} ranks, {mask}")
    if steps:
        for program in proved.programs:
            typer.echo(program.text() + "\n")
    typer.echo(f"{drawn.coverage}\n\n{drawn.timeline}")
    received = ", ".join(f"{n:,}" for n in proved.report.received_bytes)
    typer.echo(f"\nproved right; bytes received, with a head dim of {proved.sizes.dim} in bfloat16: {received}")
    if svg is not None:
        write_whole(svg, drawn.svg)
        typer.echo(f"written: {svg}")
