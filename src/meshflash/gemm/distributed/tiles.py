"""Whose tiles are whose: how rows and columns are split over ranks, who adds up a tile, and in which order.

Plain arithmetic of numbers >= 0: the kernels compile these very functions.
"""

from __future__ import annotations


def split(total: int, world: int) -> tuple[int, ...]:
    """Sizes of parts, as even as can be; the first ones are larger by one.

    >>> split(10, 4)
    (3, 3, 2, 2)
    """
    return tuple(total // world + (rank < total % world) for rank in range(world))


def section_of(turn: int, first: int, sections: int) -> int:
    """Which section of rows comes in a turn, for who begins with this one.

    >>> [section_of(turn, 2, 4) for turn in range(4)]
    [2, 3, 0, 1]
    """
    return (turn + first) % sections


def peer_of(turn: int, rank: int, world: int) -> int:
    """To whom a rank puts in a turn: to the next one first, to itself last, so that not all put to the same one.

    >>> [peer_of(turn, 1, 3) for turn in range(3)]
    [2, 0, 1]
    """
    return (rank + 1 + turn) % world


def owner_of(section: int, tile: int, world: int, sections: int) -> tuple[int, int]:
    """Who adds up a tile, and as which of its own: the rank of the section, or ranks in turns where there is one.

    >>> owner_of(2, 7, 4, 4), owner_of(0, 7, 4, 1)
    ((2, 7), (3, 1))
    """
    if sections > 1:
        return section, tile
    return tile % world, tile // world


def in_words(collective: str, shots: int | None) -> str:
    """A collective with its shots.

    >>> in_words("all_reduce", 2), in_words("ag_gemm", None)
    ('all_reduce in two shots', 'ag_gemm')
    """
    return collective + {1: " in one shot", 2: " in two shots"}.get(shots or 0, "")
