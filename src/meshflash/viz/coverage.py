"""The query x key square as a grid of cells: which attend step of which rank computes each.

Sequences are long, so cells are judged by a few positions of each. Where ranks hold turns within a cell
(stripes), rows and columns are given to ranks in turn, by their shares; each stands for its rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import shorten
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from meshflash.core import rows
from meshflash.core.problem import Problem
from meshflash.core.program import Attend, AttendGrad, Interval, Program, Ranges

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Number = TypeVar("Number", np.int64, np.bool_)

#: What a cell holds instead of a rank: no pair is visible; pairs are visible and nobody computes them.
HIDDEN, MISSING = -1, -2
#: Positions of a cell that are looked at, on each side; its first and last are among them.
SAMPLES = 4
#: Ranks that are owed as much but for this share of a cell take their turns in order.
TIE = 0.1


@dataclass(frozen=True, eq=False)
class Side:
    """One side of the square in cells: their borders, which rank each stands for, and positions of that rank.

    `shared` says that in most cells no rank holds more than half.
    """

    edges: Ints
    ranks: Ints
    samples: Ints
    shared: bool

    def __len__(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, eq=False)
class Grid:
    """Who computes which cell for these heads: `rank` and the number among that rank's attend steps, `[rows, columns]`.

    Where `rank` is HIDDEN or MISSING, so is the number.
    """

    heads: Interval
    q: Side
    k: Side
    rank: Ints
    number: Ints

    @property
    def abroad(self) -> bool:
        """Whether other ranks compute than those that hold the queries."""
        return bool(((self.rank != self.q.ranks[:, None]) & (self.rank >= 0)).any())

    @property
    def caption(self) -> str:
        """Which heads these are, and who computes them if not the ranks that hold the queries."""
        heads = f"heads {self.heads[0]}-{self.heads[1] - 1}"
        ranks = ", ".join(map(str, np.unique(self.rank[self.rank >= 0]).tolist()))
        return f"{heads} on {ranks}" if self.abroad else heads


def headline(programs: Sequence[Program], problem: Problem) -> str:
    """What the square is of."""
    name = " ".join(dict.fromkeys(f"{program.name} {program.direction}" for program in programs))
    ranks = f"{problem.world} rank{'' if problem.world == 1 else 's'}"
    sizes = f"{sum(problem.q_lengths):,} queries x {sum(problem.k_lengths):,} keys"
    return shorten(f"{name} on {ranks}: {sizes}, {problem.mask}", 80, placeholder=" ...")


def attends(program: Program) -> list[tuple[int, Attend | AttendGrad]]:
    """The attend steps of a program with their places in it."""
    return [(n, step) for n, step in enumerate(program.steps) if isinstance(step, Attend | AttendGrad)]


def head_sets(programs: Sequence[Program], problem: Problem) -> list[Interval]:
    """The heads, cut so that a step takes all of a set or none."""
    cuts = {0, problem.heads} | {cut for program in programs for _, step in attends(program) for cut in step.heads}
    return list(pairwise(sorted(cuts)))


def grids(programs: Sequence[Program], problem: Problem, height: int, width: int) -> list[Grid]:
    """A grid of at most so many rows and columns for each set of heads."""
    q, k = _side(problem.q, height), _side(problem.k, width)
    shown = _visible(problem, q, k)
    return [_grid(programs, heads, q, k, shown) for heads in head_sets(programs, problem)]


def _grid(programs: Sequence[Program], heads: Interval, q: Side, k: Side, shown: Bools) -> Grid:
    holders = np.repeat(q.ranks, SAMPLES)
    steps = [
        (program.rank, n, _among(step.q_positions, q.samples.ravel()), _among(step.k_positions, k.samples.ravel()))
        for program in programs
        for n, (_, step) in enumerate(attends(program))
        if step.heads[0] <= heads[0] < step.heads[1]
    ]
    who, which = np.full(shown.shape, MISSING), np.full(shown.shape, MISSING)
    # a rank's own rows first: where heads are spread over ranks, others compute them
    for at_home in (True, False):
        for rank, n, queries, keys in steps:
            place = np.ix_(queries & ((holders == rank) == at_home), keys)
            free = who[place] == MISSING
            who[place] = np.where(free, rank, who[place])
            which[place] = np.where(free, n, which[place])
    most = _most_frequent(_by_cell(who * (len(steps) + 2) + which, q, k), _by_cell(shown, q, k))
    ranks, numbers = (np.take_along_axis(_by_cell(each, q, k), most, axis=2)[..., 0] for each in (who, which))
    hidden = ~_by_cell(shown, q, k).any(axis=2)
    return Grid(heads, q, k, np.where(hidden, HIDDEN, ranks), np.where(hidden, HIDDEN, numbers))


def _by_cell(samples: npt.NDArray[Number], q: Side, k: Side) -> npt.NDArray[Number]:
    """`[rows, columns, samples of a cell]`."""
    split = samples.reshape(len(q), SAMPLES, len(k), SAMPLES)
    return split.transpose(0, 2, 1, 3).reshape(len(q), len(k), SAMPLES**2)


def _most_frequent(codes: Ints, seen: Bools) -> Ints:
    """The place of the code that occurs most among what is seen, `[..., 1]`."""
    counts = np.where(seen, 0, -1)
    for n in range(codes.shape[-1]):
        counts += (codes == codes[..., n : n + 1]) & seen[..., n : n + 1] & seen
    return np.asarray(counts.argmax(axis=-1)[..., None])


def _visible(problem: Problem, q: Side, k: Side) -> Bools:
    """Which of the samples see which, in any batch row."""
    i, j = q.samples.ravel()[:, None], k.samples.ravel()[None, :]
    shown = np.zeros((i.size, j.size), np.bool_)
    for batch in range(problem.mask.batch_rows or 1):
        shown |= problem.mask.visible(i, j, batch)
    held = np.repeat(q.ranks >= 0, SAMPLES)[:, None] & np.repeat(k.ranks >= 0, SAMPLES)
    return np.asarray(shown & held)


def _among(ranges: Ranges, positions: Ints) -> Bools:
    out = np.zeros(positions.shape, np.bool_)
    for r in ranges:
        out |= (positions >= r.start) & (positions < r.stop) & ((positions - r.start) % r.step == 0)
    return out


def _side(held: Sequence[Ranges], cells: int) -> Side:
    """Cells of equal length from the first position that is held to the last."""
    ranges = [r for each in held for r in each if len(r)]
    first, end = min((r[0] for r in ranges), default=0), max((r[-1] + 1 for r in ranges), default=0)
    cells = min(cells, end - first)
    edges = first + np.arange(cells + 1) * (end - first) // max(cells, 1)
    ranks, samples = np.full(cells, HIDDEN), np.zeros((cells, SAMPLES), np.int64)
    # each cell goes to the rank that is owed most: its share of the cells so far, less the cells it has
    owed = np.zeros(len(held))
    divided = 0
    for n, (lo, hi) in enumerate(pairwise(edges.tolist())):
        parts = [rows.positions(each, rows.among(each, [(lo, hi)])) for each in held]
        shares = np.array([sum(map(len, part)) for part in parts])
        if shares.any():
            divided += bool(shares.max() * 2 <= shares.sum())
            owed += shares / shares.sum()
            open_to = np.where(shares > 0, owed, -np.inf)
            rank = int((open_to > open_to.max() - TIE).argmax())
            owed[rank] -= 1
            ranks[n], samples[n] = rank, _spread(parts[rank])
    return Side(edges, ranks, samples, divided * 2 > cells)


def _spread(part: Ranges) -> Ints:
    """Positions from the first of these to the last, without listing them all."""
    ends = np.cumsum([len(r) for r in part])
    places = np.linspace(0, int(ends[-1]) - 1, SAMPLES).round().astype(np.int64).tolist()
    found = [part[n][place - int(ends[n])] for place in places for n in [int(np.searchsorted(ends, place, "right"))]]
    return np.array([min(r[0] for r in part), *found[1:-1], max(r[-1] for r in part)])
