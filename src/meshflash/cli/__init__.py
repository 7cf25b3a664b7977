"""The command line: one small file per command, each with a function that `app` names below.

Nothing here imports torch before a command runs, so help answers at once.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from meshflash import __version__
from meshflash.cli import (
    bench,
    calibrate,
    check,
    checksum,
    data,
    demo,
    doctor,
    draw,
    gemm,
    generate,
    launch,
    predict,
    trace,
    train,
)
from meshflash.core.files import OutputError
from meshflash.runtime.launchers import LaunchError


class Commands(TyperGroup):
    """All of them: what keeps a rank out of its job, or a file from being written, is one line, whichever runs."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (LaunchError, OutputError) as error:
            typer.echo(f"meshflash: {error}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    name="meshflash",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("calibrate")(calibrate.command)
app.command("check")(check.command)
app.command("checksum")(checksum.command)
app.command("data")(data.command)
app.command("demo")(demo.command)
app.command("doctor")(doctor.command)
app.command("draw")(draw.command)
app.command("gemm", context_settings={"help_option_names": ["-h", "--help"]})(gemm.command)
app.command("launch", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
    launch.command
)
app.command("generate")(generate.command)
app.command("predict")(predict.command)
app.command("trace")(trace.command)
app.command("train")(train.command)
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"meshflash {__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end."),
    ] = False,
) -> None:
    """Exact attention over sequences that no single device can hold."""
