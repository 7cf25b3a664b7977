"""`meshflash calibrate`: measure this machine's kernels once, for the choice of "auto"."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshflash.cli.outputs import writable


def command(
    tune: Annotated[
        bool, typer.Option(help="First try configurations of the Triton kernel; takes minutes of compiling.")
    ] = False,
    dim: Annotated[list[int] | None, typer.Option(min=8, max=256, help="Head dim; repeat. 64 and 128.")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=16, help="Length; repeat for several. 512, 2,048, 8,192 and 32,768.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which every kernel takes its turn.")] = 5,
    device: Annotated[str | None, typer.Option(help="Which GPU; the first by default.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="File to write; by default where calls on this device look for it.")
    ] = None,
) -> None:
    """Measure every kernel on this GPU and write the rates that kernel="auto" goes by.

    Calls never measure anything themselves. Without a table for a device they take that of its architecture,
    or else a fixed order; MESHFLASH_RATES names the folder of tables, else they lie in the user's cache.
    """
    import torch
    from rich.console import Console

    from meshflash.bench import calibrate, tables
    from meshflash.bench.cases import on_cpu, pick_device
    from meshflash.kernels import rates

    console = Console()
    try:
        device = pick_device(device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if on_cpu(device):
        raise typer.BadParameter(
            f"device {device!r}: on CPUs the order of kernels is fixed; there is nothing to measure"
        )
    path = writable(output or rates.own_file(rates.identity(torch.device(device))[0]))
    dims, lengths = tuple(dim or calibrate.DIMS), tuple(tokens or calibrate.TOKENS)
    try:
        known = rates.known(torch.device(device))
    except ValueError as error:
        console.print(f"{error}; it is replaced", markup=False)
        rates.own_file(rates.identity(torch.device(device))[0]).unlink()
        known = rates.known(torch.device(device))
    with console.status("starting") as status:
        configs = calibrate.tune(device, dims, say=status.update) if tune else known.rates.configs if known else {}
        found = calibrate.run(device, dims, lengths, rounds, configs, say=status.update)
    rates.write(found, path)
    console.print(tables.rates(found))
    typer.echo(f"written: {path}")
