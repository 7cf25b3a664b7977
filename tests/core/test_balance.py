"""Work of pieces against a count of each query, and the dealing of pieces against its definition."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from meshflash.core.balance import deal, pairs_before
from meshflash.core.layout import MAX_RANGES_PER_RANK, Layout
from meshflash.core.mask import Mask
from meshflash.core.tiles import visible_per_query

TOKENS = 60
CAUSAL = Mask.causal()
MASKS = {
    "full": Mask.full(),
    "causal": CAUSAL,
    "window": Mask.window(7, 3),
    "prefix": CAUSAL | Mask.first(20),
    "sinks": CAUSAL & (Mask.window(5, 0) | Mask.first(3)),
    "documents": CAUSAL & Mask.documents([5, 0, 30, 1, 24]),
    "rows": Mask.documents([[10, 50], [60, 0], [20, 40]]),
    "padding": CAUSAL & Mask.documents([[10, 20], [55, 0]], pad=True),
    "first of documents": Mask.documents([20, 40]) & (Mask.window(2, 2) | Mask.first(3, per_document=True)),
}


@pytest.mark.parametrize("name", MASKS)
def test_pairs_before_each_cut_equal_the_keys_that_the_queries_see(name: str) -> None:
    counts = visible_per_query(MASKS[name], TOKENS)
    cuts = list(range(TOKENS + 1))
    assert pairs_before(MASKS[name], TOKENS, cuts).tolist() == [int(counts[:cut].sum()) for cut in cuts]


def test_pairs_before_counts_an_empty_sequence_and_refuses_other_lengths() -> None:
    assert pairs_before(CAUSAL, 0, [0, 0]).tolist() == [0, 0]
    with pytest.raises(ValueError, match="5 tokens in the documents, 6 in the sequence"):
        pairs_before(Mask.documents([2, 3]), 6, [0, 6])


def deal_one_by_one(weight: npt.NDArray[np.float64], world: int, per_rank: int) -> list[list[int]]:
    """Deal pieces by comparing all ranks for each of them."""
    load = np.zeros((world, len(weight)))
    held: list[list[int]] = [[] for _ in range(world)]
    for piece in np.argsort(-weight.sum(axis=0), kind="stable"):
        candidates = [rank for rank in range(world) if len(held[rank]) < per_rank]
        rank = min(candidates, key=lambda r: float((load[r] + weight[:, piece]).max()))
        held[rank].append(int(piece))
        load[rank] += weight[:, piece]
    return held


@pytest.mark.parametrize("num_masks", [1, 2])
def test_deal_gives_each_piece_to_the_first_of_the_least_loaded_ranks(num_masks: int) -> None:
    rng = np.random.default_rng(7)
    for world in (1, 2, 5, 16):
        for per_rank in (1, 2, 8):
            shape = (num_masks, world * per_rank)
            # Few different weights, some of them 0, give many ties; thirds round differently by the order of sums.
            for weight in (rng.random(shape), rng.integers(0, 3, shape) / 3, np.ones(shape) / 3, np.zeros(shape)):
                held, largest = deal(weight, world, per_rank)
                assert held == deal_one_by_one(weight, world, per_rank)
                loads = [sum((weight[:, p] for p in taken), np.zeros(num_masks)).max() for taken in held]
                assert largest == max(loads)


def test_balanced_layout_of_many_ranks_has_equal_tokens_and_work() -> None:
    tokens, world = 1 << 20, 1024
    cuts = np.sort(np.random.default_rng(1).choice(np.arange(1, tokens), 999, replace=False))
    mask = CAUSAL & Mask.documents(np.diff([0, *cuts.tolist(), tokens]))
    layout = Layout.balanced(mask, tokens, world)
    assert set(layout.lengths) == {tokens // world}
    assert max(map(len, layout.ranges)) <= MAX_RANGES_PER_RANK
    ends = [edge for held in layout.ranges for r in held for edge in (r.start, r.stop)]
    pairs = np.diff(pairs_before(mask, tokens, ends).reshape(-1, 2), axis=1)[:, 0]
    rank = np.repeat(np.arange(world), [len(held) for held in layout.ranges])
    work = np.bincount(rank, pairs, minlength=world)
    assert work.max() <= 1.1 * work.mean()
