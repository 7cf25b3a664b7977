"""`meshflash trace`: what ranks did and when, from the files that a real run left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshflash.cli.outputs import writable


def command(
    folder: Annotated[Path, typer.Argument(help="Where MESHFLASH_TRACE had ranks write.")],
    call: Annotated[int, typer.Option(help="Which call; -1 is the last one.")] = -1,
    svg: Annotated[Path | None, typer.Option(help="Draw its timeline to this file.")] = None,
    merged: Annotated[Path | None, typer.Option(help="Write all ranks' events to one file for Perfetto.")] = None,
) -> None:
    """Draw a call of a run that was recorded with MESHFLASH_TRACE=FOLDER: when ranks attended, moved and waited."""
    import json

    from meshflash.core.files import write_whole
    from meshflash.viz import recorded
    from meshflash.viz.draw import timeline_svg, timeline_text

    for path in filter(None, (svg, merged)):
        writable(path)
    try:
        events = recorded.read(folder)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    found = recorded.calls(events)
    number = call if call >= 0 else len(found) + call
    if not 0 <= number < len(found):
        raise typer.BadParameter(f"call {call}: {len(found)} were recorded")
    timeline = recorded.timeline(events, *found[number])
    typer.echo(f"call {number} of {len(found)}\n\n{timeline_text(timeline)}")
    if svg is not None:
        write_whole(svg, timeline_svg(timeline))
        typer.echo(f"written: {svg}")
    if merged is not None:
        write_whole(merged, json.dumps({"traceEvents": events}))
        typer.echo(f"written: {merged}")
