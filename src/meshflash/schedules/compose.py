"""Composition: an all-to-all trades heads for sequence within groups of ranks, and any schedule runs across the groups.

The ranks are a grid. A row is a Ulysses group, which exchanges; a column is a ring group, which runs another schedule:

                    share 0    share 1               share = which heads a rank has after the exchange
        group 0     rank 0 <-> rank 1      exchange
                      ^          ^
                      |  ring    |  ring             each column solves the problem of all tokens for its heads,
                      v          v                   on shards that are `inner` times as long
        group 1     rank 2 <-> rank 3      exchange

One rank's forward: (1) exchange q, k and v: give away all heads but our share, receive our share of the heads for the
tokens of the whole group. (2) Run the other schedule's program, which `embed` writes between our own steps. (3)
Exchange the results back. The backward does the same with dout, and with dq, dk and dv.

The forward saves what it received in (1), so q, k and v travel once. Results travel back without their LSE unless the
caller wants it, and dout travels without delta, because the rank that computed a result can recompute delta (`Delta`).

No size has to divide another: shares may differ or be empty. With more ranks than key heads, a key head goes to every
rank whose query heads share it, and the owner sums the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, lru_cache
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from meshflash.core.problem import Problem
from meshflash.core.program import (
    LSE_KINDS,
    STEPS,
    Add,
    Copy,
    Delta,
    Dtype,
    Interval,
    Part,
    Post,
    Program,
    Ranges,
    Slice,
)
from meshflash.schedules.registry import Builder, on_change, parse
from meshflash.schedules.writer import Writer, take_rows


@dataclass(frozen=True)
class HeadPiece:
    """Query heads that one rank attends with in one round, and their key heads; each key head has equally many."""

    heads: Interval
    kv_heads: Interval

    @property
    def shape(self) -> tuple[int, int]:
        """The number of query heads and of key heads."""
        return self.heads[1] - self.heads[0], self.kv_heads[1] - self.kv_heads[0]


def split_heads(heads: int, kv_heads: int, num_ranks: int, rounds: int = 1) -> tuple[tuple[HeadPiece, ...], ...]:
    """Split heads over ranks, as evenly as possible, and each rank's share into pieces.

    Key heads stay whole while there are at least as many key heads as ranks.

    Args:
        heads: The number of query heads.
        kv_heads: The number of key heads, which divides `heads`.
        num_ranks: The number of ranks that share the heads.
        rounds: The number of pieces to split each share into, where it has that many key heads.

    >>> [[piece.heads for piece in share] for share in split_heads(8, 2, 3)]
    [[(0, 2)], [(2, 4), (4, 5)], [(5, 8)]]
    """
    gqa_ratio = heads // kv_heads
    cut = kv_heads < num_ranks
    bounds = [(heads if cut else kv_heads) * n // num_ranks * (1 if cut else gqa_ratio) for n in range(num_ranks + 1)]
    return tuple(tuple(_pieces(first, last, gqa_ratio, rounds)) for first, last in pairwise(bounds))


def _pieces(first: int, last: int, gqa_ratio: int, rounds: int) -> Iterator[HeadPiece]:
    """Split query heads `first .. last` into about `rounds` pieces of whole KV heads.

    A kernel needs equally many query heads for each key head. A GQA group that the bounds cut therefore becomes a piece
    of its own.
    """
    held = [
        (kv, max(first, kv * gqa_ratio), min(last, (kv + 1) * gqa_ratio))
        for kv in range(first // gqa_ratio, -(-last // gqa_ratio))
    ]
    held = held if first < last else []
    kv_per_piece = max(1, -(-len(held) // rounds))
    for _, alike in groupby(held, key=lambda entry: entry[2] - entry[1]):
        these = list(alike)
        for n in range(0, len(these), kv_per_piece):
            taken = these[n : n + kv_per_piece]
            yield HeadPiece((taken[0][1], taken[-1][2]), (taken[0][0], taken[-1][0] + 1))


class RowRun(NamedTuple):
    """Rows of one rank that stay neighbours in the shard of its group.

    `rows` counts within the rank's own shard, `group_rows` within the group's shard.
    """

    rank: int
    rows: Interval
    group_rows: Interval


@dataclass(frozen=True)
class GroupShard:
    """The rows of all ranks of a Ulysses group, sorted by position. `merge_shards` makes it."""

    runs: tuple[RowRun, ...]
    positions: Ranges

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return sum(map(len, self.positions))

    def of(self, rank: int) -> list[RowRun]:
        """Return the runs of one rank."""
        return self._runs_by_rank.get(rank, [])

    @cached_property
    def _runs_by_rank(self) -> dict[int, list[RowRun]]:
        out: dict[int, list[RowRun]] = {}
        for run in self.runs:
            out.setdefault(run.rank, []).append(run)
        return out


def merge_shards(ranks: tuple[int, ...], held: tuple[Ranges, ...]) -> GroupShard:
    """Merge the shards of some ranks into one shard, sorted by position, so that neighbouring ranges join.

    Args:
        ranks: The ranks to merge.
        held: The ranges of positions of every rank of the problem.

    >>> merge_shards((0, 1), ((range(0, 2), range(6, 8)), (range(2, 4), range(4, 6)))).positions
    (range(0, 8),)
    """
    found = []
    for rank in ranks:
        row = 0
        for r in held[rank]:
            if len(r):
                found.append((r, rank, (row, row + len(r))))
            row += len(r)
    found.sort(key=lambda entry: (entry[0].start, entry[1]))
    runs: list[RowRun] = []
    row = 0
    for r, rank, rows in found:
        runs.append(RowRun(rank, rows, (row, row + len(r))))
        row += len(r)
    return GroupShard(tuple(runs), _join([r for r, _, _ in found]))


def _join(ranges: Iterable[range]) -> Ranges:
    """Join neighbouring ranges of step 1."""
    out: list[range] = []
    for r in ranges:
        if out and r.start == out[-1].stop and r.step == out[-1].step == 1:
            out[-1] = range(out[-1].start, r.stop)
        else:
            out.append(r)
    return tuple(out)


@dataclass(frozen=True)
class Grid:
    """The ranks of a problem as a grid of Ulysses groups (rows) and ring groups (columns).

    `inner` neighbouring ranks form a Ulysses group; if `transposed`, every `world / inner`-th rank does.
    """

    problem: Problem
    inner: int
    transposed: bool
    rounds: int

    @property
    def num_groups(self) -> int:
        """The number of Ulysses groups."""
        return self.problem.world // self.inner

    def rank(self, group: int, share: int) -> int:
        """Return the rank at a place of the grid."""
        return share * self.num_groups + group if self.transposed else group * self.inner + share

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return the group and the share of a rank."""
        if self.transposed:
            share, group = divmod(rank, self.num_groups)
        else:
            group, share = divmod(rank, self.inner)
        return group, share

    def ulysses_group(self, group: int) -> tuple[int, ...]:
        """Return the ranks of a Ulysses group, in the order of their shares."""
        return tuple(self.rank(group, share) for share in range(self.inner))

    def ring_group(self, share: int) -> tuple[int, ...]:
        """Return the ranks with the same share, in the order of their groups."""
        return tuple(self.rank(group, share) for group in range(self.num_groups))

    @cached_property
    def shares(self) -> tuple[tuple[HeadPiece, ...], ...]:
        """The heads of each share, in pieces."""
        return split_heads(self.problem.heads, self.problem.kv_heads, self.inner, self.rounds)

    @cached_property
    def repeats_kv_heads(self) -> bool:
        """Whether some key head goes to several ranks, so that the owner has to sum its gradients."""
        taken = [head for share in self.shares for piece in share for head in range(*piece.kv_heads)]
        return len(taken) != len(set(taken))


@lru_cache(maxsize=64)
def _group_shards(grid: Grid, group: int) -> tuple[GroupShard, GroupShard]:
    """Return the merged queries and the merged keys of a Ulysses group; cached for its ranks and for both passes."""
    problem, ranks = grid.problem, grid.ulysses_group(group)
    q = merge_shards(ranks, problem.q)
    return q, q if problem.k == problem.q else merge_shards(ranks, problem.k)


@lru_cache(maxsize=256)
def _ring_problem(grid: Grid, schedule: str, shape: tuple[int, int]) -> Problem:
    """Return the problem that a ring group solves for one piece of (query heads, key heads)."""
    problem = grid.problem
    q = _group_positions(grid, problem.q)
    k = q if problem.k == problem.q else _group_positions(grid, problem.k)
    return Problem(q, k, problem.mask, *shape, options=parse(schedule)[1])


def _group_positions(grid: Grid, held: tuple[Ranges, ...]) -> tuple[Ranges, ...]:
    """Return the positions of each group's merged shard; unlike `merge_shards`, without the runs of its ranks."""
    out = []
    for group in range(grid.num_groups):
        ranges = [r for rank in grid.ulysses_group(group) for r in held[rank] if len(r)]
        out.append(_join(sorted(ranges, key=attrgetter("start"))))
    return tuple(out)


on_change.append(_ring_problem.cache_clear)


def heads_for_sequence(
    schedule: str = "ring", inner: int = 0, *, transposed: bool = False, rounds: int = 1
) -> tuple[Builder, Builder]:
    """Return builders (forward, backward) of a hybrid: Ulysses within groups of ranks, a schedule across the groups.

    Args:
        schedule: The schedule that runs across the groups, with its options.
        inner: The number of ranks of a Ulysses group; 0 makes one group of all ranks.
        transposed: Make groups of ranks that are `world / inner` apart, so that the schedule runs among neighbours.
        rounds: The number of rounds that the exchange of a rank's heads is split into.

    >>> from meshflash.schedules.registry import build_program, register_schedule, unregister_schedule
    >>> from meshflash import Layout, Mask
    >>> register_schedule("pairs", *heads_for_sequence("zigzag", 2), layout=Layout.zigzag, saves_buffers=True)
    >>> build_program("pairs", Layout.zigzag(16, 4), Mask.causal(), rank=1, heads=2, kv_heads=2).saves
    ('out', 'q:0', 'kv:0', 'out:0')
    >>> unregister_schedule("pairs")
    """

    def forward(problem: Problem, rank: int, name: str) -> Program:
        return exchange_forward(_grid(problem, inner, transposed, rounds, name), schedule, rank, name)

    def backward(problem: Problem, rank: int, name: str) -> Program:
        return exchange_backward(_grid(problem, inner, transposed, rounds, name), schedule, rank, name)

    return forward, backward


@lru_cache(maxsize=256)
def _grid(problem: Problem, inner: int, transposed: bool, rounds: int, name: str) -> Grid:
    inner = inner or problem.world
    if problem.world % inner:
        raise ValueError(
            f"{name}: inner={inner} does not divide {problem.world} ranks into groups; give an inner that divides them"
        )
    return Grid(replace(problem, options=()), inner, transposed, rounds)


def exchange_forward(grid: Grid, schedule: str, rank: int, name: str) -> Program:
    """Build the forward of one rank: exchange q, k and v, run the schedule on our heads, exchange the results back.

    Rounds are pipelined: while round n - 1 computes, round n arrives and round n - 2 returns.

    Args:
        grid: The ranks as Ulysses groups and ring groups.
        schedule: The schedule that runs across the groups.
        rank: The rank that runs the program.
        name: The name of the program, for people.
    """
    e = _Exchange(grid, schedule, rank, name, "forward")
    w = e.w
    if grid.inner == 1:
        return e.without_exchange()
    for n in range(e.num_rounds + 1):
        if n < e.num_rounds:
            e.post_exchange(n, {"q": e.saved_buffer("q", n), "kv": e.saved_buffer("kv", n)})
        if n:
            saved = {kind: e.saved_buffer(kind, n - 1) for kind in ("q", "kv", "out")}
            e.run(n - 1, saved)
            e.post_return(n - 1, {"out": saved["out"]})
            e.collect(n - 2)
    e.collect(e.num_rounds - 1)
    return w.program(("out", *e.saved))


def exchange_backward(grid: Grid, schedule: str, rank: int, name: str) -> Program:
    """Build the backward of one rank: exchange dout, run the schedule's backward, exchange dq, dk and dv back.

    Args:
        grid: The ranks as Ulysses groups and ring groups.
        schedule: The schedule that runs across the groups.
        rank: The rank that runs the program.
        name: The name of the program, for people.
    """
    e = _Exchange(grid, schedule, rank, name, "backward")
    w = e.w
    if grid.inner == 1:
        return e.without_exchange()
    # Gradients of a repeated key head are summed by its owner, so they travel in the dtype of reductions.
    dtype: Dtype = "reduce" if grid.repeats_kv_heads else "input"
    for n in range(e.num_rounds + 1):
        if n < e.num_rounds:
            e.post_exchange(n, {"dout": e.scratch_buffer("dout", n)})
        if n:
            m = n - 1
            saved = {kind: e.saved_buffer(kind, m) for kind in ("q", "kv", "out")}
            made = {"dq": e.scratch_buffer("dq", m), "dkv": e.scratch_buffer("dkv", m, dtype)}
            e.run(m, {**saved, "dout": e.scratch_buffer("dout", m), **made})
            e.post_return(m, made)
            e.collect(m - 1)
    e.collect(e.num_rounds - 1)
    w.finalize()
    return w.program()


#: The fields of each step, and those that are slices.
_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in STEPS.values()}
_SLICES = {field.name for kind in STEPS.values() for field in fields(kind) if field.type == "Slice"}


class _Exchange:
    """One rank's side of the exchange in its Ulysses group. There is one round for each piece of the largest share."""

    def __init__(self, grid: Grid, schedule: str, rank: int, name: str, direction: Any) -> None:
        self.grid, self.schedule, self.rank = grid, schedule, rank
        self.w = Writer(name, direction, grid.problem, rank)
        self.w.groups += parse(schedule)[0].groups
        self.group, self.share = grid.coordinates(rank)
        self.members = grid.ulysses_group(self.group)
        self.shares = grid.shares
        self.mine = self.shares[self.share]
        self.num_rounds = max(map(len, self.shares))
        self.q, self.kv = _group_shards(grid, self.group)
        self.saved: list[str] = []
        #: Kinds whose rows travel without LSE or delta: none if the caller wants the LSE.
        self._without_lse = frozenset() if grid.problem.lse else LSE_KINDS
        #: For each round, the buffers that go back, by kind.
        self._returned: dict[int, dict[str, str]] = {}
        #: Where gradients of repeated key heads add up; None if every key head goes to one rank.
        self._dkv_sum: Slice | None = None
        #: Key heads that have a first share in `_dkv_sum`, so that the next one is added.
        self._initialized: set[int] = set()
        if direction == "backward" and grid.repeats_kv_heads and grid.inner > 1:
            self._dkv_sum = self.w.accumulator("dkv", partial=bool(self.w.k_rows))

    def without_exchange(self) -> Program:
        """Return the other schedule's program for all heads: a group of one rank exchanges nothing."""
        found, options = parse(self.schedule)
        problem = replace(self.grid.problem, options=options)
        builder = found.forward if self.w.direction == "forward" else found.backward
        return builder(problem, self.rank, self.w.name)

    def saved_buffer(self, kind: str, n: int) -> str:
        """Return the buffer of round n that the forward saves and the backward reads; "" if we have no piece."""
        if n >= len(self.mine):
            return ""
        name = f"{kind}:{n}"
        if name not in self.saved:
            self.saved.append(name)
            heads, kv_heads = self.mine[n].shape
            is_kv = kind == "kv"
            self.w.save_buffer(name, kind, (self.kv if is_kv else self.q).num_rows, kv_heads if is_kv else heads)
        return name

    def scratch_buffer(self, kind: str, n: int, dtype: Dtype = "input") -> str:
        """Return the scratch buffer of round n, a double buffer; "" if we have no piece in this round."""
        if n >= len(self.mine):
            return ""
        heads, kv_heads = self.mine[n].shape
        is_kv = kind == "dkv"
        num_heads = kv_heads if is_kv else heads
        name = f"{kind}{num_heads}.{n % 2}"
        self.w.scratch(name, kind, (self.kv if is_kv else self.q).num_rows, dtype, num_heads)
        return name

    def post_exchange(self, n: int, buffers: dict[str, str]) -> None:
        """Post the exchange of round n: send our rows of each member's heads, receive their rows of our heads."""
        sends: list[Part] = []
        recvs: list[Part] = []
        whole = self._whole(buffers)
        for share, member in enumerate(self.members):
            for kind in buffers:
                if n < len(self.shares[share]):
                    given = self._own(kind, self._heads(kind, self.shares[share][n]))
                    if member != self.rank:
                        sends += [Part(member, part) for part in given]
                    else:
                        self.w.append_each(Copy, zip(given, self._member_rows(kind, whole[kind], member), strict=True))
                if member != self.rank and kind in whole:
                    recvs += [Part(member, place) for place in self._member_rows(kind, whole[kind], member)]
        self.w.post(Post(f"in {n}", tuple(sends), tuple(recvs)))

    def run(self, n: int, names: dict[str, str]) -> None:
        """Write the other schedule's program for our piece of round n; `names` are the buffers it works on."""
        self.w.wait(f"in {n}")
        if n >= len(self.mine):
            return
        piece = self.mine[n]
        found, _ = parse(self.schedule)
        problem = _ring_problem(self.grid, self.schedule, piece.shape)
        builder = found.forward if self.w.direction == "forward" else found.backward
        program = builder(problem, self.group, found.name)
        if any(b.role == "saved" for b in program.buffers):
            raise ValueError(
                f"{self.w.name}: schedule {found.name!r} saves buffers and cannot be composed; choose another schedule"
            )
        if others := sorted(set(program.group) - set(self.w.groups)):
            raise ValueError(
                f"{self.w.name}: schedule {found.name!r} posts to groups of its own; register it with groups={others}"
            )
        if self._without_lse and "dout" in names and self.q.num_rows:
            self.w.steps.append(Delta(self.w.own(names["out"]), self.w.own(names["dout"])))
        embed(self.w, program, names, self.grid.ring_group(self.share), piece.heads[0], f"{n}")

    def post_return(self, n: int, made: dict[str, str]) -> None:
        """Post the way back of round n: send each member the results for its rows, receive those for ours."""
        sends: list[Part] = []
        recvs: list[Part] = []
        whole = self._whole(made)
        for share, member in enumerate(self.members):
            for kind in made:
                if member != self.rank and kind in whole:
                    sends += [Part(member, place) for place in self._member_rows(kind, whole[kind], member)]
                if n < len(self.shares[share]) and member != self.rank:
                    back = self._return_buffer(kind, share, n)
                    recvs += [Part(member, take_rows(back, *run.rows)) for run in self._shard(kind).of(self.rank)]
        self.w.post(Post(f"out {n}", tuple(sends), tuple(recvs)))
        self._returned[n] = made

    def collect(self, n: int) -> None:
        """Wait for the way back of round n, and store its rows; repeated key heads are summed."""
        if n < 0:
            return
        self.w.wait(f"out {n}")
        whole = self._whole(self._returned[n])
        for share, member in enumerate(self.members):
            if n >= len(self.shares[share]):
                continue
            piece = self.shares[share][n]
            for kind in self._returned[n]:
                if member == self.rank:
                    sources = self._member_rows(kind, whole[kind], member)
                    rows = [run.rows for run in self._shard(kind).of(member)]
                else:
                    back = self._return_buffer(kind, share, n)
                    sources, rows = [back], [back.rows]
                self._store(kind, list(zip(sources, rows, strict=True)), self._heads(kind, piece))

    def _store(self, kind: str, found: list[tuple[Slice, Interval]], heads: Interval) -> None:
        """Store (source, our rows) for these heads: copy to the output, or add to the sum of repeated key heads."""
        if kind != "dkv" or self._dkv_sum is None:
            own = [(source, self._travelling(kind, self.w.own(kind, rows, heads))) for source, rows in found]
            self.w.append_each(Copy, own)
            return
        for n, head in enumerate(range(*heads)):
            pairs = [
                (replace(source, heads=(n, n + 1)), replace(self._dkv_sum, rows=rows, heads=(head, head + 1)))
                for source, rows in found
            ]
            self.w.append_each(Add if head in self._initialized else Copy, pairs)
            self._initialized.add(head)

    def _shard(self, kind: str) -> GroupShard:
        return self.kv if kind in ("kv", "dkv") else self.q

    @staticmethod
    def _heads(kind: str, piece: HeadPiece) -> Interval:
        return piece.kv_heads if kind in ("kv", "dkv") else piece.heads

    def _travelling(self, kind: str, place: Slice) -> Slice:
        """Return a slice as it travels: without LSE or delta where the receiver does not need them."""
        return replace(place, without_lse=kind in self._without_lse)

    def _own(self, kind: str, heads: Interval) -> list[Slice]:
        """Return our rows of some heads, one slice for each run that stays together in the group's shard."""
        own = self._travelling(kind, self.w.own(kind))
        return [replace(own, rows=run.rows, heads=heads) for run in self._shard(kind).of(self.rank)]

    def _whole(self, buffers: dict[str, str]) -> dict[str, Slice]:
        """Return the buffers that hold the group's shard, by kind; none if we have no piece."""
        return {kind: self._travelling(kind, self.w.own(name)) for kind, name in buffers.items() if name}

    def _member_rows(self, kind: str, whole: Slice, rank: int) -> list[Slice]:
        """Return the rows of one member in a buffer that holds the group's shard."""
        return [take_rows(whole, *run.group_rows) for run in self._shard(kind).of(rank)]

    def _return_buffer(self, kind: str, share: int, n: int) -> Slice:
        """Return the buffer in which results of one member for our rows arrive."""
        piece = self.shares[share][n]
        heads = self._heads(kind, piece)
        rows = self.w.k_rows if kind == "dkv" else self.w.q_rows
        dtype: Dtype = "reduce" if kind == "dkv" and self._dkv_sum is not None else "input"
        buffer = self.w.scratch(f"{kind} of {share}.{n}", kind, rows, dtype, heads[1] - heads[0])
        return self._travelling(kind, buffer)


def embed(
    w: Writer, program: Program, names: dict[str, str], ranks: tuple[int, ...], first_head: int, tag: str
) -> None:
    """Append the steps of another program, with its buffers, ranks, heads and posts renamed.

    Scratch buffers of the same name and head count are shared by all programs that are embedded this way.

    Args:
        w: The writer to append to.
        program: The program to embed.
        names: Our buffer for each of the program's caller's buffers.
        ranks: Our rank for each of the program's ranks.
        first_head: Our query head that is the program's head 0.
        tag: A prefix that makes the names of posts unique.
    """
    buffers = dict(names)
    for b in program.buffers:
        if b.role == "scratch":
            buffers[b.name] = f"{b.name} {b.heads}"
            w.scratch(buffers[b.name], b.kind, b.rows, b.dtype, b.heads)

    @cache
    def renamed(place: Slice) -> Slice:
        return replace(place, buffer=buffers[place.buffer])

    def sent(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(Part(ranks[part.peer], renamed(part.slice)) for part in parts)

    def tagged(post: str) -> str:
        return f"{tag}: {post}"

    translate: dict[str, Callable[[Any], Any]] = {
        **dict.fromkeys(_SLICES, renamed),
        "heads": lambda heads: (heads[0] + first_head, heads[1] + first_head),
        "sends": sent,
        "recvs": sent,
        "name": tagged,
        "post": tagged,
        "collective": lambda _: "",  # the group has all ranks, but only this ring group makes the post
    }
    for step in program.steps:
        kind: Any = type(step)
        values = ((name, getattr(step, name)) for name in _FIELDS[kind])
        w.steps.append(kind(*[translate[name](value) if name in translate else value for name, value in values]))
