"""How long one rank of a large world takes to build its programs, by schedule, mask and number of ranks.

A world has 256 tokens a rank. Each time is that of one rank's forward and backward, from a mask and a layout, with
empty caches; the median over a rank at the front, in the middle and at the end. `packing` is the time of another mask
on the same layout, as each batch of packed documents needs. Memory is the peak of what Python allocates meanwhile.
"""

from __future__ import annotations

import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.protocol import Rows, one_table
from meshflash.bench.columns import Column
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import DIRECTIONS, Program
from meshflash.core.tiles import worklist
from meshflash.schedules.registry import build, default_layout, names

TOKENS_A_RANK = 256
WORLDS = (8, 64, 256, 1024, 4096, 16384)
HEADS, KV_HEADS = 32, 8
#: Timed repetitions at each rank; their least time counts.
REPEATS = 3
#: The part whose rows are programs, and that of mask, layouts and tables of very many documents.
PROGRAMS, DOCUMENTS = "programs", "documents"
Say = Callable[[str], None]


@dataclass(frozen=True)
class ScaleRow:
    """One schedule and mask at one number of ranks, or one layout of many documents."""

    part: str
    name: str
    mask: str
    world: int
    tokens: int
    build_ms: float
    packing_ms: float | None
    megabytes: float | None
    steps: int


def schedule_texts() -> list[str]:
    """Return every schedule; hybrid and double_ring with nodes of 8 ranks."""
    inner = {"hybrid": "hybrid(inner=8)", "double_ring": "double_ring(inner=8)"}
    return [inner.get(name, name) for name in names()]


def document_lengths(tokens: int, documents: int, seed: int) -> list[int]:
    """Return the lengths of documents with random boundaries.

    Args:
        tokens: The length of the sequence.
        documents: The number of documents.
        seed: The seed of the boundaries.
    """
    inner = np.random.default_rng(seed).choice(np.arange(1, tokens), min(documents, tokens) - 1, replace=False)
    lengths: list[int] = np.diff(np.concatenate([[0], np.sort(inner), [tokens]])).tolist()
    return lengths


def mask_makers(tokens: int, seed: int) -> dict[str, Callable[[], Mask]]:
    """Return functions that make the masks, by name.

    Args:
        tokens: The length of the sequence.
        seed: The seed of the documents.
    """
    lengths = document_lengths(tokens, 1000, seed)
    return {
        "causal": Mask.causal,
        "window": lambda: Mask.causal() & Mask.window(4 * TOKENS_A_RANK - 1, 0),
        "documents": lambda: Mask.causal() & Mask.documents(lengths),
    }


def run(worlds: Sequence[int], schedules: Sequence[str], documents: int, say: Say) -> Iterator[ScaleRow]:
    """Yield a row for each number of ranks, schedule and mask, and then for each layout of very many documents.

    Args:
        worlds: The numbers of ranks.
        schedules: The schedules; none means all of them.
        documents: The number of documents of the last part, in 16M tokens over 1,024 ranks; 0 leaves it out.
        say: A function that is called with progress messages.
    """
    for world in worlds:
        tokens = TOKENS_A_RANK * world
        for schedule in schedules or schedule_texts():
            for name in mask_makers(tokens, 0):
                say(f"{world:,} ranks, {schedule}, {name}")
                yield _programs(schedule, name, world, tokens)
    if documents:
        yield from _documents(documents, 2**24, 1024, say)


def _programs(schedule: str, name: str, world: int, tokens: int) -> ScaleRow:
    ranks = (0, world // 2, world - 1)
    layout = default_layout(schedule)(tokens, world)
    # every timed packing is new: no rank finds the tables of another one
    made = [mask_makers(tokens, seed)[name] for seed in range(1 + REPEATS * len(ranks))]
    cold, warm = [], []
    for n, rank in enumerate(ranks):
        times = []
        for _ in range(REPEATS):
            _clear_caches()
            times.append(_timed(partial(_build, schedule, layout, made[0], rank)))
        cold.append(min(times))
        others = made[1 + n * REPEATS : 1 + (n + 1) * REPEATS]
        warm.append(min(_timed(partial(_build, schedule, layout, make, rank)) for make in others))
    _clear_caches()
    tracemalloc.start()
    both = _build(schedule, layout, made[0], ranks[-1])
    megabytes = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return ScaleRow(
        part=PROGRAMS,
        name=schedule,
        mask=name,
        world=world,
        tokens=tokens,
        build_ms=statistics.median(cold),
        packing_ms=statistics.median(warm) if name == "documents" else None,
        megabytes=megabytes,
        steps=sum(len(program.steps) for program in both),
    )


def _build(schedule: str, layout: Layout, make: Callable[[], Mask], rank: int) -> list[Program]:
    """Build both programs of a rank, from its mask on."""
    problem = Problem(layout.ranges, layout.ranges, make(), HEADS, KV_HEADS)
    return [build(schedule, problem, rank, direction) for direction in DIRECTIONS]


def _documents(documents: int, tokens: int, world: int, say: Say) -> Iterator[ScaleRow]:
    """Yield the time of mask, layout and one rank's table of very many documents, for each layout."""
    lengths = document_lengths(tokens, documents, 0)
    rank = world - 1
    for name in ("contiguous", "zigzag", "balanced"):
        say(f"{documents:,} documents, {name}")
        times = []
        for _ in range(REPEATS):
            _clear_caches()
            begin = time.perf_counter()
            mask = Mask.causal() & Mask.documents(lengths)
            make = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag}
            layout = Layout.balanced(mask, tokens, world) if name == "balanced" else make[name](tokens, world)
            problem = Problem(layout.ranges, layout.ranges, mask)
            keys = [r for owner in problem.needed_from(rank) for r in layout.ranges[owner]]
            spans = len(worklist(mask, layout.ranges[rank], tuple(keys)).by_query.spans)
            times.append((time.perf_counter() - begin) * 1e3)
        yield ScaleRow(DOCUMENTS, name, f"{documents:,} documents", world, tokens, min(times), None, None, spans)


def _timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1e3


def _clear_caches() -> None:
    """Empty every cache of the core and of the schedules, so that the next build starts from nothing."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("meshflash.core.", "meshflash.schedules.")):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


COLUMNS = (
    Column("ranks", lambda row: f"{row['world']:,}"),
    Column("schedule\nor layout", "name", is_text=True),
    Column("mask", "mask", is_text=True),
    Column("steps\nor spans", lambda row: f"{row['steps']:,}"),
    Column("build\n(ms)", lambda row: f"{row['build_ms']:.1f}"),
    Column("packing\n(ms)", lambda row: "" if row["packing_ms"] is None else f"{row['packing_ms']:.1f}"),
    Column("memory\n(MB)", lambda row: "" if row["megabytes"] is None else f"{row['megabytes']:.1f}"),
)


def title(rows: Rows) -> str:
    """Return what was built, in words."""
    del rows
    return f"forward and backward programs of one rank, {TOKENS_A_RANK} tokens a rank"


BENCHMARK = one_table("scale", {"packing_ms", "megabytes"}, COLUMNS, title)
