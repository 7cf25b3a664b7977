"""All-gather: each rank gathers the keys that its queries see, one piece at a time, and attends to them.

    piece n of every rank:      rank 0   [K0 n]--+
                                rank 1   [K1 n]--+--> every rank that needs it: kv buffer n % 2
                                rank 2   [K2 n]--+

    forward     post gather 0 | post gather 1, attend piece 0 | post gather 2, attend piece 1 | ...
    backward    the same, and after each piece post the shares of dK and dV to their owners, which sum them up

A piece is `head_stride` key heads (0: all of them) of one of `chunks` chunks of each rank's keys. Smaller pieces take
less memory and more steps. With one chunk each head is attended in one step, and its result needs no merge.
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
    """Build the forward of one rank: gather keys and values, and attend to them, piece by piece.

    Args:
        problem: The positions that every rank holds, the mask, and the options `head_stride` and `chunks`.
        rank: The rank that runs the program.
        name: The name of the program, for people.
    """
    w = Writer(name, "forward", problem, rank)
    work = _pieces(problem)
    single_step = _only_own(problem, rank) or work[-1].chunk == 0
    out = w.accumulator("out", not single_step)
    _gather(w, work, 0)
    for n, piece in enumerate(work):
        _gather(w, work, n + 1)
        w.wait(f"kv {n}")
        taken = piece._replace(num_chunks=1) if single_step else piece
        # A rank that needs only its own keys attends to all chunks in one step, at the first chunk of each stride.
        if taken.chunk < taken.num_chunks:
            heads = _query_heads(problem, piece.heads)
            carry = taken.chunk > 0
            keys, positions = _keys(w, taken, n), _positions(problem, rank, taken)
            w.attend(keys, positions, replace(out, heads=heads), heads, carry=carry, final=single_step)
    w.finalize()
    return w.program(SAVES)


def backward(problem: Problem, rank: int, name: str = "allgather") -> Program:
    """Build the backward of one rank: gather keys again, and send each share of dK and dV to the keys' owner.

    Args:
        problem: The positions that every rank holds, the mask, and the options `head_stride` and `chunks`.
        rank: The rank that runs the program.
        name: The name of the program, for people.
    """
    w = Writer(name, "backward", problem, rank)
    work = _pieces(problem)
    if _only_own(problem, rank) and not any(need for d, need in enumerate(problem.needs[rank]) if d != rank):
        # Nothing moves: our queries see only our own keys, and no other rank needs them.
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
        _collect(w, work, n - 1)  # one piece late, so that its messages move during this piece's kernel
    _collect(w, work, len(work) - 1)
    w.finalize()
    return w.program()


class Piece(NamedTuple):
    """One gather: an interval of key heads, and chunk `chunk` of `num_chunks` of each rank's keys."""

    heads: Interval
    chunk: int
    num_chunks: int

    def rows(self, count: int) -> Rows:
        """Return this piece's rows of a rank that holds `count` keys."""
        begin, end = count * self.chunk // self.num_chunks, count * (self.chunk + 1) // self.num_chunks
        return ((begin, end),) if begin < end else ()


def _pieces(problem: Problem) -> list[Piece]:
    """Return all pieces in the order in which they are gathered: for each stride of heads, each chunk."""
    option = {"head_stride": 0, "chunks": 1, **problem.option}
    stride, num_chunks = int(option["head_stride"]) or problem.kv_heads, int(option["chunks"]) or 1
    heads = [(first, min(first + stride, problem.kv_heads)) for first in range(0, problem.kv_heads, stride)]
    return [Piece(taken, chunk, num_chunks) for taken in heads for chunk in range(num_chunks)]


def _query_heads(problem: Problem, heads: Interval) -> Interval:
    """Return the query heads that share these key heads."""
    gqa_ratio = problem.heads // problem.kv_heads
    return heads[0] * gqa_ratio, heads[1] * gqa_ratio


def _only_own(problem: Problem, rank: int) -> bool:
    """Whether the queries of a rank see only its own keys."""
    return not any(needs[rank] for c, needs in enumerate(problem.needs) if c != rank)


@lru_cache(maxsize=256)
def _is_even(problem: Problem) -> bool:
    """Whether all ranks hold equally many keys and need all keys: then one collective call can serve."""
    return problem.world > 1 and len(set(problem.k_lengths)) == 1 and problem.everything_needed


def _needed(problem: Problem, piece: Piece, c: int, d: int) -> Rows:
    """Return the key rows of rank c that rank d gathers with a piece."""
    return rows.common(problem.needs[c][d], piece.rows(problem.k_lengths[c]))


def _held(problem: Problem, rank: int, piece: Piece) -> list[Rows]:
    """Return, for each rank, its key rows that `rank` attends to; the gathered buffer holds them in this order."""
    if _only_own(problem, rank):
        return [piece.rows(n) if c == rank else () for c, n in enumerate(problem.k_lengths)]
    return [_needed(problem, piece, c, rank) for c in range(problem.world)]


def _positions(problem: Problem, rank: int, piece: Piece) -> Ranges:
    """Return the positions of the gathered keys, in the order of the buffer."""
    held = _held(problem, rank, piece)
    return tuple(r for c, taken in enumerate(held) for r in rows.positions(problem.k[c], taken))


def _slots(whole: Slice, held: list[Rows]) -> list[Slice]:
    """Cut a gathered buffer into one slice for each rank."""
    out, first = [], 0
    for taken in held:
        out.append(Slice(whole.buffer, (first, first + rows.count(taken)), whole.heads))
        first += rows.count(taken)
    return out


def _keys(w: Writer, piece: Piece, n: int) -> Slice:
    """Return the keys and values to attend to: the gathered buffer, or our own tensor if we need no others."""
    if _only_own(w.problem, w.rank):
        return w.own("kv", next(iter(piece.rows(w.k_rows)), (0, 0)), piece.heads)
    width = piece.heads[1] - piece.heads[0]
    return w.scratch(f"kv{width}.{n % 2}", "kv", _count(w, piece), heads=width)


def _shares(w: Writer, piece: Piece, n: int) -> Slice:
    """Return the buffer for our share of the gradients of all keys that we attended to."""
    width = piece.heads[1] - piece.heads[0]
    return w.scratch(f"dkv{width}.{n % 2}", "dkv", _count(w, piece), "reduce", width)


def _count(w: Writer, piece: Piece) -> int:
    return sum(map(rows.count, _held(w.problem, w.rank, piece)))


def _gather(w: Writer, work: list[Piece], n: int) -> None:
    """Post the gather of the n-th piece: send each rank the rows of ours that it needs, receive the rows we need."""
    if n >= len(work):
        return
    problem, rank, piece = w.problem, w.rank, work[n]
    own, all_rows = w.own("kv", heads=piece.heads), ((0, w.k_rows),)
    sends = [
        part
        for d in range(problem.world)
        if not _only_own(problem, d)
        for part in parts(d, own, all_rows, _needed(problem, piece, rank, d))
    ]
    recvs: list[Part] = []
    if not _only_own(problem, rank):
        held = _held(problem, rank, piece)
        for c, slot in enumerate(_slots(_keys(w, piece, n), held)):
            recvs += parts(c, slot, held[c], held[c])
    w.post(Post(f"kv {n}", tuple(sends), tuple(recvs), collective="all_gather" if _is_even(problem) else ""))


def _scatter(w: Writer, piece: Piece, n: int) -> None:
    """Post our shares to the owners of the keys, and receive the shares of our keys.

    Our own share goes through the post as well, so that all shares lie in one buffer for an all_to_all.
    """
    problem, rank = w.problem, w.rank
    held, theirs = _held(problem, rank, piece), _shares_of_others(problem, rank, piece)
    sends = [
        part
        for c, slot in enumerate(_slots(_shares(w, piece, n), held))
        for part in parts(c, slot, held[c], _needed(problem, piece, c, rank))
    ]
    recvs = [
        part
        for d, slot in enumerate(_slots(_recv_buffer(w, piece, n), theirs))
        for part in parts(d, slot, theirs[d], theirs[d])
    ]
    w.post(Post(f"dkv {n}", tuple(sends), tuple(recvs), collective="all_to_all" if _is_even(problem) else ""))


def _collect(w: Writer, work: list[Piece], n: int) -> None:
    """Sum the shares of all ranks for the n-th piece, in rank order, so that rounding is the same in every run."""
    if n < 0:
        return
    piece = work[n]
    theirs, mine = _shares_of_others(w.problem, w.rank, piece), piece.rows(w.k_rows)
    w.wait(f"dkv {n}")
    if not mine:
        return
    total = w.scratch("dkv.sum", "dkv", w.k_rows, "partial", becomes="dkv")
    total = Slice(total.buffer, mine[0], piece.heads)
    # If rank 0 has a share of every row, its copy initializes the sum; otherwise the sum starts from zero.
    covers_all = theirs[0] == mine
    if not covers_all:
        w.steps.append(Clear(total))
    for d, slot in enumerate(_slots(_recv_buffer(w, piece, n), theirs)):
        pairs = zip(pieces(slot, theirs[d], theirs[d]), pieces(total, mine, theirs[d]), strict=True)
        w.append_each(Copy if covers_all and d == 0 else Add, pairs)
    w.append_each(Copy, [(total, w.own("dkv", mine[0], piece.heads))])


def _shares_of_others(problem: Problem, rank: int, piece: Piece) -> list[Rows]:
    """Return, for each rank, the rows of our keys that it has a share of the gradient for."""
    return [_needed(problem, piece, rank, d) for d in range(problem.world)]


def _recv_buffer(w: Writer, piece: Piece, n: int) -> Slice:
    """Return the buffer in which the shares of our keys arrive."""
    width = piece.heads[1] - piece.heads[0]
    count = sum(map(rows.count, _shares_of_others(w.problem, w.rank, piece)))
    return w.scratch(f"dkv{width}.in.{n % 2}", "dkv", count, "reduce", width)


for _name, _layout, _summary in (
    ("allgather", Layout.contiguous, "each rank gathers the keys that its queries see"),
    ("ringx3", Layout.zigzag, "same as allgather, on zigzag shards"),
):
    register(Schedule(_name, forward, backward, _layout, _summary, (("head_stride", 0), ("chunks", 1))))
