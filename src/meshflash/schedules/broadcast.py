"""Broadcast schedules: each rank in turn is the root and broadcasts its rows, while the others work on the last ones.

    ringx4: broadcast K and V                        ringx1, ringx2: broadcast Q
    root r sends K(r), V(r) to each rank d           root r sends Q(r) to each rank c
    rank d attends Q(d) to them                      rank c attends Q(r) to its own K(c), V(c)
    (backward: d returns its share of dK, dV)        c returns a partial (out, LSE); r merges all of them by LSE

The backward of `ringx1` and `ringx2` broadcasts queries or keys, whichever moves fewer bytes. Rows go only to ranks
that need them, so a causal mask needs no schedule of its own: `ringx1` and `ringx2` are the same schedule.
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
    own = problem.needs[rank][rank]
    broadcast = _Broadcast(w, "kv", lambda root, peer: problem.needs[root][peer])
    broadcast.begin()
    # The first step always runs, over no keys if need be: it initializes the accumulator for every query.
    kv = w.own("kv") if own else w.own("kv", (0, 0))
    w.attend(kv, problem.k[rank] if own else (), out, final=single_step)
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
    broadcast.begin()
    w.attend_grad(w.own("kv"), problem.k[rank], dq, dkv)
    reduce = _ReduceToRoot(w, "dkv", "reduce", lambda root, peer: problem.needs[root][peer], dkv)
    for root in range(problem.world):
        received = broadcast.receive(root)
        if received is not None:
            share = reduce.share_buffer(root)
            positions = rows.positions(problem.k[root], problem.needs[root][rank])
            w.attend_grad(received, positions, dq, share, add_dq=True)
            reduce.send(root, share)
        elif root == rank:
            reduce.collect(consumers)
    reduce.close()
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
    own = problem.needs[rank][rank]
    broadcast = _Broadcast(w, "q", lambda root, peer: queries_seeing(problem, root, peer))
    broadcast.begin()
    kv = w.own("kv") if own else w.own("kv", (0, 0))
    w.attend(kv, problem.k[rank] if own else (), out, final=not helpers)
    # Partial results stay in float32 on the way back: rounding them before the merge would lose precision.
    reduce = _ReduceToRoot(w, "out", "partial", lambda root, peer: queries_seeing(problem, root, peer), out)
    for root in range(problem.world):
        received = broadcast.receive(root)
        if received is not None:
            share = reduce.share_buffer(root)
            positions = rows.positions(problem.q[root], queries_seeing(problem, root, rank))
            w.steps.append(Attend(received, w.own("kv"), share, positions, problem.k[rank], (0, problem.heads)))
            reduce.send(root, share)
        elif root == rank:
            reduce.collect(helpers)
    reduce.close()
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
    broadcast.begin()
    w.attend_grad(w.own("kv"), problem.k[rank], dq, dkv)
    reduce = _ReduceToRoot(w, "dq", "reduce", lambda root, peer: queries_seeing(problem, root, peer), dq)
    for root in range(problem.world):
        received = broadcast.receive(root)
        if received is not None:
            share = reduce.share_buffer(root)
            positions = rows.positions(problem.q[root], queries_seeing(problem, root, rank))
            results = broadcast.buffer("out", root), broadcast.buffer("dout", root)
            all_heads = (0, problem.heads)
            w.steps.append(
                AttendGrad(
                    received, *results, w.own("kv"), share, dkv, positions, problem.k[rank], all_heads, add_dkv=True
                )
            )
            reduce.send(root, share)
        elif root == rank:
            reduce.collect(helpers)
    reduce.close()
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

    def begin(self) -> None:
        """Post the rows of the first root."""
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

    def __init__(self, w: Writer, kind: str, dtype: Dtype, wanted: Callable[[int, int], Rows], total: Slice) -> None:
        self.w, self.kind, self.dtype, self.wanted, self.total = w, kind, dtype, wanted, total

    def share_buffer(self, root: int) -> Slice:
        """Return the buffer for our share of a root's rows: a double buffer, free once its last send has completed."""
        for earlier in range(root % 2, root, 2):
            self.w.wait(f"{self.kind} {earlier}")
        return self._scratch(f"{self.kind}.part.{root % 2}", self.wanted(root, self.w.rank))

    def send(self, root: int, share: Slice) -> None:
        """Post our share to the root."""
        mine = self.wanted(root, self.w.rank)
        self.w.post(Post(f"{self.kind} {root}", parts(root, share, mine, mine), ()))

    def collect(self, peers: list[int]) -> None:
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

    def close(self) -> None:
        """Wait for the shares that we still send."""
        for root in range(self.w.problem.world):
            self.w.wait(f"{self.kind} {root}")

    def _scratch(self, name: str, held: Rows) -> Slice:
        return self.w.scratch(name, self.kind, rows.count(held), self.dtype)


for _name, _forward, _backward, _layout, _summary in (
    ("ringx1", broadcast_q, broadcast_q_backward, Layout.contiguous, "each rank in turn broadcasts its queries"),
    ("ringx2", broadcast_q, broadcast_q_backward, Layout.contiguous, "same as ringx1; ringX's name for causal masks"),
    ("ringx4", broadcast_kv, broadcast_kv_backward, Layout.zigzag, "each rank in turn broadcasts its keys and values"),
):
    register(Schedule(_name, _forward, _backward, _layout, _summary))
