"""How long a worklist takes to build: one rank's rows of a packed sequence against all keys, by layout."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from benchmarks.protocol import Rows, one_table
from meshflash.bench.columns import Column
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.tiles import Worklist

LAYOUTS = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag, "striped": Layout.striped}


@dataclass(frozen=True)
class TilesRow:
    """One layout: the median milliseconds over ranks for the table by query, over one rank's keys and over all."""

    layout: str
    documents: int
    ranks: int
    tokens: int
    step_ms: float
    step_spans: int
    all_ms: float
    all_spans: int


def run(tokens: int, documents: int, ranks: int) -> Iterator[TilesRow]:
    """Yield a row for each layout of causal documents with random boundaries."""
    if documents > tokens:
        raise ValueError(f"{documents} documents do not fit in {tokens} tokens")
    inner = np.random.default_rng(0).choice(np.arange(1, tokens), documents - 1, replace=False)
    mask = Mask.causal() & Mask.from_cu_seqlens([0, *np.sort(inner).tolist(), tokens])
    for name, make in LAYOUTS.items():
        layout = make(tokens, ranks)
        every = tuple(chain.from_iterable(layout.ranges))
        _time(mask, layout.ranges[0], every)
        step = [_time(mask, own, own) for own in layout.ranges]
        whole = [_time(mask, own, every) for own in layout.ranges]
        (step_ms, step_spans), (all_ms, all_spans) = (
            (statistics.median(ms for ms, _ in times), max(spans for _, spans in times)) for times in (step, whole)
        )
        yield TilesRow(name, documents, ranks, tokens, step_ms, step_spans, all_ms, all_spans)


def _time(mask: Mask, q_ranges: tuple[range, ...], k_ranges: tuple[range, ...]) -> tuple[float, int]:
    work = Worklist(mask, q_ranges, k_ranges, exact_positions=False)
    start = time.perf_counter()
    spans = len(work.by_query.spans)
    return (time.perf_counter() - start) * 1e3, spans


COLUMNS = (
    Column("layout", "layout", is_text=True),
    Column("keys of one\nrank (ms)", lambda row: f"{row['step_ms']:.2f}"),
    Column("spans", lambda row: f"{row['step_spans']:,}"),
    Column("all keys\n(ms)", lambda row: f"{row['all_ms']:.2f}"),
    Column("spans", lambda row: f"{row['all_spans']:,}"),
)


def title(rows: Rows) -> str:
    """Return the packed sequence in words."""
    return f"{rows[0]['documents']} documents, {rows[0]['ranks']} ranks, {rows[0]['tokens']:,} tokens"


BENCHMARK = one_table("tiles", {"step_spans", "all_spans"}, COLUMNS, title)
