"""The ring family: keys and values travel from neighbour to neighbour while each rank attends to what it has.

`ring`, `zigzag` and `striped` are this one schedule on three layouts. Rows travel only as far as a rank
needs them; each way round is weighed, and both at once. Gradients of keys follow their keys home.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from meshflash.core import rows
from meshflash.core.layout import Layout
from meshflash.core.problem import Problem
from meshflash.core.program import Add, Copy, Post, Program, Slice
from meshflash.core.rows import Rows
from meshflash.schedules.registry import Schedule, register
from meshflash.schedules.writer import SAVES, Writer, parts, pieces

#: Gradients go straight home where that moves less than this share of what going round would.
DIRECT_BELOW = 0.5


@dataclass(frozen=True)
class Lane:
    """One way round: keys reach a rank from `rank + toward`, hop by hop, from as many as `hops` ranks away."""

    toward: int
    hops: int

    def chunk(self, rank: int, hop: int, world: int) -> int:
        """Whose keys are with a rank after so many hops."""
        return (rank + self.toward * hop) % world

    def holder(self, chunk: int, hop: int, world: int) -> int:
        """With which rank these keys are after so many hops."""
        return (chunk - self.toward * hop) % world


@lru_cache(maxsize=256)
def wires(problem: Problem, lane: Lane) -> tuple[tuple[Rows, ...], ...]:
    """`[chunk][hop]`: the rows that make this hop, for a rank at its end or beyond needs them; hop 0 is none."""
    world = problem.world
    out = []
    for chunk in range(world):
        needs = [problem.needs[chunk][lane.holder(chunk, hop, world)] for hop in range(1, lane.hops + 1)]
        out.append(((), *reversed(_unions(reversed(needs)))))
    return tuple(out)


@lru_cache(maxsize=256)
def gathered(problem: Problem, lane: Lane) -> tuple[tuple[Rows, ...], ...]:
    """`[chunk][hop]`: the rows for which a rank up to this hop has gradients."""
    world = problem.world
    return tuple(
        ((), *_unions(problem.needs[chunk][lane.holder(chunk, hop, world)] for hop in range(1, lane.hops + 1)))
        for chunk in range(world)
    )


@lru_cache(maxsize=256)
def lanes(problem: Problem) -> tuple[Lane, ...]:
    """The way round that moves least: down, up, or the nearer half of the ranks each way."""
    world = problem.world
    if world == 1:
        return ()
    near = (Lane(1, world // 2), Lane(-1, (world - 1) // 2))
    ways = [(Lane(1, world - 1),), (Lane(-1, world - 1),), tuple(lane for lane in near if lane.hops)]
    return min(ways, key=lambda way: sum(_moved(wires(problem, lane)) for lane in way))


@lru_cache(maxsize=256)
def goes_round(problem: Problem) -> bool:
    """Whether gradients of keys go on round the ring, collected on the way, rather than straight home."""
    way = lanes(problem)
    if len(way) > 1:
        return False
    straight = sum(rows.count(need) for c, needs in enumerate(problem.needs) for d, need in enumerate(needs) if c != d)
    return all(straight >= DIRECT_BELOW * _moved(gathered(problem, lane)) for lane in way)


def forward(problem: Problem, rank: int, name: str = "ring") -> Program:
    """Attend to our own keys, then to each neighbour's as they come by."""
    w = Writer(name, "forward", problem, rank)
    way, world = lanes(problem), problem.world
    visits = _visits(problem, rank)
    alone = not visits
    out = w.total("out", not alone)
    _hop(w, way, 1)
    own = problem.needs[rank][rank]
    kv = w.own("kv") if own else w.own("kv", (0, 0))
    w.attend(kv, problem.k[rank] if own else (), out, final=alone)
    for hop in range(1, _last(way) + 1):
        _arrive(w, way, hop)
        _hop(w, way, hop + 1)
        for lane in way:
            if (lane, hop) in visits:
                chunk = lane.chunk(rank, hop, world)
                held = wires(problem, lane)[chunk][hop]
                w.attend(_room(w, lane, hop), rows.positions(problem.k[chunk], held), out, carry=True)
    w.settle()
    return w.program(SAVES)


def backward(problem: Problem, rank: int, name: str = "ring") -> Program:
    """The same way round for keys; their gradients are collected behind them, or sent straight home."""
    w = Writer(name, "backward", problem, rank)
    way, world = lanes(problem), problem.world
    visits = _visits(problem, rank)
    guests = [d for d in range(world) if d != rank and problem.needs[rank][d]]
    dq = w.total("dq", bool(visits))
    dkv = w.total("dkv", bool(guests))
    home = _Round(w, way, dkv) if goes_round(problem) else _Straight(w, way, dkv)
    _hop(w, way, 1)
    w.attend_grad(w.own("kv"), problem.k[rank], dq, dkv)
    for hop in range(1, _last(way) + 1):
        _arrive(w, way, hop)
        _hop(w, way, hop + 1)
        for lane in way:
            if hop > lane.hops:
                continue
            chunk = lane.chunk(rank, hop, world)
            held = wires(problem, lane)[chunk][hop]
            part = home.room(lane, hop, held)
            if (lane, hop) in visits:
                kv = _room(w, lane, hop)
                w.attend_grad(kv, rows.positions(problem.k[chunk], held), dq, part, add_dq=True)
            home.send(lane, hop, part, held)
    home.close()
    w.settle()
    return w.program()


def _visits(problem: Problem, rank: int) -> set[tuple[Lane, int]]:
    """The hops that bring keys which a rank's own queries see."""
    return {
        (lane, hop)
        for lane in lanes(problem)
        for hop in range(1, lane.hops + 1)
        if problem.needs[lane.chunk(rank, hop, problem.world)][rank]
    }


class _Round:
    """Gradients of keys travel on behind their keys, each rank adding its share, and come home at last."""

    def __init__(self, w: Writer, way: tuple[Lane, ...], dkv: Slice) -> None:
        self.w, self.way, self.dkv = w, way, dkv

    def room(self, lane: Lane, hop: int, held: Rows) -> Slice:
        return self.w.scratch("dkv.part", "dkv", rows.count(held), "partial")

    def send(self, lane: Lane, hop: int, part: Slice, held: Rows) -> None:
        """Add our share to what came from behind, pass it on, and make ready for the next."""
        w, problem, world = self.w, self.w.problem, self.w.problem.world
        chunk = lane.chunk(w.rank, hop, world)
        share = problem.needs[chunk][w.rank]
        before, after = (gathered(problem, lane)[chunk][h] for h in (hop - 1, hop))
        w.wait(f"dkv {hop - 1}")
        total = self._room(hop, after)
        for kind, these in ((Add, rows.common(share, before)), (Copy, rows.without(share, before))):
            w.each(kind, zip(pieces(part, held, these), pieces(total, after, these), strict=True))
        following = lane.chunk(w.rank, hop + 1, world)
        coming = gathered(problem, lane)[following][hop]
        onward, behind = lane.holder(w.rank, 1, world), lane.chunk(w.rank, 1, world)
        if hop < lane.hops:
            grown = gathered(problem, lane)[following][hop + 1]
            room = parts(behind, self._room(hop + 1, grown), grown, coming)
        else:
            room = parts(behind, self._room(hop + 1, coming), coming, coming)
        w.post(Post(f"dkv {hop}", parts(onward, total, after, after), room))

    def close(self) -> None:
        w = self.w
        for lane in self.way:
            w.wait(f"dkv {lane.hops}")
            back = gathered(w.problem, lane)[w.rank][lane.hops]
            arrived = self._room(lane.hops + 1, back)
            everything = ((0, w.k_rows),)
            w.each(Add, zip(pieces(arrived, back, back), pieces(self.dkv, everything, back), strict=True))

    def _room(self, hop: int, held: Rows) -> Slice:
        return self.w.scratch(f"dkv.{hop % 2}", "dkv", rows.count(held), "reduce")


class _Straight:
    """Each rank sends its share of the gradients straight to the rank whose keys they are of."""

    def __init__(self, w: Writer, way: tuple[Lane, ...], dkv: Slice) -> None:
        self.w, self.way, self.dkv = w, way, dkv

    def room(self, lane: Lane, hop: int, held: Rows) -> Slice:
        self._collect(lane, hop - 2)
        return self.w.scratch(f"dkv{lane.toward:+d}.{hop % 2}", "dkv", rows.count(held), "reduce")

    def send(self, lane: Lane, hop: int, part: Slice, held: Rows) -> None:
        w, problem, world = self.w, self.w.problem, self.w.problem.world
        chunk, guest = lane.chunk(w.rank, hop, world), lane.holder(w.rank, hop, world)
        share, back = problem.needs[chunk][w.rank], problem.needs[w.rank][guest]
        w.post(
            Post(
                f"dkv{lane.toward:+d} {hop}",
                parts(chunk, part, held, share),
                parts(guest, self._room(lane, hop, back), back, back),
            )
        )

    def close(self) -> None:
        for lane in self.way:
            for hop in (lane.hops - 1, lane.hops):
                self._collect(lane, hop)

    def _collect(self, lane: Lane, hop: int) -> None:
        if hop < 1:
            return
        w = self.w
        back = w.problem.needs[w.rank][lane.holder(w.rank, hop, w.problem.world)]
        w.wait(f"dkv{lane.toward:+d} {hop}")
        everything = ((0, w.k_rows),)
        arrived = pieces(self._room(lane, hop, back), back, back)
        w.each(Add, zip(arrived, pieces(self.dkv, everything, back), strict=True))

    def _room(self, lane: Lane, hop: int, back: Rows) -> Slice:
        return self.w.scratch(f"dkv{lane.toward:+d}.home.{hop % 2}", "dkv", rows.count(back), "reduce")


def _hop(w: Writer, way: tuple[Lane, ...], hop: int) -> None:
    """Post this hop: pass on what came with the last one, take in what comes with this one."""
    problem, rank, world = w.problem, w.rank, w.problem.world
    for lane in way:
        if hop > lane.hops:
            continue
        leaving, coming = lane.chunk(rank, hop - 1, world), lane.chunk(rank, hop, world)
        wire = wires(problem, lane)
        held: Rows = ((0, w.k_rows),) if hop == 1 else wire[leaving][hop - 1]
        source = w.own("kv") if hop == 1 else _room(w, lane, hop - 1)
        sends = parts(lane.holder(rank, 1, world), source, held, wire[leaving][hop])
        arriving = wire[coming][hop]
        w.post(
            Post(
                f"kv{lane.toward:+d} {hop}",
                sends,
                parts(lane.chunk(rank, 1, world), _room(w, lane, hop), arriving, arriving),
            )
        )


def _arrive(w: Writer, way: tuple[Lane, ...], hop: int) -> None:
    for lane in way:
        w.wait(f"kv{lane.toward:+d} {hop}")


def _room(w: Writer, lane: Lane, hop: int) -> Slice:
    """Where the keys of this hop are: two rooms for each lane, by turns."""
    held = wires(w.problem, lane)[lane.chunk(w.rank, hop, w.problem.world)][hop]
    return w.scratch(f"kv{lane.toward:+d}.{hop % 2}", "kv", rows.count(held))


def _unions(sets: Iterable[Rows]) -> list[Rows]:
    """The union of the first one, of the first two, and so on."""
    return list(accumulate(sets, lambda a, b: rows.union(a, b)))


def _last(way: tuple[Lane, ...]) -> int:
    return max((lane.hops for lane in way), default=0)


def _moved(table: tuple[tuple[Rows, ...], ...]) -> int:
    return sum(rows.count(hop) for chunk in table for hop in chunk)


for _name, _layout, _summary in (
    ("ring", Layout.contiguous, "keys travel round; each rank holds one run of the sequence"),
    ("zigzag", Layout.zigzag, "keys travel round; each rank holds a piece from the front and one from the back"),
    ("striped", Layout.striped, "keys travel round; each rank holds every world-th token"),
):
    register(Schedule(_name, forward, backward, _layout, _summary))
