"""Broadcast schedules: each rank in turn is the root and broadcasts its rows, while the others work on the last ones.

    ringx4: broadcast K and V                        ringx1, ringx2: broadcast Q
    root r sends K(r), V(r) to each rank d           root r sends Q(r) to each rank c
    rank d attends Q(d) to them                      rank c attends Q(r) to its own K(c), V(c)
    (backward: d returns its share of dK, dV)        c returns a partial (out, LSE); r merges all of them by LSE

The backward of `ringx1` and `ringx2` broadcasts queries or keys, whichever moves fewer bytes. Rows go only to ranks
that need them, so a causal mask needs no schedule of its own: `ringx1` and `ringx2` are the same schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np

from meshflash.core import rows
from meshflash.core.layout import Layout
from meshflash.core.problem import Problem
from meshflash.core.program import Add, Attend, AttendGrad, Dtype, Interval, Part, Post, Program, Ranges, Slice
from meshflash.core.rows import Rows
from meshflash.core.runs import Ints, Runs, merge_intervals, row_at, views
from meshflash.core.shards import RowTable
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
    broadcast = _Broadcast(w, "kv", *_keys_moved(problem, rank))
    attended = _attended(problem, rank)
    single_step = not broadcast.received
    out = w.accumulator("out", not single_step)
    broadcast.start()
    w.attend_own(out, final=single_step)
    for root in broadcast.roots:
        received = broadcast.receive(root)
        if received is not None:
            k_positions, q_rows = attended[root]
            w.attend(received, k_positions, out, carry=True, q_rows=q_rows)
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
    broadcast = _Broadcast(w, "kv", *_keys_moved(problem, rank))
    attended = _attended(problem, rank)
    dq = w.accumulator("dq", bool(broadcast.received))
    dkv = w.accumulator("dkv", bool(broadcast.sent))
    broadcast.start()
    w.attend_grad(w.own("kv"), problem.k[rank], dq, dkv)
    for root, received, share in _ReduceToRoot(broadcast, "dkv", "reduce", dkv).shares():
        k_positions, q_rows = attended[root]
        w.attend_grad(received, k_positions, dq, share, add_dq=True, q_rows=q_rows)
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
    broadcast = _Broadcast(w, "q", *queries_moved(problem, rank))
    out = w.accumulator("out", bool(broadcast.sent))
    broadcast.start()
    w.attend_own(out, final=not broadcast.sent)
    # Partial results stay in float32 on the way back: rounding them before the merge would lose precision.
    for root, received, share in _ReduceToRoot(broadcast, "out", "partial", out).shares():
        positions = rows.positions(problem.q[root], broadcast.received[root])
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
    # A gradient kernel needs the result and its gradient for each query row, so out and dout travel with q.
    broadcast = _Broadcast(w, "q", *queries_moved(problem, rank), with_results=True)
    dq = w.accumulator("dq", bool(broadcast.sent))
    dkv = w.accumulator("dkv", bool(broadcast.received))
    broadcast.start()
    w.attend_grad(w.own("kv"), problem.k[rank], dq, dkv)
    for root, received, share in _ReduceToRoot(broadcast, "dq", "reduce", dq).shares():
        positions = rows.positions(problem.q[root], broadcast.received[root])
        results = broadcast.buffer("out", root), broadcast.buffer("dout", root)
        all_heads = (0, problem.heads)
        w.steps.append(
            AttendGrad(received, *results, w.own("kv"), share, dkv, positions, problem.k[rank], all_heads, add_dkv=True)
        )
    w.finalize()
    return w.program()


@lru_cache(maxsize=256)
def queries_move_less(problem: Problem) -> bool:
    """Whether a backward that broadcasts queries moves fewer bytes than one that broadcasts keys."""
    ranks, q, k = np.array(problem.sampled_ranks), problem.table.q, problem.table.k
    needed, own = problem.table.num_needed(ranks)
    owner, begin, end = q.rows_in(*_positions_seeing(problem, k.of_ranks(ranks)))
    queries = int((end - begin)[q.rank_of(begin) != owner].sum())
    keys = int((needed - own).sum())
    return queries * problem.heads * QUERY_COST < keys * problem.kv_heads * KEY_COST


def _keys_moved(problem: Problem, rank: int) -> tuple[dict[int, Rows], dict[int, Rows]]:
    """Return the key rows of other ranks that our queries see, and our key rows that queries of other ranks see."""
    return _others(problem.needed_from(rank), rank), _others(problem.needed_by(rank), rank)


def queries_moved(problem: Problem, rank: int) -> tuple[dict[int, Rows], dict[int, Rows]]:
    """Return the query rows of other ranks that see a rank's keys, and its query rows that see keys of other ranks.

    Args:
        problem: The positions that every rank holds, and the mask.
        rank: The rank that receives the former queries and sends the latter.
    """
    q, k = problem.table.q, problem.table.k
    _, begin, end = q.rows_in(*_positions_seeing(problem, k.of_ranks(np.array([rank]))))
    peer = q.rank_of(begin)
    received = RowTable.of(peer, begin - q.first_row[peer], end - q.first_row[peer])
    owner, lo, hi = _positions_seeing(problem, k.runs)
    # Row 0 is our first query; each run of ours meets all intervals.
    runs = q.of_ranks(np.array([rank]))
    runs = Runs(*(column[:, None] for column in (runs.row - q.first_row[rank], runs.rows, runs.position, runs.step)))
    begin, end = np.maximum(row_at(runs, lo), 0), np.minimum(row_at(runs, hi), runs.rows)
    owner = np.broadcast_to(owner, begin.shape)
    sent = RowTable.of(owner.ravel(), (runs.row + begin).ravel(), (runs.row + end).ravel())
    return _others(received.by_rank, rank), _others(sent.by_rank, rank)


def _positions_seeing(problem: Problem, keys: Runs) -> tuple[Ints, Ints, Ints]:
    """Return (owner, lo, hi): the positions of queries that see keys of each owner, as intervals `[lo, hi)`.

    Args:
        problem: The positions that every rank holds, and the mask.
        keys: Runs of keys; their rows are numbered over all ranks.
    """
    found = [np.zeros((3, 0), np.int64)]
    for view in views(problem.mask, keys, by_key=True):
        view = view.without_gaps()
        found.append(np.stack([problem.table.k.rank_of(view.segments.row), *view.limits()]))
    return merge_intervals(*np.concatenate(found, axis=1))


def _attended(problem: Problem, rank: int) -> Mapping[int, tuple[Ranges, Interval]]:
    """Return the positions of the keys of other ranks that our queries see, and the rows of these queries, by owner."""
    needed = problem.table.needed_from(rank)
    return problem.positions_and_q_rows(rank, needed.take(needed.rank != rank))


def _others(by_rank: Mapping[int, Rows], rank: int) -> dict[int, Rows]:
    return {other: these for other, these in by_rank.items() if other != rank}


class _Broadcast:
    """Each root sends its peers the rows that they need, one root ahead of their use.

    Args:
        w: The writer of this rank's program.
        kind: The kind of the rows.
        received: The rows that we receive, by root.
        sent: Our rows that we send at our own turn, by peer.
        with_results: Whether out and dout travel with the rows.
    """

    def __init__(
        self,
        w: Writer,
        kind: str,
        received: Mapping[int, Rows],
        sent: Mapping[int, Rows],
        with_results: bool = False,
    ) -> None:
        self.w, self.received, self.sent = w, received, sent
        self.kinds = (kind, "out", "dout") if with_results else (kind,)
        #: The turns that we take part in, in order.
        self.roots = sorted({*received, w.rank})
        #: A double buffer for each kind, as the next root's rows arrive meanwhile.
        self._buffers: dict[tuple[str, int], Slice] = {}

    def start(self) -> None:
        """Post the rows of the first root."""
        self._post(0)

    def receive(self, root: int) -> Slice | None:
        """Wait for the rows of this root, and post those of the next; None if this rank gets none."""
        if root and root - 1 not in self.received and root - 1 != self.w.rank:
            self._post(root)  # we had no turn just before this one
        self.w.wait(f"{self.kinds[0]} {root}")
        self._post(root + 1)
        return self.buffer(self.kinds[0], root) if root in self.received else None

    def buffer(self, kind: str, root: int) -> Slice:
        """Return the buffer of a root's rows, until the rows of the next root but one are posted."""
        return self._buffers[kind, root % 2]

    def _post(self, root: int) -> None:
        w = self.w
        sends: list[Part] = []
        recvs: list[Part] = []
        for kind in self.kinds:
            if root == w.rank:
                own = w.own(kind)
                for peer, theirs in self.sent.items():
                    sends += parts(peer, own, (own.rows,), theirs)
            elif mine := self.received.get(root):
                arriving = w.scratch(f"{kind}.{root % 2}", kind, rows.count(mine))
                self._buffers[kind, root % 2] = arriving
                recvs += parts(root, arriving, mine, mine)
        w.post(Post(f"{self.kinds[0]} {root}", tuple(sends), tuple(recvs)), drop_empty=False)


class _ReduceToRoot:
    """Every peer returns its share for a root's rows, and the root adds the shares to `total` in rank order.

    The fixed order makes the sum, and so its rounding, the same in every run.
    """

    def __init__(self, broadcast: _Broadcast, kind: str, dtype: Dtype, total: Slice) -> None:
        self.broadcast, self.kind, self.dtype, self.total = broadcast, kind, dtype, total
        self.w = broadcast.w

    def shares(self) -> Iterator[tuple[int, Slice, Slice]]:
        """Yield (root, its rows, buffer for our share) for each root whose rows we get, and send the share afterwards.

        At our own turn, collect the shares of our peers. The buffer is a double buffer, free once its last send has
        completed.
        """
        w = self.w
        last_sends: dict[int, str] = {}  # the last post from each half of the double buffer
        for root in self.broadcast.roots:
            received = self.broadcast.receive(root)
            if received is None:
                self._collect()
                continue
            if root % 2 in last_sends:
                w.wait(last_sends.pop(root % 2))
            mine = self.broadcast.received[root]
            share = self._scratch(f"{self.kind}.part.{root % 2}", mine)
            yield root, received, share
            w.post(Post(f"{self.kind} {root}", parts(root, share, mine, mine), ()), drop_empty=False)
            last_sends[root % 2] = f"{self.kind} {root}"
        for name in last_sends.values():
            w.wait(name)

    def _collect(self) -> None:
        """As the root, receive the shares of all peers and add them; one arrives while the last one is added."""
        last: tuple[int, Rows, Slice] | None = None
        for n, (peer, theirs) in enumerate(self.broadcast.sent.items()):
            arriving = self._scratch(f"{self.kind}.in.{n % 2}", theirs)
            recvs = parts(peer, arriving, theirs, theirs)
            self.w.post(Post(f"{self.kind} from {peer}", (), recvs), drop_empty=False)
            if last is not None:
                self._add(*last)
            last = peer, theirs, arriving
        if last is not None:
            self._add(*last)

    def _add(self, peer: int, theirs: Rows, arrived: Slice) -> None:
        """Wait for the share of a peer, and add it."""
        self.w.wait(f"{self.kind} from {peer}")
        pairs = zip(pieces(arrived, theirs, theirs), pieces(self.total, (self.total.rows,), theirs), strict=True)
        self.w.append_each(Add, pairs)

    def _scratch(self, name: str, held: Rows) -> Slice:
        return self.w.scratch(name, self.kind, rows.count(held), self.dtype)


for _name, _forward, _backward, _layout, _summary in (
    ("ringx1", broadcast_q, broadcast_q_backward, Layout.contiguous, "each rank in turn broadcasts its queries"),
    ("ringx2", broadcast_q, broadcast_q_backward, Layout.contiguous, "same as ringx1; ringX's name for causal masks"),
    ("ringx4", broadcast_kv, broadcast_kv_backward, Layout.zigzag, "each rank in turn broadcasts its keys and values"),
):
    register(Schedule(_name, _forward, _backward, _layout, _summary))
