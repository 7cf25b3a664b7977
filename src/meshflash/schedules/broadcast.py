"""Broadcast: ranks take turns; whoever's turn it is gives to all that need it, while they work on what came before.

`ringx4` gives keys and values, and each rank sends its share of their gradients back. `ringx1` and `ringx2` give
queries: every rank attends to its own keys with them and sends back its part of the result, which the owner
merges; their gradients travel the same way, or as those of `ringx4`, whichever moves less. Nothing goes to a rank
that has no use for it, so a causal mask needs no schedule of its own: `ringx1` and `ringx2` are one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from meshflash.core import rows
from meshflash.core.layout import Layout
from meshflash.core.problem import Problem
from meshflash.core.program import Add, Attend, AttendGrad, Dtype, Part, Post, Program, Slice
from meshflash.core.rows import Rows
from meshflash.schedules.registry import Schedule, register
from meshflash.schedules.writer import SAVES, Writer, parts, pieces

#: Elements that move for a row of one head, in those of the input's dtype, for half precision whose gradients travel
#: in float32: keys and values there and their gradients back; queries, what is known of their rows, and theirs.
KEY_COST, QUERY_COST = 2 + 4, 1 + 2 + 2


def give_keys(problem: Problem, rank: int, name: str = "ringx4") -> Program:
    """Attend to our own keys, then to those of each rank as its turn comes."""
    w = Writer(name, "forward", problem, rank)
    turns = _others(problem, rank)
    alone = not any(problem.needs[c][rank] for c in turns)
    out = w.total("out", not alone)
    own = problem.needs[rank][rank]
    giving = _Giving(w, "kv", lambda c, d: problem.needs[c][d])
    giving.begin()
    kv = w.own("kv") if own else w.own("kv", (0, 0))
    w.attend(kv, problem.k[rank] if own else (), out, final=alone)
    for turn in range(problem.world):
        here = giving.take(turn)
        if here is not None:
            w.attend(here, rows.positions(problem.k[turn], problem.needs[turn][rank]), out, carry=True)
    w.settle()
    return w.program(SAVES)


def give_keys_backward(problem: Problem, rank: int, name: str = "ringx4") -> Program:
    """The same for keys; the gradients of keys go back to the rank whose turn it is."""
    w = Writer(name, "backward", problem, rank)
    turns = _others(problem, rank)
    visits = [c for c in turns if problem.needs[c][rank]]
    guests = [d for d in turns if problem.needs[rank][d]]
    dq = w.total("dq", bool(visits))
    dkv = w.total("dkv", bool(guests))
    giving = _Giving(w, "kv", lambda c, d: problem.needs[c][d])
    giving.begin()
    w.attend_grad(w.own("kv"), problem.k[rank], dq, dkv)
    back = _Returning(w, "dkv", "reduce", lambda c, d: problem.needs[c][d], dkv)
    for turn in range(problem.world):
        here = giving.take(turn)
        if here is not None:
            part = back.room(turn)
            w.attend_grad(here, rows.positions(problem.k[turn], problem.needs[turn][rank]), dq, part, add_dq=True)
            back.send(turn, part)
        elif turn == rank:
            back.collect(guests)
    back.close()
    w.settle()
    return w.program()


def give_queries(problem: Problem, rank: int, name: str = "ringx1") -> Program:
    """Attend with our own queries, then with those of each rank as its turn comes, always to our own keys."""
    w = Writer(name, "forward", problem, rank)
    guests = [c for c in _others(problem, rank) if asking(problem, rank, c)]
    out = w.total("out", bool(guests))
    own = problem.needs[rank][rank]
    giving = _Giving(w, "q", lambda d, c: asking(problem, d, c))
    giving.begin()
    kv = w.own("kv") if own else w.own("kv", (0, 0))
    w.attend(kv, problem.k[rank] if own else (), out, final=not guests)
    back = _Returning(w, "out", "partial", lambda d, c: asking(problem, d, c), out)
    for turn in range(problem.world):
        here = giving.take(turn)
        if here is not None:
            part = back.room(turn)
            positions = rows.positions(problem.q[turn], asking(problem, turn, rank))
            w.steps.append(Attend(here, w.own("kv"), part, positions, problem.k[rank], (0, problem.heads)))
            back.send(turn, part)
        elif turn == rank:
            back.collect(guests)
    back.close()
    w.settle()
    return w.program(SAVES)


def give_queries_backward(problem: Problem, rank: int, name: str = "ringx1") -> Program:
    """Gradients of the same: queries and their rows go round, or keys do, whichever moves less."""
    if not queries_move_less(problem):
        return give_keys_backward(problem, rank, name)
    w = Writer(name, "backward", problem, rank)
    others = _others(problem, rank)
    guests = [c for c in others if asking(problem, rank, c)]
    visits = [d for d in others if asking(problem, d, rank)]
    dq = w.total("dq", bool(guests))
    dkv = w.total("dkv", bool(visits))
    giving = _Giving(w, "q", lambda d, c: asking(problem, d, c), with_rows=True)
    giving.begin()
    w.attend_grad(w.own("kv"), problem.k[rank], dq, dkv)
    back = _Returning(w, "dq", "reduce", lambda d, c: asking(problem, d, c), dq)
    for turn in range(problem.world):
        here = giving.take(turn)
        if here is not None:
            part = back.room(turn)
            positions = rows.positions(problem.q[turn], asking(problem, turn, rank))
            known = giving.place("out", turn), giving.place("dout", turn)
            everything = (0, problem.heads)
            w.steps.append(
                AttendGrad(here, *known, w.own("kv"), part, dkv, positions, problem.k[rank], everything, add_dkv=True)
            )
            back.send(turn, part)
        elif turn == rank:
            back.collect(guests)
    back.close()
    w.settle()
    return w.program()


def asking(problem: Problem, owner: int, rank: int) -> Rows:
    """The queries of an owner that see a key of this rank."""
    if owner == rank or not problem.needs[rank][owner]:
        return ()
    return problem.q_seeing(owner, problem.k[rank])


@lru_cache(maxsize=256)
def queries_move_less(problem: Problem) -> bool:
    """Whether giving queries round moves fewer bytes in the backward than giving keys."""
    pairs = [(c, d) for c in range(problem.world) for d in range(problem.world) if c != d]
    queries = sum(rows.count(asking(problem, d, c)) for c, d in pairs) * problem.heads * QUERY_COST
    keys = sum(rows.count(problem.needs[c][d]) for c, d in pairs) * problem.kv_heads * KEY_COST
    return queries < keys


def _others(problem: Problem, rank: int) -> list[int]:
    return [c for c in range(problem.world) if c != rank]


class _Giving:
    """In its turn each rank gives others the rows that they need, `wanted(owner, other)`, one turn ahead of use."""

    def __init__(self, w: Writer, kind: str, wanted: Callable[[int, int], Rows], with_rows: bool = False) -> None:
        self.w, self.wanted = w, wanted
        self.kinds = (kind, "out", "dout") if with_rows else (kind,)

    def begin(self) -> None:
        """The first turn's rows set out."""
        self._post(0)

    def take(self, turn: int) -> Slice | None:
        """Wait for the rows of this turn, and let those of the next set out; None if none are for us."""
        self.w.wait(f"{self.kinds[0]} {turn}")
        self._post(turn + 1)
        if turn == self.w.rank or not self.wanted(turn, self.w.rank):
            return None
        return self.place(self.kinds[0], turn)

    def place(self, kind: str, turn: int) -> Slice:
        """Where the rows of a turn are: two rooms, by turns."""
        return self.w.scratch(f"{kind}.{turn % 2}", kind, rows.count(self.wanted(turn, self.w.rank)))

    def _post(self, turn: int) -> None:
        w = self.w
        if turn >= w.problem.world:
            return
        sends: list[Part] = []
        recvs: list[Part] = []
        for kind in self.kinds:
            if turn == w.rank:
                everything = ((0, w.own(kind).rows[1]),)
                for other in _others(w.problem, w.rank):
                    sends += parts(other, w.own(kind), everything, self.wanted(turn, other))
            elif mine := self.wanted(turn, w.rank):
                recvs += parts(turn, self.place(kind, turn), mine, mine)
        w.post(Post(f"{self.kinds[0]} {turn}", tuple(sends), tuple(recvs)))


class _Returning:
    """What others made of our rows comes back to be added to `total`, one rank after another."""

    def __init__(self, w: Writer, kind: str, dtype: Dtype, wanted: Callable[[int, int], Rows], total: Slice) -> None:
        self.w, self.kind, self.dtype, self.wanted, self.total = w, kind, dtype, wanted, total

    def room(self, turn: int) -> Slice:
        """Where our share for the rank of this turn is made: two rooms, by turns."""
        for earlier in range(turn % 2, turn, 2):
            self.w.wait(f"{self.kind} {earlier}")
        return self._scratch(f"{self.kind}.part.{turn % 2}", self.wanted(turn, self.w.rank))

    def send(self, turn: int, part: Slice) -> None:
        """Our share goes to the rank whose turn it is."""
        mine = self.wanted(turn, self.w.rank)
        self.w.post(Post(f"{self.kind} {turn}", parts(turn, part, mine, mine), ()))

    def collect(self, guests: list[int]) -> None:
        """It is our turn: take in the shares of all, two at a time, and add them up in the order of ranks."""
        w, everything = self.w, ((0, self.total.rows[1]),)
        for n in range(len(guests) + 1):
            if n < len(guests):
                theirs = self.wanted(w.rank, guests[n])
                room = self._scratch(f"{self.kind}.in.{n % 2}", theirs)
                w.post(Post(f"{self.kind} from {guests[n]}", (), parts(guests[n], room, theirs, theirs)))
            if n:
                theirs = self.wanted(w.rank, guests[n - 1])
                w.wait(f"{self.kind} from {guests[n - 1]}")
                room = self._scratch(f"{self.kind}.in.{(n - 1) % 2}", theirs)
                w.each(Add, zip(pieces(room, theirs, theirs), pieces(self.total, everything, theirs), strict=True))

    def close(self) -> None:
        """Wait for what we still send."""
        for turn in range(self.w.problem.world):
            self.w.wait(f"{self.kind} {turn}")

    def _scratch(self, name: str, held: Rows) -> Slice:
        return self.w.scratch(name, self.kind, rows.count(held), self.dtype)


for _name, _forward, _backward, _layout, _summary in (
    ("ringx1", give_queries, give_queries_backward, Layout.contiguous, "ranks take turns to give their queries round"),
    ("ringx2", give_queries, give_queries_backward, Layout.contiguous, "the same, by its name for causal masks"),
    ("ringx4", give_keys, give_keys_backward, Layout.zigzag, "ranks take turns to give their keys round"),
):
    register(Schedule(_name, _forward, _backward, _layout, _summary))
