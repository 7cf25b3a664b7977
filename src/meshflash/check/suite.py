"""What is checked: schedules, layouts, mask families and features with each other, or at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch

from meshflash.check.oracle import Case
from meshflash.check.spread import Item
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.schedules.registry import home, parse

#: As many tokens as no number of ranks divides.
TOKENS = 37
CAUSAL = Mask.causal()

#: Mask families, for a number of tokens.
MASKS: dict[str, Callable[[int], Mask]] = {
    "full": lambda n: Mask.full(),
    "causal": lambda n: CAUSAL,
    "window": lambda n: CAUSAL & Mask.window(n // 4, 0),
    "both sides": lambda n: Mask.window(n // 9, n // 6),
    "prefix": lambda n: CAUSAL | Mask.first(1 + n // 3),
    "sink tokens": lambda n: CAUSAL & (Mask.window(n // 6, 0) | Mask.first(1 + n // 9)),
    "documents": lambda n: CAUSAL & Mask.documents([n // 7, 0, n // 2, n - n // 7 - n // 2]),
    "documents by row": lambda n: Mask.documents([[n // 7, n - n // 7], [n, 0]]),
    "padding": lambda n: CAUSAL & Mask.documents([[n // 7, n // 2], [n - n // 5, 0]], pad=True),
}
#: Features, as changes to a plain case.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "gqa": dict(heads=4, kv_heads=2),
    "mqa": dict(heads=3, kv_heads=1),
    "value dim": dict(dim=24, value_dim=16),
    "scale, softcap": dict(scale=0.4, softcap=3.0),
    "sinks": dict(sinks=True, heads=4, kv_heads=2),
    "alibi": dict(alibi=True),
    "dropout": dict(dropout=0.3, heads=4, kv_heads=2),
    "lse gradient": dict(lse_gradient=True),
}
LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "striped": Layout.striped,
    "balanced": lambda n, world: Layout.balanced(CAUSAL, n, world),
}
QUICK_MASKS = ("full", "causal", "window", "documents by row")
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Check:
    """An item, and what it is called in a report."""

    layout: str
    mask: str
    features: str
    item: Item


def everything(
    schedules: Sequence[str], world: int, quick: bool = False, device: str = "cpu", transport: str = "auto"
) -> list[Check]:
    """Each schedule on each layout with each mask family and feature; dtypes by turns.

    Quickly: on the schedule's own layout, with some masks, features by turns.
    """
    out = []
    for schedule in schedules:
        own = home(schedule)(TOKENS, world).name
        if quick:
            features = list(FEATURES)
            turns = product([own], QUICK_MASKS, range(2))
            cells = [(layout, mask, features[n % len(features)]) for n, (layout, mask, _) in enumerate(turns)]
        else:
            cells = list(product(LAYOUTS, MASKS, FEATURES))
        for n, (layout, mask, feature) in enumerate(cells):
            case = replace(Case(MASKS[mask](TOKENS), tokens=TOKENS), **FEATURES[feature])
            held = LAYOUTS[layout](TOKENS, world)
            out.append(
                Check(
                    layout,
                    mask,
                    feature,
                    Item(case, schedule, world, DTYPES[n % 2], held, device=device, transport=transport),
                )
            )
    return out


def at_random(
    schedules: Sequence[str], world: int, count: int, seed: int, device: str = "cpu", transport: str = "auto"
) -> Iterator[Check]:
    """So many checks, the same ones for the same seed."""
    draw = random.Random(seed)
    for _ in range(count):
        tokens = draw.choice((1, 2, 3, 5, 7, draw.randint(8, 64), draw.randint(8, 64), draw.randint(64, 150)))
        mask, feature, layout = draw.choice(list(MASKS)), draw.choice(list(FEATURES)), draw.choice(list(LAYOUTS))
        case = replace(Case(MASKS[mask](tokens), tokens=tokens), **FEATURES[feature])
        if "row" not in mask and mask != "padding":
            case = replace(case, batch=draw.randint(1, 3))
        kv_heads = draw.randint(1, 4)
        case = replace(case, heads=kv_heads * draw.choice((1, 2, 3, 4)), kv_heads=kv_heads)
        lse_gradient, sinks = draw.random() < 0.2, draw.random() < 0.2
        case = replace(case, lse_gradient=case.lse_gradient or lse_gradient, sinks=case.sinks or sinks)
        held = LAYOUTS[layout](tokens, world)
        if draw.random() < 0.2:
            held = _scattered(draw, tokens, world)
            layout = "scattered"
        dtype = draw.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
        reduce = torch.bfloat16 if dtype == torch.bfloat16 and draw.random() < 0.3 else None
        schedule = _varied(draw, draw.choice(list(schedules)), world)
        item = Item(case, schedule, world, dtype, held, reduce_dtype=reduce, device=device, transport=transport)
        yield Check(layout, mask, feature, item)


def _varied(draw: random.Random, schedule: str, world: int) -> str:
    """A schedule with some options, where it was given without: numbers up to the ranks, names of other schedules."""
    found, _ = parse(schedule)
    if "(" in schedule and found.name != "hybrid":
        return schedule
    inner = draw.choice([n for n in range(1, world + 1) if world % n == 0])
    rings = ("ring", "zigzag", "striped", "allgather", "ringx1", "ringx3", "ringx4", "double_ring")
    values = {
        "inner": inner,
        "ring": draw.choice(rings),
        "turned": draw.random() < 0.5,
        "rounds": draw.randint(1, 3),
        "head_stride": draw.randint(0, 2),
        "chunks": draw.randint(1, 3),
    }
    options = [f"{key}={values.get(key, default)}" for key, default in found.options]
    return f"{found.name}({', '.join(options)})" if options else found.name


def _scattered(draw: random.Random, tokens: int, world: int) -> Layout:
    """Runs of tokens, dealt out to ranks at random; some ranks may get none."""
    cuts = sorted({0, tokens, *(draw.randint(0, tokens) for _ in range(2 * world))})
    held: list[list[range]] = [[] for _ in range(world)]
    for begin, end in pairwise(cuts):
        held[draw.randrange(world)].append(range(begin, end))
    for runs in held:
        draw.shuffle(runs)
    return Layout(tuple(tuple(runs) for runs in held))
