"""The little of SVG that the pictures need: shapes, text, and colours that hold on light and dark pages.

A drawing is a text of elements with a size; `document` makes it a file of its own. No fonts, no scripts.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from math import ceil

#: A sequence from the first attend step to the last; each is seen on white and on black.
STOPS = ((83, 86, 201), (47, 128, 205), (26, 160, 165), (78, 181, 105), (186, 190, 62), (240, 166, 60))
#: Text and lines: 4.5 : 1 on white, 4 : 1 on the usual dark pages.
INK = "#6e7781"
ALARM = "#d1242f"


@dataclass(frozen=True)
class Drawing:
    """Elements with their size."""

    width: float
    height: float
    body: str


def document(drawing: Drawing) -> str:
    """A file that holds a drawing, with some room around it."""
    margin = 12
    width, height = drawing.width + 2 * margin, drawing.height + 2 * margin
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-margin} {-margin} {width:.6g} {height:.6g}" '
        f'width="{width:.6g}" height="{height:.6g}" font-family="ui-sans-serif, system-ui, sans-serif" '
        f'font-size="11" fill="{INK}">\n{drawing.body}\n</svg>\n'
    )


def beside(drawings: list[Drawing], title: str = "", gap: float = 28) -> Drawing:
    """Drawings from left to right, with a title above them."""
    body, x, y = [], 0.0, 0.0
    if title:
        body.append(text(0, 14, title, font_size=15, font_weight="bold"))
        y = 28.0
    for drawing in drawings:
        body.append(moved(drawing, x, y))
        x += drawing.width + gap
    return Drawing(x - gap, y + max(drawing.height for drawing in drawings), "\n".join(body))


def moved(drawing: Drawing, x: float, y: float) -> str:
    """A drawing at another place."""
    return f'<g transform="translate({x:.6g} {y:.6g})">\n{drawing.body}\n</g>'


def colour(n: int, count: int) -> str:
    """The colour of the n-th of so many.

    >>> colour(0, 4), colour(3, 4)
    ('#5356c9', '#f0a63c')
    """
    place = n / max(count - 1, 1) * (len(STOPS) - 1)
    low = min(int(place), len(STOPS) - 2)
    mixed = (round(a + (b - a) * (place - low)) for a, b in zip(STOPS[low], STOPS[low + 1], strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def ink_on(background: str) -> str:
    """Black or white, whichever is read better on a colour.

    >>> ink_on("#5356c9"), ink_on("#f0a63c")
    ('#fff', '#111')
    """
    red, green, blue = (int(background[n : n + 2], 16) for n in (1, 3, 5))
    return "#111" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#fff"


def text(x: float, y: float, content: str, anchor: str = "start", **attributes: str | float) -> str:
    """A line of text; `y` is its baseline."""
    return f'<text x="{x:.6g}" y="{y:.6g}"{_listed(text_anchor=anchor, **attributes)}>{escape(content)}</text>'


def box(x: float, y: float, width: float, height: float, title: str = "", **attributes: str | float) -> str:
    """A rectangle; the title is seen where the pointer rests on it."""
    shape = f'<rect x="{x:.6g}" y="{y:.6g}" width="{width:.6g}" height="{height:.6g}"{_listed(**attributes)}'
    return f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>"


def path(strokes: str, title: str, **attributes: str | float) -> str:
    """Strokes, as the commands of a path."""
    return f'<path d="{strokes}"{_listed(**attributes)}><title>{escape(title)}</title></path>'


def legend(count: int, width: float) -> Drawing:
    """The colours of the attend steps in their order."""
    left, each = 124.0, min(18.0, (width - 124) / max(count, 1))
    every = ceil(18 / each)
    body = [text(0, 11, "attend step of a rank")]
    body += [box(left + n * each, 0, each, 14, f"attend {n}", fill=colour(n, count)) for n in range(count)]
    for n in range(0, count, every):
        middle = left + (n + 0.5) * each
        ink = ink_on(colour(n, count))
        body.append(text(max(middle, left + 6), 11, str(n), "middle", fill=ink, pointer_events="none"))
    return Drawing(width, 14, "\n".join(body))


def _listed(**attributes: str | float) -> str:
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items() if value != "")
