"""The tile timeline of a fused GEMM, as SVG: when each output tile was computed, sent and received on each rank.

Each rank has a band: time runs to the right, tiles run down in order, and each event of a tile is a mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshflash.planner.timeline import format_seconds
from meshflash.viz import shapes
from meshflash.viz.shapes import Drawing
from meshflash.viz.svg import SPAN, TITLED

#: The events of a tile, in the order in which kernels record them, and their colours.
EVENTS = ("computed", "sent", "received")
COLOURS = ("#5356c9", "#1aa0a5", "#f0a63c")
#: In pixels: the largest height of a tile, the largest height of a band, and the gap below it.
TILE_HEIGHT, BAND_HEIGHT, GAP = 7.0, 160.0, 14.0
#: The width of a mark, in pixels.
MARK_WIDTH = 3.0

#: For each rank and tile, the time of each event in nanoseconds; 0 if there was none.
Times = Mapping[int, Sequence[Sequence[int]]]


def picture(times: Times, title: str, note: str = "") -> str:
    """Return an SVG file with all ranks on one time axis, which begins with the first event.

    Args:
        times: The times of all tiles.
        title: The title.
        note: A line below the picture.
    """
    return shapes.document(draw_tiles(times, title, note))


def draw_tiles(times: Times, title: str, note: str = "") -> Drawing:
    """Return the bands of all ranks with an axis and a legend; raise ValueError if no tile has an event.

    Args:
        times: The times of all tiles.
        title: The title.
        note: A line below the picture.
    """
    known = [time for tiles in times.values() for tile in tiles for time in tile if time]
    if not known:
        raise ValueError("no tile has an event to draw")
    first, total = min(known), max(max(known) - min(known), 1)
    left, top = 52.0, 28.0
    tiles = max(map(len, times.values()))
    pitch = min(TILE_HEIGHT, BAND_HEIGHT / tiles)
    bottom = top + len(times) * (tiles * pitch + GAP)
    body = [shapes.text(0, 11, title)]
    for n in range(5):
        x = left + SPAN * n / 4
        body.append(shapes.box(x - 0.25, top - 4, 0.5, bottom - top, fill_opacity=0.5))
        body.append(shapes.text(x, bottom + 10, format_seconds(total * n / 4 * 1e-9), "middle"))
    titled = len(known) <= TITLED
    for number, rank in enumerate(sorted(times)):
        y = top + number * (tiles * pitch + GAP)
        body.append(shapes.text(left - 8, y + 10, f"rank {rank}", "end"))
        band = _marks(rank, times[rank], first, SPAN / total, pitch, titled)
        body.append(shapes.translate(Drawing(SPAN, tiles * pitch, band), left, y))
    x = 0.0
    for n, (name, colour) in enumerate(zip(EVENTS, COLOURS, strict=True)):
        if any(tile[n] for rank in times.values() for tile in rank):
            body.append(shapes.box(x, bottom + 22, 10, 10, fill=colour))
            body.append(shapes.text(x + 16, bottom + 31, name))
            x += 90
    body.append(shapes.text(x, bottom + 31, "tiles of a rank go down, in their order"))
    if note:
        body.append(shapes.text(0, bottom + 50, note))
    return Drawing(left + SPAN + 24, bottom + (54 if note else 36), "\n".join(body))


def _marks(rank: int, tiles: Sequence[Sequence[int]], first: int, scale: float, pitch: float, titled: bool) -> str:
    """Return the marks of a rank: each with a title and a line along its tile, or one shape for each event."""
    body, strokes = [], dict[int, list[str]]()
    height = max(pitch - 1, pitch / 2)
    for number, tile in enumerate(tiles):
        y = number * pitch
        xs = [(time - first) * scale for time in tile if time]
        if titled and len(xs) > 1:
            body.append(shapes.box(min(xs), y + height / 2 - 0.5, max(xs) - min(xs), 1, fill_opacity=0.3))
        for kind, time in enumerate(tile):
            if not time:
                continue
            x = (time - first) * scale
            if titled:
                title = f"rank {rank}, tile {number}: {EVENTS[kind]} after {format_seconds((time - first) * 1e-9)}"
                body.append(shapes.box(x - MARK_WIDTH / 2, y, MARK_WIDTH, height, title, fill=COLOURS[kind]))
            else:
                strokes.setdefault(kind, []).append(f"M{x - MARK_WIDTH / 2:.1f} {y + height / 2:.2f}h{MARK_WIDTH:g}")
    for kind, commands in sorted(strokes.items()):
        name = f"rank {rank}, {EVENTS[kind]}"
        body.append(shapes.path("".join(commands), name, stroke=COLOURS[kind], stroke_width=round(height, 3)))
    return "\n".join(body)
