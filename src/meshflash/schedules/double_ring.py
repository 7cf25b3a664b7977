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

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isqrt
from typing import NamedTuple

import numpy as np

from meshflash.core import rows
from meshflash.core.layout import Layout
from meshflash.core.problem import Problem
from meshflash.core.program import Add, Copy, Interval, Part, Post, Program, Ranges, Slice
from meshflash.core.rows import Rows
from meshflash.core.runs import Ints, expand, merge_intervals, row_at, views
from meshflash.core.shards import RowTable, Shards
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

    def time(self, rank: int, holder: int) -> Clock:
        """Return the time at which `holder` holds the keys of `rank`."""
        (node, place), (to_node, to_place) = divmod(rank, self.inner), divmod(holder, self.inner)
        return Clock((to_node - node) % self.count, (to_place - place) % self.inner)

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


class Passing:
    """The key rows that pass one rank, by their owner: each owner's keys pass once. `keys_passing` makes and caches it.

    Args:
        problem: The positions that every rank holds, the mask, and the option `inner`.
        rank: The rank that the keys pass.
    """

    def __init__(self, problem: Problem, rank: int) -> None:
        self.problem, self.rank, self.nodes = problem, rank, nodes_of(problem)
        nodes, (node, place) = self.nodes, divmod(rank, self.nodes.inner)
        owners = np.arange(problem.world)
        #: How many nodes and hops the keys of each owner have made when they reach us.
        self._nodes_made = (node - owners // nodes.inner) % nodes.count
        self._hops_made = (place - owners) % nodes.inner
        needed = problem.table.needed_from(rank)
        self._needed = needed.take(needed.rank != rank)

    def busy_times(self, others: Iterable[Clock] = ()) -> list[tuple[Clock, int]]:
        """Return the times at which we have anything to do, in order, with the owner of the keys that we hold.

        A post is made one time before its rows are used, and waited for until one time after; moves between nodes take
        from hop 0 to hop 0. The first times always count: they declare the buffers, so that all programs have them in
        the same order.

        Args:
            others: More times, at which gradients arrive.
        """
        nodes, world = self.nodes, self.problem.world
        number = self._nodes_made * nodes.inner + self._hops_made
        busy = np.zeros(world + 1, np.bool_)
        busy[number[list(self.held)]] = True
        busy[[at.node * nodes.inner + at.hop for at in others]] = True
        busy[1:] |= busy[:-1]
        busy[:-1] |= busy[1:]
        busy[: world : nodes.inner] = busy[:3] = True
        owner = np.empty(world, np.int64)
        owner[number] = np.arange(world)
        found = np.flatnonzero(busy[:world])
        times = map(Clock, (found // nodes.inner).tolist(), (found % nodes.inner).tolist())
        return list(zip(times, owner[found].tolist(), strict=True))

    @cached_property
    def needed(self) -> dict[int, Rows]:
        """The rows of other ranks that our own queries see."""
        return self._needed.by_rank

    @cached_property
    def ahead(self) -> dict[int, Rows]:
        """The rows that a later rank of our node needs."""
        return self._ahead.by_rank

    @cached_property
    def beyond(self) -> dict[int, Rows]:
        """The rows that a later node needs, of owners at our place: only hop 0 passes keys on to the next node."""
        return self._beyond.by_rank

    @cached_property
    def held(self) -> dict[int, Rows]:
        """The rows that we hold: all of ours, and those that we, a later rank of our node or a later node need."""
        return self._held.by_rank | {self.rank: ((0, self.problem.k_lengths[self.rank]),)}

    @cached_property
    def attended(self) -> dict[int, tuple[Ranges, Interval]]:
        """For each owner whose keys our queries see: the positions of the keys that we hold, and the query rows."""
        held = self._held
        found = self.problem.positions_and_q_rows(self.rank, held.take(np.isin(held.rank, self._needed.rank)))
        return dict(found)

    @cached_property
    def before(self) -> dict[int, Rows]:
        """The rows with gradients of earlier ranks of our node. The owner is not counted: it adds its own gradients."""
        # In our own node the owner comes first.
        others = self._hops_made - (self._nodes_made == 0)
        return self._needed_by_first(np.maximum(others, 0), self._in_node(-1)).by_rank

    @cached_property
    def after(self) -> dict[int, Rows]:
        """The rows with gradients of our node, ours included; none if the sum has left for the owner before us."""
        needed, ahead = self.needed, self.ahead
        grown = {owner: rows.union(taken, needed.get(owner, ())) for owner, taken in self.before.items()}
        return {owner: taken for owner, taken in (needed | grown).items() if owner in needed or owner in ahead}

    @cached_property
    def _ahead(self) -> RowTable:
        return self._needed_by_first(self.nodes.inner - 1 - self._hops_made, self._in_node(1))

    @cached_property
    def _beyond(self) -> RowTable:
        first = np.where(self._hops_made == 0, self.nodes.count - 1 - self._nodes_made, 0)
        node = np.arange(self.problem.world) // self.nodes.inner
        return self._needed_by_first(first, (node - self.rank // self.nodes.inner) % self.nodes.count)

    @cached_property
    def _held(self) -> RowTable:
        tables = (self._needed, self._ahead, self._beyond)
        columns = zip(*((table.rank, table.begin, table.end) for table in tables), strict=True)
        held = RowTable.of(*map(np.concatenate, columns))
        return held.take(held.rank != self.rank)

    def _in_node(self, step: int) -> Ints:
        """Return the distance from us of each rank of our node, in a direction round the node; 0 for other ranks."""
        ranks, inner = np.arange(self.problem.world), self.nodes.inner
        return np.where(ranks // inner == self.rank // inner, step * (ranks - self.rank) % inner, 0)

    def _needed_by_first(self, count: Ints, distance: Ints) -> RowTable:
        """Return the rows of each owner that ranks at distances from 1 to `count` need.

        What several ranks need follows from the positions that any of them sees. So the positions are merged first, for
        each count, and each owner's keys are then looked up once, not once for each rank.

        Args:
            count: The largest distance for each owner; 0 for none.
            distance: The distance of each rank; ranks at distance 0 are left out.
        """
        q, k = self.problem.table.q, self.problem.table.k
        found = [np.zeros((3, 0), np.int64)]
        for view in views(self.problem.mask, q.of_ranks(np.flatnonzero(distance)), by_key=False):
            view = view.without_gaps()
            found.append(np.stack([distance[q.rank_of(view.segments.row)], *view.limits()]))
        number, lo, hi = merge_intervals(*np.concatenate(found, axis=1))
        # The ranks at distance n count for every count from n on.
        interval, more = expand(distance.max(initial=0) + 1 - number)
        number, lo, hi = merge_intervals(number[interval] + more, lo[interval], hi[interval])
        return _rows_within(k, count, number, lo, hi)


@lru_cache(maxsize=64)
def keys_passing(problem: Problem, rank: int) -> Passing:
    """Return the key rows that pass a rank; cached for both passes.

    Args:
        problem: The positions that every rank holds, the mask, and the option `inner`.
        rank: The rank that the keys pass.
    """
    return Passing(problem, rank)


def _rows_within(k: Shards, group: Ints, number: Ints, lo: Ints, hi: Ints) -> RowTable:
    """Return the rows of each rank whose positions lie in the intervals of a group.

    Args:
        k: The keys of all ranks.
        group: The number of the group of intervals for each rank.
        number: The group of each interval `[lo, hi)`; intervals are sorted by group, and do not touch within one.
        lo: The first position of each interval.
        hi: The end of each interval.
    """
    # Groups in the upper half of 64 bits, so that one search serves all groups.
    runs, base = k.runs, group[k.rank].astype(np.int64) << 32
    first = np.searchsorted((number << 32) + hi, base + runs.position, "right")
    end = np.searchsorted((number << 32) + lo, base + runs.last, "right")
    run, nth = expand(np.maximum(end - first, 0))
    taken, interval, rank = runs.take(run), first[run] + nth, k.rank[run]
    row = taken.row - k.first_row[rank]
    begin = np.maximum(row_at(taken, lo[interval]), 0)
    stop = np.minimum(row_at(taken, hi[interval]), taken.rows)
    return RowTable.of(rank, row + begin, row + stop)


def forward(problem: Problem, rank: int, name: str = "double_ring") -> Program:
    """Build the forward of one rank: attend to our own keys, then to the keys of each time.

    Args:
        problem: The positions that every rank holds, the mask, and the option `inner`.
        rank: The rank that runs the program.
        name: The name of the program, for people.
    """
    w = Writer(name, "forward", problem, rank)
    keys = _KeyRoute(w)
    passing = keys.passing
    single_step = not passing.needed
    out = w.accumulator("out", not single_step)
    for at, owner in passing.busy_times():
        keys.arrive(at, owner)
        if owner == rank:
            w.attend_own(out, final=single_step)
        elif owner in passing.needed:
            k_positions, q_rows = passing.attended[owner]
            w.attend(keys.buffer(at, owner), k_positions, out, carry=True, q_rows=q_rows)
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
    passing, sums = keys.passing, finished_sums(problem, rank)
    dq = w.accumulator("dq", bool(passing.needed))
    dkv = w.accumulator("dkv", bool(sums))
    gradients = _GradientRoute(w, keys, dkv, sums)
    for at, owner in passing.busy_times(sums):
        keys.arrive(at, owner)
        if owner == rank:
            w.attend_grad(w.own("kv"), problem.k[rank], dq, dkv)
        elif owner in passing.needed:
            k_positions, q_rows = passing.attended[owner]
            share = gradients.share_buffer(owner)
            w.attend_grad(keys.buffer(at, owner), k_positions, dq, share, add_dq=True, q_rows=q_rows)
        gradients.pass_on(at, owner)
    keys.close()
    gradients.close()
    w.finalize()
    return w.program()


def finished_sums(problem: Problem, rank: int) -> dict[Clock, Rows]:
    """Return the rows of a rank's keys whose gradients each node returns, by the time of its last contributor.

    Args:
        problem: The positions that every rank holds, the mask, and the option `inner`.
        rank: The rank that holds the keys.
    """
    nodes = nodes_of(problem)
    shares: dict[int, dict[int, Rows]] = defaultdict(dict)
    for consumer, needed in problem.needed_by(rank).items():
        at = nodes.time(rank, consumer)
        if consumer != rank:
            shares[at.node][at.hop] = needed
    return {Clock(node, max(by_hop)): rows.union(*by_hop.values()) for node, by_hop in shares.items()}


class _KeyRoute:
    """The keys and values that pass one rank: what it receives, holds and sends at each time. The builders make it."""

    def __init__(self, w: Writer) -> None:
        self.w, self.nodes, self.passing = w, nodes_of(w.problem), keys_passing(w.problem, w.rank)
        w.groups.append(FAR)

    def buffer(self, at: Clock, owner: int) -> Slice:
        """Return the buffer of the keys that we hold at a time: one double buffer for each of the two rings."""
        if owner == self.w.rank:
            return self.w.own("kv")
        name = f"kv.{at.hop % 2}" if at.hop else f"kv.far.{at.node % 2}"
        return self.w.scratch(name, "kv", rows.count(self.passing.held.get(owner, ())))

    def arrive(self, at: Clock, owner: int) -> None:
        """Wait for the keys of this time, and post those of the next time."""
        if at.hop:
            self.w.wait(f"kv {at.node}.{at.hop}")
        elif at.node:
            self.close_node(at.node - 1)
            self.w.wait(f"far {at.node}")
        if not at.hop and at.node + 1 < self.nodes.count:
            then = Clock(at.node + 1, 0)
            self._post(f"far {then.node}", FAR, self.buffer(at, owner), owner, self.passing.beyond, then)
        if at.hop + 1 < self.nodes.inner:
            then = Clock(at.node, at.hop + 1)
            self._post(f"kv {then.node}.{then.hop}", "mesh", self.buffer(at, owner), owner, self.passing.ahead, then)

    def close_node(self, node: int) -> None:
        """Wait for the last hop within a node, so that its buffers are free."""
        self.w.wait(f"kv {node}.{self.nodes.inner - 1}")

    def close(self) -> None:
        """Wait for the last hop within the last node."""
        self.close_node(self.nodes.count - 1)

    def _post(self, name: str, group: str, source: Slice, owner: int, leaving: dict[int, Rows], then: Clock) -> None:
        """Send rows of the keys that we hold, whose owner is `owner`, and receive the keys that we hold `then`."""
        rank, step = self.w.rank, self.nodes.across if group == FAR else self.nodes.along
        held = self.passing.held
        sends = parts(step(rank, 1), source, held.get(owner, ()), leaving.get(owner, ()))
        recvs: tuple[Part, ...] = ()
        next_owner = self.nodes.owner(rank, then)
        if arriving := held.get(next_owner, ()):
            recvs = parts(step(rank, -1), self.buffer(then, next_owner), arriving, arriving)
        self.w.post(Post(name, sends, recvs, group), drop_empty=False)


class _GradientRoute:
    """The dK and dV that pass one rank: round its node, one hop behind the keys, and then straight to the owner."""

    def __init__(self, w: Writer, keys: _KeyRoute, dkv: Slice, sums: dict[Clock, Rows]) -> None:
        self.w, self.nodes, self.passing, self.dkv, self.sums = w, keys.nodes, keys.passing, dkv, sums
        self._last_post = ""
        #: The buffer and rows of a finished sum of our own keys that the last post receives.
        self._arriving: tuple[str, Rows] | None = None

    def share_buffer(self, owner: int) -> Slice:
        """Return the buffer for our share of the gradients of the keys of an owner."""
        return self.w.scratch("dkv.part", "dkv", rows.count(self.passing.held[owner]), "partial")

    def pass_on(self, at: Clock, owner: int) -> None:
        """Add our share to the sum of this node; send the sum to the next rank, or to the owner if it is complete."""
        w, nodes, passing = self.w, self.nodes, self.passing
        self.close()
        after = passing.after.get(owner, ())
        total = self._sum_buffer(at, after)
        sends: tuple[Part, ...] = ()
        if after:
            before, needed, held = passing.before.get(owner, ()), passing.needed.get(owner, ()), passing.held[owner]
            share = self.share_buffer(owner)
            # Rows with an earlier contribution are added; rows without one are copied.
            for kind, these in ((Add, rows.common(needed, before)), (Copy, rows.without(needed, before))):
                w.append_each(kind, zip(pieces(share, held, these), pieces(total, after, these), strict=True))
            onward = nodes.along(w.rank, 1) if owner in passing.ahead else owner
            sends = parts(onward, total, after, after)
        recvs: tuple[Part, ...] = ()
        if at.hop + 1 < nodes.inner:
            then = Clock(at.node, at.hop + 1)
            next_owner = nodes.owner(w.rank, then)
            if grown := passing.after.get(next_owner, ()):
                incoming = passing.before.get(next_owner, ())
                recvs += parts(nodes.along(w.rank, -1), self._sum_buffer(then, grown), grown, incoming)
        if back := self.sums.get(at, ()):  # the last contributor of a node sends us our finished sum
            arrived = w.scratch(f"dkv.home.{(at.node + at.hop) % 2}", "dkv", rows.count(back), "reduce")
            recvs += parts(nodes.holder(w.rank, at), arrived, back, back)
            self._arriving = arrived.buffer, back
        self._last_post = f"dkv {at.node}.{at.hop}"
        w.post(Post(self._last_post, sends, recvs), drop_empty=False)

    def close(self) -> None:
        """Wait for the last post, and add a finished sum that came with it to the gradient of our own keys."""
        self.w.wait(self._last_post)
        if self._arriving is not None:
            name, back = self._arriving
            arrived = self.w.scratch(name, "dkv", rows.count(back), "reduce")
            all_rows = ((0, self.w.k_rows),)
            self.w.append_each(Add, zip(pieces(arrived, back, back), pieces(self.dkv, all_rows, back), strict=True))
            self._arriving = None

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
