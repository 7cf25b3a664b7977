"""`meshflash trace`: draw the timeline of a recorded run, or merge its traces for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshflash.cli.bench_options import explained
from meshflash.cli.outputs import writable


def command(
    folder: Annotated[Path, typer.Argument(help="The folder that MESHFLASH_TRACE named in the run.")],
    call: Annotated[int, typer.Option(help="The call to draw; -1 is the last one.")] = -1,
    svg: Annotated[Path | None, typer.Option(help="Write the timeline to this SVG file.")] = None,
    merged: Annotated[
        Path | None, typer.Option(help="Write the events of all ranks to one JSON file for Perfetto.")
    ] = None,
) -> None:
    """Draw one call of a run that was recorded with MESHFLASH_TRACE=FOLDER: when ranks computed, sent and waited."""
    import json

    from meshflash.core.files import write_whole
    from meshflash.viz import recorded
    from meshflash.viz.draw import timeline_svg, timeline_text

    for path in filter(None, (svg, merged)):
        writable(path)
    with explained():
        events = recorded.read(folder)
    found = recorded.calls(events)
    number = call if call >= 0 else len(found) + call
    if not 0 <= number < len(found):
        raise typer.BadParameter(
            f"call {call}: {len(found)} calls were recorded; give 0 to {len(found) - 1}, or -1 for the last"
        )
    timeline = recorded.timeline(events, *found[number])
    typer.echo(f"call {number} of {len(found)}\n\n{timeline_text(timeline)}")
    if svg is not None:
        write_whole(svg, timeline_svg(timeline))
        typer.echo(f"written: {svg}")
    if merged is not None:
        write_whole(merged, json.dumps({"traceEvents": events}))
        typer.echo(f"written: {merged}")
