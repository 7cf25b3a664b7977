"""The ring family: keys and values travel from neighbour to neighbour while each rank attends to what it holds.

    ranks 0..3, one direction, forward (K0 = the keys and values of rank 0):

        hop      rank 0   rank 1   rank 2   rank 3
         0         K0       K1       K2       K3      own keys, attended while hop 1 moves
         1         K1       K2       K3       K0      attended while hop 2 moves
         2         K2       K3       K0       K1
         3         K3       K0       K1       K2

`ring`, `zigzag` and `striped` are this one schedule on three layouts. Rows travel only as far as some rank needs them.
The builder compares three routes (one direction, the other, and the nearer half of the ranks each way) and takes the
one that moves the fewest rows. In the backward, dK and dV either follow their keys round the ring (`_RingReturn`) or
go straight to the rank that owns the keys (`_DirectReturn`).
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

#: Gradients go straight to their owners where that moves less than this fraction of the rows of a trip round the ring.
DIRECT_BELOW = 0.5


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


@lru_cache(maxsize=256)
def rows_in_flight(problem: Problem, direction: RingDirection) -> tuple[tuple[Rows, ...], ...]:
    """Return `[owner][hop]`: the key rows of `owner` that make this hop; entry 0 is empty.

    A row makes a hop if the rank at its end or any later rank needs it, so each entry holds the next one.
    """
    world = problem.world
    out = []
    for owner in range(world):
        needs = [problem.needs[owner][direction.holder(owner, hop, world)] for hop in range(1, direction.num_hops + 1)]
        out.append(((), *reversed(_cumulative_unions(reversed(needs)))))
    return tuple(out)


@lru_cache(maxsize=256)
def rows_accumulated(problem: Problem, direction: RingDirection) -> tuple[tuple[Rows, ...], ...]:
    """Return `[owner][hop]`: the key rows of `owner` that have a gradient from any rank up to this hop."""
    world = problem.world
    return tuple(
        (
            (),
            *_cumulative_unions(
                problem.needs[owner][direction.holder(owner, hop, world)] for hop in range(1, direction.num_hops + 1)
            ),
        )
        for owner in range(world)
    )


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
    return min(routes, key=lambda route: sum(_count_rows(rows_in_flight(problem, direction)) for direction in route))


@lru_cache(maxsize=256)
def dkv_follows_ring(problem: Problem) -> bool:
    """Whether dK and dV follow their keys round the ring; otherwise each rank sends its share to the owner."""
    directions = choose_directions(problem)
    if len(directions) > 1:
        return False
    direct = sum(rows.count(need) for c, needs in enumerate(problem.needs) for d, need in enumerate(needs) if c != d)
    return all(direct >= DIRECT_BELOW * _count_rows(rows_accumulated(problem, direction)) for direction in directions)


def forward(problem: Problem, rank: int, name: str = "ring") -> Program:
    """Build the forward of one rank: attend to its own keys, then to the keys of each hop.

    Args:
        problem: The positions that every rank holds, and the mask.
        rank: The rank that runs the program.
        name: The name of the program, for people.
    """
    w = Writer(name, "forward", problem, rank)
    directions, world = choose_directions(problem), problem.world
    attended_hops = _attended_hops(problem, rank)
    # A rank whose queries see only its own keys writes its result at once; all others accumulate partial results.
    single_step = not attended_hops
    out = w.accumulator("out", not single_step)
    _post_hop(w, directions, 1)
    w.attend_own(out, final=single_step)
    for hop in range(1, _max_hops(directions) + 1):
        # The next hop starts before the attention over this one, so communication overlaps with compute.
        _wait_hop(w, directions, hop)
        _post_hop(w, directions, hop + 1)
        for direction in directions:
            if (direction, hop) in attended_hops:
                owner = direction.owner(rank, hop, world)
                held = rows_in_flight(problem, direction)[owner][hop]
                w.attend(_kv_buffer(w, direction, hop), rows.positions(problem.k[owner], held), out, carry=True)
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
    directions, world = choose_directions(problem), problem.world
    attended_hops = _attended_hops(problem, rank)
    consumers = [d for d in range(world) if d != rank and problem.needs[rank][d]]
    dq = w.accumulator("dq", bool(attended_hops))
    dkv = w.accumulator("dkv", bool(consumers))
    dkv_return = _RingReturn(w, directions, dkv) if dkv_follows_ring(problem) else _DirectReturn(w, directions, dkv)
    _post_hop(w, directions, 1)
    w.attend_grad(w.own("kv"), problem.k[rank], dq, dkv)
    for hop in range(1, _max_hops(directions) + 1):
        _wait_hop(w, directions, hop)
        _post_hop(w, directions, hop + 1)
        for direction in directions:
            if hop > direction.num_hops:
                continue
            owner = direction.owner(rank, hop, world)
            held = rows_in_flight(problem, direction)[owner][hop]
            share = dkv_return.share_buffer(direction, hop, held)
            if (direction, hop) in attended_hops:
                kv = _kv_buffer(w, direction, hop)
                w.attend_grad(kv, rows.positions(problem.k[owner], held), dq, share, add_dq=True)
            dkv_return.send(direction, hop, share, held)
    dkv_return.close()
    w.finalize()
    return w.program()


def _attended_hops(problem: Problem, rank: int) -> set[tuple[RingDirection, int]]:
    """Return the hops that bring keys which this rank's own queries see; it only forwards the others."""
    return {
        (direction, hop)
        for direction in choose_directions(problem)
        for hop in range(1, direction.num_hops + 1)
        if problem.needs[direction.owner(rank, hop, problem.world)][rank]
    }


class _RingReturn:
    """dK and dV travel one hop behind their keys. Each rank adds its share; the last hop reaches the owner.

    hop h, on the rank that holds K of owner c:

        sum(c) from the previous rank --+
                                        +--> sum(c) to the next rank
        own share of dKV(c) ------------+

    The kernel writes the share into its own buffer, and `Add` merges it with the sum afterwards. The sum can therefore
    arrive while the kernel runs.
    """

    def __init__(self, w: Writer, directions: tuple[RingDirection, ...], dkv: Slice) -> None:
        self.w, self.directions, self.dkv = w, directions, dkv

    def share_buffer(self, direction: RingDirection, hop: int, held: Rows) -> Slice:
        """Return the buffer for this rank's share of the gradients of the keys of a hop."""
        return self.w.scratch("dkv.part", "dkv", rows.count(held), "partial")

    def send(self, direction: RingDirection, hop: int, share: Slice, held: Rows) -> None:
        """Add our share to the incoming sum and pass the sum on; receive the sum of the next hop's keys."""
        w, problem, world = self.w, self.w.problem, self.w.problem.world
        owner = direction.owner(w.rank, hop, world)
        needed = problem.needs[owner][w.rank]
        before, after = (rows_accumulated(problem, direction)[owner][h] for h in (hop - 1, hop))
        w.wait(f"dkv {hop - 1}")
        total = self._sum_buffer(hop, after)
        # Rows that an earlier rank has contributed to are added; the other rows are copied.
        for kind, these in ((Add, rows.common(needed, before)), (Copy, rows.without(needed, before))):
            w.append_each(kind, zip(pieces(share, held, these), pieces(total, after, these), strict=True))
        next_owner = direction.owner(w.rank, hop + 1, world)
        incoming = rows_accumulated(problem, direction)[next_owner][hop]
        next_rank, previous_rank = direction.holder(w.rank, 1, world), direction.owner(w.rank, 1, world)
        if hop < direction.num_hops:
            # The sum lands where the next hop accumulates it, with space for the rows that our share will add.
            grown = rows_accumulated(problem, direction)[next_owner][hop + 1]
            recvs = parts(previous_rank, self._sum_buffer(hop + 1, grown), grown, incoming)
        else:
            recvs = parts(previous_rank, self._sum_buffer(hop + 1, incoming), incoming, incoming)
        w.post(Post(f"dkv {hop}", parts(next_rank, total, after, after), recvs))

    def close(self) -> None:
        """Add the sum that has come back to us to the gradient of our own keys."""
        w = self.w
        for direction in self.directions:
            w.wait(f"dkv {direction.num_hops}")
            back = rows_accumulated(w.problem, direction)[w.rank][direction.num_hops]
            arrived = self._sum_buffer(direction.num_hops + 1, back)
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

    def __init__(self, w: Writer, directions: tuple[RingDirection, ...], dkv: Slice) -> None:
        self.w, self.directions, self.dkv = w, directions, dkv

    def share_buffer(self, direction: RingDirection, hop: int, held: Rows) -> Slice:
        """Return the buffer for our share; frees it first, by completing the exchange of two hops ago."""
        self._collect(direction, hop - 2)
        return self.w.scratch(f"dkv{direction.source_offset:+d}.{hop % 2}", "dkv", rows.count(held), "reduce")

    def send(self, direction: RingDirection, hop: int, share: Slice, held: Rows) -> None:
        """Post our share to the owner of the keys, and receive the share of the rank that used ours."""
        w, problem, world = self.w, self.w.problem, self.w.problem.world
        owner, consumer = direction.owner(w.rank, hop, world), direction.holder(w.rank, hop, world)
        needed, back = problem.needs[owner][w.rank], problem.needs[w.rank][consumer]
        w.post(
            Post(
                f"dkv{direction.source_offset:+d} {hop}",
                parts(owner, share, held, needed),
                parts(consumer, self._recv_buffer(direction, hop, back), back, back),
            )
        )

    def close(self) -> None:
        """Collect the last two hops of each direction."""
        for direction in self.directions:
            for hop in (direction.num_hops - 1, direction.num_hops):
                self._collect(direction, hop)

    def _collect(self, direction: RingDirection, hop: int) -> None:
        """Wait for the exchange of a hop, and add the received share to the gradient of our own keys."""
        if hop < 1:
            return
        w = self.w
        back = w.problem.needs[w.rank][direction.holder(w.rank, hop, w.problem.world)]
        w.wait(f"dkv{direction.source_offset:+d} {hop}")
        all_rows = ((0, w.k_rows),)
        arrived = pieces(self._recv_buffer(direction, hop, back), back, back)
        w.append_each(Add, zip(arrived, pieces(self.dkv, all_rows, back), strict=True))

    def _recv_buffer(self, direction: RingDirection, hop: int, back: Rows) -> Slice:
        return self.w.scratch(f"dkv{direction.source_offset:+d}.home.{hop % 2}", "dkv", rows.count(back), "reduce")


def _post_hop(w: Writer, directions: tuple[RingDirection, ...], hop: int) -> None:
    """Post one hop: send on the rows of the previous hop that are still needed, and receive those of this hop."""
    problem, rank, world = w.problem, w.rank, w.problem.world
    for direction in directions:
        if hop > direction.num_hops:
            continue
        leaving, coming = direction.owner(rank, hop - 1, world), direction.owner(rank, hop, world)
        in_flight = rows_in_flight(problem, direction)
        held: Rows = ((0, w.k_rows),) if hop == 1 else in_flight[leaving][hop - 1]
        source = w.own("kv") if hop == 1 else _kv_buffer(w, direction, hop - 1)
        sends = parts(direction.holder(rank, 1, world), source, held, in_flight[leaving][hop])
        arriving = in_flight[coming][hop]
        w.post(
            Post(
                f"kv{direction.source_offset:+d} {hop}",
                sends,
                parts(direction.owner(rank, 1, world), _kv_buffer(w, direction, hop), arriving, arriving),
            )
        )


def _wait_hop(w: Writer, directions: tuple[RingDirection, ...], hop: int) -> None:
    for direction in directions:
        w.wait(f"kv{direction.source_offset:+d} {hop}")


def _kv_buffer(w: Writer, direction: RingDirection, hop: int) -> Slice:
    """Return the buffer of the keys of a hop: a double buffer for each direction."""
    held = rows_in_flight(w.problem, direction)[direction.owner(w.rank, hop, w.problem.world)][hop]
    return w.scratch(f"kv{direction.source_offset:+d}.{hop % 2}", "kv", rows.count(held))


def _cumulative_unions(sets: Iterable[Rows]) -> list[Rows]:
    """Return the union of the first set, of the first two, and so on."""
    return list(accumulate(sets, lambda a, b: rows.union(a, b)))


def _max_hops(directions: tuple[RingDirection, ...]) -> int:
    return max((direction.num_hops for direction in directions), default=0)


def _count_rows(table: tuple[tuple[Rows, ...], ...]) -> int:
    """Return the rows of a table `[owner][hop]`, each counted once per hop."""
    return sum(rows.count(hop) for owner in table for hop in owner)


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
