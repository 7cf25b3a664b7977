"""How long a worklist takes to build: one rank's rows of a packed sequence against all keys, by layout."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.tiles import Worklist

LAYOUTS = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag, "striped": Layout.striped}


@dataclass(frozen=True)
class TilesRow:
    """One layout: the median over ranks of the milliseconds for the table by query, against one rank's keys and all."""

    layout: str
    documents: int
    ranks: int
    tokens: int
    step_ms: float
    step_spans: int
    all_ms: float
    all_spans: int


def run(tokens: int, documents: int, ranks: int) -> Iterator[TilesRow]:
    """A row for each layout; causal documents with random borders."""
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
