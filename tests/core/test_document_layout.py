"""Whole documents on ranks: equal tokens and work, and fewer keys of other ranks than equal pieces need."""

from __future__ import annotations

import numpy as np
import pytest

from meshflash.core import document_layout
from meshflash.core import layout as layout_module
from meshflash.core.balance import deal, pairs_before
from meshflash.core.document_layout import _exchange, _level_tokens, place_documents, rows_moved
from meshflash.core.layout import BALANCE_GOAL, Layout
from meshflash.core.mask import Mask

CAUSAL = Mask.causal()


#: Equal pieces differ by a token each.
FEW = 16


def lengths_of(seed: int, tokens: int, median: float, sigma: float = 1.2) -> list[int]:
    """Return lognormal document lengths that add up to a number of tokens."""
    rng, out = np.random.default_rng(seed), list[int]()
    while tokens:
        out.append(min(tokens, max(1, int(rng.lognormal(np.log(median), sigma)))))
        tokens -= out[-1]
    return out


def load_of(mask: Mask, layout: Layout) -> float:
    """Return the work of the busiest rank, where 1 is the mean."""
    ends = [edge for held in layout.ranges for r in held for edge in (r.start, r.stop)]
    pairs = np.diff(pairs_before(mask, layout.tokens, ends).reshape(-1, 2), axis=1)[:, 0]
    rank = np.repeat(np.arange(layout.world), [len(held) for held in layout.ranges])
    work = np.bincount(rank, pairs, minlength=layout.world)
    return float(work.max() / work.mean())


@pytest.fixture
def equal_pieces(monkeypatch: pytest.MonkeyPatch):
    """Return a function that balances without placing documents."""

    def build(mask: Mask, tokens: int, world: int) -> Layout:
        with monkeypatch.context() as patch:
            patch.setattr(layout_module, "_document_cuts", lambda masks, tokens: np.array([0, tokens]))
            return Layout.balanced(mask, tokens, world)

    return build


@pytest.mark.parametrize("world", [2, 4, 7])
@pytest.mark.parametrize(("median", "gain"), [(40, 0.4), (300, 0.9), (3000, 1.0)])
def test_ranks_have_equal_tokens_and_work_and_need_fewer_keys(median, gain, world, equal_pieces) -> None:
    """`gain` is how many of the keys still have to move, on average over packings."""
    moved = []
    for seed in range(4):
        tokens = 16384 + seed
        mask = CAUSAL & Mask.documents(lengths_of(seed, tokens, median))
        layout, pieces = Layout.balanced(mask, tokens, world), equal_pieces(mask, tokens, world)
        assert max(layout.lengths) - min(layout.lengths) <= FEW
        assert load_of(mask, layout) <= max(BALANCE_GOAL, load_of(mask, pieces)) + 1e-9
        moved.append(rows_moved([mask], layout.ranges) / rows_moved([mask], pieces.ranges))
        assert max(map(len, layout.ranges)) <= document_layout.MAX_RANGES
    assert np.mean(moved) <= gain


@pytest.mark.parametrize("median", [40, 300])
def test_short_documents_move_almost_nothing(median, equal_pieces) -> None:
    tokens, world = 32768, 4
    mask = CAUSAL & Mask.documents(lengths_of(1, tokens, median, sigma=0.6))
    moved = rows_moved([mask], Layout.balanced(mask, tokens, world).ranges)
    assert moved <= 0.02 * tokens / world
    assert moved < 0.2 * rows_moved([mask], equal_pieces(mask, tokens, world).ranges)


def test_documents_of_two_sizes_are_placed_as_they_fit() -> None:
    """Each rank gets one long document, which is as much work as the others, and the same number of short ones."""
    lengths = [1000, 100, 100] * 4
    mask = CAUSAL & Mask.documents(lengths)
    layout = Layout.balanced(mask, sum(lengths), 4)
    assert layout.lengths == (1200,) * 4
    assert rows_moved([mask], layout.ranges) == 0
    assert load_of(mask, layout) == 1.0


def test_a_document_that_is_too_long_is_cut_in_pairs_of_pieces() -> None:
    lengths = [10, 5000, *[500] * 10, 490]
    mask = CAUSAL & Mask.documents(lengths)
    cuts = np.cumsum([0, *lengths])
    assert place_documents([mask], cuts, 4, 1.0001) is None
    placed = place_documents([mask], cuts, 4, 1.03) or []
    assert load_of(mask, Layout(tuple(map(tuple, placed)))) <= 1.03
    assert [sum(map(len, held)) for held in placed] == [2625] * 4
    assert all(any(10 <= r.start < 5010 for r in held) for held in placed)


def test_documents_are_not_placed_where_no_rank_can_hold_most_of_them() -> None:
    assert place_documents([CAUSAL & Mask.documents([9000, 1000])], np.array([0, 9000, 10000]), 4, 1.5) is None


@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL & Mask.documents([30, 0, 70, 1, 1, 98]),
        CAUSAL & Mask.documents([30, 70], pad=True),
        Mask.documents([100, 50, 50]),
        CAUSAL & Mask.window(16, 0) & Mask.documents([150, 50]),
        CAUSAL & Mask.documents([1] * 200),
        CAUSAL & (Mask.documents([150, 50]) | Mask.first(4)),
        CAUSAL & Mask.documents([[150, 50], [100, 100]]),
        CAUSAL & Mask.documents([200]),
        CAUSAL & Mask.documents([0, 0, 0], pad=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("world", [1, 2, 3, 64])
def test_any_documents_can_be_balanced(mask: Mask, world: int) -> None:
    layout = Layout.balanced(mask, 200, world)
    assert layout.tokens == 200
    assert max(layout.lengths) - min(layout.lengths) <= FEW


def test_masks_of_all_layers_are_balanced() -> None:
    lengths = lengths_of(3, 16384, 600)
    masks = [CAUSAL & Mask.documents(lengths), CAUSAL & Mask.window(200, 0) & Mask.documents(lengths)]
    layout = Layout.balanced(masks, 16384, 4)
    assert max(load_of(mask, layout) for mask in masks) <= 1.02


def test_tokens_are_levelled_by_moving_heads_of_ranges() -> None:
    held = [[range(100), range(300, 330)], [range(100, 120)], [range(120, 300)], []]
    _level_tokens(held, 330)
    assert sorted(sum(map(len, taken)) for taken in held) == [82, 82, 83, 83]
    assert sorted(n for taken in held for r in taken for n in r) == list(range(330))
    assert held[0][0].stop == 100
    assert any(r.stop == 300 for r in held[2])
    rng = np.random.default_rng(0)
    for world in (2, 3, 9):
        cuts = sorted(rng.choice(np.arange(1, 500), 40, replace=False).tolist())
        held = [[] for _ in range(world)]
        for a, b in zip([0, *cuts], [*cuts, 500], strict=True):
            held[rng.integers(world)].append(range(a, b))
        _level_tokens(held, 500)
        lengths = [sum(map(len, taken)) for taken in held]
        assert max(lengths) - min(lengths) <= 1
        assert sorted(n for taken in held for r in taken for n in r) == list(range(500))


def test_exchanges_even_out_what_dealing_leaves_uneven() -> None:
    rng = np.random.default_rng(5)
    for world in (2, 4, 9):
        weight = rng.lognormal(0.0, 1.0, (2, 12 * world))
        weight *= world / weight.sum(axis=1, keepdims=True)
        held, before = deal(weight, world, 12 * world)
        _exchange(weight, held, 1.01)
        after = max(float(weight[:, taken].sum(axis=1).max()) for taken in held)
        assert sorted(piece for taken in held for piece in taken) == list(range(12 * world))
        assert after < 1 + 0.6 * (before - 1)


def test_documents_are_not_placed_on_very_many_ranks() -> None:
    most = document_layout.MAX_RANKS
    lengths = [16] * (8 * most)
    masks, cuts = [CAUSAL & Mask.documents(lengths)], np.cumsum([0, *lengths])
    assert place_documents(masks, cuts, most, 1.01) is not None
    assert place_documents(masks, cuts, most + 1, 1.5) is None


def test_keys_of_other_ranks_are_counted() -> None:
    mask = CAUSAL & Mask.documents([6, 4])
    assert rows_moved([mask], [[range(6)], [range(6, 10)]]) == 0
    assert rows_moved([mask], [[range(5)], [range(5, 10)]]) == 5
    assert rows_moved([mask, CAUSAL & Mask.window(2, 0)], [[range(6)], [range(6, 10)]]) == 2
