"""`meshflash calibrate`: measure this GPU's kernels once; `kernel="auto"` chooses by the measured rates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshflash.cli.bench_options import explained
from meshflash.cli.outputs import writable

if TYPE_CHECKING:
    import torch


def command(
    tune: Annotated[
        bool, typer.Option(help="Tune the Triton kernel's configurations first; compiling takes minutes.")
    ] = False,
    dim: Annotated[
        list[int] | None, typer.Option(min=8, max=256, help="Head dim; repeat for several. Default: 64 to 256.")
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=16, help="Sequence length; repeat for several. Default: 512, 2,048, 8,192 and 32,768."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that time every kernel once each.")] = 5,
    device: Annotated[str | None, typer.Option(help="The GPU to measure. Default: the first.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="File to write. Default: where calls on this device look for it.")
    ] = None,
) -> None:
    """Measure every kernel on this GPU and write the rates by which kernel="auto" chooses.

    Hopper kernels that were not tested with this version of Triton are checked first, in a process of their own. The
    verdict is remembered for this machine. Calls never measure anything themselves. Without a table for a device they
    use that of its architecture, or else a fixed order. Tables are in the folder MESHFLASH_RATES, or in the
    user's cache.
    """
    import torch
    from rich.console import Console

    from meshflash.bench import calibrate, tables, trial
    from meshflash.bench.cases import on_cpu, pick_device
    from meshflash.kernels import rates

    console = Console()
    with explained():
        device = pick_device(device)
    if on_cpu(device):
        raise typer.BadParameter(
            f"device {device!r}: on CPUs the order of kernels is fixed, so there is nothing to measure; give a GPU"
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
        if trial.is_due(torch.device(device)):
            status.update("trying the Hopper kernels with this version of Triton, which takes minutes")
            _try_kernels(torch.device(device))
        configs = calibrate.tune(device, dims, say=status.update) if tune else known.rates.configs if known else {}
        found = calibrate.run(device, dims, lengths, rounds, configs, say=status.update)
    rates.write(found, path)
    console.print(tables.rates(found))
    typer.echo(f"written: {path}")


def _try_kernels(device: torch.device) -> None:
    """Try the Hopper kernels, and say how it ended."""
    from meshflash.bench import trial
    from meshflash.kernels.hopper.support import verdict_file

    writable(verdict_file(device))
    try:
        verdict = trial.run(device)
    except trial.RefusedError as refused:
        typer.echo(f"kernel hopper stays off: {refused}", err=True)
        return
    outcome = "passed; it is now on" if verdict.right else f"failed; it stays off: {verdict.reason}"
    typer.echo(f"kernel hopper with Triton {verdict.triton} {outcome}")
