"""`meshflash checksum`: a small job over ranks whose answer is known, under any launcher."""

from __future__ import annotations

from typing import Annotated

import typer

from meshflash.cli.ranks import Nproc, rerun


def command(
    batch: Annotated[int, typer.Option(min=1, help="Rows, split over ranks.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Sequence length.")] = 256,
    dim: Annotated[int, typer.Option(min=1, max=256, help="Head dim.")] = 64,
    nproc: Nproc = 1,
) -> None:
    """Attention for a batch split over ranks: checksums and kernel times of each rank, and of all.

    Start it by torchrun, mpiexec or srun; --nproc starts ranks on this machine.
    """
    rerun(nproc)
    from meshflash.check import checksum as job
    from meshflash.job import init

    with init() as world:
        parts = job.run(world, batch, tokens, dim)
        if parts is not None:
            typer.echo(job.report(parts, world, batch, tokens, dim))
