"""`meshflash launch`: ranks of a script on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from meshflash.cli.ranks import become


def command(
    script: Annotated[list[str], typer.Argument(help="A script, or -m and a module, with its arguments.")],
    nproc: Annotated[int, typer.Option("--nproc", "-n", min=1, help="Ranks.")] = 1,
) -> None:
    """Start a script as ranks of this machine, by torchrun; each line that a rank writes begins with its number."""
    become(nproc, script, prefixed=True)
