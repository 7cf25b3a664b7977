"""When tiles of a fused product were computed, sent and received on each rank, as a picture in SVG.

A band for each rank: time goes to the right, tiles go down in their order, and each moment of a tile is a mark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshflash.viz import shapes
from meshflash.viz.shapes import Drawing
from meshflash.viz.svg import SPAN, TITLED
from meshflash.viz.timeline import in_words

#: The moments of a tile, in the order in which kernels note them, and their colours.
MOMENTS = ("computed", "sent", "received")
COLOURS = ("#5356c9", "#1aa0a5", "#f0a63c")
#: A band: how high a tile is where there are few, how high all of them are at most, and the gap below.
TILE, BAND, GAP = 7.0, 160.0, 14.0
#: How wide a mark is.
MARK = 3.0

#: Of each rank, by tile: nanoseconds of its three moments, 0 where it has none.
Times = Mapping[int, Sequence[Sequence[int]]]


def picture(times: Times, title: str, note: str = "") -> str:
    """An SVG file of all ranks, on one time axis that begins with the first moment of any."""
    return shapes.document(moments(times, title, note))


def moments(times: Times, title: str, note: str = "") -> Drawing:
    """The bands of all ranks, an axis and a legend; ValueError where no tile has a moment."""
    known = [moment for tiles in times.values() for tile in tiles for moment in tile if moment]
    if not known:
        raise ValueError("no tile has a moment to draw")
    first, total = min(known), max(max(known) - min(known), 1)
    left, top = 52.0, 28.0
    tiles = max(map(len, times.values()))
    pitch = min(TILE, BAND / tiles)
    bottom = top + len(times) * (tiles * pitch + GAP)
    body = [shapes.text(0, 11, title)]
    for n in range(5):
        x = left + SPAN * n / 4
        body.append(shapes.box(x - 0.25, top - 4, 0.5, bottom - top, fill_opacity=0.5))
        body.append(shapes.text(x, bottom + 10, in_words(total * n / 4 * 1e-9), "middle"))
    titled = len(known) <= TITLED
    for number, rank in enumerate(sorted(times)):
        y = top + number * (tiles * pitch + GAP)
        body.append(shapes.text(left - 8, y + 10, f"rank {rank}", "end"))
        band = _marks(rank, times[rank], first, SPAN / total, pitch, titled)
        body.append(shapes.moved(Drawing(SPAN, tiles * pitch, band), left, y))
    x = 0.0
    for n, (name, colour) in enumerate(zip(MOMENTS, COLOURS, strict=True)):
        if any(tile[n] for rank in times.values() for tile in rank):
            body.append(shapes.box(x, bottom + 22, 10, 10, fill=colour))
            body.append(shapes.text(x + 16, bottom + 31, name))
            x += 90
    body.append(shapes.text(x, bottom + 31, "tiles of a rank go down, in their order"))
    if note:
        body.append(shapes.text(0, bottom + 50, note))
    return Drawing(left + SPAN + 24, bottom + (54 if note else 36), "\n".join(body))


def _marks(rank: int, tiles: Sequence[Sequence[int]], first: int, scale: float, pitch: float, titled: bool) -> str:
    """The marks of a rank: with a title each, or all of a kind as one shape. A line joins those of a tile."""
    body, strokes = [], dict[int, list[str]]()
    height = max(pitch - 1, pitch / 2)
    for number, tile in enumerate(tiles):
        y = number * pitch
        places = [(moment - first) * scale for moment in tile if moment]
        if titled and len(places) > 1:
            body.append(shapes.box(min(places), y + height / 2 - 0.5, max(places) - min(places), 1, fill_opacity=0.3))
        for kind, moment in enumerate(tile):
            if not moment:
                continue
            x = (moment - first) * scale
            if titled:
                words = f"rank {rank}, tile {number}: {MOMENTS[kind]} after {in_words((moment - first) * 1e-9)}"
                body.append(shapes.box(x - MARK / 2, y, MARK, height, words, fill=COLOURS[kind]))
            else:
                strokes.setdefault(kind, []).append(f"M{x - MARK / 2:.1f} {y + height / 2:.2f}h{MARK:g}")
    for kind, commands in sorted(strokes.items()):
        name = f"rank {rank}, {MOMENTS[kind]}"
        body.append(shapes.path("".join(commands), name, stroke=COLOURS[kind], stroke_width=round(height, 3)))
    return "\n".join(body)
