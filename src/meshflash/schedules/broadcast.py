"""Broadcast schedules: each rank in turn is the root and broadcasts its rows, while the others work on the last ones.

    ringx4: broadcast K and V                        ringx1, ringx2: broadcast Q
    root r sends K(r), V(r) to each rank d           root r sends Q(r) to each rank c
    rank d attends Q(d) to them                      rank c attends Q(r) to its own K(c), V(c)
    (backward: d returns its share of dK, dV)        c returns a partial (out, LSE); r merges all of them by LSE

The backward of `ringx1` and `ringx2` broadcasts queries or keys, whichever moves fewer bytes. Rows go only to ranks
that need them, so a causal mask needs no schedule of its own: `ringx1` and `ringx2` are the same schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from meshflash.core import rows
from meshflash.core.layout import Layout
from meshflash.core.problem import Problem
from meshflash.core.program import Add, Attend, AttendGrad, Dtype, Part, Post, Program, Slice
from meshflash.core.rows import Rows
from meshflash.schedules.registry import Schedule, register
from meshflash.schedules.writer import SAVES, Writer, parts, pieces

#: Traffic of a backward for one row and head, in units of `dim` elements of half precision, with float32 gradients.
#: Keys: k and v out (2), dk and dv back (4). Queries: q out (1), out and dout with it (2), dq back (2).
KEY_COST, QUERY_COST = 2 + 4, 1 + 2 + 2


def broadcast_kv(problem: Problem, rank: int, name: str = "ringx4") -> Program:
    """Build the forward of one rank: attend to our own keys, then to the keys that each root broadcasts.

    Args:
        problem: The positions that every rank holds, and the mask.
        rank: The rank that runs the program.
        name: The name of the program, for people.
    """
    w = Writer(name, "forward", problem, rank)
    single_step = not any(problem.needs[c][rank] for c in _others(problem, rank))
    out = w.accumulator("out", not single_step)
    broadcast = _Broadcast(w, "kv", lambda root, peer: problem.needs[root][peer])
    w.attend_own(out, final=single_step)
    for root in range(problem.world):
        received = broadcast.receive(root)
        if received is not None:
            w.attend(received, rows.positions(problem.k[root], problem.needs[root][rank]), out, carry=True)
    w.finalize()
    return w.program(SAVES)


def broadcast_kv_backward(problem: Problem, rank: int, name: str = "ringx4") -> Program:
    """Build the backward of one rank: each root broadcasts its keys again and collects the shares of dK and dV.

    Args:
        problem: The positions that every rank holds, and the mask.
        rank: The rank that runs the program.
        name: The name of the program, for people.
    """
    w = Writer(name, "backward", problem, rank)
    others = _others(problem, rank)
    providers = [c for c in others if problem.needs[c][rank]]
    consumers = [d for d in others if problem.needs[rank][d]]
    dq = w.accumulator("dq", bool(providers))
    dkv = w.accumulator("dkv", bool(consumers))
    broadcast = _Broadcast(w, "kv", lambda root, peer: problem.needs[root][peer])
    w.attend_grad(w.own("kv"), problem.k[rank], dq, dkv)
    for root, received, share in _ReduceToRoot(broadcast, "dkv", "reduce", dkv).shares(consumers):
        positions = rows.positions(problem.k[root], problem.needs[root][rank])
        w.attend_grad(received, positions, dq, share, add_dq=True)
    w.finalize()
    return w.program()


def broadcast_q(problem: Problem, rank: int, name: str = "ringx1") -> Program:
    """Build the forward of one rank: attend with our own queries, then with those of each root, to our own keys.

    Args:
        problem: The positions that every rank holds, and the mask.
        rank: The rank that runs the program.
        name: The name of the program, for people.
    """
    w = Writer(name, "forward", problem, rank)
    helpers = [c for c in _others(problem, rank) if queries_seeing(problem, rank, c)]
    out = w.accumulator("out", bool(helpers))
    broadcast = _Broadcast(w, "q", lambda root, peer: queries_seeing(problem, root, peer))
    w.attend_own(out, final=not helpers)
    # Partial results stay in float32 on the way back: rounding them before the merge would lose precision.
    for root, received, share in _ReduceToRoot(broadcast, "out", "partial", out).shares(helpers):
        positions = rows.positions(problem.q[root], queries_seeing(problem, root, rank))
        w.steps.append(Attend(received, w.own("kv"), share, positions, problem.k[rank], (0, problem.heads)))
    w.finalize()
    return w.program(SAVES)


def broadcast_q_backward(problem: Problem, rank: int, name: str = "ringx1") -> Program:
    """Build the backward of one rank: broadcast q, out and dout, or keys and values, whichever moves fewer bytes.

    Args:
        problem: The positions that every rank holds, and the mask.
        rank: The rank that runs the program.
        name: The name of the program, for people.
    """
    if not queries_move_less(problem):
        return broadcast_kv_backward(problem, rank, name)
    w = Writer(name, "backward", problem, rank)
    others = _others(problem, rank)
    helpers = [c for c in others if queries_seeing(problem, rank, c)]
    served = [d for d in others if queries_seeing(problem, d, rank)]
    dq = w.accumulator("dq", bool(helpers))
    dkv = w.accumulator("dkv", bool(served))
    # A gradient kernel needs the result and its gradient for each query row, so out and dout travel with q.
    broadcast = _Broadcast(w, "q", lambda root, peer: queries_seeing(problem, root, peer), with_results=True)
    w.attend_grad(w.own("kv"), problem.k[rank], dq, dkv)
    for root, received, share in _ReduceToRoot(broadcast, "dq", "reduce", dq).shares(helpers):
        positions = rows.positions(problem.q[root], queries_seeing(problem, root, rank))
        results = broadcast.buffer("out", root), broadcast.buffer("dout", root)
        all_heads = (0, problem.heads)
        w.steps.append(
            AttendGrad(received, *results, w.own("kv"), share, dkv, positions, problem.k[rank], all_heads, add_dkv=True)
        )
    w.finalize()
    return w.program()


def queries_seeing(problem: Problem, owner: int, rank: int) -> Rows:
    """Return the query rows of `owner` that see a key of `rank`; none for a rank and itself.

    Args:
        problem: The positions that every rank holds, and the mask.
        owner: The rank that holds the queries.
        rank: The rank that holds the keys.
    """
    if owner == rank or not problem.needs[rank][owner]:
        return ()
    return problem.q_seeing(owner, problem.k[rank])


@lru_cache(maxsize=256)
def queries_move_less(problem: Problem) -> bool:
    """Whether a backward that broadcasts queries moves fewer bytes than one that broadcasts keys."""
    pairs = [(c, d) for c in range(problem.world) for d in range(problem.world) if c != d]
    queries = sum(rows.count(queries_seeing(problem, d, c)) for c, d in pairs) * problem.heads * QUERY_COST
    keys = sum(rows.count(problem.needs[c][d]) for c, d in pairs) * problem.kv_heads * KEY_COST
    return queries < keys


def _others(problem: Problem, rank: int) -> list[int]:
    return [c for c in range(problem.world) if c != rank]


class _Broadcast:
    """Each root sends every peer the rows `wanted(root, peer)`, one root ahead of their use."""

    def __init__(self, w: Writer, kind: str, wanted: Callable[[int, int], Rows], with_results: bool = False) -> None:
        self.w, self.wanted = w, wanted
        self.kinds = (kind, "out", "dout") if with_results else (kind,)
        self._post(0)

    def receive(self, root: int) -> Slice | None:
        """Wait for the rows of this root, and post those of the next; None if this rank gets none."""
        self.w.wait(f"{self.kinds[0]} {root}")
        self._post(root + 1)
        if root == self.w.rank or not self.wanted(root, self.w.rank):
            return None
        return self.buffer(self.kinds[0], root)

    def buffer(self, kind: str, root: int) -> Slice:
        """Return the buffer of a root's rows: a double buffer, as the next root's rows arrive meanwhile."""
        return self.w.scratch(f"{kind}.{root % 2}", kind, rows.count(self.wanted(root, self.w.rank)))

    def _post(self, root: int) -> None:
        w = self.w
        if root >= w.problem.world:
            return
        sends: list[Part] = []
        recvs: list[Part] = []
        for kind in self.kinds:
            if root == w.rank:
                all_rows = ((0, w.own(kind).rows[1]),)
                for other in _others(w.problem, w.rank):
                    sends += parts(other, w.own(kind), all_rows, self.wanted(root, other))
            elif mine := self.wanted(root, w.rank):
                recvs += parts(root, self.buffer(kind, root), mine, mine)
        w.post(Post(f"{self.kinds[0]} {root}", tuple(sends), tuple(recvs)))


class _ReduceToRoot:
    """Every peer returns its share for a root's rows, and the root adds the shares to `total` in rank order.

    The fixed order makes the sum, and so its rounding, the same in every run.
    """

    def __init__(self, broadcast: _Broadcast, kind: str, dtype: Dtype, total: Slice) -> None:
        self.broadcast, self.kind, self.dtype, self.total = broadcast, kind, dtype, total
        self.w, self.wanted = broadcast.w, broadcast.wanted

    def shares(self, peers: list[int]) -> Iterator[tuple[int, Slice, Slice]]:
        """Yield (root, its rows, buffer for our share) for each root whose rows we get, and send the share afterwards.

        At our own turn, collect the shares of `peers`. The buffer is a double buffer, free once its last send has
        completed.
        """
        w = self.w
        for root in range(w.problem.world):
            received = self.broadcast.receive(root)
            if received is not None:
                for earlier in range(root % 2, root, 2):
                    w.wait(f"{self.kind} {earlier}")
                mine = self.wanted(root, w.rank)
                share = self._scratch(f"{self.kind}.part.{root % 2}", mine)
                yield root, received, share
                w.post(Post(f"{self.kind} {root}", parts(root, share, mine, mine), ()))
            elif root == w.rank:
                self._collect(peers)
        for root in range(w.problem.world):
            w.wait(f"{self.kind} {root}")

    def _collect(self, peers: list[int]) -> None:
        """As the root, receive the shares of all peers and add them; one arrives while the last one is added."""
        w, all_rows = self.w, ((0, self.total.rows[1]),)
        for n in range(len(peers) + 1):
            if n < len(peers):
                theirs = self.wanted(w.rank, peers[n])
                arriving = self._scratch(f"{self.kind}.in.{n % 2}", theirs)
                w.post(Post(f"{self.kind} from {peers[n]}", (), parts(peers[n], arriving, theirs, theirs)))
            if n:
                theirs = self.wanted(w.rank, peers[n - 1])
                w.wait(f"{self.kind} from {peers[n - 1]}")
                arrived = self._scratch(f"{self.kind}.in.{(n - 1) % 2}", theirs)
                pairs = zip(pieces(arrived, theirs, theirs), pieces(self.total, all_rows, theirs), strict=True)
                w.append_each(Add, pairs)

    def _scratch(self, name: str, held: Rows) -> Slice:
        return self.w.scratch(name, self.kind, rows.count(held), self.dtype)


for _name, _forward, _backward, _layout, _summary in (
    ("ringx1", broadcast_q, broadcast_q_backward, Layout.contiguous, "each rank in turn broadcasts its queries"),
    ("ringx2", broadcast_q, broadcast_q_backward, Layout.contiguous, "same as ringx1; ringX's name for causal masks"),
    ("ringx4", broadcast_kv, broadcast_kv_backward, Layout.zigzag, "each rank in turn broadcasts its keys and values"),
):
    register(Schedule(_name, _forward, _backward, _layout, _summary))
