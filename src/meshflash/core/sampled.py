"""Sampled verification: programs of a few ranks of a large world, with all other ranks as an unknown outside.

`verify_programs` needs the program of every rank, which is too much for thousands of ranks. `verify_sampled` looks at
sampled ranks, each together with some of its partners (the ranks that it exchanges messages with). It runs them as
`verify_programs` does. What differs is a message from a rank that is not looked at: its rows have unknown symbols, and
its sums are leaves of unknown content. A step that names the positions of such rows binds their symbols. So a symbol
is claimed by the first rank that uses it, and every other rank that is looked at must agree.

What is proved for each rank that is looked at, whatever the other ranks do:

- Memory: no buffer is read before it is written, touched while it moves, or written when it may be the caller's.
- Messages between two ranks that are looked at match in order, shape, kind, dtype and content, and do not deadlock as
  long as all other ranks answer.
- Pairs: the steps compute each visible pair of every query that they touch exactly once, and each output row takes its
  result and its dQ from one rank. In schedules that move queries, the same holds for each visible pair of every key.
  Results that no outside rank contributes to are exact.
- Conservation: every sum that a rank computes or receives leaves it exactly once, in a message or an output, and with
  the symbol that it came with. Nothing is lost and nothing is counted twice.
- Placement: every output row holds sums of its own token only. Results and gradients that travel in the input's dtype
  are complete, because nothing can be added to them later.

If all of this holds for every rank, with every partner, and nothing deadlocks, the whole world is right: by induction
over the order in which messages arrive, all unknown symbols are what their first user claims. A query is complete on
each rank that touches it, and its output takes from one rank only, so by conservation no other rank touches it, and
each pair is computed once. Its contribution travels from rank to rank without loss or copy until it enters an output,
which is the one of its own token. (Where queries move, it must be given that no two ranks attend to the same key with
the same head, as when each attends to its own keys.) A sample does not prove that: ranks that are not looked at may be
wrong, and a cycle of waiting ranks may be longer than the ranks that are looked at. `schedules.registry.verified`
therefore also proves the same schedule completely on the first ranks of the same layout.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshflash.core.contents import SUM_KINDS, ZERO, Content, Saved, VerificationError
from meshflash.core.coverage import Bools, Ints, Visibility, expand, index
from meshflash.core.delivery import check_groups, run
from meshflash.core.problem import Problem
from meshflash.core.program import SAVES, Attend, AttendGrad, Direction, Part, Post, Program, Sizes, Wait, slices
from meshflash.core.sums import COMPLETE, Leaf, SymbolTable
from meshflash.core.symbols import Posted, Rank
from meshflash.core.verify import Report

#: Up to this many ranks, programs are verified completely; beyond, by sampled ranks.
MAX_COMPLETE = 64
#: The most (query, key) pairs of one rank that are compared with the mask's definition one by one, in each pass.
MAX_PAIRS = 1 << 24
#: The most pairs of one step whose tile tables are compared with the mask's definition.
MAX_TABLE_PAIRS = 1 << 20
#: About the most steps of one program whose tile tables are compared; a ring has as many steps as ranks.
MAX_TABLES = 256

Build = Callable[[int, Direction], Program]
PASSES: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True)
class Sampling:
    """What a sampled verification looked at. `verify_sampled` makes it."""

    world: int
    #: The sampled ranks.
    ranks: tuple[int, ...]
    #: The partners that were looked at together with them.
    partners: tuple[int, ...]
    #: Whether every partner of every sampled rank was looked at.
    all_partners: bool
    #: How many of the looked-at ranks have programs that differ by more than a shift of ranks and positions.
    num_classes: int
    #: Messages between two looked-at ranks, and messages whose other side was not looked at.
    matched_messages: int
    outside_messages: int
    #: Query rows that were compared with the mask's definition pair by pair, of all that the ranks attend with.
    checked_rows: int
    all_rows: int
    #: Steps whose tile tables were compared with the mask, of all attend steps.
    checked_tables: int
    all_tables: int

    def summary(self) -> tuple[str, str]:
        """Return what was proved, and what was sampled."""
        looked_at = len({*self.ranks, *self.partners})
        proved = (
            f"{len(self.ranks)} ranks and {len(self.partners)} of their partners compute their pairs once, pass every "
            f"sum on once, touch no buffer in flight, and agree on {self.matched_messages:,} messages between them"
        )
        sampled = (
            f"{looked_at} of {self.world:,} ranks ({self.num_classes} classes up to a shift), "
            f"{'all' if self.all_partners else 'some'} partners of each, "
            f"{self.outside_messages:,} messages checked on one side, "
            f"{self.checked_rows:,} of {self.all_rows:,} query rows pair by pair, "
            f"tile tables of {self.checked_tables:,} of {self.all_tables:,} steps; "
            "no proof for other ranks, or that more ranks do not deadlock"
        )
        return proved, sampled


def sample_ranks(world: int, count: int = 4, seed: int = 0) -> tuple[int, ...]:
    """Return ranks to look at: the first, the last, the middle one, and random ones.

    Args:
        world: The number of ranks.
        count: The number of ranks to return; fewer if the world is smaller.
        seed: The seed of the random ones.

    >>> sample_ranks(4096, 3)
    (0, 2048, 4095)
    """
    chosen = dict.fromkeys((0, world - 1, world // 2))
    others = [rank for rank in range(world) if rank not in chosen]
    random.Random(seed).shuffle(others)
    return tuple(sorted([*chosen, *others][:count]))


def partners(programs: Sequence[Program]) -> tuple[int, ...]:
    """Return the other ranks that programs of one rank exchange messages with, in the order of their first message.

    Args:
        programs: Programs of one rank.
    """
    peers = dict.fromkeys(
        part.peer
        for program in programs
        for step in program.steps
        if isinstance(step, Post)
        for part in (*step.sends, *step.recvs)
    )
    return tuple(peer for peer in peers if peer != programs[0].rank)


def verify_sampled(
    build: Build,
    problem: Problem,
    ranks: Sequence[int],
    *,
    sizes: Sizes | None = None,
    tables: bool = True,
    num_partners: int = 4,
    seed: int = 0,
    listen: Callable[[str], None] = lambda text: None,
) -> tuple[dict[Direction, Report], Sampling]:
    """Verify both passes of some ranks of a large world; raise VerificationError with the rank and step that is wrong.

    The top of this module says what that proves. The reports have one entry for each rank of `ranks`.

    Args:
        build: A function that builds the program of a rank in a direction.
        problem: The positions that every rank holds, and the mask.
        ranks: The ranks to look at.
        sizes: The sizes that turn rows into the bytes of the reports.
        tables: Whether to check the tile tables of small steps against the mask as well.
        num_partners: The most partners of each rank to look at; the nearest in order of messages, and random ones.
        seed: The seed of random partners and rows.
        listen: A function that is told what is being looked at.

    >>> from meshflash.core.layout import Layout
    >>> from meshflash.core.mask import Mask
    >>> from meshflash.schedules import registry
    >>> layout = Layout.contiguous(160, 80)
    >>> problem = Problem(layout.ranges, layout.ranges, Mask.causal())
    >>> build = lambda rank, direction: registry.build("ring", problem, rank, direction)
    >>> reports, sampling = verify_sampled(build, problem, [0, 40])
    >>> sampling.partners, sampling.all_partners
    ((1, 39, 41, 79), True)
    """
    sizes = sizes or Sizes()
    if not ranks or not all(0 <= rank < problem.world for rank in ranks):
        raise VerificationError(f"ranks={list(ranks)}: expected ranks from 0 to {problem.world - 1}")
    try:
        visibility = Visibility(problem)
    except ValueError as error:
        raise VerificationError(str(error)) from error
    rng = random.Random(seed)
    runs = [
        _Look(build, problem, visibility, rank, tables, num_partners, random.Random(rng.random()), listen)
        for rank in dict.fromkeys(ranks)
    ]
    for look in runs:
        look.run()
    for direction in PASSES:
        if not set.intersection(*(look.sides[direction] for look in runs)):
            found = ", ".join(f"rank {look.rank}: {' '.join(look.sides[direction])}" for look in runs)
            raise VerificationError(f"{direction}: some ranks complete their queries, others their keys ({found})")
    sampling = _sampling(problem, runs)
    proved, sampled = sampling.summary()
    reports: dict[Direction, Report] = {}
    for direction in PASSES:
        own = [look.programs[direction][look.rank] for look in runs]
        reports[direction] = Report(
            tuple(program.received(sizes) for program in own),
            tuple(program.scratch_bytes(sizes) for program in own),
            tuple(program.saved_bytes(sizes) for program in own),
            ranks=tuple(look.rank for look in runs),
            proved=proved,
            sampled=sampled,
        )
    return reports, sampling


def _sampling(problem: Problem, runs: list[_Look]) -> Sampling:
    """Add up what all looks have seen."""
    sampled = {look.rank for look in runs}
    near = {rank for look in runs for rank in look.numbers if rank not in sampled}
    forms = {rank: look.form(rank) for look in runs for rank in look.numbers}
    return Sampling(
        problem.world,
        tuple(sorted(sampled)),
        tuple(sorted(near)),
        all(look.all_partners for look in runs),
        len(set(forms.values())),
        sum(look.matched for look in runs),
        sum(look.outside for look in runs),
        sum(look.checked_rows for look in runs),
        sum(look.all_rows for look in runs),
        sum(look.checked_tables for look in runs),
        sum(look.all_tables for look in runs),
    )


class _SampledRank(Rank):
    """A rank whose tile tables are checked only for some steps, evenly spaced, and only for small ones."""

    checked_tables = all_tables = 0

    def _check_tables(self, step: Attend | AttendGrad) -> None:
        small = self.visibility.batch * step.q.shape[0] * step.kv.shape[0] <= MAX_TABLE_PAIRS
        if self.tables and small and self.all_tables % self.table_stride == 0:
            self.checked_tables += 1
            super()._check_tables(step)
        self.all_tables += 1

    @cached_property
    def table_stride(self) -> int:
        """Every how many attend steps the tables of one are checked."""
        steps = sum(isinstance(step, Attend | AttendGrad) for step in self.program.steps)
        return -(-steps // MAX_TABLES) or 1


class _Look:
    """One sampled rank with some of its partners, in both passes; all other ranks are outside."""

    def __init__(
        self,
        build: Build,
        problem: Problem,
        visibility: Visibility,
        rank: int,
        tables: bool,
        num_partners: int,
        rng: random.Random,
        listen: Callable[[str], None],
    ) -> None:
        self.build, self.problem, self.visibility, self.rank = build, problem, visibility, rank
        self.tables, self.rng, self.listen = tables, rng, listen
        self.programs: dict[Direction, dict[int, Program]] = {"forward": {}, "backward": {}}
        #: For each direction, whether all ranks compute all pairs of their queries, of their keys, or both.
        self.sides: dict[Direction, set[str]] = {}
        self.matched = self.outside = 0
        self.checked_rows = self.all_rows = self.checked_tables = self.all_tables = 0
        self._build(rank)
        peers = partners([built[rank] for built in self.programs.values()])
        near, far = peers[: (num_partners + 1) // 2], list(peers[(num_partners + 1) // 2 :])
        rng.shuffle(far)
        chosen = [*near, *far[: num_partners - len(near)]]
        self.all_partners = len(chosen) == len(peers)
        self.numbers = (rank, *chosen)
        for partner in chosen:
            self._build(partner)

    def _build(self, rank: int) -> None:
        self.listen(f"build rank {rank}")
        for direction, built in self.programs.items():
            built[rank] = self.build(rank, direction)
            if (built[rank].rank, built[rank].direction) != (rank, direction):
                raise VerificationError(f"{direction} of rank {rank}: its builder returns another rank or direction")

    def run(self) -> None:
        """Verify the forward, and the backward after it."""
        table = SymbolTable(self.problem.mask)
        saved: dict[int, Mapping[str, Saved | None]] = {number: dict.fromkeys(SAVES) for number in self.numbers}
        for direction, programs in self.programs.items():
            self.listen(f"verify {direction} of rank {self.rank}")
            first = len(table.nodes)
            ranks = {
                number: _SampledRank(program, self.problem, self.visibility, self.tables, saved[number], table)
                for number, program in programs.items()
            }
            check_groups(ranks)
            outside = _Outside(table)
            run(ranks, outside)
            for rank in ranks.values():
                rank.check_end()
                for buffer in rank.program.buffers:
                    if buffer.role == "output":
                        content = rank.buffers[buffer.name]
                        assert content.sums is not None
                        outside.flow(content.cells, content.sums)
            self._check_conserved(ranks, table, first, outside)
            self.sides[direction] = self._check_sides(ranks)
            if "keys" not in self.sides[direction]:
                self._check_sources(ranks, table)
            saved = {number: rank.saved() for number, rank in ranks.items()}
            self._count(ranks, outside)

    def form(self, rank: int) -> int:
        """Return a hash of both programs of a rank that a shift of ranks and positions does not change."""
        return hash(tuple(_form(built[rank], self.problem) for built in self.programs.values()))

    def _count(self, ranks: Mapping[int, _SampledRank], outside: _Outside) -> None:
        self.outside += outside.num_messages
        for rank in ranks.values():
            posts = [step for step in rank.program.steps if isinstance(step, Post)]
            self.matched += sum(part.peer in ranks for post in posts for part in post.recvs)
            self.checked_tables += rank.checked_tables
            self.all_tables += rank.all_tables

    def _check_conserved(self, ranks: Mapping[int, Rank], table: SymbolTable, first: int, outside: _Outside) -> None:
        """Check that each sum that was computed or received in this pass left the ranks exactly once."""
        for number in range(first, len(table.nodes)):
            leaf = table.nodes[number]
            if not isinstance(leaf, Leaf):
                continue
            rank = ranks[leaf.rank]
            made = np.sort(table.resolve(leaf.cells).ravel())
            left = np.sort(np.concatenate([made[:0], *(table.resolve(cells) for cells in outside.left[number])]))
            if np.array_equal(made, left):
                continue
            cells, times = np.unique(left, return_counts=True)
            if (times > 1).any() or not np.isin(cells, made).all():
                self._fail(rank, leaf, f"{int((times > 1).sum())} rows of {leaf.kind} are passed on more than once")
            lost = made[~np.isin(made, cells)]
            # Rows that see nothing of the other side add nothing, so nothing is lost with them.
            if leaf.positions is None or self._sees(leaf, lost).any():
                self._fail(rank, leaf, f"{len(lost)} rows of {leaf.kind} reach neither a message nor an output")

    def _sees(self, leaf: Leaf, cells: Ints) -> Bools:
        """Return which cells of a leaf have a visible pair in it."""
        assert leaf.positions is not None
        if leaf.kind == "dkv":
            found = self.visibility.pairs(expand(leaf.positions), cells // self.problem.kv_heads)
            return np.asarray(found.any((0, 1)))
        return np.asarray(self.visibility.pairs(cells // self.problem.heads, expand(leaf.positions)).any((0, 2)))

    @staticmethod
    def _fail(rank: Rank, leaf: Leaf, message: str) -> None:
        raise VerificationError(f"{rank.program.direction} of rank {rank.number}, {leaf.source}: {message}")

    def _check_sources(self, ranks: Mapping[int, Rank], table: SymbolTable) -> None:
        """Check that each row of out and dq takes its sum from one rank, as each query is complete on one rank."""
        for rank in ranks.values():
            for buffer in rank.program.buffers:
                if buffer.role != "output" or buffer.kind == "dkv":
                    continue
                sums = rank.buffers[buffer.name].sums
                assert sums is not None
                for number in np.unique(sums).tolist():
                    found = table.leaves(number)
                    leaves = [node for node in map(table.nodes.__getitem__, found) if isinstance(node, Leaf)]
                    computed = {leaf.rank for leaf in leaves if leaf.positions is not None}
                    if len(computed) + sum(leaf.positions is None for leaf in leaves) + (COMPLETE in found) > 1:
                        raise VerificationError(
                            f"{rank.program.direction} of rank {rank.number}: output {buffer.name} takes sums of "
                            "several ranks, and each of these ranks computes all pairs of its queries"
                        )

    def _check_sides(self, ranks: Mapping[int, Rank]) -> set[str]:
        """Check that each rank computes all visible pairs of the queries that it touches, or of the keys, once.

        Return for which of the two this holds. All ranks must do it for the same side, or a pair might be computed for
        its query and again for its key.
        """
        wrong: dict[str, list[str]] = {"queries": [], "keys": []}
        for rank in ranks.values():
            for side, found in wrong.items():
                missing, repeated = self._wrong_pairs(rank, side)
                if missing or repeated:
                    found.append(
                        f"{rank.program.direction} of rank {rank.number}: of the {side} that its steps attend, "
                        f"{missing} pairs are missing and {repeated} are repeated"
                    )
        if wrong["queries"] and wrong["keys"]:
            raise VerificationError(f"{wrong['queries'][0]}; {wrong['keys'][0]}")
        return {side for side, found in wrong.items() if not found}

    def _wrong_pairs(self, rank: Rank, side: str) -> tuple[int, int]:
        """Return how many visible pairs of the touched queries (or keys) are missing, and how many are repeated."""
        steps = [step for step in rank.program.steps if isinstance(step, Attend | AttendGrad)]
        of_keys = side == "keys"
        tokens = self.visibility.q_tokens if of_keys else self.visibility.k_tokens
        missing = repeated = 0
        for heads in dict.fromkeys(step.heads for step in steps):
            alike = [step for step in steps if step.heads[0] <= heads[0] < step.heads[1]]
            sides = [(step.q_positions, step.k_positions)[:: -1 if of_keys else 1] for step in alike]
            touched = np.unique(np.concatenate([expand(own) for own in dict.fromkeys(own for own, _ in sides)]))
            rows = self._sample_rows(touched, tokens)
            if not of_keys:
                self.checked_rows += len(rows)
                self.all_rows += len(touched)
            counts = np.zeros((len(rows), tokens), np.int16)
            for own, other in sides:
                mine = np.flatnonzero(np.isin(rows, expand(own)))
                for r in other if len(mine) else ():
                    counts[mine, index(r)] += 1
            shown = self.visibility.of_keys(rows) if of_keys else self.visibility.of_queries(rows)
            missing += int((shown & (counts == 0)).sum())
            repeated += int((shown & (counts > 1)).sum())
        return missing, repeated

    def _sample_rows(self, touched: Ints, tokens: int) -> Ints:
        """Return all rows, or if they have too many pairs the first, the last and random ones."""
        limit = max(2, MAX_PAIRS // max(1, tokens * self.visibility.batch))
        if len(touched) <= limit:
            return touched
        inner = self.rng.sample(range(1, len(touched) - 1), limit - 2)
        return touched[[0, *sorted(inner), -1]]


class _Outside:
    """All ranks that are not looked at: always ready, and with messages of unknown content."""

    def __init__(self, table: SymbolTable) -> None:
        self.table = table
        self.num_messages = 0
        #: leaf -> the symbols of its cells that left the ranks that are looked at
        self.left: dict[int, list[Ints]] = defaultdict(list)

    def receive(self, post: Posted, part: Part) -> Content:
        """Return rows of unknown tokens. Results in the input's dtype are complete: their sender checks that."""
        self.num_messages += 1
        rank, shape = post.rank, part.slice.shape
        buffer = rank.program.buffer[part.slice.buffer]
        cells = self.table.unknown(shape)
        finished = buffer.kind == "out" and buffer.dtype == "input"
        sums = None
        if buffer.kind in SUM_KINDS:
            source = f"post {post.step.name} from rank {part.peer}"
            leaf = COMPLETE if finished else self.table.leaf(Leaf(rank.number, source, cells, buffer.kind))
            sums = np.full(shape, leaf)
        return Content(cells, sums, np.full(shape, finished), np.full(shape, part.slice.without_lse))

    def send(self, post: Posted, part: Part, content: Content) -> None:
        """Check that rows which travel in the input's dtype are complete, and note the sums that leave."""
        self.num_messages += 1
        rank = post.rank
        buffer = rank.program.buffer[part.slice.buffer]
        if content.sums is None:
            return
        if buffer.kind == "out" and (content.finished != (buffer.dtype == "input")).any():
            self._fail(post, part, "a finished result travels in the input's dtype, a partial one does not")
        cells = self.table.resolve(content.cells)
        if buffer.dtype == "input" and any(rank.wrong_pairs(buffer.kind, cells, content.sums)):
            self._fail(post, part, "rows that travel in the input's dtype must hold all of their pairs, each once")
        self.flow(content.cells, content.sums)

    def flow(self, cells: Ints, sums: Ints) -> None:
        """Note the sums that leave the ranks that are looked at."""
        for number in np.unique(sums).tolist():
            taken = cells[(sums == number) & (cells != ZERO)]
            for leaf, times in self.table.leaves(number).items():
                self.left[leaf] += [taken] * times

    @staticmethod
    def _fail(post: Posted, part: Part, message: str) -> None:
        program = post.rank.program
        raise VerificationError(
            f"{program.direction} of rank {program.rank}, post {post.step.name}, "
            f"{part.slice} to rank {part.peer}: {message}"
        )


def _form(program: Program, problem: Problem) -> int:
    """Return a hash of a program that a shift of ranks and positions does not change."""
    rank, world = program.rank, program.world
    origin = [next((r.start for r in side[rank] if len(r)), 0) for side in (problem.q, problem.k)]
    tokens = max(1, sum(problem.k_lengths))
    posts = {step.name: n for n, step in enumerate(program.steps) if isinstance(step, Post)}

    def shifted(positions: Sequence[range], by: int) -> Iterator[tuple[int, int, int]]:
        return (((r.start - by) % tokens, len(r), r.step) for r in positions)

    def items() -> Iterator[object]:
        yield from program.buffers
        for step in program.steps:
            yield type(step).__name__
            if isinstance(step, Wait):
                yield posts[step.post]
                continue
            if isinstance(step, Post):
                yield step.group, step.collective
                yield from ((part.peer - rank) % world for part in (*step.sends, *step.recvs))
            elif isinstance(step, Attend | AttendGrad):
                yield step.heads
                yield from shifted(step.q_positions, origin[0])
                yield from shifted(step.k_positions, origin[1])
            yield from (place for place, _ in slices(step))

    return hash(tuple(items()))
