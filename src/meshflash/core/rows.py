"""Sets of local rows of a shard, as sorted intervals that do not touch: which rows a message or a buffer holds.

A buffer that holds such a set holds its rows packed, in order. Masks and communication are not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: Intervals `[begin, end)`, sorted, not empty, not touching.
Rows = tuple[tuple[int, int], ...]


def union(*sets: Iterable[tuple[int, int]]) -> Rows:
    """Return the rows that are in any of the sets.

    >>> union([(0, 2), (5, 7)], [(2, 4)])
    ((0, 4), (5, 7))
    """
    kept = [intervals for intervals in sets if intervals]
    if len(kept) == 1 and isinstance(kept[0], tuple):
        return kept[0]
    out: list[tuple[int, int]] = []
    for begin, end in sorted(interval for intervals in kept for interval in intervals):
        if end <= begin:
            continue
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return tuple(out)


def count(rows: Rows) -> int:
    """Return the number of rows."""
    return sum(end - begin for begin, end in rows)


def places(rows: Rows, within: Rows) -> Rows:
    """Return where `rows` lie in a buffer that holds `within` packed: one interval for each interval of `rows`.

    >>> places(((1, 2), (5, 7)), within=((0, 2), (5, 8)))
    ((1, 2), (2, 4))
    """
    out = []
    for begin, end in rows:
        before = 0
        for first, last in within:
            if first <= begin and end <= last:
                out.append((before + begin - first, before + end - first))
                break
            before += last - first
        else:
            raise ValueError(f"places(rows): rows {begin} to {end} are not within {within}")
    return tuple(out)


def positions(ranges: Sequence[range], rows: Rows) -> tuple[range, ...]:
    """Return the positions of some rows of a shard that holds `ranges`, in order.

    >>> positions((range(0, 4), range(10, 20, 2)), ((2, 6),))
    (range(2, 4), range(10, 14, 2))
    """
    out = []
    first = 0
    for held in ranges:
        for begin, end in rows:
            part = held[max(0, begin - first) : max(0, end - first)]
            if len(part):
                out.append(part)
        first += len(held)
    return tuple(out)


def among(ranges: Sequence[range], intervals: Iterable[tuple[int, int]]) -> Rows:
    """Return the rows of a shard that holds `ranges` whose positions lie in any of some intervals.

    >>> among((range(0, 4), range(10, 20, 2)), [(3, 13)])
    ((3, 6),)
    """
    wanted = list(intervals)
    out = []
    first = 0
    for held in ranges:
        for lo, hi in wanted:
            begin = max(0, -((held.start - lo) // held.step))
            end = min(len(held), -((held.start - hi) // held.step))
            if begin < end:
                out.append((first + begin, first + end))
        first += len(held)
    return union(out)


def common(a: Rows, b: Rows) -> Rows:
    """Return the rows that are in both sets.

    >>> common(((0, 4), (6, 8)), ((2, 7),))
    ((2, 4), (6, 7))
    """
    return tuple(
        (max(begin, first), min(end, last))
        for begin, end in a
        for first, last in b
        if max(begin, first) < min(end, last)
    )


def without(a: Rows, b: Rows) -> Rows:
    """Return the rows of the first set that are not in the second.

    >>> without(((0, 4), (6, 8)), ((2, 7),))
    ((0, 2), (7, 8))
    """
    out = []
    for begin, end in a:
        for first, last in b:
            if last <= begin or end <= first:
                continue
            if begin < first:
                out.append((begin, first))
            begin = last
            if begin >= end:
                break
        if begin < end:
            out.append((begin, end))
    return tuple(out)
