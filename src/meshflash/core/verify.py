"""Proves programs right without a device: it runs all ranks at once on symbols instead of numbers.

What a buffer holds is known by (position, head) for each of its cells, and for sums by how often each
pair went in. At the end every pair that `Mask.visible` shows must have been counted once, and every
gradient be home. Posts are taken to complete in order within a group, as they do on the strictest
backends: what passes here deadlocks on none.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np

from meshflash.core.coverage import Bools, Counts, Ints, Truth, distinct, expand, table_pairs
from meshflash.core.problem import Problem
from meshflash.core.program import (
    KEY_KINDS,
    KINDS,
    Add,
    Attend,
    AttendGrad,
    Clear,
    Copy,
    Finish,
    Part,
    Post,
    Program,
    Sizes,
    Slice,
    Step,
    Wait,
    slices,
)

#: What a cell holds besides (position, head): nothing yet, and a zero of nobody's.
UNDEFINED, ZERO = -1, -2


class VerificationError(ValueError):
    """What is wrong with a program, with its rank and step."""


@dataclass(frozen=True)
class Report:
    """What is known of programs that are right: bytes that each rank receives from each, and its scratch."""

    received: tuple[dict[int, int], ...]
    scratch_bytes: tuple[int, ...]

    @property
    def received_bytes(self) -> tuple[int, ...]:
        """What each rank receives from all others together."""
        return tuple(sum(row.values()) for row in self.received)


def verify_programs(
    programs: Sequence[Program], problem: Problem, sizes: Sizes | None = None, tables: bool = True
) -> Report:
    """Raise VerificationError unless these programs, one of each rank, solve the problem together.

    Every visible (batch row, head, query, key) is computed once; every output and gradient is complete
    and home; nothing deadlocks; no buffer is read before it is written or touched while it moves. With
    `tables`, the tables that kernels walk are held against the mask as well, for the rows of each step.

    >>> from meshflash.core.layout import Layout
    >>> from meshflash.core.mask import Mask
    >>> from meshflash.schedules.registry import build
    >>> layout = Layout.zigzag(16, 2)
    >>> problem = Problem(layout.ranges, layout.ranges, Mask.causal())
    >>> programs = [build("zigzag", problem, rank, "forward") for rank in range(2)]
    >>> verify_programs(programs, problem).received
    ({1: 2048}, {0: 1024})
    """
    sizes = sizes or Sizes()
    if [program.rank for program in programs] != list(range(problem.world)):
        raise VerificationError(f"expected one program for each of {problem.world} ranks, in their order")
    if len({program.direction for program in programs}) != 1:
        raise VerificationError("some programs are forward and some backward")
    try:
        truth = Truth(problem)
    except ValueError as error:
        raise VerificationError(str(error)) from error
    ranks = [_Rank(program, problem, truth, tables) for program in programs]
    _check_groups(ranks)
    _run(ranks)
    for rank in ranks:
        rank.check_end()
    return Report(
        tuple(program.received(sizes) for program in programs),
        tuple(program.scratch_bytes(sizes) for program in programs),
    )


@dataclass(eq=False)
class _Content:
    """What some cells hold: [rows, heads] of (position, head), and [batch, rows, heads, ...] of counts.

    Counts are of keys for each query and head, and for gradients of keys of (query head in its group,
    query); other kinds have none. A result is `finished` once sink logits are in it.
    """

    cells: Ints
    counts: Counts | None
    finished: Bools

    def at(self, place: Slice) -> _Content:
        """Some of these cells: the same memory."""
        index = place.index
        counts = None if self.counts is None else self.counts[(slice(None), *index)]
        return _Content(self.cells[index], counts, self.finished[index])

    def copy(self) -> _Content:
        """The same in memory of its own."""
        return _Content(self.cells.copy(), None if self.counts is None else self.counts.copy(), self.finished.copy())

    def put(self, new: _Content) -> None:
        """Overwrite."""
        self.cells[:], self.finished[:] = new.cells, new.finished
        if self.counts is not None:
            assert new.counts is not None
            self.counts[:] = new.counts

    def clear(self) -> None:
        """Hold nobody's zero."""
        self.cells[:], self.finished[:] = ZERO, False
        if self.counts is not None:
            self.counts[:] = 0


@dataclass(eq=False)
class _Posted:
    """A post on its way: what it sends, and for each part the post that it met."""

    rank: _Rank
    step: Post
    contents: list[_Content]
    met: list[_Posted] = field(default_factory=list)
    arrived: dict[int, _Content] = field(default_factory=dict)
    complete: bool = False
    waited: bool = False


class _Rank:
    """One rank: its program, how far it is, and what its buffers hold."""

    def __init__(self, program: Program, problem: Problem, truth: Truth, tables: bool) -> None:
        self.program, self.problem, self.truth, self.tables = program, problem, truth, tables
        self.number = program.rank
        self.at = len(program.steps)  # nowhere yet
        self.group = problem.heads // problem.kv_heads
        self.posts: dict[str, _Posted] = {}
        #: by memory: what moves, which post moves it, and whether it is sent
        self.in_flight: dict[str, list[tuple[Slice, str, bool]]] = defaultdict(list)
        self._check_program()
        #: scratch that becomes an output may be its memory; the cells that have become it are done
        self.memory = {b.name: b.becomes or b.name for b in program.buffers}
        self.source = {b.becomes: b.name for b in program.buffers if b.becomes}
        self.done = {b.name: np.zeros((b.rows, b.heads), np.bool_) for b in program.buffers if b.becomes}
        self.buffers = {b.name: self._new(b.kind, b.rows, b.heads) for b in program.buffers}
        for buffer in program.buffers:
            if buffer.role == "input":
                self.buffers[buffer.name].cells[:] = self._expected(buffer.kind)
        self.at = 0

    def fail(self, message: str) -> NoReturn:
        """Say where and what."""
        place = ""
        if self.at < len(self.program.steps):
            place = f", step {self.at} ({self.program.steps[self.at]})"
        raise VerificationError(f"{self.program.direction} of rank {self.number}{place}: {message}")

    @property
    def step(self) -> Step | None:
        """The step that comes next."""
        return self.program.steps[self.at] if self.at < len(self.program.steps) else None

    def blocked(self) -> bool:
        """Whether there is no next step, or it waits for what has not come yet."""
        step = self.step
        if not isinstance(step, Wait):
            return step is None
        post = self.posts.get(step.post)
        if post is None or post.waited:
            self.fail("there is nothing to wait for")
        return not post.complete

    def take(self) -> Step:
        """Do the next step; of a wait, take what has arrived."""
        step = self.step
        assert step is not None
        self._check_access(step)
        match step:
            case Attend():
                self._attend(step)
            case AttendGrad():
                self._attend_grad(step)
            case Post():
                self._post(step)
            case Wait():
                self._wait(step)
            case Copy():
                self._copy(step)
            case Add():
                self._add(step)
            case Clear():
                self._at(step.dst).clear()
            case Finish():
                self._finish(step)
            case _:
                self.fail("this is no step")
        self.at += 1
        return step

    def check_end(self) -> None:
        """Everything was waited for, and the outputs are what they must be."""
        for name, post in self.posts.items():
            if not post.waited:
                self.fail(f"post {name} is never waited for")
        for buffer in self.program.buffers:
            if buffer.role != "output":
                continue
            content = self.buffers[buffer.name]
            known = (content.cells == self._expected(buffer.kind)) | (content.cells == ZERO)
            if not known.all():
                self.fail(f"output {buffer.name}: {int((~known).sum())} cells are not the rows they should be")
            if buffer.kind == "out" and not content.finished.all():
                self.fail("output out is not the finished result")
            assert content.counts is not None
            difference = content.counts - self._wanted(buffer.kind)
            if difference.any():
                missing, extra = int((difference < 0).sum()), int((difference > 0).sum())
                self.fail(f"output {buffer.name}: {missing} pairs are missing, {extra} are repeated or not visible")

    def _check_program(self) -> None:
        program, problem = self.program, self.problem
        if program.world != problem.world:
            self.fail(f"is written for {program.world} ranks, the problem has {problem.world}")
        for name, members in program.groups:
            if self.number not in members or list(members) != sorted(set(members)):
                self.fail(f"group {name} does not hold this rank, or not its ranks once and in order")
        if len(program.group) != len(program.groups):
            self.fail("two groups have the same name")
        if len(program.buffer) != len(program.buffers):
            self.fail("two buffers have the same name")
        forward = {"q": "input", "kv": "input", "out": "output"}
        backward = {"q": "input", "kv": "input", "rows": "input", "dq": "output", "dkv": "output"}
        wanted = forward if program.direction == "forward" else backward
        found = {b.name: b.role for b in program.buffers if b.role != "scratch"}
        if found != wanted:
            self.fail(f"the caller's buffers are {found}, expected {wanted}")
        saved = sorted(forward) if program.direction == "forward" else []
        if sorted(program.saves) != sorted(saved):
            self.fail(f"saves {program.saves}, expected {saved}")
        for b in program.buffers:
            if b.kind not in KINDS or b.rows < 0 or b.heads < 1:
                self.fail(f"{b.name} is of no known kind, or of no size")
            lengths = problem.k_lengths if b.kind in KEY_KINDS else problem.q_lengths
            heads = problem.kv_heads if b.kind in KEY_KINDS else problem.heads
            own = (b.kind, lengths[self.number], heads, "input", "")
            if b.role != "scratch" and (b.name, b.rows, b.heads, b.dtype, b.becomes) != own:
                self.fail(f"the caller's buffer {b.name} does not have the shape and dtype of the problem")
            if b.becomes:
                target = program.buffer.get(b.becomes)
                if target is None or (target.role, target.kind) != ("output", b.kind) or b.dtype == "reduce":
                    self.fail(f"{b.name} cannot become {b.becomes}")
                if (target.rows, target.heads) != (b.rows, b.heads):
                    self.fail(f"{b.name} becomes {b.becomes} and has another shape")
                if sum(other.becomes == b.becomes for other in program.buffers) > 1:
                    self.fail(f"two buffers become {b.becomes}")

    def _expected(self, kind: str) -> Ints:
        """(position, head) of a caller's cells."""
        keys = kind in KEY_KINDS
        ranges = (self.problem.k if keys else self.problem.q)[self.number]
        heads = self.problem.kv_heads if keys else self.problem.heads
        return expand(ranges)[:, None] * heads + np.arange(heads)

    def _wanted(self, kind: str) -> Counts:
        """How often each pair must be counted: what the mask shows, once."""
        if kind in KEY_KINDS:
            shown = self.truth.visible[:, :, expand(self.problem.k[self.number])]
            return shown.transpose(0, 2, 1)[:, :, None, None, :]
        return self.truth.visible[:, expand(self.problem.q[self.number])][:, :, None, :]

    def _new(self, kind: str, rows: int, heads: int) -> _Content:
        counts: Counts | None = None
        if kind in ("out", "dq"):
            counts = np.zeros((self.truth.batch, rows, heads, self.truth.k_tokens), np.int16)
        elif kind == "dkv":
            counts = np.zeros((self.truth.batch, rows, heads, self.group, self.truth.q_tokens), np.int16)
        return _Content(np.full((rows, heads), UNDEFINED), counts, np.zeros((rows, heads), np.bool_))

    def _at(self, place: Slice) -> _Content:
        return self.buffers[place.buffer].at(place)

    def _read(self, place: Slice) -> _Content:
        content = self._at(place)
        if (content.cells == UNDEFINED).any():
            self.fail(f"{place} is read before it is written, or after it was finished")
        return content

    def _check_access(self, step: Step) -> None:
        """What a step touches is there, is not on its way, and may be written."""
        touched = list(slices(step))
        if isinstance(step, Finish):
            touched[0] = step.src, "update"  # sink logits may join in place
        for n, (place, how) in enumerate(touched):
            buffer = self.program.buffer.get(place.buffer)
            if buffer is None:
                self.fail(f"there is no buffer {place.buffer}")
            for (begin, end), size in ((place.rows, buffer.rows), (place.heads, buffer.heads)):
                if not 0 <= begin <= end <= size:
                    self.fail(f"{place} lies outside its buffer of {buffer.rows} rows and {buffer.heads} heads")
            if how != "read":
                self._check_writable(step, place, how == "update")
            for moving, name, sent in self.in_flight.get(self.memory[place.buffer], ()):
                if not (sent and how == "read") and place.overlaps(moving):
                    verb = "sends" if sent else "receives"
                    self.fail(f"{place} is touched while post {name} still {verb} {moving}")
            for other, other_how in touched[:n]:
                if other.buffer == place.buffer and (how, other_how) != ("read", "read") and place.overlaps(other):
                    self.fail(f"{place} is written and used otherwise by the same step")

    def _check_writable(self, step: Step, place: Slice, update: bool) -> None:
        buffer, source = self.program.buffer[place.buffer], self.source.get(place.buffer)
        if buffer.role == "input":
            self.fail(f"{place} is the caller's and may not be written")
        if isinstance(step, Post) and (buffer.role == "output" or buffer.becomes):
            self.fail(f"{place} is, or may become, the caller's: messages arrive in scratch of their own")
        if buffer.role == "output" and update:
            self.fail(f"{place} is added to, where only results go")
        if source and not (isinstance(step, Copy | Finish) and step.src == replace(place, buffer=source)):
            self.fail(f"{place} may be the memory of {source}, and can only be written from the same place there")
        if buffer.becomes and self.done[buffer.name][place.index].any():
            self.fail(f"{place} is written after it became {buffer.becomes}")

    def _check_alike(self, src: Slice, dst: Slice) -> None:
        kinds = [self.program.buffer[place.buffer].kind for place in (src, dst)]
        if kinds[0] != kinds[1] or src.shape != dst.shape:
            self.fail("source and target differ in kind or shape")

    def _become(self, src: Slice, dst: Slice) -> None:
        """Scratch that became an output is done: to write there would change the output, where they are one."""
        if self.program.buffer[src.buffer].becomes == dst.buffer:
            self.done[src.buffer][src.index] = True

    def _copy(self, step: Copy) -> None:
        self._check_alike(step.src, step.dst)
        self._at(step.dst).put(self._read(step.src))
        self._become(step.src, step.dst)

    def _add(self, step: Add) -> None:
        self._check_alike(step.src, step.dst)
        buffer, new, old = self.program.buffer[step.dst.buffer], self._read(step.src), self._read(step.dst)
        if buffer.kind not in ("dq", "dkv", "out") or buffer.dtype == "input" or (new.finished | old.finished).any():
            self.fail("only gradients and partial results are added, in their dtype or that of reductions")
        if not ((new.cells == ZERO) | (old.cells == ZERO) | (old.cells == new.cells)).all():
            self.fail("adds rows to other rows")
        assert new.counts is not None
        assert old.counts is not None
        old.cells[:] = np.where(old.cells == ZERO, new.cells, old.cells)
        old.counts += new.counts

    def _finish(self, step: Finish) -> None:
        self._check_alike(step.src, step.dst)
        content = self._read(step.src)
        source, target = (self.program.buffer[place.buffer] for place in (step.src, step.dst))
        if source.kind != "out" or (source.dtype, target.dtype) != ("partial", "input") or content.finished.any():
            self.fail("finishes what is no partial result, or to where no result goes")
        heads = np.arange(*step.heads)
        if (
            len(heads) != content.cells.shape[1]
            or not ((content.cells % self.problem.heads == heads) | (content.cells == ZERO)).all()
        ):
            self.fail("its heads are not those that it names")
        result = self._at(step.dst)
        result.put(content)
        result.finished[:] = True
        content.cells[:] = UNDEFINED
        self._become(step.src, step.dst)

    def _attend(self, step: Attend) -> None:
        q, _ = self._operands(step)
        buffer = self.program.buffer[step.out.buffer]
        if buffer.kind != "out" or buffer.dtype != ("input" if step.final else "partial"):
            self.fail("a final result is in the input's dtype, any other in that of partial results")
        if step.carry and step.final:
            self.fail("a final result carries on from nothing")
        out = self._target(step.out, q.cells, step.carry)
        if step.carry and out.finished.any():
            self.fail(f"carries on from {step.out}, which is finished")
        out.finished[:] = step.final
        assert out.counts is not None
        out.counts[..., expand(step.k_positions)] += self._shown(step)[:, :, None, :]

    def _attend_grad(self, step: AttendGrad) -> None:
        q, kv = self._operands(step)
        if self.program.buffer[step.rows.buffer].kind != "rows" or not np.array_equal(
            q.cells, self._read(step.rows).cells
        ):
            self.fail("q and what is known of its rows are not the same rows")
        for place, kind, add in ((step.dq, "dq", step.add_dq), (step.dkv, "dkv", step.add_dkv)):
            buffer = self.program.buffer[place.buffer]
            if buffer.kind != kind or (add and buffer.dtype != "partial"):
                self.fail(f"{place} cannot take these gradients: sums are kept in the dtype of partial results")
        dq = self._target(step.dq, q.cells, step.add_dq)
        dkv = self._target(step.dkv, kv.cells, step.add_dkv)
        assert dq.counts is not None
        assert dkv.counts is not None
        shown, q_positions, k_positions = self._shown(step), expand(step.q_positions), expand(step.k_positions)
        dq.counts[..., k_positions] += shown[:, :, None, :]
        per_key = q.cells.shape[1] // kv.cells.shape[1]
        for n, head in enumerate(range(*step.heads)):
            dkv.counts[:, :, n // per_key, head % self.group][..., q_positions] += shown.transpose(0, 2, 1)

    def _operands(self, step: Attend | AttendGrad) -> tuple[_Content, _Content]:
        """The queries and keys of a step, after checking that they are what it says."""
        problem = self.problem
        for place, kind in ((step.q, "q"), (step.kv, "kv")):
            buffer = self.program.buffer[place.buffer]
            if (buffer.kind, buffer.dtype) != (kind, "input"):
                self.fail(f"takes {buffer.name} ({buffer.kind}, {buffer.dtype}) for {kind} in the input's dtype")
        q, kv = self._read(step.q), self._read(step.kv)
        q_positions, k_positions, heads = expand(step.q_positions), expand(step.k_positions), np.arange(*step.heads)
        if (len(q_positions), len(heads)) != q.cells.shape or len(k_positions) != len(kv.cells):
            self.fail("names other rows or heads than it takes")
        if not distinct(step.q_positions) or not distinct(step.k_positions):
            self.fail("names a position twice")
        if not np.array_equal(q.cells, q_positions[:, None] * problem.heads + heads):
            self.fail("its queries are not at the positions and heads that it names")
        key_heads = kv.cells.shape[1]
        if not key_heads or len(heads) % key_heads:
            self.fail("its key heads do not divide its query heads")
        serving = heads[:: len(heads) // key_heads] // self.group
        if (heads // self.group != np.repeat(serving, len(heads) // key_heads)).any():
            self.fail("its query heads of one key head are not of one group")
        if not np.array_equal(kv.cells, k_positions[:, None] * problem.kv_heads + serving):
            self.fail("its keys are not at the positions that it names, or their heads do not serve its queries")
        return q, kv

    def _shown(self, step: Attend | AttendGrad) -> Counts:
        """The pairs that a step computes, [batch, q rows, k rows]: those of its rows that the mask shows."""
        q, k = step.q_positions, step.k_positions
        shown = self.truth.visible[:, expand(q)][:, :, expand(k)]
        walked = (False,) if isinstance(step, Attend) else (False, True)
        if self.tables and not all(
            np.array_equal(table_pairs(self.problem.mask, q, k, by_key), shown) for by_key in walked
        ):
            self.fail("the tables for its rows do not hold each pair that the mask shows once")
        return shown

    def _target(self, place: Slice, cells: Ints, add: bool) -> _Content:
        """Where a step adds its pairs for these cells: what is there, or nothing yet."""
        content = self._read(place) if add else self._at(place)
        if content.cells.shape != cells.shape:
            self.fail(f"{place} does not have the shape of its source")
        if not add:
            content.clear()
        if not ((content.cells == cells) | (content.cells == ZERO)).all():
            self.fail(f"adds to {place}, which holds other rows")
        content.cells[:] = cells
        return content

    def _post(self, step: Post) -> None:
        if step.name in self.posts:
            self.fail(f"two posts are called {step.name}")
        members = self.program.group.get(step.group)
        if members is None:
            self.fail(f"there is no group {step.group}")
        parts = (*step.sends, *step.recvs)
        for part in parts:
            if part.peer not in members:
                self.fail(f"rank {part.peer} is not in group {step.group}")
        if not parts or not all(part.slice.cells for part in parts):
            self.fail("moves nothing, or has parts that are empty")
        for part in step.recvs:
            if part.slice.heads != (0, self.program.buffer[part.slice.buffer].heads):
                self.fail(f"receives into some heads of {part.slice.buffer}: messages are whole rows")
        self.posts[step.name] = _Posted(self, step, [self._read(part.slice).copy() for part in step.sends])
        for part in step.sends:
            self.in_flight[self.memory[part.slice.buffer]].append((part.slice, step.name, True))
        for part in step.recvs:
            self.in_flight[self.memory[part.slice.buffer]].append((part.slice, step.name, False))

    def _wait(self, step: Wait) -> None:
        post = self.posts[step.post]
        post.waited = True
        for memory in {self.memory[part.slice.buffer] for part in (*post.step.sends, *post.step.recvs)}:
            self.in_flight[memory] = [entry for entry in self.in_flight[memory] if entry[1] != step.post]
        for n, part in enumerate(post.step.recvs):
            self._at(part.slice).put(post.arrived[n])


class _Mesh:
    """What is on its way between all ranks. The posts of a rank in a group begin one after another."""

    def __init__(self) -> None:
        self.queues: dict[tuple[str, int], deque[_Posted]] = defaultdict(deque)
        #: by group, source and target: parts that have begun and were not met yet
        self.sends: dict[tuple[str, int, int], deque[tuple[_Posted, int]]] = defaultdict(deque)
        self.recvs: dict[tuple[str, int, int], deque[tuple[_Posted, int]]] = defaultdict(deque)

    def post(self, post: _Posted) -> None:
        """Take a post; it begins once those before it are complete, and so may others then."""
        queue = self.queues[post.step.group, post.rank.number]
        queue.append(post)
        begun = deque([post] if len(queue) == 1 else [])
        while begun:
            begun += self._begin(begun.popleft())

    def _begin(self, post: _Posted) -> list[_Posted]:
        """Let the parts of a post meet those of others, in order; the posts that can begin after that."""
        group, me = post.step.group, post.rank.number
        following = []
        for n, part in enumerate(post.step.sends):
            self.sends[group, me, part.peer].append((post, n))
            following += self._meet(group, me, part.peer)
        for n, part in enumerate(post.step.recvs):
            self.recvs[group, part.peer, me].append((post, n))
            following += self._meet(group, part.peer, me)
        return following

    def _meet(self, group: str, source: int, target: int) -> list[_Posted]:
        sends, recvs = self.sends[group, source, target], self.recvs[group, source, target]
        if not sends or not recvs:
            return []
        (sender, n), (receiver, m) = sends.popleft(), recvs.popleft()
        _check_match(sender.rank, sender.step.sends[n], receiver.rank, receiver.step.recvs[m])
        receiver.arrived[m] = sender.contents[n]
        sender.met.append(receiver)
        receiver.met.append(sender)
        following = []
        for post in (sender,) if sender is receiver else (sender, receiver):
            if len(post.met) == len(post.step.sends) + len(post.step.recvs):
                if post.step.collective:
                    _check_collective(post)
                post.complete = True
                queue = self.queues[group, post.rank.number]
                queue.popleft()
                following += list(queue)[:1]
        return following


def _check_groups(ranks: list[_Rank]) -> None:
    for name, members in dict.fromkeys(group for rank in ranks for group in rank.program.groups):
        for member in members:
            if not 0 <= member < len(ranks) or ranks[member].program.group.get(name) != members:
                raise VerificationError(f"group {name}: rank {member} does not agree that it has the ranks {members}")


def _run(ranks: list[_Rank]) -> None:
    """Let every rank go as far as it can until all are done, or none can go on."""
    mesh = _Mesh()
    progress = True
    while progress:
        progress = False
        for rank in ranks:
            while not rank.blocked():
                step = rank.take()
                if isinstance(step, Post):
                    mesh.post(rank.posts[step.name])
                progress = True
    stuck = [rank for rank in ranks if rank.step is not None]
    if stuck:
        places = "; ".join(f"rank {rank.number} at step {rank.at} ({rank.step})" for rank in stuck)
        raise VerificationError(f"deadlock: {places}")


def _check_match(source: _Rank, sent: Part, target: _Rank, received: Part) -> None:
    theirs, mine = source.program.buffer[sent.slice.buffer], target.program.buffer[received.slice.buffer]
    if sent.slice.shape != received.slice.shape or (theirs.kind, theirs.dtype) != (mine.kind, mine.dtype):
        target.fail(
            f"receives {received.slice} and rank {source.number} sends {sent.slice}: not the same shape, kind and dtype"
        )


def _check_collective(post: _Posted) -> None:
    """Every rank of the group makes this call with equal parts for all, in the order of the group."""
    step, rank = post.step, post.rank
    members = list(rank.program.group[step.group])
    peers = [[part.peer for part in side] for side in (step.sends, step.recvs)]
    shapes = {part.slice.shape for part in (*step.sends, *step.recvs)}
    forms = {other.step.collective for other in post.met}
    if peers != [members] * 2 or len(shapes) != 1 or forms != {step.collective} or len(set(post.met)) != len(members):
        rank.fail(f"post {step.name} is no {step.collective}: the ranks or their parts differ")
    if step.collective == "all_gather":
        if len({part.slice for part in step.sends}) != 1:
            rank.fail("an all_gather sends one slice to all")
    else:
        buffer = rank.program.buffer[step.sends[0].slice.buffer]
        if buffer.role != "scratch" or buffer.becomes or step.sends[0].slice.heads != (0, buffer.heads):
            rank.fail("an all_to_all sends whole rows of scratch")
    for side in [step.recvs] + ([step.sends] if step.collective == "all_to_all" else []):
        begins = [(part.slice.buffer, part.slice.rows[0]) for part in side[1:]]
        if begins != [(part.slice.buffer, part.slice.rows[1]) for part in side[:-1]]:
            rank.fail(f"the parts of an {step.collective} do not lie one after another")
