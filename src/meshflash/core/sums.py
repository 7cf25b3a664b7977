"""What the cells of the verifier's buffers refer to: sums of pairs as numbers, and symbols that are not known yet.

A result or gradient is a sum over pairs of queries and keys. Counting every pair of every cell would take rows x tokens
numbers for each buffer, so a cell holds the number of a sum instead. A sum is a leaf (what one step computes, or what a
message brings from a rank that is not looked at) or two earlier sums. `leaves` lists what a sum is made of, and
`covered` counts its pairs.

Symbols are unknown only where some ranks are not looked at. Their messages have rows of unknown tokens; the first step
that names the positions of such rows binds them, and every later step must agree.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from meshflash.core.coverage import Counts, Ints, index
from meshflash.core.mask import Mask
from meshflash.core.program import Interval, Ranges

#: The sum of nothing, and a sum of all visible pairs of its row, each once.
EMPTY, COMPLETE = 0, 1
#: Symbols up to this one are unknown: `FIRST_UNKNOWN - n` is the n-th unknown.
FIRST_UNKNOWN = -3


@dataclass(frozen=True, eq=False)
class Leaf:
    """What one step adds to each of its cells, or what one message brings. `SymbolTable` makes it."""

    #: The rank that computes it, or the rank that receives it.
    rank: int
    #: Where it comes from, for errors.
    source: str
    #: The symbols of its cells, [rows, heads].
    cells: Ints
    #: The kind of its rows: out, dq or dkv.
    kind: str
    #: The positions whose visible pairs with each cell's own row are in it; None for a message of unknown content.
    positions: Ranges | None = None
    #: The query heads of these pairs.
    heads: Interval = (0, 0)


class SymbolTable:
    """The sums and unknown symbols of one forward and its backward, of all ranks. `verify_programs` makes one.

    Args:
        mask: The mask under which pairs are counted.
    """

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        #: Sum -> a leaf, or two earlier sums; None for EMPTY and COMPLETE.
        self.nodes: list[Leaf | tuple[int, int] | None] = [None, None]
        self._sums: dict[tuple[int, int], int] = {}
        #: Unknown -> its symbol, or the unknown that it equals (itself if nothing is known of it).
        self._bound = np.zeros(0, np.int64)
        self._num_unknown = 0

    def leaf(self, leaf: Leaf) -> int:
        """Return the number of a new sum."""
        self.nodes.append(leaf)
        return len(self.nodes) - 1

    def add(self, a: Ints, b: Ints | int) -> Ints:
        """Return the sums of two arrays of sums, cell by cell."""
        if not a.size:
            return a
        size = len(self.nodes)
        codes = a * size + b
        first = int(codes.flat[0])
        if (codes == first).all():
            return np.full(codes.shape, self._add(*divmod(first, size)))
        pairs, inverse = np.unique(codes, return_inverse=True)
        added = np.array([self._add(*divmod(pair, size)) for pair in pairs.tolist()], np.int64)
        return np.asarray(added[inverse.reshape(codes.shape)])

    def _add(self, a: int, b: int) -> int:
        if EMPTY in (a, b):
            return a + b
        if (a, b) not in self._sums:
            self.nodes.append((a, b))
            self._sums[a, b] = len(self.nodes) - 1
        return self._sums[a, b]

    def leaves(self, number: int) -> dict[int, int]:
        """Return the leaves of a sum, and how often each is in it; COMPLETE is its own leaf.

        Args:
            number: The number of the sum.
        """
        times, out = {number: 1}, {}
        queue = [-number]  # largest first: a sum is larger than its parts, so each is complete when it is taken
        while queue:
            top = -heapq.heappop(queue)
            count, node = times.pop(top), self.nodes[top]
            if not isinstance(node, tuple):
                if top != EMPTY:
                    out[top] = count
                continue
            for part in node:
                if part not in times:
                    times[part] = 0
                    heapq.heappush(queue, -part)
                times[part] += count
        return out

    def covered(self, number: int, num_tokens: int, head: int | None = None) -> Counts | None:
        """Return how often a sum holds the pair of its row with each position; None if a part of it is unknown.

        Args:
            number: The number of the sum.
            num_tokens: The number of positions.
            head: The query head whose pairs count; all heads by default.
        """
        out = np.zeros(num_tokens, np.int16)
        for name, times in self.leaves(number).items():
            leaf = self.nodes[name]
            if name == COMPLETE:
                out += times
                continue
            assert isinstance(leaf, Leaf)
            if leaf.positions is None:
                return None
            if head is None or leaf.heads[0] <= head < leaf.heads[1]:
                for r in leaf.positions:
                    out[index(r)] += times
        return out

    def unknown(self, shape: tuple[int, int]) -> Ints:
        """Return new unknown symbols."""
        count = shape[0] * shape[1]
        new = FIRST_UNKNOWN - np.arange(self._num_unknown, self._num_unknown + count)
        if self._num_unknown + count > len(self._bound):
            grown = FIRST_UNKNOWN - np.arange(2 * (self._num_unknown + count))
            grown[: self._num_unknown] = self._bound[: self._num_unknown]
            self._bound = grown
        self._num_unknown += count
        return new.reshape(shape)

    def resolve(self, cells: Ints) -> Ints:
        """Return symbols with all that is known by now put in."""
        if not self._num_unknown:
            return cells
        while True:
            unknown = cells <= FIRST_UNKNOWN
            if not unknown.any():
                return cells
            found = cells.copy()
            found[unknown] = self._bound[FIRST_UNKNOWN - cells[unknown]]
            if np.array_equal(found, cells):
                return cells
            cells = found

    def unify(self, cells: Ints, wanted: Ints) -> tuple[Ints, Ints]:
        """Let unknown symbols be those on the other side, and return both sides as far as they are known.

        The caller compares the two: symbols that are known on both sides may differ.
        """
        while True:
            cells, wanted = self.resolve(cells), self.resolve(wanted)
            if not self._num_unknown:
                return cells, wanted
            # ZERO and UNDEFINED tell nothing about an unknown. Of two unknowns the newer becomes the older, so that
            # no cycle arises. Where one unknown meets two symbols, the next round compares these two.
            low, high = np.minimum(cells, wanted), np.maximum(cells, wanted)
            new = (low != high) & (low <= FIRST_UNKNOWN) & ((high >= 0) | (high <= FIRST_UNKNOWN))
            if not new.any():
                return cells, wanted
            self._bound[FIRST_UNKNOWN - low[new]] = high[new]
