"""Pictures of programs, as text for a terminal and as SVG: coverage (which step computes what) and timelines (when).

Both number the attend steps of a rank in order. `svg` draws the SVG.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase, digits

from meshflash.core.problem import Problem
from meshflash.core.program import Program
from meshflash.planner.timeline import Event, Timeline, format_seconds
from meshflash.viz import shapes, svg
from meshflash.viz.coverage import HIDDEN, MISSING, Grid, grids, head_sets, headline

#: Step numbers and ranks as one character; larger ones are MORE.
NUMBERS, MORE = digits + ascii_lowercase, "+"
#: The smallest width of a panel for one set of heads, and the gap between panels, in characters.
MIN_PANEL, GAP = 12, 2


def coverage_text(programs: Sequence[Program], problem: Problem, width: int = 48) -> str:
    """Return the query x key matrix as text: each cell is the index of the attend step that computes it.

    A row stands for queries of the rank at its left, a column for keys of the rank above it. If steps take only some of
    the heads, there is a panel for each set of heads.

    Args:
        programs: One program for each rank.
        problem: The problem that the programs solve.
        width: The width of the matrix, in characters.

    >>> from meshflash.core.layout import Layout
    >>> from meshflash.core.mask import Mask
    >>> from meshflash.schedules.registry import build
    >>> layout = Layout.contiguous(4, 2)
    >>> problem = Problem(layout.ranges, layout.ranges, Mask.causal())
    >>> print(coverage_text([build("ring", problem, rank, "forward") for rank in range(2)], problem))
    ring forward on 2 ranks: 4 queries x 4 keys, causal
    <BLANKLINE>
    keys of  0 0 1 1
    rank 0 | 0 . . .
    rank 0 | 0 0 . .
    rank 1 | 1 1 0 .
    rank 1 | 1 1 0 0
    <BLANKLINE>
    0-1: the attend step of the rank   .: nothing visible
    """
    panels_per_row = max(1, min(len(head_sets(programs, problem)), (width + GAP) // (MIN_PANEL + GAP)))
    columns = max(1, (width + GAP) // panels_per_row - GAP)
    panels = grids(programs, problem, max(1, columns // 2), columns)
    lines = [headline(programs, problem)]
    for first in range(0, len(panels), panels_per_row):
        lines += ["", *_panels(panels[first : first + panels_per_row], columns, problem.world)]
    last = max(int(panel.number.max(initial=0)) for panel in panels)
    legend = [f"{f'0-{_character(min(last, len(NUMBERS) - 1))}' if last else '0'}: the attend step of the rank"]
    if max(last, problem.world - 1) >= len(NUMBERS):
        legend.append(f"{MORE}: {len(NUMBERS)} or more")
    legend.append(".: nothing visible")
    if any((panel.rank == MISSING).any() for panel in panels):
        legend.append("?: no rank computes it")
    return "\n".join([*lines, "", "   ".join(legend)])


def timeline_text(timeline: Timeline, width: int = 72) -> str:
    """Return a timeline as text: for each rank a line of attend steps, with dots while it waits, and a line of moves.

    Args:
        timeline: The timeline.
        width: The width of the time axis, in characters.
    """
    total, lines = timeline.total, [timeline.title, ""]
    margin = len(_label("", timeline.world)) - 1
    for rank in range(timeline.world):
        waits = [(".", event) for event in timeline.of(rank, "other")]
        steps = [(_character(n), event) for n, event in enumerate(timeline.of(rank, "attend"))]
        moves = timeline.of(rank, "move")
        link = _bar([("=", event) for event in moves], total, width)
        for event in moves:
            link[_column(event.begin, total, width)] = "<"
        lines.append((_label(f"rank {rank}", timeline.world) + "".join(_bar(waits + steps, total, width))).rstrip())
        lines.append((_label("  link", timeline.world) + "".join(link)).rstrip())
    axis, marks = list("-" * (width + 1)), ""
    for n in range(5):
        axis[width * n // 4] = "+"
        mark = format_seconds(total * n / 4)
        marks = marks.ljust(width * n // 4) + mark if n < 4 else marks.ljust(width + 1 - len(mark)) + mark
    lines += [" " * margin + "".join(axis), " " * margin + marks]
    return "\n".join([*lines, "", timeline.summary, "0-9a-z: attend step   .: exposed comm   <==: communication"])


def coverage_svg(programs: Sequence[Program], problem: Problem) -> str:
    """Return the query x key matrix as an SVG file, coloured by the attend step that computes each cell.

    Args:
        programs: One program for each rank.
        problem: The problem that the programs solve.
    """
    return shapes.document(svg.coverage(programs, problem))


def timeline_svg(timeline: Timeline) -> str:
    """Return a timeline as an SVG file: for each rank a lane of attend steps and a thin lane of communication."""
    return shapes.document(svg.timeline(timeline))


def picture_svg(programs: Sequence[Program], problem: Problem, *timelines: Timeline, title: str = "") -> str:
    """Return one SVG file with the coverage on the left and the timelines on the right.

    Args:
        programs: One program for each rank.
        problem: The problem that the programs solve.
        timelines: The timelines to draw.
        title: The title above the picture.
    """
    drawings = [svg.coverage(programs, problem), *map(svg.timeline, timelines)]
    return shapes.document(shapes.beside(drawings, title))


def _character(n: int) -> str:
    return NUMBERS[n] if n < len(NUMBERS) else MORE


def _label(text: str, world: int) -> str:
    """Return the label at the left of a line, 8 characters wide, or more for very many ranks."""
    return text.ljust(max(7, len(f"rank {world - 1}"))) + "|"


def _panels(panels: list[Grid], columns: int, world: int) -> list[str]:
    """Return the lines of panels side by side; all have the same rows and columns."""
    q, k = panels[0].q, panels[0].k
    # Characters are twice as high as wide: if the width allows, a space after each cell makes cells about square.
    join = " " if len(k) * 2 <= columns else ""
    wide = max(len(k) * (1 + len(join)), MIN_PANEL) if len(panels) > 1 else columns

    def line(label: str, parts: list[str]) -> str:
        return f"{label} {(' ' * GAP).join(part.ljust(wide) for part in parts)}".rstrip()

    blank = _label("", world).replace("|", " ")
    out = []
    if panels[0].heads != (0, max(panel.heads[1] for panel in panels)) or panels[0].computed_elsewhere:
        out.append(line(blank, [panel.caption for panel in panels]))
    keys = join.join(map(_character, k.ranks.tolist()))
    out.append(line("keys of".ljust(len(blank)), [keys] * len(panels)))
    for n, rank in enumerate(q.ranks.tolist()):
        cells = []
        for panel in panels:
            row = zip(panel.rank[n].tolist(), panel.number[n].tolist(), strict=True)
            cells.append(join.join({HIDDEN: ".", MISSING: "?"}.get(rank, _character(step)) for rank, step in row))
        out.append(line(_label(f"rank {rank}", world), cells))
    return out


def _column(seconds: float, total: float, width: int) -> int:
    return min(width - 1, int(seconds / total * width)) if total else 0


def _bar(marks: list[tuple[str, Event]], total: float, width: int) -> list[str]:
    """Return events as characters: each column shows the event that fills most of it."""
    out, filled = [" "] * width, [0.0] * width
    marks = [(mark, event) for mark, event in marks if event.seconds]
    for mark, event in marks:
        for column in range(_column(event.begin, total, width), _column(event.end, total, width) + 1):
            begin, end = column * total / width, (column + 1) * total / width
            share = (min(event.end, end) - max(event.begin, begin)) / (end - begin)
            if share > filled[column]:
                filled[column], out[column] = share, mark
    # An event that fills no column most still gets one, unless it would replace the only column of another event.
    for mark, event in marks:
        column = _column((event.begin + event.end) / 2, total, width)
        if mark not in (*out, ".") and (out[column] in " ." or out.count(out[column]) > 1):
            out[column] = mark
    return out
