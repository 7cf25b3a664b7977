"""Attention cases that every kernel must pass: masks, shapes and features, at small and odd sizes."""

from __future__ import annotations

from meshflash import Mask
from meshflash.check.oracle import Case

CAUSAL = Mask.causal()

#: Maps a name to (case, is it supported by the vendor kernel in float32, is it supported in half precision).
CASES = {
    "full": (Case(), True, True),
    "causal": (Case(CAUSAL), True, True),
    "length 1": (Case(CAUSAL, tokens=1), True, True),
    "length 0": (Case(CAUSAL, tokens=0), True, True),
    "no keys": (Case(tokens=5, k_tokens=0), True, True),
    "long and odd": (Case(CAUSAL, batch=1, tokens=613, heads=1), True, True),
    "gqa": (Case(CAUSAL, heads=6, kv_heads=2), True, True),
    "mqa": (Case(CAUSAL, heads=3, kv_heads=1), True, True),
    "dim 8": (Case(CAUSAL, dim=8), True, True),
    "dim 40": (Case(CAUSAL, dim=40), True, True),
    "dim 80": (Case(CAUSAL, dim=80), True, True),
    "dim 96": (Case(CAUSAL, dim=96), True, True),
    "dim 192": (Case(CAUSAL, dim=192), True, True),
    "dim 256": (Case(CAUSAL, dim=256), True, True),
    "smaller value dim": (Case(CAUSAL, dim=24, value_dim=16), False, False),
    "larger value dim": (Case(CAUSAL, dim=16, value_dim=40, heads=4, kv_heads=2), False, False),
    "scale": (Case(CAUSAL, scale=0.7), True, True),
    "scale 0": (Case(scale=0.0), True, True),
    "negative scale": (Case(CAUSAL, scale=-0.4), False, False),
    "batch 0": (Case(CAUSAL & Mask.window(4, 0), batch=0, heads=4, kv_heads=2), False, False),
    "softcap": (Case(CAUSAL, softcap=2.0), False, False),
    "alibi": (Case(CAUSAL, alibi=True, heads=4, kv_heads=2), False, False),
    "alibi, full": (Case(alibi=True), False, False),
    "sinks": (Case(CAUSAL, sinks=True, heads=4, kv_heads=2), True, False),
    "dropout": (Case(CAUSAL, dropout=0.3, heads=4, kv_heads=2), False, False),
    "lse gradient": (Case(CAUSAL, lse_gradient=True, heads=4, kv_heads=2), False, False),
    "documents": (Case(CAUSAL & Mask.documents([5, 0, 20, 12])), True, True),
    "bidirectional documents": (Case(Mask.documents([1, 30, 6])), True, True),
    "documents by row": (Case(CAUSAL & Mask.documents([[5, 32], [37]])), True, True),
    "documents and padding": (Case(CAUSAL & Mask.documents([[5, 20], [30]], pad=True)), True, True),
    "one document in one row": (Case(CAUSAL & Mask.documents([[37], [0]], pad=True)), True, True),
    "one document in one row, sinks": (Case(Mask.documents([[37], [0]], pad=True), sinks=True), True, False),
    "cross documents in one row": (
        Case(Mask.documents([[37], [37]], k_lengths=[[20], [0]], pad=True), k_tokens=29),
        True,
        True,
    ),
    "cross documents": (Case(Mask.documents([7, 30], k_lengths=[20, 9]), k_tokens=29), True, True),
    "window": (Case(Mask.window(5, 3)), False, False),
    "causal window": (Case(CAUSAL & Mask.window(7, 0)), False, False),
    "prefix": (Case(CAUSAL | Mask.first(11)), True, False),
    "sink tokens": (Case(CAUSAL & (Mask.window(6, 0) | Mask.first(4))), False, False),
    "sink tokens by document": (
        Case(
            Mask.documents([9, 28]) & CAUSAL & (Mask.window(6, 0) | Mask.first(2, per_document=True)),
            heads=4,
            kv_heads=2,
        ),
        False,
        False,
    ),
    "slices": (
        Case(
            Mask.slices(
                [[(0, 15), (9, 30), (30, 37)], [(3, 30)]],
                [[(0, 15), (5, 33), (0, 37)], [(0, 37)]],
                [["causal", "bi_causal", "full"], ["inv_causal"]],
            ),
            heads=4,
            kv_heads=2,
        ),
        False,
        False,
    ),
    "more keys": (Case(CAUSAL, tokens=13, k_tokens=37), True, True),
    "fewer keys": (Case(CAUSAL, tokens=37, k_tokens=13), True, True),
    "decoding": (Case(CAUSAL, tokens=1, k_tokens=37, q_offset=36), True, True),
    "queries aligned with the last keys": (Case(CAUSAL, tokens=13, k_tokens=37, q_offset=24), True, False),
    "empty rows": (Case(Mask.window(None, 0) & Mask.window(4, None), tokens=37, k_tokens=20), False, False),
    "everything": (
        Case(
            Mask.documents([[9, 28], [36]], pad=True) & CAUSAL & (Mask.window(6, 0) | Mask.first(3)),
            heads=6,
            kv_heads=2,
            dim=24,
            value_dim=40,
            scale=0.4,
            softcap=3.0,
            sinks=True,
            alibi=True,
            dropout=0.2,
            lse_gradient=True,
        ),
        False,
        False,
    ),
}

#: At least one schedule of each family; tests over several ranks run all of them.
SCHEDULES = (
    "ring",
    "zigzag",
    "striped",
    "allgather",
    "allgather(head_stride=1)",
    "ringx1",
    "ringx4",
    "ulysses",
    "double_ring",
)
