"""The problem that a schedule solves: the positions of queries and keys on each rank, and the mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from meshflash.core import rows
from meshflash.core.mask import Mask
from meshflash.core.needs import Needs
from meshflash.core.program import Interval, Ranges
from meshflash.core.rows import Rows
from meshflash.core.runs import Ints, seen
from meshflash.core.shards import RowTable, shards_of

Option = int | float | bool | str

#: The most ranks whose traffic decides what all ranks do alike.
MAX_SAMPLED = 64
#: The most problems whose tables over all ranks are kept. A table may have megabytes, and only builders read it.
MAX_TABLES = 8


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

    @cached_property
    def _hash(self) -> int:
        return hash((self.q, self.k, self.mask, self.heads, self.kv_heads, self.options, self.lse))

    def __hash__(self) -> int:
        # Caches ask for it in each call, and thousands of ranks have many ranges.
        return self._hash

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.q)

    @property
    def option(self) -> dict[str, Option]:
        """The options by name."""
        return dict(self.options)

    @property
    def table(self) -> Needs:
        """What all ranks need of each other, as arrays over all ranks."""
        return _table(self)

    @cached_property
    def q_lengths(self) -> tuple[int, ...]:
        """The number of queries of each rank."""
        return tuple(np.diff(self.table.q.first_row).tolist())

    @cached_property
    def k_lengths(self) -> tuple[int, ...]:
        """The number of keys of each rank."""
        return tuple(np.diff(self.table.k.first_row).tolist())

    @cached_property
    def needs(self) -> tuple[tuple[Rows, ...], ...]:
        """`needs[c][d]`: the key rows of rank c that some query of rank d sees."""
        columns = [self.needed_from(rank) for rank in range(self.world)]
        return tuple(tuple(column.get(owner, ()) for column in columns) for owner in range(self.world))

    def rows_needed(self, owner: int, rank: int) -> Rows:
        """Return the key rows of `owner` that some query of `rank` sees.

        Args:
            owner: The rank that holds the keys.
            rank: The rank that holds the queries.
        """
        return self.needed_from(rank).get(owner, ())

    def needed_from(self, rank: int) -> Mapping[int, Rows]:
        """Return the key rows that the queries of a rank see, by the rank that holds them, in the order of ranks.

        Ranks none of whose keys are seen are left out; `rank` itself is not.

        Args:
            rank: The rank that holds the queries.
        """
        return self.table_from(rank).by_rank

    def needed_by(self, owner: int) -> Mapping[int, Rows]:
        """Return the key rows of a rank that queries see, by the rank that holds the queries, in the order of ranks.

        Ranks that see none of the keys are left out; `owner` itself is not.

        Args:
            owner: The rank that holds the keys.
        """
        return self.table_by(owner).by_rank

    def table_from(self, rank: int) -> RowTable:
        """Return what `needed_from` returns, as arrays.

        Args:
            rank: The rank that holds the queries.
        """
        return _needed_from(self, rank)

    def table_by(self, owner: int) -> RowTable:
        """Return what `needed_by` returns, as arrays.

        Args:
            owner: The rank that holds the keys.
        """
        return _needed_by(self, owner)

    @cached_property
    def sampled_ranks(self) -> tuple[int, ...]:
        """The ranks that decisions of all ranks are based on: all up to MAX_SAMPLED, then evenly spaced ones.

        A decision that all ranks must take alike, such as the direction of a ring, compares the traffic of these ranks
        only. So it costs O(world), and every rank finds the same.
        """
        count = min(self.world, MAX_SAMPLED)
        return tuple((2 * n + 1) * self.world // (2 * count) for n in range(count))  # the middle of each part

    @cached_property
    def everything_needed(self) -> bool:
        """Whether every rank needs every key."""
        keys = sum(self.k_lengths)
        # A few ranks answer most cases, so that all ranks are only asked where the answer is likely to be yes.
        asked = (self.sampled_ranks, range(self.world))
        return all((self.table.num_needed(np.array(ranks))[0] == keys).all() for ranks in asked)

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

    def positions_and_q_rows(self, rank: int, keys: RowTable) -> Mapping[int, tuple[Ranges, Interval]]:
        """Return the positions of key rows and the query rows that see them, by the owner of the keys.

        The query rows are an interval, from the first to the last query of the rank that sees any key of the owner.

        Args:
            rank: The rank that holds the queries.
            keys: The key rows of each owner, with all that the queries see.
        """
        table, owners = self.table, np.unique(keys.rank)
        base = table.k.first_row[keys.rank]
        interval, runs = table.k.positions(base + keys.begin, base + keys.end)
        which = owners.searchsorted(keys.rank[interval])
        q_rows = _q_rows(self, rank)[owners].tolist()
        columns = (runs.position.tolist(), (runs.position + runs.step * runs.rows).tolist(), runs.step.tolist())
        ranges = list(map(range, *columns))
        cuts = which.searchsorted(np.arange(len(owners) + 1)).tolist()
        return {
            owner: (tuple(ranges[a:b]), (first, end))
            for owner, (a, b), (first, end) in zip(owners.tolist(), pairwise(cuts), q_rows, strict=True)
        }


@lru_cache(maxsize=4096)
def _seeing(mask: Mask, k_positions: Ranges) -> tuple[Interval, ...]:
    """Return the positions of queries that see any of these keys; cached, as every rank that receives them asks."""
    return tuple(seen(mask, k_positions, by_key=True))


@lru_cache(maxsize=MAX_TABLES)
def _table(problem: Problem) -> Needs:
    # Not kept by the problem itself: executables and caches of small values hold hundreds of problems.
    return Needs(problem.mask, shards_of(problem.q), shards_of(problem.k))


@lru_cache(maxsize=64)
def _needed_from(problem: Problem, rank: int) -> RowTable:
    return problem.table.needed_from(rank)


@lru_cache(maxsize=64)
def _needed_by(problem: Problem, owner: int) -> RowTable:
    return problem.table.needed_by(owner)


@lru_cache(maxsize=64)
def _q_rows(problem: Problem, rank: int) -> Ints:
    return problem.table.q_rows(rank, problem.table_from(rank))
