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
    if len(rows) == 1:
        return rows[0][1] - rows[0][0]
    return sum([end - begin for begin, end in rows])


def places(rows: Rows, within: Rows) -> Rows:
    """Return where `rows` lie in a buffer that holds `within` packed: one interval for each interval of `rows`.

    >>> places(((1, 2), (5, 7)), within=((0, 2), (5, 8)))
    ((1, 2), (2, 4))
    """
    out = []
    before = 0
    if rows is within or rows == within:
        for begin, end in rows:
            out.append((before, before := before + end - begin))
        return tuple(out)
    held = iter(within)
    first = last = 0
    for begin, end in rows:
        while end > last:
            before += last - first
            first, last = next(held, (end, end))
        if begin < first:
            raise ValueError(f"places(rows): rows {begin} to {end} are not within {within}")
        out.append((before + begin - first, before + end - first))
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
    if a is b or a == b:
        return a
    out = []
    n = m = 0
    while n < len(a) and m < len(b):
        (begin, end), (first, last) = a[n], b[m]
        if max(begin, first) < min(end, last):
            out.append((max(begin, first), min(end, last)))
        if end < last:
            n += 1
        else:
            m += 1
    return tuple(out)


def without(a: Rows, b: Rows) -> Rows:
    """Return the rows of the first set that are not in the second.

    >>> without(((0, 4), (6, 8)), ((2, 7),))
    ((0, 2), (7, 8))
    """
    if not b or a == b:
        return () if b else a
    out = []
    m = 0
    for begin, end in a:
        while m < len(b) and b[m][1] <= begin:
            m += 1
        n = m
        while n < len(b) and b[n][0] < end:
            first, last = b[n]
            if begin < first:
                out.append((begin, first))
            begin = last
            n += 1
        if begin < end:
            out.append((begin, end))
    return tuple(out)
