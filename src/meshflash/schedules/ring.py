"""The ring family: keys and values travel from neighbour to neighbour while each rank attends to what it holds.

    ranks 0..3, one direction, forward (K0 = the keys and values of rank 0):

        hop      rank 0   rank 1   rank 2   rank 3
         0         K0       K1       K2       K3      own keys, attended while hop 1 moves
         1         K1       K2       K3       K0      attended while hop 2 moves
         2         K2       K3       K0       K1
         3         K3       K0       K1       K2

`ring`, `zigzag` and `striped` are this one schedule on three layouts. Rows travel only as far as some rank needs them;
gaps of a few rows between them travel along, since each part of a message has a cost of its own.
The builder compares three routes (one direction, the other, and the nearer half of the ranks each way) and takes the
one that moves the fewest rows. In the backward, dK and dV either follow their keys round the ring (`_RingReturn`) or
go straight to the rank that owns the keys (`_DirectReturn`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from meshflash.core import rows
from meshflash.core.layout import Layout
from meshflash.core.needs import HopTable
from meshflash.core.problem import Problem
from meshflash.core.program import Add, Copy, Interval, Post, Program, Ranges, Slice
from meshflash.core.rows import Rows
from meshflash.core.runs import Ints
from meshflash.core.shards import RowTable
from meshflash.schedules.registry import Schedule, register
from meshflash.schedules.writer import SAVES, Writer, make_slice, parts, pieces

#: Gradients go straight to their owners where that moves less than this fraction of the rows of a trip round the ring.
DIRECT_BELOW = 0.5
#: Gaps of at most this many rows between the rows of a message are not cut out: each run of rows is a message of its
#: own, and 16 rows of 8 heads of dim 128 travel in about a microsecond ...
MAX_GAP = 16
#: ... unless all shards are shorter than this, so that small shards move no more than they must.
MIN_ROWS_TO_FILL = 128
#: More hops than any trip has.
NEVER = 1 << 30


@dataclass(frozen=True)
class RingDirection:
    """One direction round the ring: in each hop a rank receives from `rank + source_offset`.

    `choose_directions` makes them. After hop h, a rank holds keys of the rank h steps away; h ends at `num_hops`.
    """

    source_offset: int
    num_hops: int

    def owner(self, rank: int, hop: int, world: int) -> int:
        """Return the owner of the keys that `rank` holds after `hop` hops."""
        return (rank + self.source_offset * hop) % world

    def holder(self, owner: int, hop: int, world: int) -> int:
        """Return the rank that holds the keys of `owner` after `hop` hops: the inverse of `owner`."""
        return (owner - self.source_offset * hop) % world


class Trip:
    """What one rank does in one direction: the rows that arrive in each hop, are sent on and get gradients.

    `trip_of` makes and caches it, for both passes. A row makes a hop if the rank at its end or any later rank needs it.
    Tables are by hop, and only have hops with rows.

    Args:
        problem: The positions that every rank holds, and the mask.
        rank: The rank.
        direction: The direction.
    """

    def __init__(self, problem: Problem, rank: int, direction: RingDirection) -> None:
        self.problem, self.rank, self.direction = problem, rank, direction
        self.offset, self.num_hops = direction.source_offset, direction.num_hops
        self.next_rank = direction.holder(rank, 1, problem.world)
        self.previous_rank = direction.owner(rank, 1, problem.world)
        #: The hop in which the keys of each rank reach this one; its own after a whole round.
        self.hop_of = (self.offset * (np.arange(problem.world) - rank) - 1) % problem.world + 1
        #: A part of a message costs more than a few rows, so rows of small gaps travel along.
        self.max_gap = MAX_GAP if max(problem.k_lengths) >= MIN_ROWS_TO_FILL else 0
        #: Posts of keys by hop; both passes have the same ones.
        self._posts: dict[int, Post] = {}

    def kv(self, hop: int) -> Slice:
        """Return the keys that arrive in a hop: hops take turns in two buffers."""
        name = f"kv{self.offset:+d}.{hop % 2}"
        return make_slice(name, 0, self.num_arriving.get(hop, 0), (0, self.problem.kv_heads))

    def post(self, hop: int) -> Post:
        """Return the post of a hop: send on the rows of the hop before that are still needed, and receive new ones."""
        if hop not in self._posts:
            held, source = self.arriving.get(hop - 1, ()), self.kv(hop - 1)
            if hop == 1:
                num_rows = self.problem.k_lengths[self.rank]
                held, source = ((0, num_rows),), make_slice("kv", 0, num_rows, (0, self.problem.kv_heads))
            arriving = self.arriving.get(hop, ())
            self._posts[hop] = Post(
                f"kv{self.offset:+d} {hop}",
                parts(self.next_rank, source, held, self.leaving.get(hop, ())),
                parts(self.previous_rank, self.kv(hop), arriving, arriving),
            )
        return self._posts[hop]

    @cached_property
    def arriving(self) -> dict[int, Rows]:
        """The key rows that this rank receives in each hop."""
        return self._by_hop(self._arriving, self.hop_of)

    @cached_property
    def num_arriving(self) -> dict[int, int]:
        """The number of rows that arrive in each hop."""
        return {hop: rows.count(arriving) for hop, arriving in self.arriving.items()}

    @cached_property
    def leaving(self) -> dict[int, Rows]:
        """The key rows that this rank sends in each hop: those of the hop before that are needed further on."""
        hop = self.hop_of % self.problem.world + 1
        sent = self._last_hops.at_least(np.where(hop <= self.num_hops, hop, NEVER))
        return self._by_hop(sent.fill_gaps(self.max_gap), hop)

    @cached_property
    def needed(self) -> dict[int, Rows]:
        """The key rows of each hop that this rank's own queries see; it only forwards the others."""
        return self._needed(0)

    @cached_property
    def needed_filled(self) -> dict[int, Rows]:
        """The same rows, and those of small gaps between them."""
        return self._needed(self.max_gap)

    @cached_property
    def attended(self) -> dict[int, tuple[Ranges, Interval]]:
        """The hops that bring keys which our queries see: the positions of all arriving keys, and the query rows."""
        seen = np.zeros(self.problem.world, np.bool_)
        seen[self.problem.table_from(self.rank).rank] = True
        table = self._arriving.take(seen[self._arriving.rank])
        found = self.problem.positions_and_q_rows(self.rank, table)
        return {int(self.hop_of[owner]): pair for owner, pair in found.items()}

    @property
    def has_consumers(self) -> bool:
        """Whether another rank needs any of our keys."""
        return bool((self.problem.table_by(self.rank).rank != self.rank).any())

    @cached_property
    def back_filled(self) -> dict[int, Rows]:
        """The rows of our own keys that the rank which holds them after each hop needs, and those of small gaps."""
        hop = (self.offset * (self.rank - np.arange(self.problem.world)) - 1) % self.problem.world + 1
        table = self.problem.table_by(self.rank)
        return self._by_hop(table.take(hop[table.rank] <= self.num_hops).fill_gaps(self.max_gap), hop)

    @cached_property
    def before(self) -> dict[int, Rows]:
        """The key rows of each hop that have a gradient from a rank that held them earlier, up to our own keys."""
        limit = self.num_hops + 2 - self.hop_of
        return self._by_hop(self._hops_after_first.at_least(limit), self.hop_of)

    @cached_property
    def after(self) -> dict[int, Rows]:
        """The key rows of each hop that have a gradient from this rank, or from one that held them earlier."""
        limit = np.where(self.hop_of <= self.num_hops, self.num_hops + 1 - self.hop_of, NEVER)
        return self._by_hop(self._hops_after_first.at_least(limit), self.hop_of)

    @property
    def _last_hops(self) -> HopTable:
        return self.problem.table.last_hops(self.offset, self.num_hops)

    @property
    def _hops_after_first(self) -> HopTable:
        return self.problem.table.hops_after_first(self.offset, self.num_hops)

    @cached_property
    def _arriving(self) -> RowTable:
        limit = np.where(self.hop_of <= self.num_hops, self.hop_of, NEVER)
        return self._last_hops.at_least(limit).fill_gaps(self.max_gap)

    def _needed(self, max_gap: int) -> dict[int, Rows]:
        table = self.problem.table_from(self.rank)
        return self._by_hop(table.take(self.hop_of[table.rank] <= self.num_hops).fill_gaps(max_gap), self.hop_of)

    def _by_hop(self, table: RowTable, hop_of: Ints) -> dict[int, Rows]:
        hops = hop_of.tolist()
        return {hops[owner]: taken for owner, taken in table.by_rank.items()}


@lru_cache(maxsize=64)
def trip_of(problem: Problem, rank: int, direction: RingDirection) -> Trip:
    """Return what one rank does in one direction; cached for both passes."""
    return Trip(problem, rank, direction)


@lru_cache(maxsize=256)
def choose_directions(problem: Problem) -> tuple[RingDirection, ...]:
    """Choose the route that moves the fewest rows: one direction, the other, or the nearer half of the ranks each way.

    A causal mask on contiguous shards needs one direction only; a two-sided window needs one hop each way.
    """
    world = problem.world
    if world == 1:
        return ()
    both = (RingDirection(1, world // 2), RingDirection(-1, (world - 1) // 2))
    routes = [
        (RingDirection(1, world - 1),),
        (RingDirection(-1, world - 1),),
        tuple(direction for direction in both if direction.num_hops),
    ]
    ranks, table = problem.sampled_ranks, problem.table

    def num_rows(direction: RingDirection) -> int:
        return table.last_hops(direction.source_offset, direction.num_hops, ranks).total

    return min(routes, key=lambda route: sum(map(num_rows, route)))


@lru_cache(maxsize=256)
def dkv_follows_ring(problem: Problem) -> bool:
    """Whether dK and dV follow their keys round the ring; otherwise each rank sends its share to the owner."""
    directions, ranks, table = choose_directions(problem), problem.sampled_ranks, problem.table
    if len(directions) != 1:
        return not directions
    offset, num_hops = directions[0].source_offset, directions[0].num_hops
    last, after_first = (find(offset, num_hops, ranks) for find in (table.last_hops, table.hops_after_first))
    # At most the ranks from the first to the last one that needs a row send a share of its gradient.
    most = last.total + after_first.total - num_hops * last.num_rows
    if most < DIRECT_BELOW * after_first.total:
        return False
    # All ranks count here, for causal masks are at the limit: half of the pairs of ranks share keys.
    needed, own = table.num_needed(np.arange(problem.world))
    return int((needed - own).sum()) * len(ranks) >= DIRECT_BELOW * after_first.total * problem.world


def forward(problem: Problem, rank: int, name: str = "ring") -> Program:
    """Build the forward of one rank: attend to its own keys, then to the keys of each hop.

    Args:
        problem: The positions that every rank holds, and the mask.
        rank: The rank that runs the program.
        name: The name of the program, for people.
    """
    w = Writer(name, "forward", problem, rank)
    trips = [trip_of(problem, rank, direction) for direction in choose_directions(problem)]
    # A rank whose queries see only its own keys writes its result at once; all others accumulate partial results.
    single_step = not any(trip.attended for trip in trips)
    out = w.accumulator("out", not single_step)
    _declare_kv_buffers(w, trips)
    _post_hop(w, trips, 1)
    w.attend_own(out, final=single_step)
    for hop in _busy_hops(trips):
        # The next hop starts before the attention over this one, so communication overlaps with compute.
        _wait_hop(w, trips, hop)
        _post_hop(w, trips, hop + 1)
        for trip in trips:
            if hop in trip.attended:
                k_positions, q_rows = trip.attended[hop]
                w.attend(trip.kv(hop), k_positions, out, carry=True, q_rows=q_rows)
    w.finalize()
    return w.program(SAVES)


def backward(problem: Problem, rank: int, name: str = "ring") -> Program:
    """Build the backward of one rank: keys travel as in the forward, and dK and dV return to their owners.

    Args:
        problem: The positions that every rank holds, and the mask.
        rank: The rank that runs the program.
        name: The name of the program, for people.
    """
    w = Writer(name, "backward", problem, rank)
    trips = [trip_of(problem, rank, direction) for direction in choose_directions(problem)]
    dq = w.accumulator("dq", any(trip.attended for trip in trips))
    dkv = w.accumulator("dkv", any(trip.has_consumers for trip in trips))
    dkv_return = _RingReturn(w, trips, dkv) if dkv_follows_ring(problem) else _DirectReturn(w, trips, dkv)
    _declare_kv_buffers(w, trips)
    _post_hop(w, trips, 1)
    w.attend_grad(w.own("kv"), problem.k[rank], dq, dkv)
    for hop in _busy_hops(trips, dkv_return.hops()):
        _wait_hop(w, trips, hop)
        _post_hop(w, trips, hop + 1)
        for trip in trips:
            if hop > trip.num_hops:
                continue
            share = dkv_return.share_buffer(trip, hop)
            if hop in trip.attended:
                k_positions, q_rows = trip.attended[hop]
                w.attend_grad(trip.kv(hop), k_positions, dq, share, add_dq=True, q_rows=q_rows)
            dkv_return.send(trip, hop, share)
    dkv_return.close()
    w.finalize()
    return w.program()


class _RingReturn:
    """dK and dV travel one hop behind their keys. Each rank adds its share; the last hop reaches the owner.

    hop h, on the rank that holds K of owner c:

        sum(c) from the previous rank --+
                                        +--> sum(c) to the next rank
        own share of dKV(c) ------------+

    The kernel writes the share into its own buffer, and `Add` merges it with the sum afterwards. The sum can therefore
    arrive while the kernel runs.
    """

    def __init__(self, w: Writer, trips: list[Trip], dkv: Slice) -> None:
        self.w, self.trips, self.dkv = w, trips, dkv

    def hops(self) -> Iterator[int]:
        """Yield the hops in which gradients arrive or leave."""
        for trip in self.trips:
            yield from (*trip.before, *trip.after)

    def share_buffer(self, trip: Trip, hop: int) -> Slice:
        """Return the buffer for this rank's share of the gradients of the keys of a hop."""
        return self.w.scratch("dkv.part", "dkv", trip.num_arriving.get(hop, 0), "partial")

    def send(self, trip: Trip, hop: int, share: Slice) -> None:
        """Add our share to the incoming sum and pass the sum on; receive the sum of the next hop's keys."""
        w, needed, held = self.w, trip.needed.get(hop, ()), trip.arriving.get(hop, ())
        before, after = trip.before.get(hop, ()), trip.after.get(hop, ())
        w.wait(f"dkv {hop - 1}")
        total = self._sum_buffer(hop, after)
        # Rows that an earlier rank has contributed to are added; the other rows are copied.
        for kind, these in ((Add, rows.common(needed, before)), (Copy, rows.without(needed, before))):
            w.append_each(kind, zip(pieces(share, held, these), pieces(total, after, these), strict=True))
        incoming = trip.before.get(hop + 1, ())
        # The sum lands where the next hop accumulates it, with space for the rows that our share will add.
        grown = trip.after.get(hop + 1, ()) if hop < trip.num_hops else incoming
        recvs = parts(trip.previous_rank, self._sum_buffer(hop + 1, grown), grown, incoming)
        w.post(Post(f"dkv {hop}", parts(trip.next_rank, total, after, after), recvs), drop_empty=False)

    def close(self) -> None:
        """Add the sum that has come back to us to the gradient of our own keys."""
        w = self.w
        for trip in self.trips:
            w.wait(f"dkv {trip.num_hops}")
            back = trip.before.get(trip.num_hops + 1, ())
            arrived = self._sum_buffer(trip.num_hops + 1, back)
            all_rows = ((0, w.k_rows),)
            w.append_each(Add, zip(pieces(arrived, back, back), pieces(self.dkv, all_rows, back), strict=True))

    def _sum_buffer(self, hop: int, held: Rows) -> Slice:
        """Return the buffer of a hop's sum: a double buffer, one half sends while the other receives."""
        return self.w.scratch(f"dkv.{hop % 2}", "dkv", rows.count(held), "reduce")


class _DirectReturn:
    """Each rank sends its share of dK and dV straight to the rank that owns the keys.

    Used where few ranks need a key, as under a window: a trip round the ring would carry finished sums past ranks that
    add nothing.
    """

    def __init__(self, w: Writer, trips: list[Trip], dkv: Slice) -> None:
        self.w, self.trips, self.dkv = w, trips, dkv

    def hops(self) -> Iterator[int]:
        """Yield the hops in which shares arrive or leave."""
        for trip in self.trips:
            yield from (*trip.needed_filled, *trip.back_filled)

    def share_buffer(self, trip: Trip, hop: int) -> Slice:
        """Return the buffer for our share; frees it first, by completing the exchange of two hops ago."""
        self._collect(trip, hop - 2)
        num_rows = trip.num_arriving.get(hop, 0)
        return self.w.scratch(f"dkv{trip.offset:+d}.{hop % 2}", "dkv", num_rows, "reduce")

    def send(self, trip: Trip, hop: int, share: Slice) -> None:
        """Post our share to the owner of the keys, and receive the share of the rank that used ours."""
        w, world, direction = self.w, self.w.problem.world, trip.direction
        owner, consumer = direction.owner(w.rank, hop, world), direction.holder(w.rank, hop, world)
        back = trip.back_filled.get(hop, ())
        w.post(
            Post(
                f"dkv{trip.offset:+d} {hop}",
                parts(owner, share, trip.arriving.get(hop, ()), trip.needed_filled.get(hop, ())),
                parts(consumer, self._recv_buffer(trip, hop, back), back, back),
            ),
            drop_empty=False,
        )

    def close(self) -> None:
        """Collect the last two hops of each direction."""
        for trip in self.trips:
            for hop in (trip.num_hops - 1, trip.num_hops):
                self._collect(trip, hop)

    def _collect(self, trip: Trip, hop: int) -> None:
        """Wait for the exchange of a hop, and add the received share to the gradient of our own keys."""
        if hop < 1:
            return
        w, back = self.w, trip.back_filled.get(hop, ())
        w.wait(f"dkv{trip.offset:+d} {hop}")
        all_rows = ((0, w.k_rows),)
        arrived = pieces(self._recv_buffer(trip, hop, back), back, back)
        w.append_each(Add, zip(arrived, pieces(self.dkv, all_rows, back), strict=True))

    def _recv_buffer(self, trip: Trip, hop: int, back: Rows) -> Slice:
        return self.w.scratch(f"dkv{trip.offset:+d}.home.{hop % 2}", "dkv", rows.count(back), "reduce")


def _busy_hops(trips: list[Trip], others: Iterable[int] = ()) -> list[int]:
    """Return the hops in which this rank has anything to do, in order.

    A post is made one hop before its rows are used, and waited for until two hops after. The first hops always count:
    they declare the buffers, so that all programs have them in the same order.
    """
    found = {-2, *others}
    for trip in trips:
        found.update(trip.arriving, trip.leaving)
    around = {hop + n for hop in found for n in (-1, 0, 1, 2)} | {1, 2, 3}
    last = max((trip.num_hops for trip in trips), default=0)
    return sorted(hop for hop in around if 1 <= hop <= last)


def _declare_kv_buffers(w: Writer, trips: list[Trip]) -> None:
    """Declare the buffers of arriving keys: a double buffer for each direction, as large as the largest hop."""
    for odd in (1, 0):
        for trip in trips:
            most = max((n for hop, n in trip.num_arriving.items() if hop % 2 == odd), default=0)
            w.scratch(trip.kv(odd).buffer, "kv", most)


def _post_hop(w: Writer, trips: list[Trip], hop: int) -> None:
    for trip in trips:
        if hop <= trip.num_hops:
            w.post(trip.post(hop), drop_empty=False)


def _wait_hop(w: Writer, trips: list[Trip], hop: int) -> None:
    for trip in trips:
        if hop <= trip.num_hops:
            w.wait(trip.post(hop).name)


for _name, _layout, _summary in (
    ("ring", Layout.contiguous, "keys travel round the ring; each rank holds one range of the sequence"),
    (
        "zigzag",
        Layout.zigzag,
        "keys travel round the ring; each rank holds a piece from the front and one from the back",
    ),
    ("striped", Layout.striped, "keys travel round the ring; each rank holds every world-th token"),
):
    register(Schedule(_name, forward, backward, _layout, _summary))
