"""`meshflash launch`: run a script as several ranks on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshflash.cli.ranks import become


def command(
    script: Annotated[list[str], typer.Argument(help="A script, or -m and a module, with its arguments.")],
    nproc: Annotated[int, typer.Option("--nproc", "-n", min=1, help="The number of ranks.")] = 1,
) -> None:
    """Run a script as several ranks on this machine, by torchrun; each output line begins with its rank."""
    if script[0] != "-m" and not Path(script[0]).exists():
        raise typer.BadParameter(f"{script[0]}: there is no such file or folder", param_hint="SCRIPT")
    become(nproc, script, prefixed=True)
