"""`meshflash check`: compare every schedule on this machine with float64 attention."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshflash.cli.bench_options import explained
from meshflash.cli.outputs import writable


def command(
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", "-n", min=1, max=16, help="Ranks, one process each: 4, and 2, 3 and 4 for --fuzz."),
    ] = None,
    schedule: Annotated[
        list[str], typer.Option(help="A schedule, with its options; repeat for several. Default: all.")
    ] = [],  # noqa: B006
    quick: Annotated[bool, typer.Option("--quick", help="Default layouts, some masks, one feature a case.")] = False,
    fuzz: Annotated[int, typer.Option(min=0, help="Run this many random cases instead; resumes from --output.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random cases.")] = 0,
    case: Annotated[str, typer.Option(help="Repeat these cases of --fuzz, such as 12 or 3-7.")] = "",
    threads: Annotated[
        bool | None, typer.Option("--threads/--no-threads", help="Whether random cases use threads.")
    ] = None,
    limit: Annotated[float, typer.Option(min=1.0, help="Seconds after which a random case fails.")] = 60.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Restart a --fuzz campaign from its beginning.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda; ranks share GPUs if there are fewer GPUs.")] = "cpu",
    transport: Annotated[str, typer.Option(help="A transport, as in attention().")] = "auto",
    output: Annotated[
        Path | None, typer.Option(help="JSON report to write; with --fuzz, fuzz-seedS.json by default.")
    ] = None,
) -> None:
    """Check every schedule, layout, mask family and feature over ranks: forward and gradients against float64.

    Errors must be within FlashAttention's tolerance rule, and bytes must match the verifier's count. Exits with 1 if
    any check fails. Under torchrun, mpiexec or srun the ranks are those of the job.
    """
    from rich.console import Console

    from meshflash.bench import record, tables
    from meshflash.bench.cases import pick_device
    from meshflash.check import run, suite
    from meshflash.check.campaign import numbers_of
    from meshflash.cli import check_fuzz
    from meshflash.comm.transports.choice import check as check_transport
    from meshflash.job import init, shutdown
    from meshflash.runtime.launchers import detect
    from meshflash.schedules.registry import parse, schedule_variants

    with explained():
        pick_device(device)
        check_transport(transport)
        for name in schedule:
            parse(name)
        cases = numbers_of(case)
    if output:
        writable(output)
    here = init() if detect().world_size > 1 else None
    console = Console(quiet=bool(here and here.rank))
    if fuzz or cases:
        ranks = here.world_size if here else nproc
        settings = check_fuzz.settings_of(seed, ranks, schedule, device, transport, threads)
        if cases:
            if here:
                raise typer.BadParameter(
                    "start it without a launcher; -n gives the number of ranks", param_hint="--case"
                )
            check_fuzz.repeat(console, settings, cases, limit)
        else:
            check_fuzz.fuzz(console, settings, fuzz, output, fresh, limit, here)
        if here:
            shutdown()
        return
    world = here.world_size if here else nproc or 4
    chosen = tuple(schedule) or schedule_variants(world)
    checks = suite.everything(chosen, world, quick, device, transport)
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
