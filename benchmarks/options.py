"""What the commands of `python -m benchmarks` share: where a record goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshflash.bench.record import Recorder
from meshflash.cli.outputs import writable

#: The records that docs/benchmarks.md shows; they are tracked by git.
RESULTS = Path(__file__).parent / "results"
Update = Annotated[bool, typer.Option("--update", help="Replace the tracked record in benchmarks/results.")]


def recorder(name: str, output: Path | None, update: bool, plot: Path | None = None) -> Recorder:
    """Return the recorder of a run; refuse, before anything is measured, paths that cannot be written.

    Args:
        name: The name of the tracked record, without its suffix.
        output: The file that the user named, or None.
        update: Whether the tracked record is written; without it and without `output` no record is.
        plot: The picture that the user named, or None.
    """
    if output is not None and update:
        raise typer.BadParameter("--output and --update name two records; give one of them")
    return Recorder(writable(RESULTS / f"{name}.json" if update else output, plot))
