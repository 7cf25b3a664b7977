"""Layouts: every position is held once, at any length on any number of ranks, and work is balanced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshflash.core.layout import MAX_RANGES_PER_RANK, Layout, positions
from meshflash.core.mask import Mask

LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "striped": Layout.striped,
    "balanced": lambda tokens, world: Layout.balanced(Mask.causal(), tokens, world),
    "balanced for two": lambda tokens, world: Layout.balanced([Mask.window(5, 2), Mask.causal()], tokens, world),
}


def split_evenly(tokens: int, pieces: int) -> list[list[int]]:
    """Cut positions from 0 into pieces of equal size; the first pieces take the remainder."""
    rest, out = list(range(tokens)), []
    for n in range(pieces):
        size = tokens // pieces + (n < tokens % pieces)
        out.append(rest[:size])
        rest = rest[size:]
    return out


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_hold_each_position_once(name: str) -> None:
    for tokens in range(41):
        for world in range(1, 10):
            layout = LAYOUTS[name](tokens, world)
            held = [p for rank in range(world) for p in layout.positions(rank).tolist()]
            assert sorted(held) == list(range(tokens))
            assert layout.name == name.split()[0]
            assert layout.world == world
            assert layout.tokens == tokens
            assert layout.lengths == tuple(len(layout.positions(rank)) for rank in range(world))
            for rank in range(world):
                assert layout.positions(rank).dtype == np.int64
                assert layout.positions(rank).tolist() == [p for r in layout.ranges[rank] for p in r]
                assert positions(layout, rank).tolist() == layout.positions(rank).tolist()
                assert all(len(r) for r in layout.ranges[rank])


def test_contiguous_zigzag_and_striped_match_their_definitions() -> None:
    for tokens in range(41):
        for world in range(1, 10):
            runs, pieces = split_evenly(tokens, world), split_evenly(tokens, 2 * world)
            contiguous, zigzag, striped = (
                make(tokens, world) for make in (Layout.contiguous, Layout.zigzag, Layout.striped)
            )
            for rank in range(world):
                assert contiguous.positions(rank).tolist() == runs[rank]
                assert zigzag.positions(rank).tolist() == pieces[rank] + pieces[2 * world - 1 - rank]
                assert striped.positions(rank).tolist() == list(range(rank, tokens, world))
                assert len(contiguous.ranges[rank]) <= 1
                assert len(zigzag.ranges[rank]) <= 2
                assert len(striped.ranges[rank]) <= 1
            assert max(contiguous.lengths) - min(contiguous.lengths) <= 1
            assert max(striped.lengths) - min(striped.lengths) <= 1
            assert max(zigzag.lengths) - min(zigzag.lengths) <= 1


def test_neighbouring_ranges_are_merged() -> None:
    assert Layout.zigzag(8, 1).ranges == ((range(8),),)
    assert Layout.zigzag(16, 4).ranges[3] == (range(6, 10),)
    assert Layout.balanced(Mask.full(), 16, 1).ranges == ((range(16),),)


def test_ranks_may_hold_no_positions() -> None:
    assert Layout.contiguous(2, 3).ranges == ((range(1),), (range(1, 2),), ())
    assert Layout.striped(0, 2).ranges == ((), ())
    assert Layout.contiguous(0, 1).positions(0).tolist() == []
    assert Layout((((range(3),)), ())).lengths == (3, 0)


def loads(layout: Layout, mask: Mask) -> npt.NDArray[np.float64]:
    """Return the visible pairs of each rank over the mean, counted query by query."""
    j = np.arange(layout.tokens)
    rows = range(mask.batch_rows or 1)
    work = np.zeros(layout.world)
    for rank in range(layout.world):
        i = layout.positions(rank)
        work[rank] = sum(mask.visible(i[:, None], j[None, :], batch=b).sum() for b in rows)
    share: npt.NDArray[np.float64] = work / work.mean()
    return share


def random_lengths(tokens: int, count: int) -> list[int]:
    cuts = np.random.default_rng(1).choice(np.arange(1, tokens), count - 1, replace=False)
    return [int(n) for n in np.diff([0, *np.sort(cuts), tokens])]


TOKENS, WORLD = 4096, 8
MASKS = {
    "full": Mask.full(),
    "causal": Mask.causal(),
    "window": Mask.window(256, 0),
    "documents": Mask.documents(random_lengths(TOKENS, 12)),
    "causal documents": Mask.documents(random_lengths(TOKENS, 40)) & Mask.causal(),
    "rows": Mask.documents([random_lengths(TOKENS, 4), [TOKENS]]) & Mask.causal(),
    "prefix": Mask.causal() | Mask.first(500),
    "sinks": Mask.causal() & (Mask.window(128, 0) | Mask.first(4)),
}


@pytest.mark.parametrize("name", MASKS)
def test_balanced_ranks_have_equal_tokens_and_work(name: str) -> None:
    layout = Layout.balanced(MASKS[name], TOKENS, WORLD)
    assert max(layout.lengths) - min(layout.lengths) <= 1
    assert max(map(len, layout.ranges)) <= MAX_RANGES_PER_RANK
    assert loads(layout, MASKS[name]).max() <= 1.03


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("full", "contiguous"),
        ("causal", "zigzag"),
        ("window", "contiguous"),
        ("documents", "balanced"),
        ("causal documents", "balanced"),
        ("rows", "balanced"),
        ("prefix", "balanced"),
        ("sinks", "contiguous"),
    ],
)
def test_auto_takes_the_simplest_layout_of_equal_work(name: str, expected: str) -> None:
    layout = Layout.auto(MASKS[name], TOKENS, WORLD)
    assert layout.name == expected
    assert loads(layout, MASKS[name]).max() <= (1.05 if expected != "balanced" else 1.06)


def test_auto_balances_all_masks_of_a_model_and_the_best_it_can() -> None:
    assert Layout.auto([MASKS["window"], MASKS["causal"]], TOKENS, WORLD).name == "zigzag"
    assert Layout.auto(MASKS["causal"], TOKENS, 1).name == "contiguous"
    assert Layout.auto(MASKS["causal documents"], TOKENS, 1).name == "contiguous"
    assert Layout.auto(Mask.causal(), 0, 3).lengths == (0, 0, 0)
    for tokens in range(1, 12):  # too few tokens for equal work: no candidate is better
        best = min(loads(other(tokens, 4), Mask.causal()).max() for other in (Layout.contiguous, Layout.zigzag))
        assert loads(Layout.auto(Mask.causal(), tokens, 4), Mask.causal()).max() <= best
    with pytest.raises(ValueError, match=r"auto\(masks\): expected a mask"):
        Layout.auto([], TOKENS, WORLD)


@pytest.mark.parametrize(
    "names", [("causal", "window"), ("causal", "full", "documents"), ("causal documents", "sinks", "causal")]
)
def test_balanced_balances_several_masks_at_once(names: tuple[str, ...]) -> None:
    masks = [MASKS[name] for name in names]
    layout = Layout.balanced(masks, TOKENS, WORLD)
    assert layout == Layout.balanced(tuple(masks), TOKENS, WORLD)
    assert max(layout.lengths) - min(layout.lengths) <= 1
    for mask in masks:
        assert loads(layout, mask).max() <= 1.05


def test_balanced_stops_refining_at_the_goal() -> None:
    assert Layout.balanced(Mask.full(), 4096, 8).ranges == Layout.contiguous(4096, 8).ranges
    for tokens in (4096, 4100):
        assert max(map(len, Layout.balanced(Mask.causal(), tokens, 8).ranges)) == 2


def test_balanced_distributes_tokens_without_work() -> None:
    layout = Layout.balanced(Mask.documents([1024], pad=True) & Mask.causal(), TOKENS, WORLD)
    assert max(layout.lengths) - min(layout.lengths) <= 1


def test_balanced_ranks_hold_their_positions_in_order() -> None:
    for mask in MASKS.values():
        for ranges in Layout.balanced(mask, TOKENS, WORLD).ranges:
            assert list(ranges) == sorted(ranges, key=lambda r: r.start)


def test_balanced_has_less_imbalance_than_contiguous_and_zigzag() -> None:
    mask = MASKS["causal documents"]
    balanced = loads(Layout.balanced(mask, TOKENS, WORLD), mask).max()
    for other in (Layout.contiguous, Layout.zigzag):
        assert balanced < loads(other(TOKENS, WORLD), mask).max()


@given(st.integers(0, 300), st.integers(1, 9), st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_balanced_token_counts_differ_by_at_most_one_per_piece(tokens: int, world: int, left: int) -> None:
    layout = Layout.balanced([Mask.window(left, 0), Mask.causal()], tokens, world)
    assert max(layout.lengths) - min(layout.lengths) <= MAX_RANGES_PER_RANK


def test_layouts_are_hashable() -> None:
    for make in LAYOUTS.values():
        assert make(20, 3) == make(20, 3)
        assert hash(make(20, 3)) == hash(make(20, 3))
        assert make(20, 3) != make(20, 4)
        assert make(20, 3) != make(21, 3)
    assert Layout.striped(20, 3) != Layout.contiguous(20, 3)
    a, b = Layout(((range(2),), (range(2, 4),))), Layout(((range(2, 4),), (range(2),)))
    assert a != b
    assert len({a, b, Layout(a.ranges)}) == 2


def test_sizes_may_be_numpy_integers() -> None:
    size: Any = np.int32
    for make in LAYOUTS.values():
        assert make(size(20), size(3)) == make(20, 3)


def test_layout_from_user_ranges_keeps_their_order() -> None:
    layout = Layout(((range(8, 10), range(0, 8, 2)), (), (range(1, 8, 2),)))
    assert (layout.tokens, layout.world, layout.lengths) == (10, 3, (6, 0, 4))
    assert layout.name == "custom"
    assert positions(layout, 0).tolist() == [8, 9, 0, 2, 4, 6]
    assert positions(layout, 1).tolist() == []


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ((), r"Layout\(ranges\): expected at least one rank"),
        (((range(0),),), r"range\(0, 0\) is empty, runs backwards or begins below 0"),
        (((range(3, -1, -1),),), r"range\(3, -1, -1\) is empty, runs backwards or begins below 0"),
        (((range(-1, 3),),), r"range\(-1, 3\) is empty, runs backwards or begins below 0"),
        (
            ((range(3),), (range(3),)),
            r"each position once; position \d is held twice",
        ),
        (((range(3),), (range(4, 6),)), r"once; position 3 is missing"),
        (((range(1, 4),),), r"once; position 0 is missing"),
        (((range(0, 6, 2),), (range(3, 6, 2),)), r"once; position 1 is missing"),
        (((range(0, 9, 3),), (range(1, 9, 3),)), r"once; position 2 is missing"),
        (((range(0, 9, 3),), (range(1, 9, 3),), (range(2, 4, 3),)), r"once; position 5 is missing"),
        (((range(0, 6, 2),), (range(0, 6, 2),)), r"once; position \d is held twice"),
    ],
)
def test_invalid_layouts_are_refused(ranges: tuple[tuple[range, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(ranges)


def test_error_names_the_position_that_is_held_twice() -> None:
    with pytest.raises(ValueError, match="position 2 is held twice"):
        Layout(((range(3),), (range(2, 4),)))


@pytest.mark.parametrize("ranges", [(range(4), range(4, 8)), ((0, 1), (2, 3)), range(4)], ids=str)
def test_layout_refuses_ranks_without_a_list_of_ranges(ranges: Any) -> None:
    with pytest.raises(ValueError, match=r"Layout\(ranges\)"):
        Layout(ranges)


def test_layout_accepts_lists_of_ranges() -> None:
    lists: Any = [[range(4)], []]
    assert hash(Layout(lists)) == hash(Layout(((range(4),), ())))
    assert Layout(lists) == Layout(((range(4),), ()))


@pytest.mark.parametrize("name", LAYOUTS)
def test_impossible_sizes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"Layout\(tokens=-1\): expected a length >= 0"):
        LAYOUTS[name](-1, 2)
    for world in (0, -3):
        with pytest.raises(ValueError, match=rf"Layout\(world={world}\): expected at least one rank"):
            LAYOUTS[name](8, world)


def test_balanced_refuses_masks_of_another_length() -> None:
    with pytest.raises(ValueError, match=r"balanced\(masks\): expected a mask, or a list of masks"):
        Layout.balanced([], 8, 2)
    with pytest.raises(ValueError, match="5 tokens in the documents, 8 in the sequence"):
        Layout.balanced([Mask.causal(), Mask.documents([2, 3])], 8, 2)
    with pytest.raises(ValueError, match="must hold exactly one documents"):
        Layout.balanced(Mask.first(2, per_document=True), 8, 2)


@pytest.mark.parametrize("rank", [-1, 2, 100])
def test_positions_refuses_ranks_outside_the_layout(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"positions\(rank={rank}\): expected a rank from 0 to 1"):
        positions(Layout.contiguous(8, 2), rank)


def test_balanced_keeps_token_counts_even_with_much_padding() -> None:
    mask = Mask.documents([10], pad=True) & Mask.causal()
    lengths = Layout.balanced(mask, 100, 8).lengths
    assert max(lengths) - min(lengths) <= 2


def test_layouts_with_different_names_are_equal() -> None:
    assert Layout.contiguous(8, 1) == Layout.zigzag(8, 1)
    assert hash(Layout.contiguous(8, 1)) == hash(Layout.zigzag(8, 1))


@pytest.mark.parametrize("make", [Layout.contiguous, Layout.zigzag, Layout.striped])
def test_sizes_that_are_not_integers_are_refused(make: Callable[[Any, Any], Layout]) -> None:
    with pytest.raises(ValueError, match=r"Layout\(tokens\): expected an integer, got 10.0"):
        make(10.0, 2)
    with pytest.raises(ValueError, match=r"Layout\(world\): expected an integer, got '2'"):
        make(10, "2")


def test_balanced_refuses_arguments_that_are_not_masks() -> None:
    with pytest.raises(ValueError, match=r"balanced\(masks\): expected a mask, or a list of masks"):
        Layout.balanced("causal", 8, 1)  # type: ignore[arg-type]
