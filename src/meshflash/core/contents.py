"""Symbolic contents of buffers: what the verifier holds for each row and head instead of numbers (see `symbols.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshflash.core.coverage import Bools, Ints
from meshflash.core.program import Slice
from meshflash.core.sums import EMPTY, FIRST_UNKNOWN

#: Symbols besides `position * heads + head` (which is >= 0): a cell that was never written or whose value is spent, and
#: a cell that was set to zero and belongs to no token yet, so that anything may be added to it.
UNDEFINED, ZERO = -1, -2
assert FIRST_UNKNOWN < ZERO
#: Kinds whose rows are sums over pairs.
SUM_KINDS = frozenset({"out", "dq", "dkv"})


class VerificationError(ValueError):
    """A program is wrong. The message names the direction, the rank, the step and the fault."""


@dataclass(eq=False)
class Content:
    """The symbolic content of some rows and heads of a buffer. `Rank` makes one for each buffer."""

    #: [rows, heads]: the symbol of each cell
    cells: Ints
    #: out, dq, dkv: [rows, heads], the sum in each cell; else None
    sums: Ints | None
    #: [rows, heads]: whether a result is final, with sink logits in it
    finished: Bools
    #: [rows, heads]: whether the LSE of a result, or the delta of its gradient, is unknown here
    without_lse: Bools

    @staticmethod
    def empty(kind: str, rows: int, heads: int) -> Content:
        """Return the content of a new buffer: all cells UNDEFINED, all sums EMPTY.

        Args:
            kind: The kind of the buffer's rows.
            rows: The number of rows.
            heads: The number of heads.
        """
        sums = np.full((rows, heads), EMPTY) if kind in SUM_KINDS else None
        flags = [np.zeros((rows, heads), np.bool_) for _ in range(2)]
        return Content(np.full((rows, heads), UNDEFINED), sums, *flags)

    def at(self, place: Slice) -> Content:
        """Return some of these cells as a view: writing to it writes here."""
        index = place.index
        sums = None if self.sums is None else self.sums[index]
        return Content(self.cells[index], sums, self.finished[index], self.without_lse[index])

    def copy(self) -> Content:
        """Return a copy that shares no memory."""
        sums = None if self.sums is None else self.sums.copy()
        return Content(self.cells.copy(), sums, self.finished.copy(), self.without_lse.copy())

    def put(self, new: Content, without_lse: bool = False) -> None:
        """Overwrite these cells.

        Args:
            new: The content to copy.
            without_lse: Whether the rows travel without their LSE or delta, which are unknown afterwards.
        """
        self.cells[:], self.finished[:], self.without_lse[:] = new.cells, new.finished, new.without_lse | without_lse
        if self.sums is not None:
            assert new.sums is not None
            self.sums[:] = new.sums

    def clear(self) -> None:
        """Set all cells to ZERO: no token, no pairs."""
        self.cells[:], self.finished[:], self.without_lse[:] = ZERO, False, False
        if self.sums is not None:
            self.sums[:] = EMPTY


#: The kind and the content of a saved buffer.
Saved = tuple[str, Content]
