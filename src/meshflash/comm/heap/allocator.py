"""First-fit allocation of byte ranges, without any memory behind it.

It is deterministic: the same calls in the same order give the same offsets. Ranks of a symmetric heap rely on this,
since they never exchange offsets.
"""

from __future__ import annotations

#: Alignment of allocations and of heaps, in bytes.
ALIGN = 256


class BlockAllocator:
    """Tracks which byte ranges of a heap are allocated; every `Heap` has one.

    >>> allocator = BlockAllocator(1024)
    >>> allocator.allocate(100, 256), allocator.allocate(10, 256), allocator.allocate(2000, 256)
    (0, 256, None)
    >>> allocator.release(0)
    >>> allocator.allocate(50, 16), allocator.used, allocator.peak
    (0, 60, 110)
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = self.peak = 0
        self._holes = [(0, size)]  # free ranges [begin, end), in order; no two of them touch
        self._sizes: dict[int, int] = {}  # sizes of allocated blocks by offset

    @property
    def largest(self) -> int:
        """Bytes of the largest free range."""
        return max((end - begin for begin, end in self._holes), default=0)

    def allocate(self, size: int, align: int) -> int | None:
        """Return the offset of a new block, a multiple of `align`; None if no free range has `size` bytes."""
        for number, (begin, end) in enumerate(self._holes):
            offset = -(-begin // align) * align
            if offset + size <= end:
                self._holes[number : number + 1] = [
                    hole for hole in ((begin, offset), (offset + size, end)) if hole[0] < hole[1]
                ]
                self._sizes[offset] = size
                self.used += size
                self.peak = max(self.peak, self.used)
                return offset
        return None

    def release(self, offset: int) -> None:
        """Free the block at an offset, and merge it with free ranges that touch it."""
        size = self._sizes.pop(offset)
        self.used -= size
        holes: list[tuple[int, int]] = []
        for begin, end in sorted([*self._holes, (offset, offset + size)]):
            if holes and holes[-1][1] == begin:
                holes[-1] = holes[-1][0], end
            else:
                holes.append((begin, end))
        self._holes = holes
