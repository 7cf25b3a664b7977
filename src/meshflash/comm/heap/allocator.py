"""Which bytes of a heap are taken: the first hole that is large enough, holes that touch are one.

Pure numbers: the same calls in the same order give the same places, so ranks need not tell each other where.
"""

from __future__ import annotations

#: Bytes that allocations, and heaps, begin at multiples of.
ALIGN = 256


class Blocks:
    """The places of blocks in so many bytes.

    >>> blocks = Blocks(1024)
    >>> blocks.take(100, 256), blocks.take(10, 256), blocks.take(2000, 256)
    (0, 256, None)
    >>> blocks.give(0)
    >>> blocks.take(50, 16), blocks.used, blocks.peak
    (0, 60, 110)
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = self.peak = 0
        self._holes = [(0, size)]
        self._taken: dict[int, int] = {}

    @property
    def largest(self) -> int:
        """Bytes of the largest hole."""
        return max((end - begin for begin, end in self._holes), default=0)

    def take(self, size: int, align: int) -> int | None:
        """Where a block of so many bytes begins, at a multiple of `align`; None where no hole is large enough."""
        for number, (begin, end) in enumerate(self._holes):
            place = -(-begin // align) * align
            if place + size <= end:
                self._holes[number : number + 1] = [
                    hole for hole in ((begin, place), (place + size, end)) if hole[0] < hole[1]
                ]
                self._taken[place] = size
                self.used += size
                self.peak = max(self.peak, self.used)
                return place
        return None

    def give(self, place: int) -> None:
        """Take back the block that begins here."""
        size = self._taken.pop(place)
        self.used -= size
        holes: list[tuple[int, int]] = []
        for begin, end in sorted([*self._holes, (place, place + size)]):
            if holes and holes[-1][1] == begin:
                holes[-1] = holes[-1][0], end
            else:
                holes.append((begin, end))
        self._holes = holes
