"""How the tiles of a distributed GEMM map to ranks: shard sizes, the reducing rank of a tile, and orders of sending.

Plain arithmetic on integers >= 0: the kernels compile these functions, so host and device cannot disagree.
"""

from __future__ import annotations


def split(total: int, world: int) -> tuple[int, ...]:
    """Return shard sizes that differ by at most one; the first shards are the larger ones.

    >>> split(10, 4)
    (3, 3, 2, 2)
    """
    return tuple(total // world + (rank < total % world) for rank in range(world))


def section_of(step: int, first: int, sections: int) -> int:
    """Return the section of rows at a step of a cyclic order that begins at section `first`.

    >>> [section_of(step, 2, 4) for step in range(4)]
    [2, 3, 0, 1]
    """
    return (step + first) % sections


def peer_of(step: int, rank: int, world: int) -> int:
    """Return the destination of a rank at a step: the next rank first, itself last.

    At every step each rank has another destination, so that not all of them load the same link.

    >>> [peer_of(step, 1, 3) for step in range(3)]
    [2, 0, 1]
    """
    return (rank + 1 + step) % world


def reducer_of_tile(section: int, tile: int, world: int, sections: int) -> tuple[int, int]:
    """Return the rank that reduces a tile, and the slot of the tile among those that this rank reduces.

    With several sections (reduce-scatter) it is the rank of the section; with one (two-shot all-reduce) tiles are dealt
    to the ranks round-robin.

    >>> reducer_of_tile(2, 7, 4, 4), reducer_of_tile(0, 7, 4, 1)
    ((2, 7), (3, 1))
    """
    if sections > 1:
        return section, tile
    return tile % world, tile // world


def collective_name(collective: str, shots: int | None) -> str:
    """Return a collective with its number of shots, for people.

    >>> collective_name("all_reduce", 2), collective_name("ag_gemm", None)
    ('all_reduce in two shots', 'ag_gemm')
    """
    return collective + {1: " in one shot", 2: " in two shots"}.get(shots or 0, "")
