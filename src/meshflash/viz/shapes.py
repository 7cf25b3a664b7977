"""SVG primitives: shapes, text, and colours that are readable on light and dark pages.

A `Drawing` is SVG elements with a size; `document` turns it into a file. No fonts, no scripts.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from math import ceil

#: Colour stops from the first attend step to the last; each is visible on white and on black.
STOPS = ((83, 86, 201), (47, 128, 205), (26, 160, 165), (78, 181, 105), (186, 190, 62), (240, 166, 60))
#: The colour of text and lines: contrast 4.5 : 1 on white, 4 : 1 on the usual dark pages.
INK = "#6e7781"
ALARM = "#d1242f"


@dataclass(frozen=True)
class Drawing:
    """SVG elements with their size in pixels."""

    width: float
    height: float
    body: str


def document(drawing: Drawing) -> str:
    """Return an SVG file with a drawing and a margin around it."""
    margin = 12
    width, height = drawing.width + 2 * margin, drawing.height + 2 * margin
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-margin} {-margin} {width:.6g} {height:.6g}" '
        f'width="{width:.6g}" height="{height:.6g}" font-family="ui-sans-serif, system-ui, sans-serif" '
        f'font-size="11" fill="{INK}">\n{drawing.body}\n</svg>\n'
    )


def beside(drawings: list[Drawing], title: str = "", gap: float = 28) -> Drawing:
    """Place drawings side by side, with a title above them.

    Args:
        drawings: The drawings, from left to right.
        title: The title, if any.
        gap: The space between two drawings, in pixels.
    """
    body, x, y = [], 0.0, 0.0
    if title:
        body.append(text(0, 14, title, font_size=15, font_weight="bold"))
        y = 28.0
    for drawing in drawings:
        body.append(translate(drawing, x, y))
        x += drawing.width + gap
    return Drawing(x - gap, y + max(drawing.height for drawing in drawings), "\n".join(body))


def translate(drawing: Drawing, x: float, y: float) -> str:
    """Return a drawing, moved to (x, y)."""
    return f'<g transform="translate({x:.6g} {y:.6g})">\n{drawing.body}\n</g>'


def colour(n: int, count: int) -> str:
    """Return the colour of the n-th of `count` attend steps.

    >>> colour(0, 4), colour(3, 4)
    ('#5356c9', '#f0a63c')
    """
    place = n / max(count - 1, 1) * (len(STOPS) - 1)
    low = min(int(place), len(STOPS) - 2)
    mixed = (round(a + (b - a) * (place - low)) for a, b in zip(STOPS[low], STOPS[low + 1], strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def ink_on(background: str) -> str:
    """Return black or white, whichever is more readable on a colour.

    >>> ink_on("#5356c9"), ink_on("#f0a63c")
    ('#fff', '#111')
    """
    red, green, blue = (int(background[n : n + 2], 16) for n in (1, 3, 5))
    return "#111" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#fff"


def text(x: float, y: float, content: str, anchor: str = "start", **attributes: str | float) -> str:
    """Return a line of text; `y` is its baseline."""
    return f'<text x="{x:.6g}" y="{y:.6g}"{_attributes(text_anchor=anchor, **attributes)}>{escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, title: str = "", **attributes: str | float) -> str:
    """Return a rectangle; its title is shown when the pointer rests on it."""
    shape = f'<rect x="{x:.6g}" y="{y:.6g}" width="{width:.6g}" height="{height:.6g}"{_attributes(**attributes)}'
    return f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>"


def path(strokes: str, title: str, **attributes: str | float) -> str:
    """Return a path; `strokes` are its commands."""
    return f'<path d="{strokes}"{_attributes(**attributes)}><title>{escape(title)}</title></path>'


def legend(count: int, width: float) -> Drawing:
    """Return a legend: the colours of the attend steps, in order."""
    left, each = 124.0, min(18.0, (width - 124) / max(count, 1))
    every = ceil(18 / each)
    body = [text(0, 11, "attend step of a rank")]
    body += [box(left + n * each, 0, each, 14, f"attend {n}", fill=colour(n, count)) for n in range(count)]
    for n in range(0, count, every):
        middle = left + (n + 0.5) * each
        ink = ink_on(colour(n, count))
        body.append(text(max(middle, left + 6), 11, str(n), "middle", fill=ink, pointer_events="none"))
    return Drawing(width, 14, "\n".join(body))


def _attributes(**attributes: str | float) -> str:
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items() if value != "")
