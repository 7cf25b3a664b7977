"""Options that commands of benchmarks share, and how mistakes in their values are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

MASKS = "full, causal, window-N, documents-N or documents-lognormal-N"
DTYPES = "float32, bfloat16, float16 or float64"

Kernels = Annotated[list[str], typer.Option(help='A kernel, "auto", "torch sdpa", "flex" or "standard"; repeat.')]
OneMask = Annotated[str, typer.Option(help=f"{MASKS}.")]
Batch = Annotated[int, typer.Option(min=1, help="Batch size.")]
Heads = Annotated[int, typer.Option(min=1, help="Query heads.")]
KvHeads = Annotated[int | None, typer.Option(min=1, help="KV heads; as many as query heads by default.")]
Dim = Annotated[int, typer.Option(min=1, help="Head dim.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="Our kernels' deterministic mode.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds that time every candidate once each; the median counts.")]
Output = Annotated[Path | None, typer.Option(help="JSON file to write the record to; by default none is written.")]
Plot = Annotated[Path | None, typer.Option(help="Plot to write; its suffix is the format.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option(help="MxNxK; repeat for several. By default large ones on a GPU, small ones on a CPU."),
]
GemmDtypes = Annotated[
    list[str] | None,
    typer.Option(help="bfloat16, float16, float32 or tf32; repeat. bfloat16 on GPUs, float32 on CPUs."),
]


@contextmanager
def explained() -> Iterator[None]:
    """Turn a ValueError, a mistake of the user, into a message without a traceback."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
