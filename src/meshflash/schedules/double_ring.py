"""Double ring: keys travel round a fast ring within each node, and from node to node on a slow ring.

    node 0: ranks 0, 1        node 1: ranks 2, 3        (inner = 2; K0 = the keys and values of rank 0)

        time (node, hop)      rank 0   rank 1   rank 2   rank 3
          (0, 0)                K0       K1       K2       K3     own keys; the move to the next node starts
          (0, 1)                K1       K0       K3       K2     one hop round the inner ring
          (1, 0)                K2       K3       K0       K1     the keys of the previous node have arrived
          (1, 1)                K3       K2       K1       K0

`inner` neighbouring ranks form a node. Each rank's keys cross between two nodes once, to the rank at the same place of
the next node, while they also go round the current node. Moves between nodes are posts of a group of their own, so that
moves within a node do not wait for them. dK and dV follow their keys round each node, and then go straight to their
owner. Rows travel no further than to the last rank that needs them.
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

#: The name of the group of posts between nodes.
FAR = "far"


class Clock(NamedTuple):
    """A time of the schedule: keys have crossed `node` nodes and made `hop` hops within the current node."""

    node: int
    hop: int


@dataclass(frozen=True)
class Nodes:
    """The ranks as `count` nodes of `inner` neighbours each. `nodes_of` makes it."""

    count: int
    inner: int

    def rank(self, node: int, place: int) -> int:
        """Return the rank at a place of a node; both wrap around."""
        return node % self.count * self.inner + place % self.inner

    def owner(self, rank: int, at: Clock) -> int:
        """Return the owner of the keys that `rank` holds at a time."""
        node, place = divmod(rank, self.inner)
        return self.rank(node - at.node, place - at.hop)

    def holder(self, rank: int, at: Clock) -> int:
        """Return the rank that holds the keys of `rank` at a time: the inverse of `owner`."""
        node, place = divmod(rank, self.inner)
        return self.rank(node + at.node, place + at.hop)

    def along(self, rank: int, by: int) -> int:
        """Return the rank `by` places further in the same node."""
        node, place = divmod(rank, self.inner)
        return self.rank(node, place + by)

    def across(self, rank: int, by: int) -> int:
        """Return the rank at the same place, `by` nodes further."""
        node, place = divmod(rank, self.inner)
        return self.rank(node + by, place)


@lru_cache(maxsize=256)
def nodes_of(problem: Problem) -> Nodes:
    """Return the ranks as nodes of `inner` ranks; 0 takes the largest divisor of the world up to its square root."""
    world, inner = problem.world, int(problem.option["inner"])
    if inner and world % inner:
        raise ValueError(
            f"double_ring: inner={inner} does not divide {world} ranks into nodes; give an inner that divides them"
        )
    inner = inner or max(n for n in range(1, isqrt(world) + 1) if world % n == 0)
    return Nodes(world // inner, inner)


@lru_cache(maxsize=256)
def rows_in_flight(problem: Problem) -> tuple[dict[Clock, Rows], ...]:
    """Return, for each owner, the rows of its keys that its holder has at each time.

    These are the rows that a later rank of this node needs and, at hop 0, also those that a later node needs: only
    hop 0 passes keys on to the next node.
    """
    nodes = nodes_of(problem)
    out = []
    for owner, needs in enumerate(problem.needs):
        held: dict[Clock, Rows] = {}
        beyond: Rows = ()
        for node in reversed(range(nodes.count)):
            here: Rows = ()
            for hop in reversed(range(nodes.inner)):
                at = Clock(node, hop)
                here = rows.union(here, needs[nodes.holder(owner, at)])
                held[at] = here if hop else rows.union(here, beyond)
            beyond = rows.union(here, beyond)
        held[Clock(0, 0)] = ((0, problem.k_lengths[owner]),)
        out.append(held)
    return tuple(out)


@lru_cache(maxsize=256)
def rows_accumulated(problem: Problem) -> tuple[dict[Clock, Rows], ...]:
    """Return, for each owner, the rows of its keys that have gradients of the current node at each time.

    After the last rank of a node that contributes there are none: the sum has left for the owner.
    """
    nodes = nodes_of(problem)
    out = []
    for owner, needs in enumerate(problem.needs):
        held: dict[Clock, Rows] = {}
        for node in range(nodes.count):
            shares = [needs[nodes.holder(owner, Clock(node, hop))] for hop in range(nodes.inner)]
            if not node:
                shares[0] = ()  # the owner adds its own share itself
            last = max((hop for hop, share in enumerate(shares) if share), default=-1)
            so_far: Rows = ()
            for hop, share in enumerate(shares):
                so_far = rows.union(so_far, share)
                held[Clock(node, hop)] = so_far if hop <= last else ()
        out.append(held)
    return tuple(out)


def forward(problem: Problem, rank: int, name: str = "double_ring") -> Program:
    """Build the forward of one rank: attend to our own keys, then to the keys of each time.

    Args:
        problem: The positions that every rank holds, the mask, and the option `inner`.
        rank: The rank that runs the program.
        name: The name of the program, for people.
    """
    w = Writer(name, "forward", problem, rank)
    keys = _KeyRoute(w)
    single_step = not any(problem.needs[c][rank] for c in range(problem.world) if c != rank)
    out = w.accumulator("out", not single_step)
    for at in keys.times():
        keys.arrive(at)
        owner = keys.nodes.owner(rank, at)
        if at == Clock(0, 0):
            w.attend_own(out, final=single_step)
        elif problem.needs[owner][rank]:
            w.attend(keys.buffer(at), rows.positions(problem.k[owner], keys.held(at)), out, carry=True)
    keys.close()
    w.finalize()
    return w.program(SAVES)


def backward(problem: Problem, rank: int, name: str = "double_ring") -> Program:
    """Build the backward of one rank: keys travel as in the forward, dK and dV follow them round each node.

    Args:
        problem: The positions that every rank holds, the mask, and the option `inner`.
        rank: The rank that runs the program.
        name: The name of the program, for people.
    """
    w = Writer(name, "backward", problem, rank)
    keys = _KeyRoute(w)
    others = [c for c in range(problem.world) if c != rank]
    dq = w.accumulator("dq", any(problem.needs[c][rank] for c in others))
    dkv = w.accumulator("dkv", any(problem.needs[rank][d] for d in others))
    gradients = _GradientRoute(w, keys, dkv)
    for at in keys.times():
        keys.arrive(at)
        owner = keys.nodes.owner(rank, at)
        if at == Clock(0, 0):
            w.attend_grad(w.own("kv"), problem.k[rank], dq, dkv)
        elif problem.needs[owner][rank]:
            held = keys.held(at)
            share = w.scratch("dkv.part", "dkv", rows.count(held), "partial")
            w.attend_grad(keys.buffer(at), rows.positions(problem.k[owner], held), dq, share, add_dq=True)
        gradients.pass_on(at)
    keys.close()
    gradients.close()
    w.finalize()
    return w.program()


class _KeyRoute:
    """The keys and values that pass one rank: what it receives, holds and sends at each time. The builders make it."""

    def __init__(self, w: Writer) -> None:
        self.w, self.nodes, self.in_flight = w, nodes_of(w.problem), rows_in_flight(w.problem)
        w.groups.append(FAR)

    def times(self) -> list[Clock]:
        """Return all times in order."""
        return [Clock(node, hop) for node in range(self.nodes.count) for hop in range(self.nodes.inner)]

    def held(self, at: Clock) -> Rows:
        """Return the rows that we hold at a time."""
        return self.in_flight[self.nodes.owner(self.w.rank, at)][at]

    def buffer(self, at: Clock) -> Slice:
        """Return the buffer of the keys that we hold at a time: one double buffer for each of the two rings."""
        if at == Clock(0, 0):
            return self.w.own("kv")
        name = f"kv.{at.hop % 2}" if at.hop else f"kv.far.{at.node % 2}"
        return self.w.scratch(name, "kv", rows.count(self.held(at)))

    def arrive(self, at: Clock) -> None:
        """Wait for the keys of this time, and post those of the next time."""
        if at.hop:
            self.w.wait(f"kv {at.node}.{at.hop}")
        elif at.node:
            self.close_node(at.node - 1)
            self.w.wait(f"far {at.node}")
        if not at.hop:
            self._post(f"far {at.node + 1}", FAR, at, Clock(at.node + 1, 0))
        self._post(f"kv {at.node}.{at.hop + 1}", "mesh", at, Clock(at.node, at.hop + 1))

    def close_node(self, node: int) -> None:
        """Wait for the last hop within a node, so that its buffers are free."""
        self.w.wait(f"kv {node}.{self.nodes.inner - 1}")

    def close(self) -> None:
        """Wait for the last hop within the last node."""
        self.close_node(self.nodes.count - 1)

    def _post(self, name: str, group: str, now: Clock, then: Clock) -> None:
        """Send the keys that we hold `now` to their holder `then`, and receive the keys that we hold `then`."""
        if then.node >= self.nodes.count or then.hop >= self.nodes.inner:
            return
        step = self.nodes.across if group == FAR else self.nodes.along
        rank = self.w.rank
        leaving = self.in_flight[self.nodes.owner(rank, now)][then]
        sends = parts(step(rank, 1), self.buffer(now), self.held(now), leaving)
        recvs: tuple[Part, ...] = ()
        if self.held(then):
            recvs = parts(step(rank, -1), self.buffer(then), self.held(then), self.held(then))
        self.w.post(Post(name, sends, recvs, group))


class _GradientRoute:
    """The dK and dV that pass one rank: round its node, one hop behind the keys, and then straight to the owner."""

    def __init__(self, w: Writer, keys: _KeyRoute, dkv: Slice) -> None:
        self.w, self.keys, self.dkv = w, keys, dkv
        self.nodes, self.accumulated = keys.nodes, rows_accumulated(w.problem)
        self._last_post = ""
        #: The buffer and rows of a finished sum of our own keys that the last post receives.
        self._arriving: tuple[str, Rows] | None = None

    def pass_on(self, at: Clock) -> None:
        """Add our share to the sum of this node; send the sum to the next rank, or to the owner if it is complete."""
        w, problem, nodes = self.w, self.w.problem, self.nodes
        owner = nodes.owner(w.rank, at)
        self.close()
        collected = self._collected(owner, at)
        total = self._sum_buffer(at, collected)
        if collected:
            before = self._collected(owner, Clock(at.node, at.hop - 1)) if at.hop else ()
            needed, held = problem.needs[owner][w.rank], self.keys.held(at)
            share = w.scratch("dkv.part", "dkv", rows.count(held), "partial")
            # Rows with an earlier contribution are added; rows without one are copied.
            for kind, these in ((Add, rows.common(needed, before)), (Copy, rows.without(needed, before))):
                w.append_each(kind, zip(pieces(share, held, these), pieces(total, collected, these), strict=True))
        then = Clock(at.node, at.hop + 1)
        sends: tuple[Part, ...] = ()
        if collected:
            onward = nodes.along(w.rank, 1) if self._collected(owner, then) else owner
            sends = parts(onward, total, collected, collected)
        recvs: tuple[Part, ...] = ()
        next_owner = nodes.owner(w.rank, then)
        if at.hop + 1 < nodes.inner and (grown := self._collected(next_owner, then)):
            incoming = self._collected(next_owner, at)
            recvs += parts(nodes.along(w.rank, -1), self._sum_buffer(then, grown), grown, incoming)
        back = self._collected(w.rank, at)
        if back and not self._collected(w.rank, then):  # the last contributor of a node sends us our finished sum
            arrived = w.scratch(f"dkv.home.{(at.node + at.hop) % 2}", "dkv", rows.count(back), "reduce")
            recvs += parts(nodes.holder(w.rank, at), arrived, back, back)
            self._arriving = arrived.buffer, back
        self._last_post = f"dkv {at.node}.{at.hop}"
        w.post(Post(self._last_post, sends, recvs))

    def close(self) -> None:
        """Wait for the last post, and add a finished sum that came with it to the gradient of our own keys."""
        self.w.wait(self._last_post)
        if self._arriving is not None:
            name, back = self._arriving
            arrived = self.w.scratch(name, "dkv", rows.count(back), "reduce")
            all_rows = ((0, self.w.k_rows),)
            self.w.append_each(Add, zip(pieces(arrived, back, back), pieces(self.dkv, all_rows, back), strict=True))
            self._arriving = None

    def _collected(self, owner: int, at: Clock) -> Rows:
        return self.accumulated[owner].get(at, ())

    def _sum_buffer(self, at: Clock, held: Rows) -> Slice:
        return self.w.scratch(f"dkv.{at.hop % 2}", "dkv", rows.count(held), "reduce")


register(
    Schedule(
        "double_ring",
        forward,
        backward,
        Layout.contiguous,
        "keys travel round a ring within each node, and from node to node",
        (("inner", 0),),
        groups=(FAR,),
    )
)
