"""Drawings of coverage and timelines: every cell matches a search through all steps, and nothing else is drawn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import Attend, Direction, Program, Sizes, Slice
from meshflash.planner.simulator import Rates
from meshflash.planner.timeline import Event, Timeline
from meshflash.schedules.registry import build, default_layout
from meshflash.viz.draw import NUMBERS, coverage_svg, coverage_text, picture_svg, timeline_svg, timeline_text
from planner.at_rates import simulate_at

CAUSAL = Mask.causal()
SCHEDULES = ("ring", "zigzag", "striped", "allgather(head_stride=1)")
RATES = Rates(1e6, 1e9, 1e-5)
#: A rank and the index of its attend step, or None if nothing is visible.
Owner = tuple[int, int] | None

MASKS = {
    "causal": lambda n: CAUSAL,
    "full": lambda n: Mask.full(),
    "window": lambda n: CAUSAL & Mask.window(max(1, n // 5), 0),
    "documents": lambda n: CAUSAL & Mask.documents([n // 3, n - n // 3]),
    "documents by row": lambda n: Mask.documents([[n // 3, n - n // 3], [n // 2, n - n // 2]]),
    "prefix": lambda n: CAUSAL | Mask.first(2),
}


def build_all_ranks(
    schedule: str, tokens: int, world: int, mask: Mask = CAUSAL, direction: Direction = "forward"
) -> tuple[list[Program], Problem]:
    """Return the programs of all ranks on the default layout, and their problem."""
    layout = default_layout(schedule)(tokens, world)
    problem = Problem(layout.ranges, layout.ranges, mask, heads=4, kv_heads=2)
    return [build(schedule, problem, rank, direction) for rank in range(world)], problem


def attends(program: Program) -> list[Attend]:
    return [step for step in program.steps if isinstance(step, Attend)]


def holder(problem: Problem, i: int) -> int:
    return next(rank for rank, held in enumerate(problem.q) if any(i in r for r in held))


def find_owners(programs: list[Program], problem: Problem, head: int) -> list[list[Owner]]:
    """Return, for each pair, the rank and the attend step that compute it."""
    tokens, mask = sum(problem.q_lengths), problem.mask
    i, j = np.arange(tokens)[:, None], np.arange(tokens)[None, :]
    seen = np.any([mask.visible(i, j, batch) for batch in range(mask.batch_rows or 1)], axis=0)
    out: list[list[Owner]] = [[None] * tokens for _ in range(tokens)]
    for program in programs:
        for n, step in enumerate(attends(program)):
            if not step.heads[0] <= head < step.heads[1]:
                continue
            for q in (q for r in step.q_positions for q in r):
                for k in (k for r in step.k_positions for k in r if seen[q, k]):
                    assert out[q][k] is None
                    out[q][k] = (program.rank, n)
    assert sum(cell is not None for row in out for cell in row) == seen.sum()
    return out


def read_text(text: str) -> tuple[list[int], list[list[str]]]:
    """Return the ranks at the left and the rows of characters of a text with one panel per row."""
    ranks, rows = [], []
    for line in text.splitlines():
        if match := re.fullmatch(r"rank (\d+) *\|(.*)", line):
            ranks.append(int(match[1]))
            rows.append(match[2])
    return ranks, [list(row.replace(" ", "")) for row in rows]


def character_of(cell: Owner) -> str:
    return "." if cell is None else NUMBERS[cell[1]]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("tokens", "world"), [(9, 3), (11, 4), (7, 1), (3, 5), (1, 2)])
def test_coverage_text_of_short_sequences_is_exact(schedule: str, mask: str, tokens: int, world: int) -> None:
    programs, problem = build_all_ranks(schedule, tokens, world, MASKS[mask](tokens))
    ranks, rows = read_text(coverage_text(programs, problem))
    assert ranks == [holder(problem, i) for i in range(tokens)]
    heads = (0, 2) if "head_stride" in schedule else (0,)
    panels = [find_owners(programs, problem, head) for head in heads]
    assert rows == [[character_of(cell) for panel in panels for cell in panel[i]] for i in range(tokens)]


@pytest.mark.parametrize("schedule", ["ring", "zigzag", "striped"])
@pytest.mark.parametrize("mask", MASKS)
def test_coverage_text_of_long_sequences_is_right_in_every_cell(schedule: str, mask: str) -> None:
    tokens, world, width = 61, 4, 24
    programs, problem = build_all_ranks(schedule, tokens, world, MASKS[mask](tokens))
    pairs = find_owners(programs, problem, 0)
    text = coverage_text(programs, problem, width)
    ranks, rows = read_text(text)
    columns = next(line.split()[-1] for line in text.splitlines() if line.startswith("keys of"))
    assert len(rows) == width // 2
    assert {len(row) for row in rows} == {width}
    for a, (rank, row) in enumerate(zip(ranks, rows, strict=True)):
        queries = range(a * tokens // len(rows), (a + 1) * tokens // len(rows))
        own_queries = [i for i in queries if holder(problem, i) == rank]
        assert own_queries
        for b, character in enumerate(row):
            keys = [
                j
                for j in range(b * tokens // width, (b + 1) * tokens // width)
                if holder(problem, j) == int(columns[b])
            ]
            assert keys
            cells = {pairs[i][j] for i in own_queries for j in keys}
            assert character in {character_of(cell) for cell in cells}
            if len(own_queries) <= 4 and len(keys) <= 4:
                assert (character == ".") == (cells == {None})
    # stripes are finer than these cells, and still all ranks and steps appear
    assert set(ranks) == set(range(world))
    assert {character_of(cell) for line in pairs for cell in line} == {character for row in rows for character in row}


def test_coverage_text_fits_a_terminal() -> None:
    for schedule in SCHEDULES:
        for world in (1, 4, 12):
            programs, problem = build_all_ranks(schedule, 16_384, world, CAUSAL & Mask.window(3000, 0))
            timeline = simulate_at(programs, problem, Sizes(), RATES)
            for text in (coverage_text(programs, problem), timeline_text(timeline)):
                assert max(map(len, text.splitlines())) <= 80
                assert text.isascii()
                assert text.splitlines()[0].startswith(f"{schedule.split('(')[0]} forward on {world} rank")


def test_many_sets_of_heads_wrap_into_several_rows_of_panels() -> None:
    layout = default_layout("ring")(64, 2)
    problem = Problem(layout.ranges, layout.ranges, CAUSAL, heads=5, kv_heads=5)
    programs = [build("allgather(head_stride=1)", problem, rank, "forward") for rank in range(2)]
    text = coverage_text(programs, problem, 40)
    captions = [line.split("  ") for line in text.splitlines() if "heads" in line]
    assert [[part.strip() for part in line if part.strip()] for line in captions] == [
        ["heads 0-0", "heads 1-1", "heads 2-2"],
        ["heads 3-3", "heads 4-4"],
    ]
    assert {character for row in read_text(text)[1] for character in row} == set("01234.")


def test_visible_pairs_that_no_rank_computes_are_marked() -> None:
    programs, problem = build_all_ranks("ring", 8, 2)
    last = max(n for n, step in enumerate(programs[1].steps) if isinstance(step, Attend))
    programs[1] = replace(programs[1], steps=programs[1].steps[:last] + programs[1].steps[last + 1 :])
    text = coverage_text(programs, problem)
    assert [row[:4] for row in read_text(text)[1][4:]] == [["?"] * 4] * 4
    assert "no rank computes it" in text
    assert "computed by no rank" in coverage_svg(programs, problem)
    assert "?" not in coverage_text(*build_all_ranks("ring", 8, 2))


def test_captions_name_the_rank_of_each_head_if_ranks_split_heads() -> None:
    place = Slice("q", (0, 0), (0, 0))
    whole, halves = (range(8),), ((range(4),), (range(4, 8),))
    problem = Problem(halves, halves, CAUSAL, heads=2)
    programs = [
        Program("by heads", "forward", r, 2, (), (Attend(place, place, place, whole, whole, (r, r + 1)),), ())
        for r in range(2)
    ]
    text = coverage_text(programs, problem)
    assert "heads 0-0 on 0" in text
    assert "heads 1-1 on 1" in text
    assert read_text(text) == (
        [0] * 4 + [1] * 4,
        [(["0"] * (i + 1) + ["."] * (7 - i)) * 2 for i in range(8)],
    )


def read_paths(picture: str) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield the title and the cells (row, column) of each path."""
    for path in elements(picture, "path"):
        row = column = 0
        cells = []
        for command, x, y, length in re.findall(r"([Mm])(-?\d+) (-?\d+)h(\d+)", path.attrib["d"]):
            row, column = (int(y), int(x)) if command == "M" else (row + int(y), column + int(x))
            cells += [(row, column + n) for n in range(int(length))]
            column += int(length)
        yield title_of(path), cells


def elements(picture: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(picture).iter(f"{{http://www.w3.org/2000/svg}}{tag}"))


def title_of(element: ElementTree.Element) -> str:
    return element.findtext("{http://www.w3.org/2000/svg}title") or ""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("tokens", "world"), [(23, 4), (3, 5)])
def test_svg_of_short_sequences_is_exact(schedule: str, mask: str, tokens: int, world: int) -> None:
    programs, problem = build_all_ranks(schedule, tokens, world, MASKS[mask](tokens))
    picture = coverage_svg(programs, problem)
    heads = (0, 2) if "head_stride" in schedule else (0,)
    wanted: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for head in heads:
        for i, row in enumerate(find_owners(programs, problem, head)):
            for j, cell in enumerate(row):
                if cell is not None:
                    wanted.setdefault(cell, set()).add((i, j))
    drawn = {}
    for title, cells in read_paths(picture):
        match = re.match(r"rank (\d+), attend (\d+) \(step (\d+)\): ([\d,]+) queries x ([\d,]+) keys", title)
        assert match is not None
        rank, n = int(match[1]), int(match[2])
        step = attends(programs[rank])[n]
        assert programs[rank].steps[int(match[3])] is step
        assert int(match[4]) == sum(map(len, step.q_positions))
        assert (rank, n) not in drawn
        assert len(set(cells)) == len(cells)
        drawn[rank, n] = set(cells)
    assert drawn == wanted


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_svg_of_long_sequences_is_small_and_complete(schedule: str) -> None:
    for mask in (CAUSAL, Mask.full()):
        programs, problem = build_all_ranks(schedule, 1 << 20, 8, mask)
        picture = coverage_svg(programs, problem)
        assert len(picture) < 200_000
        drawn = {title.split(" (")[0] for title, cells in read_paths(picture) if cells}
        assert drawn == {f"rank {p.rank}, attend {n}" for p in programs for n in range(len(attends(p)))}
        if mask == CAUSAL:
            assert all(row >= column for _, cells in read_paths(picture) for row, column in cells)


def test_svg_of_many_ranks_merges_shapes_of_one_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    programs, problem = build_all_ranks("zigzag", 1 << 14, 17)
    timeline = simulate_at(programs, problem, Sizes(), Rates(1e12, 1e9))
    separate = picture_svg(programs, problem, timeline)
    monkeypatch.setattr("meshflash.viz.svg.TITLED", 100)
    merged = picture_svg(programs, problem, timeline)
    assert len(merged) < len(separate) / 2
    # both pictures draw the same cells for each step
    cells: list[dict[str, set[tuple[int, int]]]] = [{}, {}]
    for by_step, picture in zip(cells, (separate, merged), strict=True):
        for title, drawn in read_paths(picture):
            step = re.search(r"attend \d+", title)
            if step is not None:
                by_step.setdefault(step[0], set()).update(drawn)
    assert cells[0] == cells[1]
    assert len(cells[0]) == 17
    titles = {title_of(path) for path in elements(merged, "path")}
    assert titles == {f"attend {n}" for n in range(17)} | {"move", "wait"}


def test_svg_is_self_contained() -> None:
    programs, problem = build_all_ranks("zigzag", 64, 4, CAUSAL & Mask.documents([40, 24]))
    timeline = simulate_at(programs, problem, Sizes(), RATES)
    both = picture_svg(programs, problem, timeline, title="Tom & Jerry <1>")
    for picture in (coverage_svg(programs, problem), timeline_svg(timeline), both):
        root = ElementTree.fromstring(picture)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert not re.search(r"<script|<image|href|@import|url\(", picture)
        assert "nan" not in picture
        assert {float(value) for value in root.attrib["viewBox"].split()[2:]} == {
            float(root.attrib[side]) for side in ("width", "height")
        }
    labels = [text.text or "" for text in elements(both, "text")]
    assert labels[0] == "Tom & Jerry <1>"
    assert {f"rank {rank}" for rank in range(4)} <= set(labels)
    assert {"queries", "keys", "63", "attend step of a rank"} <= set(labels)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("tokens", "world"), [(400, 4), (40, 1), (3, 5), (0, 2)])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_event_is_in_the_timeline(schedule: str, tokens: int, world: int, direction: Direction) -> None:
    programs, problem = build_all_ranks(schedule, tokens, world, direction=direction)
    for rates in (RATES, Rates(1e6, inf), Rates(1e12, 1e6, 1e-6)):
        timeline = simulate_at(programs, problem, Sizes(), rates)
        lines = timeline_text(timeline).splitlines()
        for rank in range(world):
            at = next(n for n, line in enumerate(lines) if line.startswith(f"rank {rank} "))
            compute, link = (line.partition("|")[2] for line in lines[at : at + 2])
            seen = {NUMBERS[n] for n, event in enumerate(timeline.of(rank, "attend")) if event.seconds}
            assert set(compute) - set(" .") == seen
            assert ("." in compute) <= (timeline.exposed(rank) > 0)
            assert ("<" in link) == bool(timeline.of(rank, "move"))
            assert max(len(compute), len(link)) <= 72
        assert lines[-2] == timeline.summary
        titles = [title_of(box) for box in elements(timeline_svg(timeline), "rect")]
        for event in timeline.events:
            if event.kind != "other" or event.seconds:
                prefix = f"rank {event.rank}, "
                assert (
                    sum(t.startswith(prefix) and f"(step {event.step})," in t and event.label in t for t in titles) == 1
                )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12), st.integers(30, 72))
def test_bars_are_proportional_to_time(lengths: list[float], width: int) -> None:
    events, now = [], 0.0
    for n, seconds in enumerate(lengths):
        events.append(Event(0, "attend", now, now + seconds, "", n))
        now += seconds
    bar = next(
        line for line in timeline_text(Timeline("", 1, tuple(events), "measured"), width).splitlines() if "|" in line
    )[8:]
    assert len(bar) == width
    assert list(bar) == sorted(bar)
    for n, seconds in enumerate(lengths):
        assert abs(bar.count(NUMBERS[n]) - seconds / now * width) <= 2


def test_timeline_text_is_exact() -> None:
    events = (
        Event(0, "attend", 0.0, 2.0, "", 1),
        Event(0, "move", 0.0, 4.0, "", 0),
        Event(0, "other", 2.0, 4.0, "", 2),
        Event(0, "attend", 4.0, 8.0, "", 3),
        Event(1, "attend", 0.0, 4.0, "", 0),
    )
    assert timeline_text(Timeline("two", 2, events, "measured"), 32).splitlines() == [
        "two on 2 ranks, measured",
        "",
        "rank 0 |00000000........1111111111111111",
        "  link |<===============",
        "rank 1 |0000000000000000",
        "  link |",
        "       +-------+-------+-------+-------+",
        "       0       2 s     4 s     6 s   8 s",
        "",
        "measured: total 8 s, efficiency 62.5%, exposed comm 2 s (rank 0)",
        "0-9a-z: attend step   .: exposed comm   <==: communication",
    ]
