"""The HTML page of `meshflash demo`: a table of results, pictures of one schedule, and the loss of a training run.

The page is one file without scripts and readable on a phone: wide pictures and the table scroll sideways.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from meshflash.bench.tables import FLAG, SINGLE_DEVICE, impossible, spread
from meshflash.core.files import write_whole

#: Size of the loss picture and its margins, in SVG units. Small, so that its text stays legible on a narrow screen.
WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 16, 48
#: Colours of the curves, from ColorBrewer's Dark2: told apart by colour-blind readers.
COLORS = ("#d95f02", "#1b9e77", "#7570b3")
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 1.5rem auto; padding: 0 1rem; color: #222;
       background: #fff; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { font-size: 1.2rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
svg { display: block; width: 100%; height: auto; max-width: 52rem; }
.wide svg { min-width: 36rem; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.15rem 0.6rem; text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid #888; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
tr.baseline td { border-bottom: 1px solid #ccc; }
caption { text-align: left; font-weight: bold; padding: 0.6rem 0 0.2rem; }
.hint { display: none; color: #666; font-size: 0.85rem; }
@media (max-width: 40rem) {
  .hint { display: block; }
  table { font-size: 0.75rem; }
  th, td { padding: 0.15rem 0.3rem; }
}
"""
HINT = '<p class="hint">Scroll sideways to see all of it.</p>'
#: Columns of the table of results.
HEADER = ("schedule", "ms", "±", "speedup", "exposed comm (ms)", "recv (MB)", "error", "peak MiB")


class Section(NamedTuple):
    """One section of the page: a heading, a paragraph, and a picture or table as HTML. Wide ones scroll sideways."""

    heading: str
    text: str
    body: str
    is_wide: bool = True


def page(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Write the page to a file."""
    parts = []
    for section in sections:
        parts += [f"<h2>{html.escape(section.heading)}</h2>", f"<p>{html.escape(section.text)}</p>"]
        parts.append(
            f'<div class="scroll wide">\n{section.body}\n</div>\n{HINT}'
            if section.is_wide
            else f'<div class="scroll">\n{section.body}\n</div>'
        )
    body = "\n".join(parts)
    write_whole(
        path,
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n{body}\n</body>\n</html>\n",
    )


def results_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of each pass: time, speedup over the single device, communication, error and memory."""
    tables = []
    for direction, own in groupby(rows, key=lambda row: row["pass"]):
        name = "forward" if direction == "forward" else "forward + backward"
        head = "".join(f"<th>{html.escape(column)}</th>" for column in HEADER)
        lines = "\n".join(_line(row, row["schedule"] == SINGLE_DEVICE) for row in own)
        tables.append(f"<table>\n<caption>{name}</caption>\n<tr>{head}</tr>\n{lines}\n</table>")
    return "\n".join(tables)


def _line(row: Mapping[str, Any], is_baseline: bool) -> str:
    cells = [
        f"{SINGLE_DEVICE} (baseline)" if is_baseline else row["schedule"],
        f"{row['ms']:.1f}",
        spread(dict(row)),
        f"{row['speedup']:.2f}{FLAG if impossible(dict(row)) else ''}",
        *(
            ("",) * 3
            if is_baseline
            else (f"{row['exposed_ms']:.2f}", f"{row['received_mean'] / 1e6:.1f}", f"{row['error']:.0e}")
        ),
        f"{row['peak_bytes'] / 2**20:.1f}",
    ]
    attributes = ' class="baseline"' if is_baseline else ""
    return f"<tr{attributes}>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"


def losses_svg(curves: Mapping[str, Sequence[float]]) -> str:
    """Return a picture of the loss by step, one curve for each name."""
    highest = max(max(values) for values in curves.values())
    steps = max(len(values) for values in curves.values())
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    bottom = TOP + height
    attributes = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="13" role="img"'
    parts = [
        f'<svg {attributes} viewBox="0 0 {WIDTH} {HEIGHT}" aria-label="training loss by step">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for n in range(5):
        y, x = bottom - height * n / 4, LEFT + width * n / 4
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{highest * n / 4:.1f}</text>')
        step = round(1 + (steps - 1) * n / 4)
        anchor = "end" if n == 4 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="{anchor}">{step}</text>')
    middle = TOP + height / 2
    parts.append(f'<text x="{LEFT + width / 2}" y="{HEIGHT - 10}" text-anchor="middle">training step</text>')
    parts.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">'
        "loss (cross-entropy, nats)</text>"
    )
    for n, (name, values) in enumerate(curves.items()):
        points = " ".join(
            f"{LEFT + width * at / max(1, steps - 1):.1f},{bottom - height * value / highest:.1f}"
            for at, value in enumerate(values)
        )
        color, dashes = COLORS[n % len(COLORS)], ' stroke-dasharray="6 5"' if n else ""
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2"{dashes} points="{points}"/>')
        where = f'x="{LEFT + width - 4}" y="{TOP + 18 * (n + 1)}" text-anchor="end"'
        parts.append(f'<text {where} fill="{color}">{html.escape(name)}</text>')
    parts.append("</svg>")
    return "\n".join(parts)
