"""The problem that a schedule solves: the positions of queries and keys on each rank, and the mask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from meshflash.core import rows
from meshflash.core.mask import Mask
from meshflash.core.program import Interval, Ranges
from meshflash.core.rows import Rows
from meshflash.core.tiles import seen, worklist

Option = int | float | bool | str


@dataclass(frozen=True)
class Problem:
    """The positions of queries and keys that each rank holds, and the mask between them.

    Args:
        q: For each rank, the ranges of positions of its queries.
        k: For each rank, the ranges of positions of its keys.
        mask: The mask between queries and keys, by position.
        heads: The number of query heads.
        kv_heads: The number of key heads, which divides `heads`.
        options: The options of the schedule, with their values.
        lse: Whether the caller needs the LSE at the rank of each query; without it the LSE has no gradient either.

    >>> from meshflash.core.layout import Layout
    >>> layout = Layout.contiguous(8, 2)
    >>> Problem(layout.ranges, layout.ranges, Mask.causal() & Mask.window(1, 0)).needs[0]
    (((0, 4),), ((3, 4),))
    """

    q: tuple[Ranges, ...]
    k: tuple[Ranges, ...]
    mask: Mask
    heads: int = 1
    kv_heads: int = 1
    options: tuple[tuple[str, Option], ...] = ()
    lse: bool = True

    def __post_init__(self) -> None:
        if len(self.q) != len(self.k) or not self.q:
            raise ValueError(
                f"Problem(q, k): {len(self.q)} ranks of queries, {len(self.k)} of keys; expected equally many"
            )
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"Problem(heads={self.heads}, kv_heads={self.kv_heads}): expected kv_heads to divide heads"
            )

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.q)

    @property
    def option(self) -> dict[str, Option]:
        """The options by name."""
        return dict(self.options)

    @cached_property
    def q_lengths(self) -> tuple[int, ...]:
        """The number of queries of each rank."""
        return tuple(sum(map(len, held)) for held in self.q)

    @cached_property
    def k_lengths(self) -> tuple[int, ...]:
        """The number of keys of each rank."""
        return tuple(sum(map(len, held)) for held in self.k)

    @cached_property
    def needs(self) -> tuple[tuple[Rows, ...], ...]:
        """`needs[c][d]`: the key rows of rank c that some query of rank d sees."""
        wanted = [seen(self.mask, held) for held in self.q]
        needs = [[rows.among(held, intervals) for intervals in wanted] for held in self.k]
        steps = [r.step for held in (*self.q, *self.k) for r in held]
        if any(term.hi - term.lo + 1 < max(steps, default=1) for term in self.mask.terms):
            # `seen` merges the windows of neighbouring queries. If a window is narrower than the step of positions, it
            # may name keys that no query sees, so check whether any tile is left.
            for c, d in product(range(self.world), repeat=2):
                if needs[c][d] and not len(worklist(self.mask, self.q[d], self.k[c]).by_query.spans):
                    needs[c][d] = ()
        return tuple(map(tuple, needs))

    @cached_property
    def everything_needed(self) -> bool:
        """Whether every rank needs every key."""
        return all(rows.count(need) == n for n, row in zip(self.k_lengths, self.needs, strict=True) for need in row)

    def q_rows(self, rank: int, k_positions: Ranges) -> Interval:
        """Return the interval of a rank's query rows from the first to the last that sees any of these keys.

        Args:
            rank: The rank that holds the queries.
            k_positions: The positions of the keys.
        """
        found = self.q_seeing(rank, k_positions)
        return (found[0][0], found[-1][1]) if found else (0, 0)

    def q_seeing(self, rank: int, k_positions: Ranges) -> Rows:
        """Return the query rows of a rank that see any of these keys.

        Args:
            rank: The rank that holds the queries.
            k_positions: The positions of the keys.
        """
        return rows.among(self.q[rank], _seeing(self.mask, k_positions))


@lru_cache(maxsize=4096)
def _seeing(mask: Mask, k_positions: Ranges) -> tuple[Interval, ...]:
    """Return the positions of queries that see any of these keys; cached, as every rank that receives them asks."""
    return tuple(seen(mask, k_positions, by_key=True))
