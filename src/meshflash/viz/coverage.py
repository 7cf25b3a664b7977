"""Coverage of the query x key matrix as a grid of cells: which attend step of which rank computes each cell.

Sequences are long, so a few positions are sampled for each cell. If several ranks hold positions of a cell (striped
layouts), rows and columns are assigned to these ranks in turn, in proportion to their shares.
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

#: Values of a cell instead of a rank: no pair is visible; or pairs are visible, but no step computes them.
HIDDEN, MISSING = -1, -2
#: The number of positions sampled for each cell and side; the first and last are among them.
SAMPLES = 4
#: Ranks whose claims on a cell differ by less than this fraction of a cell take it in rank order.
TIE = 0.1


@dataclass(frozen=True, eq=False)
class Side:
    """One side of the matrix in cells. `grids` makes it."""

    #: positions of the cell borders, [cells + 1]
    edges: Ints
    #: the rank that each cell stands for, or HIDDEN
    ranks: Ints
    #: sampled positions of that rank, [cells, SAMPLES]
    samples: Ints
    #: whether in most cells no rank holds more than half of the positions
    shared: bool

    def __len__(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, eq=False)
class Grid:
    """Which rank computes each cell for some heads, and in which of its attend steps. `grids` makes it."""

    heads: Interval
    q: Side
    k: Side
    #: [rows, columns]: the rank, or HIDDEN, or MISSING
    rank: Ints
    #: [rows, columns]: the index among the rank's attend steps, or HIDDEN, or MISSING
    number: Ints

    @property
    def computed_elsewhere(self) -> bool:
        """Whether some rank computes queries that it does not hold, as after an exchange of heads."""
        return bool(((self.rank != self.q.ranks[:, None]) & (self.rank >= 0)).any())

    @property
    def caption(self) -> str:
        """The heads, and the ranks that compute them if these are not the ranks that hold the queries."""
        heads = f"heads {self.heads[0]}-{self.heads[1] - 1}"
        ranks = ", ".join(map(str, np.unique(self.rank[self.rank >= 0]).tolist()))
        return f"{heads} on {ranks}" if self.computed_elsewhere else heads


def headline(programs: Sequence[Program], problem: Problem) -> str:
    """Return the title of a picture: schedule, direction, ranks, sizes and mask."""
    name = " ".join(dict.fromkeys(f"{program.name} {program.direction}" for program in programs))
    ranks = f"{problem.world} rank{'' if problem.world == 1 else 's'}"
    sizes = f"{sum(problem.q_lengths):,} queries x {sum(problem.k_lengths):,} keys"
    return shorten(f"{name} on {ranks}: {sizes}, {problem.mask}", 80, placeholder=" ...")


def attends(program: Program) -> list[tuple[int, Attend | AttendGrad]]:
    """Return the attend steps of a program with their step indices."""
    return [(n, step) for n, step in enumerate(program.steps) if isinstance(step, Attend | AttendGrad)]


def head_sets(programs: Sequence[Program], problem: Problem) -> list[Interval]:
    """Split the heads into sets, so that each step takes all heads of a set or none."""
    cuts = {0, problem.heads} | {cut for program in programs for _, step in attends(program) for cut in step.heads}
    return list(pairwise(sorted(cuts)))


def grids(programs: Sequence[Program], problem: Problem, height: int, width: int) -> list[Grid]:
    """Return a grid for each set of heads.

    Args:
        programs: One program for each rank.
        problem: The problem that the programs solve.
        height: The largest number of rows of a grid.
        width: The largest number of columns of a grid.
    """
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
    computing_rank, attend_step = np.full(shown.shape, MISSING), np.full(shown.shape, MISSING)
    # Steps on a rank's own queries take precedence; the other steps fill the cells that are left.
    for own_queries in (True, False):
        for rank, n, queries, keys in steps:
            place = np.ix_(queries & ((holders == rank) == own_queries), keys)
            free = computing_rank[place] == MISSING
            computing_rank[place] = np.where(free, rank, computing_rank[place])
            attend_step[place] = np.where(free, n, attend_step[place])
    most = _most_frequent(_by_cell(computing_rank * (len(steps) + 2) + attend_step, q, k), _by_cell(shown, q, k))
    ranks, numbers = (
        np.take_along_axis(_by_cell(each, q, k), most, axis=2)[..., 0] for each in (computing_rank, attend_step)
    )
    hidden = ~_by_cell(shown, q, k).any(axis=2)
    return Grid(heads, q, k, np.where(hidden, HIDDEN, ranks), np.where(hidden, HIDDEN, numbers))


def _by_cell(samples: npt.NDArray[Number], q: Side, k: Side) -> npt.NDArray[Number]:
    """Regroup samples as `[rows, columns, samples of a cell]`."""
    split = samples.reshape(len(q), SAMPLES, len(k), SAMPLES)
    return split.transpose(0, 2, 1, 3).reshape(len(q), len(k), SAMPLES**2)


def _most_frequent(codes: Ints, seen: Bools) -> Ints:
    """Return the index of the most frequent code among the visible samples of a cell, `[..., 1]`."""
    counts = np.where(seen, 0, -1)
    for n in range(codes.shape[-1]):
        counts += (codes == codes[..., n : n + 1]) & seen[..., n : n + 1] & seen
    return np.asarray(counts.argmax(axis=-1)[..., None])


def _visible(problem: Problem, q: Side, k: Side) -> Bools:
    """Return which sampled queries see which sampled keys, in any batch row."""
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
    """Return a side of cells of equal length, from the first position that a rank holds to the last."""
    ranges = [r for each in held for r in each if len(r)]
    first, end = min((r[0] for r in ranges), default=0), max((r[-1] + 1 for r in ranges), default=0)
    cells = min(cells, end - first)
    edges = first + np.arange(cells + 1) * (end - first) // max(cells, 1)
    ranks, samples = np.full(cells, HIDDEN), np.zeros((cells, SAMPLES), np.int64)
    # Each cell goes to the rank with the largest claim: the sum of its shares so far, minus the cells it already has.
    claims = np.zeros(len(held))
    divided = 0
    for n, (lo, hi) in enumerate(pairwise(edges.tolist())):
        parts = [rows.positions(each, rows.among(each, [(lo, hi)])) for each in held]
        shares = np.array([sum(map(len, part)) for part in parts])
        if shares.any():
            divided += bool(shares.max() * 2 <= shares.sum())
            claims += shares / shares.sum()
            open_to = np.where(shares > 0, claims, -np.inf)
            rank = int((open_to > open_to.max() - TIE).argmax())
            claims[rank] -= 1
            ranks[n], samples[n] = rank, _spread(parts[rank])
    return Side(edges, ranks, samples, divided * 2 > cells)


def _spread(part: Ranges) -> Ints:
    """Return SAMPLES positions of some ranges, from the first to the last, without listing all of them."""
    ends = np.cumsum([len(r) for r in part])
    places = np.linspace(0, int(ends[-1]) - 1, SAMPLES).round().astype(np.int64).tolist()
    found = [part[n][place - int(ends[n])] for place in places for n in [int(np.searchsorted(ends, place, "right"))]]
    return np.array([min(r[0] for r in part), *found[1:-1], max(r[-1] for r in part)])
