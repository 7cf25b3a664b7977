"""Compose schedules: heads are exchanged for sequence within lines of ranks, and any schedule runs between the lines.

The ranks are a table of two axes. Along one, a line of ranks exchanges: each rank gives away all heads but its share,
and gets that share for the tokens of the whole line. Along the other, ranks with the same share run another schedule
on longer shards of fewer heads. Results and gradients go back the same way. What the backward needs of the exchange is
saved, so that queries, keys and values travel once. Results go home without their LSE where nobody asks for it there,
and their gradients come without delta, for the results are here.

Nothing has to divide anything: shares may differ, or be empty, and where there are more ranks than key heads, those
key heads go to several ranks whose query heads share them, and their gradients are summed at home.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

from meshflash.core.problem import Problem
from meshflash.core.program import (
    LSE_KINDS,
    Add,
    Copy,
    Delta,
    Dtype,
    Interval,
    Part,
    Post,
    Program,
    Ranges,
    Slice,
    Step,
)
from meshflash.schedules.registry import Builder, on_change, parse
from meshflash.schedules.writer import Writer


@dataclass(frozen=True)
class Piece:
    """Query heads that one rank attends with at a time, as many of each of these key heads."""

    heads: Interval
    kv: Interval

    @property
    def shape(self) -> tuple[int, int]:
        """How many query heads and key heads."""
        return self.heads[1] - self.heads[0], self.kv[1] - self.kv[0]


def shares(heads: int, kv_heads: int, ways: int, rounds: int = 1) -> tuple[tuple[Piece, ...], ...]:
    """The heads of each of so many ranks, in the pieces in which it takes them.

    Key heads are not cut while there are as many as ranks.

    >>> [[piece.heads for piece in share] for share in shares(8, 2, 3)]
    [[(0, 2)], [(2, 4), (4, 5)], [(5, 8)]]
    """
    group = heads // kv_heads
    cut = kv_heads < ways
    bounds = [(heads if cut else kv_heads) * n // ways * (1 if cut else group) for n in range(ways + 1)]
    return tuple(tuple(_pieces(first, last, group, rounds)) for first, last in pairwise(bounds))


def _pieces(first: int, last: int, group: int, rounds: int) -> Iterator[Piece]:
    """Some heads as pieces, of at most so many key heads that there are so many rounds; groups that are cut apart."""
    held = [
        (kv, max(first, kv * group), min(last, (kv + 1) * group)) for kv in range(first // group, -(-last // group))
    ]
    held = held if first < last else []
    each = max(1, -(-len(held) // rounds))
    for _, alike in groupby(held, key=lambda entry: entry[2] - entry[1]):
        these = list(alike)
        for n in range(0, len(these), each):
            taken = these[n : n + each]
            yield Piece((taken[0][1], taken[-1][2]), (taken[0][0], taken[-1][0] + 1))


@dataclass(frozen=True)
class Run:
    """Rows of one rank that are neighbours in what its line holds together."""

    rank: int
    rows: Interval
    at: Interval


@dataclass(frozen=True)
class Line:
    """The rows of a line's ranks in the order of their positions."""

    runs: tuple[Run, ...]
    positions: Ranges

    @property
    def rows(self) -> int:
        """How many."""
        return sum(map(len, self.positions))

    def of(self, rank: int) -> list[Run]:
        """Those of one rank."""
        return [run for run in self.runs if run.rank == rank]


def line_of(ranks: tuple[int, ...], held: tuple[Ranges, ...]) -> Line:
    """What these ranks hold together, of all ranks' ranges.

    >>> line_of((0, 1), ((range(0, 2), range(6, 8)), (range(2, 4), range(4, 6)))).positions
    (range(0, 8),)
    """
    found = []
    for rank in ranks:
        row = 0
        for r in held[rank]:
            if len(r):
                found.append((r, rank, (row, row + len(r))))
            row += len(r)
    found.sort(key=lambda entry: (entry[0].start, entry[1]))
    runs: list[Run] = []
    positions: list[range] = []
    row = 0
    for r, rank, rows in found:
        runs.append(Run(rank, rows, (row, row + len(r))))
        row += len(r)
        if positions and r.step == positions[-1].step == 1 and r.start == positions[-1].stop:
            positions[-1] = range(positions[-1].start, r.stop)
        else:
            positions.append(r)
    return Line(tuple(runs), tuple(positions))


@dataclass(frozen=True)
class Table:
    """The ranks of a problem as lines that exchange, and which line's rows every rank of a share meets.

    `inner` neighbouring ranks are a line; turned, every `world / inner`-th.
    """

    problem: Problem
    inner: int
    turned: bool
    rounds: int

    @property
    def lines(self) -> int:
        """How many lines there are."""
        return self.problem.world // self.inner

    def rank(self, line: int, share: int) -> int:
        """Who has this share in this line."""
        return share * self.lines + line if self.turned else line * self.inner + share

    def place(self, rank: int) -> tuple[int, int]:
        """The line and the share of a rank."""
        if self.turned:
            share, line = divmod(rank, self.lines)
        else:
            line, share = divmod(rank, self.inner)
        return line, share

    def line(self, number: int) -> tuple[int, ...]:
        """The ranks of a line, by their shares."""
        return tuple(self.rank(number, share) for share in range(self.inner))

    def column(self, share: int) -> tuple[int, ...]:
        """The ranks with the same share, by their lines."""
        return tuple(self.rank(line, share) for line in range(self.lines))

    @property
    def shares(self) -> tuple[tuple[Piece, ...], ...]:
        """The heads of each share."""
        return shares(self.problem.heads, self.problem.kv_heads, self.inner, self.rounds)

    @property
    def summed(self) -> bool:
        """Whether key heads go to several ranks, and their gradients are sums."""
        taken = [head for share in self.shares for piece in share for head in range(*piece.kv)]
        return len(taken) != len(set(taken))


@lru_cache(maxsize=256)
def _lines(table: Table) -> tuple[tuple[Line, Line], ...]:
    """The queries and keys of each line."""
    problem = table.problem
    ranks = [table.line(n) for n in range(table.lines)]
    return tuple((line_of(each, problem.q), line_of(each, problem.k)) for each in ranks)


@lru_cache(maxsize=256)
def _between(table: Table, schedule: str, shape: tuple[int, int]) -> Problem:
    """What the ranks of one share have to solve for so many heads."""
    held = _lines(table)
    q, k = (tuple(line[side].positions for line in held) for side in (0, 1))
    return Problem(q, k, table.problem.mask, *shape, options=parse(schedule)[1])


on_change.append(_between.cache_clear)


def heads_for_sequence(
    schedule: str = "ring", inner: int = 0, *, turned: bool = False, rounds: int = 1
) -> tuple[Builder, Builder]:
    """Builders (forward, backward): heads for sequence in lines of `inner` ranks, and a schedule between the lines.

    With 0 a line is all ranks. `turned` puts the lines across: the schedule then runs between neighbours.

    >>> from meshflash.schedules.registry import build_program, register_schedule, unregister_schedule
    >>> from meshflash import Layout, Mask
    >>> register_schedule("pairs", *heads_for_sequence("zigzag", 2), layout=Layout.zigzag, saves_buffers=True)
    >>> build_program("pairs", Layout.zigzag(16, 4), Mask.causal(), rank=1, heads=2, kv_heads=2).saves
    ('out', 'q:0', 'kv:0', 'out:0')
    >>> unregister_schedule("pairs")
    """

    def forward(problem: Problem, rank: int, name: str) -> Program:
        return exchange_forward(_table(problem, inner, turned, rounds, name), schedule, rank, name)

    def backward(problem: Problem, rank: int, name: str) -> Program:
        return exchange_backward(_table(problem, inner, turned, rounds, name), schedule, rank, name)

    return forward, backward


def _table(problem: Problem, inner: int, turned: bool, rounds: int, name: str) -> Table:
    inner = inner or problem.world
    if problem.world % inner:
        raise ValueError(f"{name}: {problem.world} ranks are not lines of {inner}; give an inner that divides them")
    return Table(replace(problem, options=()), inner, turned, rounds)


def exchange_forward(table: Table, schedule: str, rank: int, name: str) -> Program:
    """Exchange, attend to longer shards of our heads, and give the results back."""
    e = _Exchange(table, schedule, rank, name, "forward")
    w = e.w
    if table.inner == 1:
        return e.alone()
    for n in range(e.rounds + 1):
        if n < e.rounds:
            e.take_in(n, {"q": e.kept("q", n), "kv": e.kept("kv", n)})
        if n:
            kept = {kind: e.kept(kind, n - 1) for kind in ("q", "kv", "out")}
            e.run(n - 1, kept)
            e.give_back(n - 1, {"out": kept["out"]})
            e.collect(n - 2)
    e.collect(e.rounds - 1)
    return w.program(("out", *e.saved))


def exchange_backward(table: Table, schedule: str, rank: int, name: str) -> Program:
    """Exchange the gradients of the results; those of our heads go back to whom the rows are of."""
    e = _Exchange(table, schedule, rank, name, "backward")
    w = e.w
    if table.inner == 1:
        return e.alone()
    dtype: Dtype = "reduce" if table.summed else "input"
    for n in range(e.rounds + 1):
        if n < e.rounds:
            e.take_in(n, {"dout": e.room("dout", n)})
        if n:
            m = n - 1
            saved = {kind: e.kept(kind, m) for kind in ("q", "kv", "out")}
            made = {"dq": e.room("dq", m), "dkv": e.room("dkv", m, dtype)}
            e.run(m, {**saved, "dout": e.room("dout", m), **made})
            e.give_back(m, made)
            e.collect(m - 1)
    e.collect(e.rounds - 1)
    w.finalize()
    return w.program()


class _Exchange:
    """One rank's part in the exchange of its line, in rounds: one for each piece of the largest share."""

    def __init__(self, table: Table, schedule: str, rank: int, name: str, direction: Any) -> None:
        self.table, self.schedule, self.rank = table, schedule, rank
        self.w = Writer(name, direction, table.problem, rank)
        self.w.groups += parse(schedule)[0].groups
        self.number, self.share = table.place(rank)
        self.members = table.line(self.number)
        self.shares = table.shares
        self.mine = self.shares[self.share]
        self.rounds = max(map(len, self.shares))
        self.q, self.kv = _lines(table)[self.number]
        self.saved: list[str] = []
        self._bare = frozenset() if table.problem.lse else LSE_KINDS
        self._made: dict[int, dict[str, str]] = {}
        self._total: Slice | None = None
        self._begun: set[int] = set()
        if direction == "backward" and table.summed and table.inner > 1:
            self._total = self.w.accumulator("dkv", partial=bool(self.w.k_rows))

    def alone(self) -> Program:
        """Lines of one rank exchange nothing: the other schedule has all heads."""
        found, options = parse(self.schedule)
        problem = replace(self.table.problem, options=options)
        builder = found.forward if self.w.direction == "forward" else found.backward
        return builder(problem, self.rank, self.w.name)

    def kept(self, kind: str, n: int) -> str:
        """The buffer of a round that the forward saves and the backward finds; empty where we have no piece."""
        if n >= len(self.mine):
            return ""
        name = f"{kind}:{n}"
        if name not in self.saved:
            self.saved.append(name)
            heads, kv = self.mine[n].shape
            keys = kind == "kv"
            self.w.save_buffer(name, kind, (self.kv if keys else self.q).rows, kv if keys else heads)
        return name

    def room(self, kind: str, n: int, dtype: Dtype = "input") -> str:
        """A buffer of a round for what is not saved: two, by turns."""
        if n >= len(self.mine):
            return ""
        heads, kv = self.mine[n].shape
        keys = kind == "dkv"
        width = kv if keys else heads
        name = f"{kind}{width}.{n % 2}"
        self.w.scratch(name, kind, (self.kv if keys else self.q).rows, dtype, width)
        return name

    def take_in(self, n: int, rooms: dict[str, str]) -> None:
        """Post the exchange of a round: our rows of others' heads go to them, others' rows of ours come here."""
        sends: list[Part] = []
        recvs: list[Part] = []
        for share, member in enumerate(self.members):
            for kind, room in rooms.items():
                if n < len(self.shares[share]):
                    given = self._own(kind, self._heads(kind, self.shares[share][n]))
                    if member != self.rank:
                        sends += [Part(member, part) for part in given]
                    else:
                        self.w.append_each(Copy, zip(given, self._places(kind, room, member), strict=True))
                if member != self.rank and room:
                    recvs += [Part(member, place) for place in self._places(kind, room, member)]
        self.w.post(Post(f"in {n}", tuple(sends), tuple(recvs)))

    def run(self, n: int, names: dict[str, str]) -> None:
        """Let the other schedule do its work on our piece of a round."""
        self.w.wait(f"in {n}")
        if n >= len(self.mine):
            return
        piece = self.mine[n]
        found, _ = parse(self.schedule)
        problem = _between(self.table, self.schedule, piece.shape)
        builder = found.forward if self.w.direction == "forward" else found.backward
        program = builder(problem, self.number, found.name)
        if any(b.role == "saved" for b in program.buffers):
            raise ValueError(f"{self.w.name}: {found.name} saves buffers of its own; compose another schedule")
        if others := sorted(set(program.group) - set(self.w.groups)):
            raise ValueError(f"{self.w.name}: {found.name} has groups of its own; register it with groups={others}")
        if self._bare and "dout" in names and self.q.rows:
            self.w.steps.append(Delta(self.w.own(names["out"]), self.w.own(names["dout"])))
        embed(self.w, program, names, self.table.column(self.share), piece.heads[0], f"{n}")

    def give_back(self, n: int, made: dict[str, str]) -> None:
        """Post the way back: rows of others that we made go to them, theirs of our rows come here."""
        sends: list[Part] = []
        recvs: list[Part] = []
        for share, member in enumerate(self.members):
            for kind in made:
                if n < len(self.mine) and member != self.rank:
                    sends += [Part(member, place) for place in self._places(kind, made[kind], member)]
                if n < len(self.shares[share]) and member != self.rank:
                    back = self._back(kind, share, n)
                    recvs += [Part(member, replace(back, rows=run.rows)) for run in self._line(kind).of(self.rank)]
        self.w.post(Post(f"out {n}", tuple(sends), tuple(recvs)))
        self._made[n] = made

    def collect(self, n: int) -> None:
        """What came back of a round is put where it belongs: copied, or added where key heads were shared."""
        if n < 0:
            return
        self.w.wait(f"out {n}")
        for share, member in enumerate(self.members):
            if n >= len(self.shares[share]):
                continue
            piece = self.shares[share][n]
            for kind, room in self._made[n].items():
                if member == self.rank:
                    sources = self._places(kind, room, member)
                    rows = [run.rows for run in self._line(kind).of(member)]
                else:
                    back = self._back(kind, share, n)
                    sources, rows = [back], [back.rows]
                self._put(kind, list(zip(sources, rows, strict=True)), self._heads(kind, piece))

    def _put(self, kind: str, found: list[tuple[Slice, Interval]], heads: Interval) -> None:
        """Put what was made of some of our rows, and these heads, where it belongs."""
        if kind != "dkv" or self._total is None:
            self.w.append_each(
                Copy, [(source, self._of(kind, self.w.own(kind, rows, heads))) for source, rows in found]
            )
            return
        for n, head in enumerate(range(*heads)):
            pairs = [
                (replace(source, heads=(n, n + 1)), replace(self._total, rows=rows, heads=(head, head + 1)))
                for source, rows in found
            ]
            self.w.append_each(Add if head in self._begun else Copy, pairs)
            self._begun.add(head)

    def _line(self, kind: str) -> Line:
        return self.kv if kind in ("kv", "dkv") else self.q

    @staticmethod
    def _heads(kind: str, piece: Piece) -> Interval:
        return piece.kv if kind in ("kv", "dkv") else piece.heads

    def _of(self, kind: str, place: Slice) -> Slice:
        """A slice as it travels: bare, where nobody needs more."""
        return replace(place, without_lse=kind in self._bare)

    def _own(self, kind: str, heads: Interval) -> list[Slice]:
        """Our rows of some heads, in runs that are neighbours in what the line holds."""
        own = self._of(kind, self.w.own(kind))
        return [replace(own, rows=run.rows, heads=heads) for run in self._line(kind).of(self.rank)]

    def _places(self, kind: str, name: str, rank: int) -> list[Slice]:
        """Where the rows of a rank lie in a buffer of the whole line."""
        whole = self._of(kind, self.w.own(name))
        return [replace(whole, rows=run.at) for run in self._line(kind).of(rank)]

    def _back(self, kind: str, share: int, n: int) -> Slice:
        """Where what a rank made of our rows arrives."""
        piece = self.shares[share][n]
        heads = self._heads(kind, piece)
        rows = self.w.k_rows if kind == "dkv" else self.w.q_rows
        dtype: Dtype = "reduce" if kind == "dkv" and self._total is not None else "input"
        return self._of(kind, self.w.scratch(f"{kind} of {share}.{n}", kind, rows, dtype, heads[1] - heads[0]))


def embed(
    w: Writer, program: Program, names: dict[str, str], ranks: tuple[int, ...], first_head: int, tag: str
) -> None:
    """Write another program into this one: its caller's buffers are ours of these names, its ranks are these of ours.

    Its heads begin at `first_head`; scratch of the same shape is shared by all programs that are written so.
    """
    places = dict(names)
    for b in program.buffers:
        if b.role == "scratch":
            places[b.name] = f"{b.name} {b.heads}"
            w.scratch(places[b.name], b.kind, b.rows, b.dtype, b.heads)
    for step in program.steps:
        w.steps.append(_moved(step, places, ranks, first_head, tag))


def _moved(step: Step, places: dict[str, str], ranks: tuple[int, ...], first_head: int, tag: str) -> Step:
    def slice_of(place: Slice) -> Slice:
        return replace(place, buffer=places[place.buffer])

    changes: dict[str, Any] = {}
    for item in fields(step):
        value = getattr(step, item.name)
        if isinstance(value, Slice):
            changes[item.name] = slice_of(value)
        elif item.name == "heads":
            changes[item.name] = (value[0] + first_head, value[1] + first_head)
        elif item.name in ("sends", "recvs"):
            changes[item.name] = tuple(Part(ranks[part.peer], slice_of(part.slice)) for part in value)
        elif item.name in ("name", "post"):
            changes[item.name] = f"{tag}: {value}"
        elif item.name == "collective":
            changes[item.name] = ""  # it is one of some ranks only
    return replace(step, **changes)
