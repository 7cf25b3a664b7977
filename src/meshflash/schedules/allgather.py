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

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import repeat
from typing import Literal, NamedTuple

import numpy as np

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
    gather = _Gather(w)
    single_step = gather.only_own or gather.work[-1].chunk == 0
    out = w.accumulator("out", not single_step)
    gather.post(0)
    for n, piece in enumerate(gather.work):
        gather.post(n + 1)
        w.wait(f"kv {n}")
        taken = piece._replace(num_chunks=1) if single_step else piece
        # A rank that needs only its own keys attends to all chunks in one step, at the first chunk of each stride.
        if taken.chunk < taken.num_chunks:
            heads = _query_heads(problem, piece.heads)
            carry = taken.chunk > 0
            keys, positions = gather.keys(taken, n), gather.positions(taken)
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
    gather = _Gather(w)
    if gather.only_own and not gather.consumers.keys() - {rank}:
        # Nothing moves: our queries see only our own keys, and no other rank needs them.
        w.attend_grad(w.own("kv"), problem.k[rank], w.own("dq"), w.own("dkv"))
        return w.program()
    work = gather.work
    dq = w.accumulator("dq", work[-1].chunk > 0)
    gather.post(0)
    for n, piece in enumerate(work):
        gather.post(n + 1)
        w.wait(f"kv {n}")
        heads = _query_heads(problem, piece.heads)
        keys, positions, share = gather.keys(piece, n), gather.positions(piece), gather.share_buffer(piece, n)
        w.attend_grad(keys, positions, replace(dq, heads=heads), share, heads, add_dq=piece.chunk > 0)
        gather.scatter(n)
        gather.collect(n - 1)  # one piece late, so that its messages move during this piece's kernel
    gather.collect(len(work) - 1)
    w.finalize()
    return w.program()


Collective = Literal["", "all_gather", "all_to_all"]


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


class _Gather:
    """One rank's side of the gathers, and of the way back of gradients. The builders make it.

    A rank that needs only its own keys receives nothing, not even from itself. Every other rank gathers its own keys
    with those of the others, so that all keys of a piece lie in one buffer.
    """

    def __init__(self, w: Writer) -> None:
        problem = w.problem
        self.w, self.work = w, _pieces(problem)
        #: The key rows that our queries see, by owner.
        self.needed = problem.needed_from(w.rank)
        #: Our key rows that queries see, by the rank of the queries.
        self.consumers = problem.needed_by(w.rank)
        #: Whether our queries see only our own keys.
        self.only_own = not self.needed.keys() - {w.rank}
        # Where all ranks hold equally many keys and need all of them, one collective call can serve.
        self._is_even = problem.world > 1 and len(set(problem.k_lengths)) == 1 and problem.everything_needed

    def positions(self, piece: Piece) -> Ranges:
        """Return the positions of the gathered keys, in the order of the buffer."""
        k, held = self.w.problem.table.k, self._held(piece)
        first_row = k.first_row.tolist()
        taken = [(first_row[c] + begin, first_row[c] + end) for c, these in held.items() for begin, end in these]
        _, runs = k.positions(*np.array(taken, np.int64).reshape(-1, 2).T)
        ends = runs.position + runs.step * runs.rows
        return tuple(map(range, runs.position.tolist(), ends.tolist(), runs.step.tolist()))

    def keys(self, piece: Piece, n: int) -> Slice:
        """Return the keys and values to attend to: the gathered buffer, or our own tensor if we need no others."""
        if self.only_own:
            return self.w.own("kv", next(iter(piece.rows(self.w.k_rows)), (0, 0)), piece.heads)
        width = piece.heads[1] - piece.heads[0]
        return self.w.scratch(f"kv{width}.{n % 2}", "kv", _count(self._held(piece)), heads=width)

    def share_buffer(self, piece: Piece, n: int) -> Slice:
        """Return the buffer for our share of the gradients of all keys that we attended to."""
        width = piece.heads[1] - piece.heads[0]
        return self.w.scratch(f"dkv{width}.{n % 2}", "dkv", _count(self._held(piece)), "reduce", width)

    def post(self, n: int) -> None:
        """Post the gather of the n-th piece: send each rank the rows of ours that it needs, receive what we need."""
        if n >= len(self.work):
            return
        w, piece = self.w, self.work[n]
        own, all_rows = w.own("kv", heads=piece.heads), ((0, w.k_rows),)
        sends = [
            part
            for d, theirs in self._shares_of_others(piece).items()
            if d != w.rank or not self.only_own
            for part in parts(d, own, all_rows, theirs)
        ]
        recvs = () if self.only_own else _packed(self.keys(piece, n), self._held(piece))
        collective: Collective = "all_gather" if self._is_even else ""
        w.post(Post(f"kv {n}", tuple(sends), recvs, collective=collective), drop_empty=False)

    def scatter(self, n: int) -> None:
        """Post our shares to the owners of the keys, and receive the shares of our keys.

        Our own share goes through the post as well, so that all shares lie in one buffer for an all_to_all.
        """
        w, piece = self.w, self.work[n]
        held, needed, shares = self._held(piece), self._needed(piece), self.share_buffer(piece, n)
        own = needed.get(w.rank, ())
        sends = parts(w.rank, shares, held[w.rank], own) if self.only_own else _packed(shares, held)
        recvs = _packed(self._recv_buffer(piece, n), self._shares_of_others(piece))
        collective: Collective = "all_to_all" if self._is_even else ""
        w.post(Post(f"dkv {n}", sends, recvs, collective=collective), drop_empty=False)

    def collect(self, n: int) -> None:
        """Sum the shares of all ranks for the n-th piece, in rank order, so that rounding is the same in every run."""
        if n < 0:
            return
        w, piece = self.w, self.work[n]
        theirs, mine = self._shares_of_others(piece), piece.rows(w.k_rows)
        w.wait(f"dkv {n}")
        if not mine:
            return
        total = w.scratch("dkv.sum", "dkv", w.k_rows, "partial", becomes="dkv")
        total = Slice(total.buffer, mine[0], piece.heads)
        # If rank 0 has a share of every row, its copy initializes the sum; otherwise the sum starts from zero.
        covers_all = theirs.get(0) == mine
        if not covers_all:
            w.steps.append(Clear(total))
        targets = (target for these in theirs.values() for target in pieces(total, mine, these))
        for part, target in zip(_packed(self._recv_buffer(piece, n), theirs), targets, strict=True):
            initialize = covers_all and part.peer == 0
            w.steps.append(Copy(part.slice, target) if initialize else Add(part.slice, target))
        w.append_each(Copy, [(total, w.own("dkv", mine[0], piece.heads))])

    def _held(self, piece: Piece) -> Mapping[int, Rows]:
        """Return the key rows that we attend to, by owner; the gathered buffer holds them in this order."""
        return {self.w.rank: piece.rows(self.w.k_rows)} if self.only_own else self._needed(piece)

    def _needed(self, piece: Piece) -> Mapping[int, Rows]:
        """Return the key rows of a piece that our queries see, by owner."""
        if piece.num_chunks == 1:
            return self.needed
        lengths = self.w.problem.k_lengths
        return _common(self.needed, (piece.rows(lengths[c]) for c in self.needed))

    def _shares_of_others(self, piece: Piece) -> Mapping[int, Rows]:
        """Return the rows of our keys that each rank, ourselves included, has a share of the gradient for."""
        return self.consumers if piece.num_chunks == 1 else _common(self.consumers, repeat(piece.rows(self.w.k_rows)))

    def _recv_buffer(self, piece: Piece, n: int) -> Slice:
        """Return the buffer in which the shares of our keys arrive."""
        width = piece.heads[1] - piece.heads[0]
        return self.w.scratch(f"dkv{width}.in.{n % 2}", "dkv", _count(self._shares_of_others(piece)), "reduce", width)


def _common(wanted: Mapping[int, Rows], taken: Iterable[Rows]) -> dict[int, Rows]:
    """Return the wanted rows of each rank that are taken as well, without ranks that have none."""
    both = {peer: rows.common(these, those) for (peer, these), those in zip(wanted.items(), taken, strict=False)}
    return {peer: these for peer, these in both.items() if these}


def _packed(whole: Slice, held: Mapping[int, Rows]) -> tuple[Part, ...]:
    """Return the parts of a packed buffer: one for each interval of rows of each rank."""
    out, first = [], 0
    for peer, these in held.items():
        for begin, end in these:
            last = first + end - begin
            out.append(Part(peer, Slice(whole.buffer, (first, last), whole.heads)))
            first = last
    return tuple(out)


def _count(held: Mapping[int, Rows]) -> int:
    return sum(map(rows.count, held.values()))


for _name, _layout, _summary in (
    ("allgather", Layout.contiguous, "each rank gathers the keys that its queries see"),
    ("ringx3", Layout.zigzag, "same as allgather, on zigzag shards"),
):
    register(Schedule(_name, forward, backward, _layout, _summary, (("head_stride", 0), ("chunks", 1))))
