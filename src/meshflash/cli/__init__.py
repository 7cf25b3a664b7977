"""The command line: one file per command, whose function is registered with `app` below.

Nothing here imports torch before a command runs, so help answers at once. Errors and Ctrl-C end a command with one line
and an exit code, without a traceback.
"""

from __future__ import annotations

import os
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
    plan,
    predict,
    rehearse,
    trace,
    train,
)

#: Exit code of a command that Ctrl-C ended: 128 + SIGINT, as shells expect.
INTERRUPTED = 130
#: Errors with a message for the user: wrong values, files, lost ranks, memory. Any other exception is a bug and keeps
#: its traceback.
EXPECTED = (ValueError, OSError, RuntimeError)


class Commands(TyperGroup):
    """The group of all commands. It prints errors as one line; with `MESHFLASH_LOG=debug` they keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):  # these are RuntimeErrors too
            raise
        except KeyboardInterrupt:
            typer.echo("meshflash: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except EXPECTED as error:
            if os.environ.get("MESHFLASH_LOG", "").lower() == "debug":
                raise
            typer.echo(f"meshflash: {without_tracebacks(str(error)) or type(error).__name__}", err=True)
            raise typer.Exit(1) from error


def without_tracebacks(message: str) -> str:
    r"""Return a message without the tracebacks of ranks that it quotes; the line with the error stays.

    >>> without_tracebacks("rank 1 of 2 raised:\nTraceback (most recent call last):\n  File ...\nValueError: no")
    'rank 1 of 2 raised:\nValueError: no'
    """
    if "Traceback (most recent call last):" not in message:
        return message
    lines = message.splitlines()
    return "\n".join(line for line in lines if line.strip() and not line.startswith((" ", "Traceback (most recent")))


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
app.command("plan")(plan.command)
app.command("predict")(predict.command)
app.command("rehearse")(rehearse.command)
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
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Exact attention over sequences sharded across devices."""
