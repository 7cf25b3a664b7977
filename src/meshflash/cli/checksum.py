"""`meshflash checksum`: a small job with a known answer, over the ranks of any launcher."""

from __future__ import annotations

from typing import Annotated

import typer

from meshflash.cli.ranks import Nproc, rerun


def command(
    batch: Annotated[int, typer.Option(min=1, help="Batch rows, split over ranks.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Sequence length.")] = 256,
    dim: Annotated[int, typer.Option(min=1, max=256, help="Head dim.")] = 64,
    nproc: Nproc = 1,
) -> None:
    """Run attention on a batch split over ranks, and compare the sum of the outputs with the expected one.

    Prints PASS, or FAIL with the wrong ranks, and exits with 1 on FAIL. Start it by torchrun, mpiexec or srun, or with
    --nproc on this machine.
    """
    rerun(nproc)
    from meshflash.check import checksum as job
    from meshflash.job import init

    with init() as world:
        parts = job.run(world, batch, tokens, dim)
        if parts is not None:
            typer.echo(job.report(parts, world, batch, tokens, dim))
            if not all(part.is_right for part in parts):
                raise typer.Exit(1)
