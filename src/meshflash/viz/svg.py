"""The pictures of `draw` as SVG: coverage of the query x key matrix, and timelines.

With many ranks, all shapes of one colour become one path: thousands of separate elements would slow a browser down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from meshflash.core.problem import Problem
from meshflash.core.program import Program
from meshflash.planner.timeline import Event, Timeline, format_seconds
from meshflash.viz import shapes
from meshflash.viz.coverage import HIDDEN, MISSING, Grid, Side, attends, grids, head_sets, headline
from meshflash.viz.shapes import Drawing

#: A coverage picture: its size in pixels, the most cells on a side, and the most cells if ranks share cells (striped
#: layouts), where each cell must be large enough to be seen.
SQUARE, CELLS, SHARED = 384, 128, 40
#: A timeline, in pixels: its width; the heights of a rank's compute lane, link lane and gap, for up to MANY ranks and
#: for more.
SPAN, LANES, NARROW_LANES, MANY = 560, (16, 6, 10), (5, 3, 3), 16
#: The most shapes of a kind that each get a title of their own.
TITLED = 1000


def coverage(programs: Sequence[Program], problem: Problem) -> Drawing:
    """Draw the coverage: one square for each set of heads, and a legend.

    Args:
        programs: One program for each rank.
        problem: The problem that the programs solve.
    """
    count = len(head_sets(programs, problem))
    columns = next(n for n in range(1, count + 1) if n * n >= count)
    cells, size = max(8, CELLS // columns), SQUARE / columns
    squares = grids(programs, problem, cells, cells)
    if squares[0].q.shared:
        squares = grids(programs, problem, cells * SHARED // CELLS, cells * SHARED // CELLS)
    most = max((len(attends(program)) for program in programs), default=0)
    title = headline(programs, problem)
    body, right, bottom = [shapes.text(0, 11, title)], 0.0, 0.0
    for n, grid in enumerate(squares):
        drawing = _square(grid, programs, most, size, count > 1 or grid.computed_elsewhere)
        x, y = n % columns * (drawing.width + 12), 24 + n // columns * (drawing.height + 12)
        body.append(shapes.translate(drawing, x, y))
        right, bottom = max(right, x + drawing.width), max(bottom, y + drawing.height)
    body.append(shapes.translate(shapes.legend(most, right), 0, bottom + 12))
    return Drawing(max(right, 5.6 * len(title)), bottom + 26, "\n".join(body))


def timeline(timeline: Timeline) -> Drawing:
    """Draw a timeline: a compute lane and a link lane for each rank, a time axis, a summary and a legend."""
    left, top, total = 52.0, 28.0, timeline.total
    lane, link, gap = LANES if timeline.world <= MANY else NARROW_LANES
    pitch = lane + link + gap
    bottom = top + timeline.world * pitch
    most = max((len(timeline.of(rank, "attend")) for rank in range(timeline.world)), default=0)
    body = [shapes.text(0, 11, timeline.title)]
    for n in range(5):
        x = left + SPAN * n / 4
        body.append(shapes.box(x - 0.25, top - 4, 0.5, bottom - top + 4, fill_opacity=0.5))
        body.append(shapes.text(x, bottom + 12, format_seconds(total * n / 4), "middle"))
    bars = []
    for rank in range(timeline.world):
        y = top + rank * pitch
        body.append(shapes.text(left - 8, y + lane / 2 + 4, f"rank {rank}", "end", font_size=min(11, pitch - 1)))
        for n, event in enumerate(timeline.of(rank, "attend")):
            bars.append(_bar(event, total, y, lane, f"attend {n}", shapes.colour(n, most), 1.0, str(n)))
        for event in timeline.of(rank, "other"):
            if event.seconds:
                bars.append(_bar(event, total, y + lane / 2 - 1, 2, "wait", shapes.INK, 0.6))
        for event in timeline.of(rank, "move"):
            bars.append(_bar(event, total, y + lane + 2, link, "move", shapes.INK, 0.8))
    drawn = _merged_bars(bars) if len(bars) > TITLED else _titled_bars(bars)
    body.append(shapes.translate(Drawing(SPAN, bottom - top, drawn), left, 0))
    body.append(shapes.text(0, bottom + 36, timeline.summary))
    body.append(shapes.translate(shapes.legend(most, SPAN), 0, bottom + 48))
    body.append(shapes.text(0, bottom + 80, "grey bars: communication; grey lines: exposed communication"))
    return Drawing(left + SPAN + 24, bottom + 84, "\n".join(body))


def _square(grid: Grid, programs: Sequence[Program], most: int, size: float, captioned: bool) -> Drawing:
    """Draw one square with its axes: queries down, keys across, and the ranks that hold them."""
    left, top = 56.0, 44.0 if captioned else 28.0
    body = [shapes.text(left, 11, grid.caption)] if captioned else []
    body.append(shapes.box(left, top, size, size, fill_opacity=0.1))
    body += _holders(grid.q, size, left - 14, top, down=True)
    body += _holders(grid.k, size, left, top - 14, down=False)
    across, down = (size / max(1, len(side)) for side in (grid.k, grid.q))
    place = f"translate({left:.6g} {top + down / 2:.6g}) scale({across:.6g} {down:.6g})"
    body.append(f'<g transform="{place}" fill="none" stroke-width="1" shape-rendering="crispEdges">')
    strokes = _strokes(grid, by_rank=True)
    if len(strokes) > TITLED:
        strokes = _strokes(grid, by_rank=False)
    for (rank, number), commands in strokes.items():
        colour = shapes.ALARM if number == MISSING else shapes.colour(number, most)
        body.append(shapes.path(commands, _cell_title(programs, rank, number), stroke=colour))
    body.append("</g>")
    body.append(shapes.text(left + size / 2, top - 18, "keys", "middle"))
    rotation = f"rotate(-90 {left - 22:.6g} {top + size / 2:.6g})"
    body.append(shapes.text(left - 22, top + size / 2, "queries", "middle", transform=rotation))
    for side, vertical in ((grid.q, True), (grid.k, False)):
        if len(side):
            first, last = f"{int(side.edges[0]):,}", f"{int(side.edges[-1]) - 1:,}"
            ends = (
                [(left - 18, top + 9), (left - 18, top + size)]
                if vertical
                else [(left, top - 18), (left + size, top - 18)]
            )
            body.append(shapes.text(*ends[0], first, "end" if vertical else "start"))
            body.append(shapes.text(*ends[1], last, "end"))
    return Drawing(left + size, top + size, "\n".join(body))


def _strokes(grid: Grid, by_rank: bool) -> dict[tuple[int, int], str]:
    """Return path commands for each (rank, attend step), in units of cells: a stroke for each run in a row.

    Args:
        grid: The grid.
        by_rank: Separate the ranks; otherwise rank -1 stands for all of them.
    """
    runs: dict[tuple[int, int], list[str]] = {}
    at: dict[tuple[int, int], tuple[int, int]] = {}
    for row, (ranks, numbers) in enumerate(zip(grid.rank.tolist(), grid.number.tolist(), strict=True)):
        column = 0
        owners = zip(ranks if by_rank else [-1] * len(ranks), numbers, strict=True)
        for key, run in groupby(owners):
            length = len(list(run))
            if key[1] != HIDDEN:
                before, last = at.get(key, (-1, 0))
                # relative moves within a row halve the file for striped layouts
                move = f"m{column - last} 0" if before == row else f"M{column} {row}"
                runs.setdefault(key, []).append(f"{move}h{length}")
                at[key] = (row, column + length)
            column += length
    return {key: "".join(strokes) for key, strokes in sorted(runs.items())}


def _cell_title(programs: Sequence[Program], rank: int, number: int) -> str:
    if number == MISSING:
        return "visible, computed by no rank"
    if rank < 0:
        return f"attend {number}"
    place, step = attends(programs[rank])[number]
    queries, keys = (sum(map(len, ranges)) for ranges in (step.q_positions, step.k_positions))
    return f"rank {rank}, attend {number} (step {place}): {queries:,} queries x {keys:,} keys"


def _holders(side: Side, size: float, x: float, y: float, down: bool) -> list[str]:
    """Draw a strip of the ranks that hold the positions, each in its own grey, with numbers where they fit."""
    strip: list[str] = []
    numbers: list[str] = []
    at = 0.0
    each, most = size / max(1, len(side)), max(1, int(side.ranks.max(initial=0)))
    for rank, run in groupby(side.ranks.tolist()):
        length = len(list(run)) * each
        if rank >= 0:
            area = (x, y + at, 10.0, length) if down else (x + at, y, length, 10.0)
            strip.append(shapes.box(*area, f"rank {rank}", fill_opacity=round(0.12 + 0.3 * rank / most, 2)))
            if length >= (9 if down else 5.5 * len(str(rank)) + 2):
                middle = (x + 5, y + at + length / 2 + 3) if down else (x + at + length / 2, y + 8)
                numbers.append(shapes.text(*middle, str(rank), "middle", font_size=9, pointer_events="none"))
        at += length
    return strip + numbers


@dataclass(frozen=True)
class _Bar:
    """An event as a bar: position and size in pixels."""

    x: float
    y: float
    width: float
    height: float
    what: str
    fill: str
    opacity: float
    mark: str
    title: str


def _bar(
    event: Event, total: float, y: float, height: float, what: str, fill: str, opacity: float, mark: str = ""
) -> _Bar:
    scale = SPAN / total if total else 0.0
    title = (
        f"rank {event.rank}, {what} (step {event.step}), "
        f"{format_seconds(event.begin)} to {format_seconds(event.end)}: {event.label}"
    )
    # very short events stay visible; the gap separates neighbours
    width = max(event.seconds * scale - 0.5, 1.0)
    return _Bar(event.begin * scale, y, width, height, what, fill, opacity, mark, title)


def _titled_bars(bars: list[_Bar]) -> str:
    """Draw each bar with a title, and with its number if it fits."""
    out = []
    for bar in bars:
        area = (bar.x, bar.y, bar.width, bar.height)
        out.append(shapes.box(*area, bar.title, rx=1, fill=bar.fill, fill_opacity=bar.opacity))
        if bar.height > 10 and bar.width >= 7 * len(bar.mark) + 4:
            ink = shapes.ink_on(bar.fill)
            x, y = bar.x + bar.width / 2, bar.y + bar.height / 2 + 4
            out.append(shapes.text(x, y, bar.mark, "middle", fill=ink, pointer_events="none"))
    return "\n".join(out)


def _merged_bars(bars: list[_Bar]) -> str:
    """Draw all bars of one look as one path."""
    alike: dict[tuple[str, str, float, float], list[str]] = {}
    for bar in bars:
        stroke = f"M{bar.x:.2f} {bar.y + bar.height / 2:g}h{bar.width:.2f}"
        alike.setdefault((bar.what, bar.fill, bar.opacity, bar.height), []).append(stroke)
    return "\n".join(
        shapes.path("".join(strokes), what, stroke=fill, stroke_opacity=opacity, stroke_width=height)
        for (what, fill, opacity, height), strokes in alike.items()
    )
