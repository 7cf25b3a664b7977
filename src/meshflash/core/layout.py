"""Layouts: which positions of a sequence each rank holds, as ranges with a step.

Any length on any number of ranks: shards may differ in size or be empty, and no size has to divide another. Moving data
into a layout is not done here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from meshflash.core.balance import deal, pairs_before
from meshflash.core.document_layout import place_documents, rows_moved
from meshflash.core.lengths import Array, as_integer
from meshflash.core.mask import Mask

#: `balanced` stops refining once the load of the busiest rank over the mean load is at most this.
BALANCE_GOAL = 1.01
#: ... or once a rank would hold more than this many ranges.
MAX_RANGES_PER_RANK = 16
#: ... or once pieces would have fewer tokens: one token more or less in each would unbalance the ranks.
MIN_PIECE = 8
#: `auto` takes a layout whose busiest rank has at most this much work, where 1 is the mean.
AUTO_GOAL = 1.05
#: Whole documents are placed if the rank that needs the most keys of others then needs less than this fraction of them.
PLACED_GAIN = 0.9


@dataclass(frozen=True)
class Layout:
    """Which positions of a sequence each rank holds, in the order of its local rows.

    Args:
        ranges: For each rank, its ranges of positions. All ranks together hold each position once.
        name: The name of the layout, for people.

    >>> Layout.zigzag(10, 2).ranges
    ((range(0, 3), range(8, 10)), (range(3, 8),))
    """

    ranges: tuple[tuple[range, ...], ...]
    name: str = field(default="custom", compare=False)
    #: Computed at construction: torch.compile reads it, and guards on this field alone. Layouts whose name and sizes
    #: describe them completely are made with a short text.
    _text: str = field(default="", kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "ranges", tuple(tuple(held) for held in self.ranges))
        except TypeError as error:
            raise ValueError("Layout(ranges): expected a list of ranges for each rank") from error
        if not self.ranges:
            raise ValueError("Layout(ranges): expected at least one rank")
        runs = [r for held in self.ranges for r in held]
        for r in runs:
            if not isinstance(r, range):
                raise ValueError(f"Layout(ranges): expected a list of ranges for each rank, found {r!r} in one")
            if r.step < 1 or r.start < 0 or not len(r):
                raise ValueError(f"Layout(ranges): {r} is empty, runs backwards or begins below 0")
        if not self._text:
            lists = (", ".join([f"[{r.start}, {r.stop}, {r.step}]" for r in held]) for held in self.ranges)
            text = "[" + ", ".join(f"[{ranges}]" for ranges in lists) + "]"
            named = self.name != "custom" and self.name.isidentifier()
            object.__setattr__(self, "_text", f"{self.name} {text}" if named else text)
        runs = sorted(runs, key=lambda r: r.start)
        if _follow_each_other(runs) or _interleave(runs):
            return
        held = np.sort(_expand(runs))
        wrong = np.flatnonzero(held != np.arange(len(held)))
        if len(wrong):
            place, found = int(wrong[0]), int(held[wrong[0]])
            fault = f"{found} is held twice" if found < place else f"{place} is missing"
            raise ValueError(f"Layout(ranges): the ranks must hold each position once; position {fault}")

    @cached_property
    def _hash(self) -> int:
        return hash(self.ranges)

    def __hash__(self) -> int:
        # Calls look up their layout in caches, and thousands of ranks have many ranges.
        return self._hash

    @property
    def tokens(self) -> int:
        """The length of the whole sequence."""
        return sum(self.lengths)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.ranges)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of positions of each rank."""
        return tuple(sum(len(r) for r in held) for held in self.ranges)

    def positions(self, rank: int) -> Array:
        """Return the positions of a rank's rows, in local order.

        Args:
            rank: The number of a rank, from 0.
        """
        return _expand(self.ranges[rank])

    def text(self) -> str:
        """Return this layout as a short text, for `parse`.

        >>> Layout.zigzag(10, 2).text(), Layout(((range(1, 2),), (range(0, 1),))).text()
        ('zigzag 10 2', '[[[1, 2, 1]], [[0, 1, 1]]]')
        """
        return self._text

    @staticmethod
    def parse(text: str) -> Layout:
        """Return the layout that `text` describes.

        Args:
            text: A layout in the format of `Layout.text`.

        >>> Layout.parse("striped 5 2") == Layout.striped(5, 2)
        True
        """
        name, _, rest = text.partition(" ")
        if name in _NAMED and not rest.startswith("["):
            tokens, world = map(int, rest.split())
            return _NAMED[name](tokens, world)
        name, rest = ("custom", text) if text.startswith("[") else (name, rest)
        return Layout(tuple(tuple(range(*r) for r in held) for held in json.loads(rest)), name)

    @staticmethod
    def contiguous(tokens: int, world: int) -> Layout:
        """Each rank holds one contiguous range of the sequence.

        Args:
            tokens: The length of the sequence.
            world: The number of ranks.

        >>> Layout.contiguous(5, 2).ranges
        ((range(0, 3),), (range(3, 5),))
        """
        tokens, world = _sizes(tokens, world)
        cuts = _even_cuts(tokens, world)
        return _layout("contiguous", [[range(cuts[r], cuts[r + 1])] for r in range(world)], tokens)

    @staticmethod
    def zigzag(tokens: int, world: int) -> Layout:
        """Rank r holds the r-th piece from the front and the r-th from the back: equal work under a causal mask.

        Args:
            tokens: The length of the sequence.
            world: The number of ranks.
        """
        tokens, world = _sizes(tokens, world)
        n = 2 * world
        cuts = _even_cuts(tokens, n)
        return _layout(
            "zigzag",
            [[range(cuts[r], cuts[r + 1]), range(cuts[n - 1 - r], cuts[n - r])] for r in range(world)],
            tokens,
        )

    @staticmethod
    def striped(tokens: int, world: int) -> Layout:
        """Rank r holds positions r, r + world, r + 2 * world, ...

        Args:
            tokens: The length of the sequence.
            world: The number of ranks.

        >>> Layout.striped(5, 2).ranges
        ((range(0, 5, 2),), (range(1, 5, 2),))
        """
        tokens, world = _sizes(tokens, world)
        return _layout("striped", [[range(r, tokens, world)] for r in range(world)], tokens)

    @staticmethod
    def balanced(masks: Mask | Sequence[Mask], tokens: int, world: int) -> Layout:
        """Balance tokens and work: ranks hold about equally many tokens, with equal work under each of the masks.

        The sequence is cut into equal pieces, dealt out heaviest first. Pieces get finer until the busiest rank
        is within 1% of the mean, or a rank would hold more than 16 ranges. On up to 128 ranks whole documents are
        placed instead, up to 64 ranges on each, if that balances as well and ranks need 10% fewer keys of others.

        Args:
            masks: The mask, or several masks if the layers of a model differ; each of them is balanced.
            tokens: The length of the sequence.
            world: The number of ranks.

        >>> Layout.balanced(Mask.causal(), 1024, 4).lengths
        (256, 256, 256, 256)
        """
        masks = _checked("balanced", masks, tokens)
        tokens, world = _sizes(tokens, world)
        best: list[list[int]] = []
        best_load, best_pieces = np.inf, 1
        pieces = 1
        while best_load > BALANCE_GOAL and pieces <= MAX_RANGES_PER_RANK:
            if best and tokens < MIN_PIECE * world * pieces:
                break
            candidate, load = _deal(masks, tokens, world, pieces)
            if load < best_load:
                best, best_load, best_pieces = candidate, load, pieces
            pieces *= 2
        cuts = _even_cuts(tokens, world * best_pieces)
        ranges = [[range(cuts[p], cuts[p + 1]) for p in sorted(held)] for held in best]
        documents = _document_cuts(masks, tokens)
        if len(documents) > 2 and world > 1:
            goal = max(BALANCE_GOAL, best_load)
            placed = place_documents(masks, documents, world, goal)
            if placed and rows_moved(masks, placed) < PLACED_GAIN * rows_moved(masks, ranges):
                ranges = placed
        return _layout("balanced", ranges)

    @staticmethod
    def auto(masks: Mask | Sequence[Mask], tokens: int, world: int) -> Layout:
        """Choose a layout by the work that masks give each rank.

        The first of these under which the busiest rank has at most 5% more work than the mean: contiguous, under which
        the fewest keys move if there is a window, zigzag, and `balanced`. If none has, as for a handful of tokens, the
        best one. For masks with documents it is always `balanced`: that keeps most of them whole.

        Args:
            masks: The mask, or several masks if the layers of a model differ.
            tokens: The length of the sequence.
            world: The number of ranks.

        >>> [Layout.auto(mask, 4096, 4).name for mask in (Mask.causal(), Mask.full(), Mask.window(99, 0))]
        ['zigzag', 'contiguous', 'contiguous']
        """
        masks = _checked("auto", masks, tokens)
        tokens, world = _sizes(tokens, world)
        if world > 1 and any(mask.has_documents for mask in masks):
            return Layout.balanced(masks, tokens, world)
        loads: dict[Layout, float] = {}
        for name in ("contiguous", "zigzag", "balanced"):
            layout = Layout.balanced(masks, tokens, world) if name == "balanced" else _NAMED[name](tokens, world)
            loads[layout] = busiest_load(layout, masks)
            if loads[layout] <= AUTO_GOAL:
                return layout
        return min(loads, key=lambda each: loads[each])


_NAMED = {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag, "striped": Layout.striped}


def positions(layout: Layout, rank: int) -> Array:
    """Return the positions of the tokens that a rank holds, in local order: for RoPE, labels and masks.

    Args:
        layout: The layout of the sequence.
        rank: The number of the rank, from 0.

    >>> positions(Layout.striped(5, 2), 1).tolist()
    [1, 3]
    """
    if not 0 <= as_integer(rank, "positions(rank)") < layout.world:
        raise ValueError(f"positions(rank={rank}): expected a rank from 0 to {layout.world - 1}")
    return layout.positions(rank)


def _checked(name: str, masks: Mask | Sequence[Mask], tokens: int) -> tuple[Mask, ...]:
    """Return the masks of a layout as a tuple; ValueError if they are none, or fit no sequence of this length."""
    masks = (masks,) if isinstance(masks, Mask) else tuple(masks)
    if not masks or not all(isinstance(mask, Mask) for mask in masks):
        raise ValueError(f"{name}(masks): expected a mask, or a list of masks; got {masks!r}")
    for mask in masks:
        mask.check(tokens, tokens, mask.batch_rows or 1)
    return masks


def busiest_load(layout: Layout, masks: Sequence[Mask]) -> float:
    """Return the largest work of any rank under any mask, where 1 is the mean.

    Args:
        layout: A layout whose ranges have no step.
        masks: The masks.

    >>> busiest_load(Layout.contiguous(4096, 4), [Mask.full()]), busiest_load(Layout.zigzag(4096, 4), [Mask.causal()])
    (1.0, 1.0)
    """
    tokens = layout.tokens
    cuts = sorted({0, tokens, *(end for held in layout.ranges for r in held for end in (r.start, r.stop))})
    at = {cut: n for n, cut in enumerate(cuts)}
    loads = [1.0]
    for mask in masks:
        before = pairs_before(mask, tokens, cuts)
        work = [sum(int(before[at[r.stop]] - before[at[r.start]]) for r in held) for held in layout.ranges]
        loads.append(max(work) * layout.world / max(1, sum(work)))
    return max(loads)


def _deal(masks: tuple[Mask, ...], tokens: int, world: int, pieces: int) -> tuple[list[list[int]], float]:
    """Deal `world * pieces` equal pieces, heaviest first, to the least loaded rank that has fewer than `pieces`.

    Return the pieces of each rank, and the largest load of any rank under any mask, where 1 is the mean.
    """
    cuts = _even_cuts(tokens, world * pieces)
    weight = np.stack([np.diff(pairs_before(mask, tokens, cuts)) for mask in masks]).astype(np.float64)
    totals = weight.sum(axis=1, keepdims=True)
    return deal(weight / np.where(totals == 0, 1, totals) * world, world, pieces)


def _document_cuts(masks: tuple[Mask, ...], tokens: int) -> Array:
    """Return where the documents of all masks begin, and the end of the sequence; padding counts as a document.

    Only [0, tokens] where there are none, where batch rows have documents of their own, or keys have others.
    """
    cuts = [np.array([0, tokens], np.int64)]
    for node in {node for mask in masks for node in mask.documents_nodes}:
        if node.rows is not None or node.k_lengths is not None:
            return cuts[0]
        cuts.append(node.q_cuts(0))
    return np.unique(np.concatenate(cuts))


def _layout(name: str, ranges: list[list[range]], tokens: int | None = None) -> Layout:
    """Build a layout; with `tokens`, its name and sizes describe it completely, which keeps its text short."""
    text = "" if tokens is None else f"{name} {tokens} {len(ranges)}"
    return Layout(tuple([tuple(_merge_neighbours(held)) for held in ranges]), name, _text=text)


def _merge_neighbours(ranges: list[range]) -> list[range]:
    """Drop empty ranges, and merge neighbouring ranges of step 1."""
    out: list[range] = []
    for r in ranges:
        if out and out[-1].step == r.step == 1 and out[-1].stop == r.start:
            out[-1] = range(out[-1].start, r.stop)
        elif len(r):
            out.append(r)
    return out


def _follow_each_other(runs: list[range]) -> bool:
    """Whether ranges of step 1, sorted by their start, hold each position once."""
    starts, stops = [r.start for r in runs], [r.stop for r in runs]
    return starts == [0, *stops[:-1]][: len(runs)] and all(r.step == 1 for r in runs)


def _interleave(runs: list[range]) -> bool:
    """Whether ranges with one step, sorted by their start, hold each position once: each holds one residue."""
    step = runs[0].step
    last = max(r[-1] for r in runs)
    return [r.start for r in runs] == list(range(min(step, last + 1))) and all(
        r.step == step and last - step < r[-1] for r in runs
    )


def _expand(ranges: Sequence[range]) -> Array:
    parts = [np.arange(r.start, r.stop, r.step, dtype=np.int64) for r in ranges]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _sizes(tokens: int, world: int) -> tuple[int, int]:
    tokens, world = as_integer(tokens, "Layout(tokens)"), as_integer(world, "Layout(world)")
    if tokens < 0:
        raise ValueError(f"Layout(tokens={tokens}): expected a length >= 0")
    if world < 1:
        raise ValueError(f"Layout(world={world}): expected at least one rank")
    return tokens, world


def _even_cuts(tokens: int, pieces: int) -> list[int]:
    size, extra = tokens // pieces, tokens % pieces  # not divmod, which torch.compile cannot read
    return [piece * size + min(piece, extra) for piece in range(pieces + 1)]
