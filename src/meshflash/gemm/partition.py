"""Divide a GEMM among CTAs: output tiles, the K iterations of each tile, and which CTA runs which of them.

A tile is one output block; a K iteration multiplies one BLOCK_K-deep slice of it. Tiles 0 .. `num_split_tiles` - 1 are
split along K: their iterations form one line, tile after tile, and groups of CTAs take equal runs of it. A run may
begin or end inside a tile. The remaining tiles are full tiles, dealt to the CTAs round-robin. A CTA runs its full tiles
first, so that its partial sums are still in L2 when the combine kernel reads them.

Plain arithmetic on integers >= 0: the kernels compile these functions, so host and device cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: Cost of one more segment for a CTA, in K iterations: it refills the load pipeline and stores a partial tile.
SEGMENT_COST_ITERS = 8
#: Largest product of K iterations and CTAs per group that the kernels count in int32.
MAX_INT32_ITERS = 2**31 - 1


def first_iter_of_cta(cta: int, ctas_per_group: int, iters_per_group: int) -> int:
    """Return the first K iteration of a CTA; the first iteration of the next CTA is where this one stops.

    >>> [first_iter_of_cta(cta, 4, 10) for cta in range(6)]
    [0, 2, 5, 7, 10, 12]
    """
    return cta // ctas_per_group * iters_per_group + cta % ctas_per_group * iters_per_group // ctas_per_group


def cta_of_iter(at: int, ctas_per_group: int, iters_per_group: int) -> int:
    """Return the CTA that runs a K iteration: the inverse of `first_iter_of_cta`.

    >>> [cta_of_iter(at, 4, 10) for at in range(12)]
    [0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 4, 4]
    """
    return at // iters_per_group * ctas_per_group + ((at % iters_per_group + 1) * ctas_per_group - 1) // iters_per_group


def swizzle_tile(tile: int, tiles_m: int, tiles_n: int, l2_swizzle: int) -> tuple[int, int]:
    """Return the row and column of a tile in L2-swizzled order.

    The order goes down `l2_swizzle` rows, then to the next column, so that CTAs that run at the same time load the same
    blocks of A and B and find them in L2.

    >>> [swizzle_tile(tile, 3, 2, 2) for tile in range(6)]
    [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    """
    width = l2_swizzle * tiles_n
    first = tile // width * l2_swizzle
    height = min(tiles_m - first, l2_swizzle)
    return first + tile % width % height, tile % width // height


@dataclass(frozen=True)
class Partition:
    """The K iterations that each CTA runs; `data_parallel`, `stream_k` and `split_k` make instances.

    The output has `tiles_m` x `tiles_n` tiles of `iters_per_tile` K iterations each. The first `num_split_tiles` are
    split along K among groups of `ctas_per_group` CTAs, and every group has the same number of tiles. The other tiles
    are full tiles, dealt to all `num_ctas` CTAs round-robin.
    """

    tiles_m: int
    tiles_n: int
    iters_per_tile: int
    num_ctas: int
    ctas_per_group: int
    num_split_tiles: int

    @property
    def num_tiles(self) -> int:
        """Number of output tiles, full and split."""
        return self.tiles_m * self.tiles_n

    @property
    def iters_per_group(self) -> int:
        """K iterations of the split tiles of one group of CTAs."""
        return self.num_split_tiles * self.iters_per_tile * self.ctas_per_group // self.num_ctas

    @property
    def needs_int64(self) -> bool:
        """Whether the kernels must count K iterations in int64, whose divisions are slow on a GPU."""
        return self.num_tiles * self.iters_per_tile * self.ctas_per_group > MAX_INT32_ITERS

    @property
    def partials_per_cta(self) -> int:
        """Partial tiles that one CTA stores at most.

        A run of iterations touches incomplete tiles only at its begin and at its end: two, or one if every run lies
        inside a single tile.
        """
        return 0 if not self.num_split_tiles else 1 if self.iters_per_group == self.iters_per_tile else 2

    def segments(self, cta: int) -> Iterator[tuple[int, int, int]]:
        """Yield the work of a CTA in order, as (tile, first K iteration, K iteration past the last)."""
        for tile in range(self.num_split_tiles + cta, self.num_tiles, self.num_ctas):
            yield tile, 0, self.iters_per_tile
        if self.num_split_tiles:
            at, end = (first_iter_of_cta(c, self.ctas_per_group, self.iters_per_group) for c in (cta, cta + 1))
            while at < end:
                tile, first = divmod(at, self.iters_per_tile)
                last = min(first + end - at, self.iters_per_tile)
                yield tile, first, last
                at += last - first


def data_parallel(tiles_m: int, tiles_n: int, iters_per_tile: int, num_ctas: int) -> Partition:
    """Partition into full tiles only."""
    num_ctas = max(1, min(num_ctas, tiles_m * tiles_n))
    return Partition(tiles_m, tiles_n, iters_per_tile, num_ctas, num_ctas, 0)


def stream_k(tiles_m: int, tiles_n: int, iters_per_tile: int, num_ctas: int) -> Partition:
    """Partition by Stream-K: full waves of full tiles, and a tail whose K iterations all CTAs share equally.

    Every CTA has the same number of full tiles, and the same number of K iterations to within one. If full waves cover
    all tiles, no tile is split. If there is less than one wave, every tile gets the same number of splits, one CTA
    each; this may leave CTAs idle, so it is done only where the others run at most `SEGMENT_COST_ITERS` more
    iterations.

    >>> split = stream_k(2, 3, 4, 4)
    >>> [list(split.segments(cta)) for cta in range(4)]
    [[(2, 0, 4), (0, 0, 2)], [(3, 0, 4), (0, 2, 4)], [(4, 0, 4), (1, 0, 2)], [(5, 0, 4), (1, 2, 4)]]
    """
    num_tiles = tiles_m * tiles_n
    waves, num_tail_tiles = divmod(num_tiles, num_ctas)
    if not num_tail_tiles:
        return data_parallel(tiles_m, tiles_n, iters_per_tile, num_ctas)
    if not waves:
        num_ctas = min(num_ctas, num_tiles * iters_per_tile)  # launch no CTA without an iteration
        splits = num_ctas // num_tiles
        if -(-iters_per_tile // splits) - num_tiles * iters_per_tile // num_ctas <= SEGMENT_COST_ITERS:
            return split_k(tiles_m, tiles_n, iters_per_tile, splits)
        return Partition(tiles_m, tiles_n, iters_per_tile, num_ctas, num_ctas, num_tiles)
    # a tail with fewer iterations than CTAs is too short to share, so a full wave joins it
    num_split_tiles = num_tail_tiles if num_tail_tiles * iters_per_tile >= num_ctas else num_tail_tiles + num_ctas
    return Partition(tiles_m, tiles_n, iters_per_tile, num_ctas, num_ctas, num_split_tiles)


def split_k(tiles_m: int, tiles_n: int, iters_per_tile: int, splits: int) -> Partition:
    """Partition every tile into `splits` runs of K, one CTA each; a tile has at most one split per K iteration."""
    num_tiles, splits = tiles_m * tiles_n, max(1, min(splits, iters_per_tile))
    if splits == 1:
        return data_parallel(tiles_m, tiles_n, iters_per_tile, num_tiles)
    return Partition(tiles_m, tiles_n, iters_per_tile, num_tiles * splits, splits, num_tiles)
