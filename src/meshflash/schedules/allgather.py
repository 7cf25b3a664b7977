"""All-gather: each rank takes in the keys that its queries see, a piece at a time, and attends to them.

`head_stride` key heads are gathered at a time (0: all of them), and each rank's keys in so many `chunks`. Smaller
pieces take less memory and more steps; the next one is on its way while this one is attended to. With several chunks
the result is a sum of partial ones.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from meshflash.core import rows
from meshflash.core.layout import Layout
from meshflash.core.problem import Problem
from meshflash.core.program import Add, Clear, Copy, Interval, Part, Post, Program, Ranges, Slice
from meshflash.core.rows import Rows
from meshflash.schedules.registry import Schedule, register
from meshflash.schedules.writer import SAVES, Writer, parts, pieces


def forward(problem: Problem, rank: int, name: str = "allgather") -> Program:
    """Gather keys and values, attend, one piece after the other."""
    w = Writer(name, "forward", problem, rank)
    work = _pieces(problem)
    whole = _only_own(problem, rank) or work[-1].chunk == 0
    out = w.accumulator("out", not whole)
    _gather(w, work, 0)
    for n, piece in enumerate(work):
        _gather(w, work, n + 1)
        w.wait(f"kv {n}")
        taken = piece._replace(chunks=1) if whole else piece
        if taken.chunk < taken.chunks:  # who needs no others' keys takes its own at once
            heads = _query_heads(problem, piece.heads)
            carry = taken.chunk > 0
            keys, positions = _keys(w, taken, n), _positions(problem, rank, taken)
            w.attend(keys, positions, replace(out, heads=heads), heads, carry=carry, final=whole)
    w.finalize()
    return w.program(SAVES)


def backward(problem: Problem, rank: int, name: str = "allgather") -> Program:
    """Gather again; each rank sends its share of the gradients of keys to the rank that holds them."""
    w = Writer(name, "backward", problem, rank)
    work = _pieces(problem)
    if _only_own(problem, rank) and not any(need for d, need in enumerate(problem.needs[rank]) if d != rank):
        w.attend_grad(w.own("kv"), problem.k[rank], w.own("dq"), w.own("dkv"))
        return w.program()
    dq = w.accumulator("dq", work[-1].chunk > 0)
    _gather(w, work, 0)
    for n, piece in enumerate(work):
        _gather(w, work, n + 1)
        w.wait(f"kv {n}")
        heads = _query_heads(problem, piece.heads)
        keys, positions, share = _keys(w, piece, n), _positions(problem, rank, piece), _shares(w, piece, n)
        w.attend_grad(keys, positions, replace(dq, heads=heads), share, heads, add_dq=piece.chunk > 0)
        _scatter(w, piece, n)
        _collect(w, work, n - 1)
    _collect(w, work, len(work) - 1)
    w.finalize()
    return w.program()


class Piece(NamedTuple):
    """Key heads that are gathered together, and which of so many chunks of each rank's keys."""

    heads: Interval
    chunk: int
    chunks: int

    def rows(self, count: int) -> Rows:
        """Those of a rank with so many keys."""
        begin, end = count * self.chunk // self.chunks, count * (self.chunk + 1) // self.chunks
        return ((begin, end),) if begin < end else ()


def _pieces(problem: Problem) -> list[Piece]:
    """What is gathered together, in order."""
    option = {"head_stride": 0, "chunks": 1, **problem.option}
    stride, chunks = int(option["head_stride"]) or problem.kv_heads, int(option["chunks"]) or 1
    heads = [(first, min(first + stride, problem.kv_heads)) for first in range(0, problem.kv_heads, stride)]
    return [Piece(taken, chunk, chunks) for taken in heads for chunk in range(chunks)]


def _query_heads(problem: Problem, heads: Interval) -> Interval:
    group = problem.heads // problem.kv_heads
    return heads[0] * group, heads[1] * group


def _only_own(problem: Problem, rank: int) -> bool:
    """Whether a rank's queries see no keys but its own."""
    return not any(needs[rank] for c, needs in enumerate(problem.needs) if c != rank)


@lru_cache(maxsize=256)
def _even(problem: Problem) -> bool:
    """Whether all ranks hold as many keys and need all of them."""
    return problem.world > 1 and len(set(problem.k_lengths)) == 1 and problem.everything_needed


def _needed(problem: Problem, piece: Piece, c: int, d: int) -> Rows:
    """The rows of rank c's keys that rank d takes in with a piece."""
    return rows.common(problem.needs[c][d], piece.rows(problem.k_lengths[c]))


def _held(problem: Problem, rank: int, piece: Piece) -> list[Rows]:
    """The rows of each rank's keys that a rank attends to, in the order in which they are gathered."""
    if _only_own(problem, rank):
        return [piece.rows(n) if c == rank else () for c, n in enumerate(problem.k_lengths)]
    return [_needed(problem, piece, c, rank) for c in range(problem.world)]


def _positions(problem: Problem, rank: int, piece: Piece) -> Ranges:
    held = _held(problem, rank, piece)
    return tuple(r for c, taken in enumerate(held) for r in rows.positions(problem.k[c], taken))


def _slots(whole: Slice, held: list[Rows]) -> list[Slice]:
    """Where each rank's rows lie in what was gathered."""
    out, first = [], 0
    for taken in held:
        out.append(Slice(whole.buffer, (first, first + rows.count(taken)), whole.heads))
        first += rows.count(taken)
    return out


def _keys(w: Writer, piece: Piece, n: int) -> Slice:
    """The keys and values to attend to: gathered, or our own where we need no others."""
    if _only_own(w.problem, w.rank):
        return w.own("kv", next(iter(piece.rows(w.k_rows)), (0, 0)), piece.heads)
    width = piece.heads[1] - piece.heads[0]
    return w.scratch(f"kv{width}.{n % 2}", "kv", _count(w, piece), heads=width)


def _shares(w: Writer, piece: Piece, n: int) -> Slice:
    """Our share of the gradients of all the keys that we attended to."""
    width = piece.heads[1] - piece.heads[0]
    return w.scratch(f"dkv{width}.{n % 2}", "dkv", _count(w, piece), "reduce", width)


def _count(w: Writer, piece: Piece) -> int:
    return sum(map(rows.count, _held(w.problem, w.rank, piece)))


def _gather(w: Writer, work: list[Piece], n: int) -> None:
    """Post the gathering of the n-th piece: to each rank what it needs of ours, from each what we need."""
    if n >= len(work):
        return
    problem, rank, piece = w.problem, w.rank, work[n]
    own, everything = w.own("kv", heads=piece.heads), ((0, w.k_rows),)
    sends = [
        part
        for d in range(problem.world)
        if not _only_own(problem, d)
        for part in parts(d, own, everything, _needed(problem, piece, rank, d))
    ]
    recvs: list[Part] = []
    if not _only_own(problem, rank):
        held = _held(problem, rank, piece)
        for c, slot in enumerate(_slots(_keys(w, piece, n), held)):
            recvs += parts(c, slot, held[c], held[c])
    w.post(Post(f"kv {n}", tuple(sends), tuple(recvs), collective="all_gather" if _even(problem) else ""))


def _scatter(w: Writer, piece: Piece, n: int) -> None:
    """Post our shares to the ranks that hold the keys, and take in theirs; our own share goes to ourselves."""
    problem, rank = w.problem, w.rank
    held, theirs = _held(problem, rank, piece), _guests(problem, rank, piece)
    sends = [
        part
        for c, slot in enumerate(_slots(_shares(w, piece, n), held))
        for part in parts(c, slot, held[c], _needed(problem, piece, c, rank))
    ]
    recvs = [
        part
        for d, slot in enumerate(_slots(_arrived(w, piece, n), theirs))
        for part in parts(d, slot, theirs[d], theirs[d])
    ]
    w.post(Post(f"dkv {n}", tuple(sends), tuple(recvs), collective="all_to_all" if _even(problem) else ""))


def _collect(w: Writer, work: list[Piece], n: int) -> None:
    """Sum the shares of all ranks, in their order."""
    if n < 0:
        return
    piece = work[n]
    theirs, mine = _guests(w.problem, w.rank, piece), piece.rows(w.k_rows)
    w.wait(f"dkv {n}")
    if not mine:
        return
    total = w.scratch("dkv.sum", "dkv", w.k_rows, "partial", becomes="dkv")
    total = Slice(total.buffer, mine[0], piece.heads)
    fresh = theirs[0] == mine
    if not fresh:
        w.steps.append(Clear(total))
    for d, slot in enumerate(_slots(_arrived(w, piece, n), theirs)):
        pairs = zip(pieces(slot, theirs[d], theirs[d]), pieces(total, mine, theirs[d]), strict=True)
        w.append_each(Copy if fresh and d == 0 else Add, pairs)
    w.append_each(Copy, [(total, w.own("dkv", mine[0], piece.heads))])


def _guests(problem: Problem, rank: int, piece: Piece) -> list[Rows]:
    """The rows of our keys that each rank has a share in."""
    return [_needed(problem, piece, rank, d) for d in range(problem.world)]


def _arrived(w: Writer, piece: Piece, n: int) -> Slice:
    width = piece.heads[1] - piece.heads[0]
    count = sum(map(rows.count, _guests(w.problem, w.rank, piece)))
    return w.scratch(f"dkv{width}.in.{n % 2}", "dkv", count, "reduce", width)


for _name, _layout, _summary in (
    ("allgather", Layout.contiguous, "each rank gathers the keys that its queries see, and attends to them"),
    ("ringx3", Layout.zigzag, "the same; each rank holds a piece from the front and one from the back"),
):
    register(Schedule(_name, forward, backward, _layout, _summary, (("head_stride", 0), ("chunks", 1))))
