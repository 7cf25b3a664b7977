"""The deterministic suite: all combinations of schedules, layouts, mask families and features. Random cases: `fuzz`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from meshflash.check.oracle import Case
from meshflash.check.spread import Item
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.schedules.registry import default_layout

#: A prime, so that shards are uneven on any number of ranks.
TOKENS = 37
CAUSAL = Mask.causal()

#: Mask families, as functions of the number of tokens.
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
    "image spans": lambda n: (
        CAUSAL | Mask.slices([(n // 9, n // 3), (n // 2, n - n // 6)], [(n // 9, n // 3), (n // 2, n - n // 6)])
    ),
    "slices by row": lambda n: Mask.slices(
        [[(0, n // 2), (n // 3, n)], [(n // 5, n)]],
        [[(0, n // 2), (n // 4, n - n // 8)], [(0, n - n // 5)]],
        [["causal", "bi_causal"], ["inv_causal"]],
    ),
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
    """An item, and its names in a report."""

    layout: str
    mask: str
    features: str
    item: Item


def everything(
    schedules: Sequence[str], world: int, quick: bool = False, device: str = "cpu", transport: str = "auto"
) -> list[Check]:
    """Return the checks of some schedules: every layout, mask family and feature; dtypes alternate.

    Args:
        schedules: The schedules to check.
        world: The number of ranks.
        quick: Take only each schedule's default layout and some masks, with features in rotation.
        device: The device type.
        transport: The transport.
    """
    out = []
    for schedule in schedules:
        own = default_layout(schedule)(TOKENS, world).name
        if quick:
            features = list(FEATURES)
            cases = product([own], QUICK_MASKS, range(2))
            cells = [(layout, mask, features[n % len(features)]) for n, (layout, mask, _) in enumerate(cases)]
        else:
            cells = list(product(LAYOUTS, MASKS, FEATURES))
        for n, (layout, mask, feature) in enumerate(cells):
            case = replace(Case(MASKS[mask](TOKENS), tokens=TOKENS), **FEATURES[feature])
            held = LAYOUTS[layout](TOKENS, world)
            item = Item(case, schedule, world, DTYPES[n % 2], held, device=device, transport=transport)
            out.append(Check(layout, mask, feature, item))
    return out


#: Lengths of a trial: full tiles only, a partial last tile, and a sequence shorter than a tile.
TRIAL_TOKENS = (512, 500, 63)


def trial_cases() -> Iterator[Case]:
    """Yield the calls that try a kernel on a GPU: head dims, masks, GQA, features, full and partial tiles."""
    causal = Mask.causal()
    for dim in (64, 128):
        for tokens in TRIAL_TOKENS:
            lengths = [tokens // 2, tokens - tokens // 2]
            for mask in (causal, Mask.full(), causal & Mask.window(100, 0), causal & Mask.documents(lengths)):
                yield Case(mask, tokens=tokens, heads=4, kv_heads=2, dim=dim)
        yield Case(causal, tokens=TRIAL_TOKENS[0], heads=4, dim=dim)
        yield Case(causal, tokens=TRIAL_TOKENS[0], heads=4, kv_heads=1, dim=dim, sinks=True)
    yield Case(causal, tokens=TRIAL_TOKENS[0], heads=4, kv_heads=2, dim=128, softcap=5.0)
