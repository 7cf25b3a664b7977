"""`meshflash check`: every schedule on this machine, against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshflash.cli.ranks import Nproc, rerun


def command(
    world: Annotated[int, typer.Option("--world", "-n", min=1, max=16, help="Ranks, each a process.")] = 4,
    schedule: Annotated[list[str], typer.Option(help="A schedule, with its options; repeat. All by default.")] = [],  # noqa: B006
    quick: Annotated[bool, typer.Option("--quick", help="Own layouts, some masks, features by turns.")] = False,
    fuzz: Annotated[int, typer.Option(min=0, help="So many cases at random instead.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the cases at random.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda; ranks share GPUs where there are more of them.")] = "cpu",
    transport: Annotated[str, typer.Option(help="As in attention.")] = "auto",
    output: Annotated[Path | None, typer.Option(help="JSON report to write.")] = None,
    nproc: Nproc = 1,
) -> None:
    """Check every schedule, layout, mask family and feature over ranks: forward and gradients against float64.

    Errors are held to FlashAttention's tolerance rule, and bytes to what the verifier counts. Ends with 1 if
    anything is missed. Started by torchrun, mpiexec or srun, the ranks are those of the job.
    """
    rerun(nproc)
    from rich.console import Console

    from meshflash.bench import record, tables
    from meshflash.bench.cases import pick_device
    from meshflash.check import run, suite
    from meshflash.job import init, shutdown
    from meshflash.launch.launchers import detect
    from meshflash.schedules.registry import over_lines, parse
    from meshflash.transport.choice import check as check_transport

    here = init() if detect().world_size > 1 else None
    world = here.world_size if here else world
    console = Console(quiet=bool(here and here.rank))
    chosen = tuple(schedule) or over_lines(world)
    try:
        pick_device(device)
        check_transport(transport)
        for name in chosen:
            parse(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    by = (device, transport)
    checks = (
        list(suite.at_random(chosen, world, fuzz, seed, *by)) if fuzz else suite.everything(chosen, world, quick, *by)
    )
    with console.status(f"{len(checks)} checks over {world} ranks") as status:
        listen = lambda text: status.update(f"check {text} over {world} ranks")  # noqa: E731
        verdicts = run.run_here(checks, here, listen) if here else run.run(checks, world, listen)
    if here:
        shutdown()
        if here.rank:
            return
    rows = [record.flat(verdict) for verdict in verdicts]
    console.print(tables.checks(rows))
    missed = [row for row in rows if row["outcome"] == "missed"]
    for row in missed[:10]:
        where = ", ".join(str(row[key]) for key in ("schedule", "layout", "mask", "features", "tokens", "dtype"))
        console.print(f"missed: {where}: {row['message']}", soft_wrap=True)
    if output:
        record.write(output, rows, record.command_line())
        console.print(f"written: {output}", soft_wrap=True)
    if missed:
        console.print(f"{len(missed)} of {len(rows)} checks missed")
        raise typer.Exit(1)
    console.print(f"{len(rows)} checks, none missed")
