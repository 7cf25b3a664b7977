"""All-gather: each rank takes in all the keys that its queries see, a few heads at a time, and attends once.

`head_stride` key heads are gathered at a time (0: all of them). Fewer heads take less memory and more
steps; the next heads are on their way while these are attended to.
"""

from __future__ import annotations

from functools import lru_cache

from meshflash.core import rows
from meshflash.core.layout import Layout
from meshflash.core.problem import Problem
from meshflash.core.program import Add, Clear, Copy, Interval, Part, Post, Program, Ranges, Slice
from meshflash.core.rows import Rows
from meshflash.schedules.registry import Schedule, register
from meshflash.schedules.writer import SAVES, Writer, parts, pieces


def forward(problem: Problem, rank: int, name: str = "allgather") -> Program:
    """Gather keys and values, attend, some heads after the other."""
    w = Writer(name, "forward", problem, rank)
    strides = _strides(problem)
    _gather(w, strides, 0)
    for n, heads in enumerate(strides):
        _gather(w, strides, n + 1)
        w.wait(f"kv {n}")
        query_heads = _query_heads(problem, heads)
        out = w.own("out", heads=query_heads)
        w.attend(_keys(w, heads, n), _positions(problem, rank), out, query_heads, final=True)
    return w.program(SAVES)


def backward(problem: Problem, rank: int, name: str = "allgather") -> Program:
    """Gather again; each rank sends its share of the gradients of keys to the rank that holds them."""
    w = Writer(name, "backward", problem, rank)
    strides = _strides(problem)
    by_itself = _only_own(problem, rank) and not any(need for d, need in enumerate(problem.needs[rank]) if d != rank)
    _gather(w, strides, 0)
    for n, heads in enumerate(strides):
        _gather(w, strides, n + 1)
        w.wait(f"kv {n}")
        query_heads = _query_heads(problem, heads)
        dkv = w.own("dkv", heads=heads) if by_itself else _shares(w, heads, n)
        dq = w.own("dq", heads=query_heads)
        w.attend_grad(_keys(w, heads, n), _positions(problem, rank), dq, dkv, query_heads)
        if not by_itself:
            _scatter(w, heads, n)
            _collect(w, strides, n - 1)
    if not by_itself:
        _collect(w, strides, len(strides) - 1)
    return w.program()


def _strides(problem: Problem) -> list[Interval]:
    """The key heads that are gathered together."""
    stride = int(problem.option["head_stride"]) or problem.kv_heads
    return [(first, min(first + stride, problem.kv_heads)) for first in range(0, problem.kv_heads, stride)]


def _query_heads(problem: Problem, heads: Interval) -> Interval:
    group = problem.heads // problem.kv_heads
    return heads[0] * group, heads[1] * group


def _only_own(problem: Problem, rank: int) -> bool:
    """Whether a rank's queries see no keys but its own."""
    return not any(needs[rank] for c, needs in enumerate(problem.needs) if c != rank)


@lru_cache(maxsize=256)
def _even(problem: Problem) -> bool:
    """Whether all ranks hold as many keys and need all of them."""
    return problem.world > 1 and len(set(problem.k_lengths)) == 1 and problem.everything_needed


def _held(problem: Problem, rank: int) -> list[Rows]:
    """The rows of each rank's keys that a rank attends to, in the order in which they are gathered."""
    if _only_own(problem, rank):
        return [((0, problem.k_lengths[c]),) if c == rank else () for c in range(problem.world)]
    return [needs[rank] for needs in problem.needs]


def _positions(problem: Problem, rank: int) -> Ranges:
    held = _held(problem, rank)
    return tuple(r for c, taken in enumerate(held) for r in rows.positions(problem.k[c], taken))


def _slots(whole: Slice, held: list[Rows]) -> list[Slice]:
    """Where each rank's rows lie in what was gathered."""
    out, first = [], 0
    for taken in held:
        out.append(Slice(whole.buffer, (first, first + rows.count(taken)), whole.heads))
        first += rows.count(taken)
    return out


def _keys(w: Writer, heads: Interval, n: int) -> Slice:
    """The keys and values to attend to: gathered, or our own where we need no others."""
    if _only_own(w.problem, w.rank):
        return w.own("kv", heads=heads)
    width = heads[1] - heads[0]
    return w.scratch(f"kv{width}.{n % 2}", "kv", _count(w.problem, w.rank), heads=width)


def _shares(w: Writer, heads: Interval, n: int) -> Slice:
    """Our share of the gradients of all the keys that we attended to."""
    width = heads[1] - heads[0]
    return w.scratch(f"dkv{width}.{n % 2}", "dkv", _count(w.problem, w.rank), "reduce", width)


def _count(problem: Problem, rank: int) -> int:
    return sum(map(rows.count, _held(problem, rank)))


def _gather(w: Writer, strides: list[Interval], n: int) -> None:
    """Post the gathering of the n-th heads: to each rank what it needs of ours, from each what we need."""
    if n >= len(strides):
        return
    problem, rank, heads = w.problem, w.rank, strides[n]
    own, everything = w.own("kv", heads=heads), ((0, w.k_rows),)
    sends = [
        part
        for d in range(problem.world)
        if not _only_own(problem, d)
        for part in parts(d, own, everything, problem.needs[rank][d])
    ]
    recvs: list[Part] = []
    if not _only_own(problem, rank):
        held = _held(problem, rank)
        for c, slot in enumerate(_slots(_keys(w, heads, n), held)):
            recvs += parts(c, slot, held[c], held[c])
    w.post(Post(f"kv {n}", tuple(sends), tuple(recvs), collective="all_gather" if _even(problem) else ""))


def _scatter(w: Writer, heads: Interval, n: int) -> None:
    """Post our shares to the ranks that hold the keys, and take in theirs; our own share goes to ourselves."""
    problem, rank = w.problem, w.rank
    held = _held(problem, rank)
    sends = [
        part
        for c, slot in enumerate(_slots(_shares(w, heads, n), held))
        for part in parts(c, slot, held[c], problem.needs[c][rank])
    ]
    recvs = [
        part
        for d, slot in enumerate(_slots(_arrived(w, heads, n), list(problem.needs[rank])))
        for part in parts(d, slot, problem.needs[rank][d], problem.needs[rank][d])
    ]
    w.post(Post(f"dkv {n}", tuple(sends), tuple(recvs), collective="all_to_all" if _even(problem) else ""))


def _collect(w: Writer, strides: list[Interval], n: int) -> None:
    """Sum the shares of all ranks, in their order."""
    if n < 0:
        return
    heads, needs = strides[n], w.problem.needs[w.rank]
    w.wait(f"dkv {n}")
    if not w.k_rows:
        return
    total = w.scratch("dkv.sum", "dkv", w.k_rows, "partial", becomes="dkv")
    total = Slice(total.buffer, total.rows, heads)
    everything = ((0, w.k_rows),)
    fresh = needs[0] == everything
    if not fresh:
        w.steps.append(Clear(total))
    for d, slot in enumerate(_slots(_arrived(w, heads, n), list(needs))):
        pairs = zip(pieces(slot, needs[d], needs[d]), pieces(total, everything, needs[d]), strict=True)
        w.each(Copy if fresh and d == 0 else Add, pairs)
    w.each(Copy, [(total, w.own("dkv", heads=heads))])


def _arrived(w: Writer, heads: Interval, n: int) -> Slice:
    width = heads[1] - heads[0]
    return w.scratch(f"dkv{width}.in.{n % 2}", "dkv", sum(map(rows.count, w.problem.needs[w.rank])), "reduce", width)


for _name, _layout, _summary in (
    ("allgather", Layout.contiguous, "each rank gathers the keys that its queries see, and attends once"),
    ("ringx3", Layout.zigzag, "the same; each rank holds a piece from the front and one from the back"),
):
    register(Schedule(_name, forward, backward, _layout, _summary, (("head_stride", 0),)))
