"""Double ring: keys go round within a node, and from node to node, so that few of them cross between nodes.

`inner` neighbouring ranks are a node. Each rank's keys go once round its own node while they are on their way to the
rank of the same number in the next node, where they go round in turn. The moves between nodes are posts of a group of
their own, so that those within a node do not wait for them. Gradients of keys are collected round each node behind the
keys, and then go straight home. Nothing travels further than to the last rank that needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import NamedTuple

from meshflash.core import rows
from meshflash.core.layout import Layout
from meshflash.core.problem import Problem
from meshflash.core.program import Add, Copy, Part, Post, Program, Slice
from meshflash.core.rows import Rows
from meshflash.schedules.registry import Schedule, register
from meshflash.schedules.writer import SAVES, Writer, parts, pieces

#: The group of the posts between nodes.
FAR = "far"


class Clock(NamedTuple):
    """Where all ranks are: how many nodes and how many ranks their keys have come from."""

    node: int
    turn: int


@dataclass(frozen=True)
class Nodes:
    """Ranks as nodes of so many neighbours."""

    count: int
    inner: int

    def rank(self, node: int, place: int) -> int:
        """The rank at a place of a node, both counted round."""
        return node % self.count * self.inner + place % self.inner

    def visited(self, rank: int, at: Clock) -> int:
        """Whose keys a rank has at this time."""
        node, place = divmod(rank, self.inner)
        return self.rank(node - at.node, place - at.turn)

    def holder(self, rank: int, at: Clock) -> int:
        """Who has a rank's keys at this time."""
        node, place = divmod(rank, self.inner)
        return self.rank(node + at.node, place + at.turn)

    def along(self, rank: int, by: int) -> int:
        """The rank so many places further in the same node."""
        node, place = divmod(rank, self.inner)
        return self.rank(node, place + by)

    def across(self, rank: int, by: int) -> int:
        """The rank of the same place so many nodes further."""
        node, place = divmod(rank, self.inner)
        return self.rank(node + by, place)


@lru_cache(maxsize=256)
def nodes_of(problem: Problem) -> Nodes:
    """The ranks as nodes; without a size, as near to a square as they go."""
    world, inner = problem.world, int(problem.option["inner"])
    if inner and world % inner:
        raise ValueError(f"double_ring: {world} ranks are not nodes of {inner}; give an inner that divides them")
    inner = inner or max(n for n in range(1, isqrt(world) + 1) if world % n == 0)
    return Nodes(world // inner, inner)


@lru_cache(maxsize=256)
def wires(problem: Problem) -> tuple[dict[Clock, Rows], ...]:
    """For each rank, the rows of its keys that are there at a time: what is still needed, in this node or beyond."""
    nodes = nodes_of(problem)
    out = []
    for chunk, needs in enumerate(problem.needs):
        held: dict[Clock, Rows] = {}
        beyond: Rows = ()
        for node in reversed(range(nodes.count)):
            here: Rows = ()
            for turn in reversed(range(nodes.inner)):
                at = Clock(node, turn)
                here = rows.union(here, needs[nodes.holder(chunk, at)])
                held[at] = here if turn else rows.union(here, beyond)
            beyond = rows.union(here, beyond)
        held[Clock(0, 0)] = ((0, problem.k_lengths[chunk]),)
        out.append(held)
    return tuple(out)


@lru_cache(maxsize=256)
def sums(problem: Problem) -> tuple[dict[Clock, Rows], ...]:
    """For each rank, the rows of its keys whose gradients were collected in a node by a time; none after the last."""
    nodes = nodes_of(problem)
    out = []
    for chunk, needs in enumerate(problem.needs):
        held: dict[Clock, Rows] = {}
        for node in range(nodes.count):
            shares = [needs[nodes.holder(chunk, Clock(node, turn))] for turn in range(nodes.inner)]
            if not node:
                shares[0] = ()  # our own share is at home
            last = max((turn for turn, share in enumerate(shares) if share), default=-1)
            so_far: Rows = ()
            for turn, share in enumerate(shares):
                so_far = rows.union(so_far, share)
                held[Clock(node, turn)] = so_far if turn <= last else ()
        out.append(held)
    return tuple(out)


def forward(problem: Problem, rank: int, name: str = "double_ring") -> Program:
    """Attend to our own keys, then to each other rank's as they come by."""
    w = Writer(name, "forward", problem, rank)
    way = _Way(w)
    alone = not any(problem.needs[c][rank] for c in range(problem.world) if c != rank)
    out = w.accumulator("out", not alone)
    for at in way.times():
        way.arrive(at)
        chunk = way.nodes.visited(rank, at)
        if at == Clock(0, 0):
            own = problem.needs[rank][rank]
            w.attend(w.own("kv") if own else w.own("kv", (0, 0)), problem.k[rank] if own else (), out, final=alone)
        elif problem.needs[chunk][rank]:
            w.attend(way.room(at), rows.positions(problem.k[chunk], way.held(at)), out, carry=True)
    way.close()
    w.finalize()
    return w.program(SAVES)


def backward(problem: Problem, rank: int, name: str = "double_ring") -> Program:
    """The same way for keys; their gradients follow them round each node, and go home from there."""
    w = Writer(name, "backward", problem, rank)
    way = _Way(w)
    others = [c for c in range(problem.world) if c != rank]
    dq = w.accumulator("dq", any(problem.needs[c][rank] for c in others))
    dkv = w.accumulator("dkv", any(problem.needs[rank][d] for d in others))
    home = _Home(w, way, dkv)
    for at in way.times():
        way.arrive(at)
        chunk = way.nodes.visited(rank, at)
        if at == Clock(0, 0):
            w.attend_grad(w.own("kv"), problem.k[rank], dq, dkv)
        elif problem.needs[chunk][rank]:
            held = way.held(at)
            part = w.scratch("dkv.part", "dkv", rows.count(held), "partial")
            w.attend_grad(way.room(at), rows.positions(problem.k[chunk], held), dq, part, add_dq=True)
        home.pass_on(at)
    way.close()
    home.close()
    w.finalize()
    return w.program()


class _Way:
    """The way of keys past one rank."""

    def __init__(self, w: Writer) -> None:
        self.w, self.nodes, self.wires = w, nodes_of(w.problem), wires(w.problem)
        w.groups.append(FAR)

    def times(self) -> list[Clock]:
        """Every time, in order."""
        return [Clock(node, turn) for node in range(self.nodes.count) for turn in range(self.nodes.inner)]

    def held(self, at: Clock) -> Rows:
        """The rows that we have at a time."""
        return self.wires[self.nodes.visited(self.w.rank, at)][at]

    def room(self, at: Clock) -> Slice:
        """Where they are: of each of the two rings two rooms, by turns."""
        if at == Clock(0, 0):
            return self.w.own("kv")
        name = f"kv.{at.turn % 2}" if at.turn else f"kv.far.{at.node % 2}"
        return self.w.scratch(name, "kv", rows.count(self.held(at)))

    def arrive(self, at: Clock) -> None:
        """Wait for what comes at this time, and let what comes at the next set out."""
        if at.turn:
            self.w.wait(f"kv {at.node}.{at.turn}")
        elif at.node:
            self.close_node(at.node - 1)
            self.w.wait(f"far {at.node}")
        if not at.turn:
            self._post(f"far {at.node + 1}", FAR, at, Clock(at.node + 1, 0))
        self._post(f"kv {at.node}.{at.turn + 1}", "mesh", at, Clock(at.node, at.turn + 1))

    def close_node(self, node: int) -> None:
        """Wait for what was sent last within a node."""
        self.w.wait(f"kv {node}.{self.nodes.inner - 1}")

    def close(self) -> None:
        """Wait for all that is left."""
        self.close_node(self.nodes.count - 1)

    def _post(self, name: str, group: str, now: Clock, then: Clock) -> None:
        """Pass on what we have now to who has it then, and take in what we have then."""
        if then.node >= self.nodes.count or then.turn >= self.nodes.inner:
            return
        step = self.nodes.across if group == FAR else self.nodes.along
        rank = self.w.rank
        leaving = self.wires[self.nodes.visited(rank, now)][then]
        sends = parts(step(rank, 1), self.room(now), self.held(now), leaving)
        recvs: tuple[Part, ...] = ()
        if self.held(then):
            recvs = parts(step(rank, -1), self.room(then), self.held(then), self.held(then))
        self.w.post(Post(name, sends, recvs, group))


class _Home:
    """The way of the gradients of keys past one rank: round its node behind the keys, and then home."""

    def __init__(self, w: Writer, way: _Way, dkv: Slice) -> None:
        self.w, self.way, self.dkv = w, way, dkv
        self.nodes, self.sums = way.nodes, sums(w.problem)
        self._last = ""
        self._arriving: tuple[str, Rows] | None = None

    def pass_on(self, at: Clock) -> None:
        """Add our share to what was collected before us; it goes to the next rank, or home."""
        w, problem, nodes = self.w, self.w.problem, self.nodes
        chunk = nodes.visited(w.rank, at)
        self.close()
        collected = self._collected(chunk, at)
        total = self._room(at, collected)
        if collected:
            before = self._collected(chunk, Clock(at.node, at.turn - 1)) if at.turn else ()
            share, held = problem.needs[chunk][w.rank], self.way.held(at)
            part = w.scratch("dkv.part", "dkv", rows.count(held), "partial")
            for kind, these in ((Add, rows.common(share, before)), (Copy, rows.without(share, before))):
                w.append_each(kind, zip(pieces(part, held, these), pieces(total, collected, these), strict=True))
        then = Clock(at.node, at.turn + 1)
        sends: tuple[Part, ...] = ()
        if collected:
            onward = nodes.along(w.rank, 1) if self._collected(chunk, then) else chunk
            sends = parts(onward, total, collected, collected)
        recvs: tuple[Part, ...] = ()
        coming = nodes.visited(w.rank, then)
        if at.turn + 1 < nodes.inner and (grown := self._collected(coming, then)):
            soon = self._collected(coming, at)
            recvs += parts(nodes.along(w.rank, -1), self._room(then, grown), grown, soon)
        back = self._collected(w.rank, at)
        if back and not self._collected(w.rank, then):
            arrived = w.scratch(f"dkv.home.{(at.node + at.turn) % 2}", "dkv", rows.count(back), "reduce")
            recvs += parts(nodes.holder(w.rank, at), arrived, back, back)
            self._arriving = arrived.buffer, back
        self._last = f"dkv {at.node}.{at.turn}"
        w.post(Post(self._last, sends, recvs))

    def close(self) -> None:
        """Wait for the last post; what came home with it is added."""
        self.w.wait(self._last)
        if self._arriving is not None:
            name, back = self._arriving
            arrived = self.w.scratch(name, "dkv", rows.count(back), "reduce")
            everything = ((0, self.w.k_rows),)
            self.w.append_each(Add, zip(pieces(arrived, back, back), pieces(self.dkv, everything, back), strict=True))
            self._arriving = None

    def _collected(self, chunk: int, at: Clock) -> Rows:
        return self.sums[chunk].get(at, ())

    def _room(self, at: Clock, held: Rows) -> Slice:
        return self.w.scratch(f"dkv.{at.turn % 2}", "dkv", rows.count(held), "reduce")


register(
    Schedule(
        "double_ring",
        forward,
        backward,
        Layout.contiguous,
        "keys travel round within nodes, and from node to node",
        (("inner", 0),),
        groups=(FAR,),
    )
)
