"""How the work of a product is shared out: tiles of the result, slices of their sums over K, programs.

Tiles that are shared have the first numbers: their slices lie in a row, tile after tile, and crews of programs take
equal runs of them, wherever a run begins or ends. The other tiles are whole, one program each, in turns. A program does
its whole tiles first, so that the sums of parts are still in the cache when they are added up. Plain arithmetic of
numbers >= 0: the kernel compiles these very functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: What a second part of a tile costs a program, in slices: its loads begin anew, and its sum goes to memory.
SEGMENT = 8
#: Slices that are counted in 32 bits, times the programs that share them.
MOST_SLICES = 2**31 - 1


def begin_of(program: int, crew: int, slices: int) -> int:
    """The first slice of a program, where each crew has so many slices; that of the next program is where it ends.

    >>> [begin_of(program, 4, 10) for program in range(6)]
    [0, 2, 5, 7, 10, 12]
    """
    return program // crew * slices + program % crew * slices // crew


def owner_of(at: int, crew: int, slices: int) -> int:
    """The program that has a slice.

    >>> [owner_of(at, 4, 10) for at in range(12)]
    [0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 4, 4]
    """
    return at // slices * crew + ((at % slices + 1) * crew - 1) // slices


def place_of(tile: int, rows: int, columns: int, group: int) -> tuple[int, int]:
    """The row and column of a tile: down `group` rows, then the next column, so that neighbours share what they load.

    >>> [place_of(tile, 3, 2, 2) for tile in range(6)]
    [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    """
    width = group * columns
    first = tile // width * group
    height = min(rows - first, group)
    return first + tile % width % height, tile % width // height


@dataclass(frozen=True)
class Partition:
    """Which program has which slices of which tiles.

    There are `rows` x `columns` tiles of `steps` slices each. The first `shared` of them are cut among crews of
    `crew` programs, each crew with an equal number of tiles; the rest go whole to the programs in turns.
    """

    rows: int
    columns: int
    steps: int
    programs: int
    crew: int
    shared: int

    @property
    def tiles(self) -> int:
        """How many there are."""
        return self.rows * self.columns

    @property
    def slices(self) -> int:
        """Those that a crew shares."""
        return self.shared * self.steps * self.crew // self.programs

    @property
    def long(self) -> bool:
        """Whether slices are to be counted in 64 bits."""
        return self.tiles * self.steps * self.crew > MOST_SLICES

    @property
    def slots(self) -> int:
        """Unfinished tiles that a program has at most: that of its first slice and that of its last."""
        return 0 if not self.shared else 1 if self.slices == self.steps else 2

    def segments(self, program: int) -> Iterator[tuple[int, int, int]]:
        """What a program does, in order: tile, first slice, and the slice before which it ends."""
        for tile in range(self.shared + program, self.tiles, self.programs):
            yield tile, 0, self.steps
        if self.shared:
            at, end = (begin_of(p, self.crew, self.slices) for p in (program, program + 1))
            while at < end:
                tile, first = divmod(at, self.steps)
                last = min(first + end - at, self.steps)
                yield tile, first, last
                at += last - first


def data_parallel(rows: int, columns: int, steps: int, programs: int) -> Partition:
    """Every tile whole."""
    programs = max(1, min(programs, rows * columns))
    return Partition(rows, columns, steps, programs, programs, 0)


def stream_k(rows: int, columns: int, steps: int, programs: int) -> Partition:
    """Full waves of whole tiles; what is left over is shared by all programs.

    So each program has the same number of slices, give or take one, and the same number of whole tiles. Where the
    tiles are full waves, nothing is shared. Less than a wave is cut into as many parts of each tile as there are
    programs for, if that leaves so few programs idle that others have no more than `SEGMENT` slices more.

    >>> split = stream_k(2, 3, 4, 4)
    >>> [list(split.segments(program)) for program in range(4)]
    [[(2, 0, 4), (0, 0, 2)], [(3, 0, 4), (0, 2, 4)], [(4, 0, 4), (1, 0, 2)], [(5, 0, 4), (1, 2, 4)]]
    """
    tiles = rows * columns
    waves, left = divmod(tiles, programs)
    if not left:
        return data_parallel(rows, columns, steps, programs)
    if not waves:
        programs = min(programs, tiles * steps)  # a program without a slice is none
        parts = programs // tiles
        if -(-steps // parts) - tiles * steps // programs <= SEGMENT:
            return split_k(rows, columns, steps, parts)
        return Partition(rows, columns, steps, programs, programs, tiles)
    shared = left if left * steps >= programs else left + programs
    return Partition(rows, columns, steps, programs, programs, shared)


def split_k(rows: int, columns: int, steps: int, parts: int) -> Partition:
    """Every tile in so many parts, or as many as it has slices, each for a program of its own."""
    tiles, parts = rows * columns, max(1, min(parts, steps))
    if parts == 1:
        return data_parallel(rows, columns, steps, tiles)
    return Partition(rows, columns, steps, tiles * parts, parts, tiles)
