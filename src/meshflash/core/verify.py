"""Proves programs right without a device: it runs all ranks at once on symbols instead of numbers.

What a buffer holds is known by (position, head) for each of its cells, and for sums by how often each
pair went in. At the end every pair that `Mask.visible` shows must have been counted once, and every
gradient be home. Posts are taken to complete in order within a group, as they do on the strictest
backends: what passes here deadlocks on none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from meshflash.core.lengths import UNBOUNDED
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import (
    KEY_KINDS,
    Add,
    Attend,
    AttendGrad,
    Clear,
    Copy,
    Finish,
    Part,
    Post,
    Program,
    Ranges,
    Sizes,
    Slice,
    Step,
    Wait,
    slices,
)
from meshflash.core.tiles import Table, worklist

Ints = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int16]

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


def verify_programs(programs: Sequence[Program], problem: Problem, sizes: Sizes | None = None) -> Report:
    """Raise VerificationError unless these programs, one of each rank, solve the problem together.

    Every visible (batch row, head, query, key) is computed once; every output and gradient is complete
    and home; nothing deadlocks; no buffer is read before it is written or touched while it moves.

    >>> from meshflash.core.layout import Layout
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
    ranks = [_Rank(program, problem) for program in programs]
    _run(ranks)
    for rank in ranks:
        rank.check_end()
    received = []
    for rank in ranks:
        row: dict[int, int] = defaultdict(int)
        for post in rank.posts.values():
            for part in post.step.recvs:
                if part.peer != rank.program.rank:
                    row[part.peer] += rank.program.slice_bytes(part.slice, sizes)
        received.append(dict(row))
    return Report(tuple(received), tuple(program.scratch_bytes(sizes) for program in programs))


@dataclass(eq=False)
class _Content:
    """What some cells hold: [rows, heads] of (position, head), and [batch, rows, heads, ...] of counts."""

    cells: Ints
    counts: Counts | None
    finished: npt.NDArray[np.bool_]


@dataclass(eq=False)
class _Posted:
    """A post on its way."""

    step: Post
    number: int
    matches: list[tuple[_Posted, Part] | None] = field(default_factory=list)
    contents: list[_Content] = field(default_factory=list)
    complete: bool = False
    waited: bool = False


class _Rank:
    """One rank: its program, how far it is, and what its buffers hold."""

    def __init__(self, program: Program, problem: Problem) -> None:
        self.program, self.problem = program, problem
        self.at = 0
        self.posts: dict[str, _Posted] = {}
        self.in_flight: list[tuple[str, Slice, bool]] = []
        self.batch = problem.mask.batch_rows or 1
        self.q_tokens, self.k_tokens = sum(problem.q_lengths), sum(problem.k_lengths)
        self.ends: dict[str, Slice] = {}
        if len(program.buffer) != len(program.buffers):
            self.fail("two buffers have the same name")
        for name, members in program.groups:
            if program.rank not in members or len(set(members)) != len(members):
                self.fail(f"group {name} does not hold this rank once")
        self._check_buffers()
        self.buffers = {b.name: self._undefined(b.kind, b.rows, b.heads) for b in program.buffers}
        for buffer in program.buffers:
            if buffer.role == "input":
                self.buffers[buffer.name].cells[:] = self._expected(buffer.kind)

    def fail(self, message: str) -> NoReturn:
        """Say where and what."""
        place = ""
        if self.at < len(self.program.steps):
            place = f", step {self.at} ({self.program.steps[self.at]})"
        raise VerificationError(f"{self.program.direction} of rank {self.program.rank}{place}: {message}")

    @property
    def step(self) -> Step | None:
        """The step that comes next."""
        return self.program.steps[self.at] if self.at < len(self.program.steps) else None

    def take(self) -> None:
        """Do the next step; of a wait, take what has arrived."""
        step = self.step
        self._check_access(step) if not isinstance(step, Wait) else None
        match step:
            case Attend():
                self._attend(step)
            case AttendGrad():
                self._attend_grad(step)
            case Post():
                self._post(step)
            case Wait():
                self._arrive(step)
            case Copy():
                self._same_kind(step.src, step.dst)
                self._note_end(step.src, step.dst)
                self._set(step.dst, self._get(step.src))
            case Add():
                self._add(step)
            case Clear():
                self._set(step.dst, self._zero(step.dst))
            case Finish():
                self._finish(step)
        self.at += 1

    def check_end(self) -> None:
        """Everything was waited for, and the outputs are what they must be."""
        for name, post in self.posts.items():
            if not post.waited:
                self.fail(f"post {name} is never waited for")
        for buffer in self.program.buffers:
            if buffer.role != "output":
                continue
            content, expected = self.buffers[buffer.name], self._expected(buffer.kind)
            known = (content.cells == expected) | (content.cells == ZERO)
            if not known.all():
                self.fail(f"output {buffer.name}: {int((~known).sum())} cells are not the rows they should be")
            if buffer.kind == "out" and not content.finished.all():
                self.fail("output out is not the finished result")
            assert content.counts is not None
            wanted = self._wanted(buffer.kind)
            difference = content.counts - wanted
            if difference.any():
                missing, extra = int((difference < 0).sum()), int((difference > 0).sum())
                self.fail(f"output {buffer.name}: {missing} pairs are missing, {extra} are repeated or not visible")
        if self.program.direction == "forward":
            unknown = set(self.program.saves) - {b.name for b in self.program.buffers if b.role != "scratch"}
            if unknown or not {"q", "kv", "out"} <= set(self.program.saves):
                self.fail(f"saves {self.program.saves}: expected q, kv, out and buffers of the caller")

    def _check_buffers(self) -> None:
        problem, rank = self.problem, self.program.rank
        forward = {"q": "input", "kv": "input", "out": "output"}
        backward = {"q": "input", "kv": "input", "rows": "input", "dq": "output", "dkv": "output"}
        wanted = forward if self.program.direction == "forward" else backward
        found = {b.name: b.role for b in self.program.buffers if b.role != "scratch"}
        if found != wanted:
            self.fail(f"the caller's buffers are {found}, expected {wanted}")
        for b in self.program.buffers:
            n = (problem.k_lengths if b.kind in KEY_KINDS else problem.q_lengths)[rank]
            heads = problem.kv_heads if b.kind in KEY_KINDS else problem.heads
            if b.role != "scratch" and (b.name, b.rows, b.heads, b.dtype) != (b.kind, n, heads, "input"):
                self.fail(f"the caller's buffer {b.name} does not have the shape and dtype of the problem")
            if b.becomes:
                target = self.program.buffer.get(b.becomes)
                if target is None or target.role != "output" or target.kind != b.kind or b.role != "scratch":
                    self.fail(f"{b.name} cannot become {b.becomes}")
                if (target.rows, target.heads) != (b.rows, b.heads):
                    self.fail(f"{b.name} becomes {b.becomes} and has another shape")
                if sum(other.becomes == b.becomes for other in self.program.buffers) > 1:
                    self.fail(f"two buffers become {b.becomes}")

    def _expected(self, kind: str) -> Ints:
        """(position, head) of a caller's cells."""
        keys = kind in KEY_KINDS
        ranges = (self.problem.k if keys else self.problem.q)[self.program.rank]
        heads = self.problem.kv_heads if keys else self.problem.heads
        return _expand(ranges)[:, None] * heads + np.arange(heads)

    def _wanted(self, kind: str) -> Counts:
        """How often each pair must be counted: what the mask shows, once."""
        shown = _visible(self.problem, self.program.rank, kind in KEY_KINDS)
        if kind in KEY_KINDS:
            return np.broadcast_to(shown[:, :, None, None, :], self._counts_shape(kind, shown.shape[1]))
        return np.broadcast_to(shown[:, :, None, :], self._counts_shape(kind, shown.shape[1]))

    def _counts_shape(self, kind: str, rows: int, heads: int | None = None) -> tuple[int, ...]:
        if kind in KEY_KINDS:
            group = self.problem.heads // self.problem.kv_heads
            return (self.batch, rows, heads or self.problem.kv_heads, group, self.q_tokens)
        return (self.batch, rows, heads or self.problem.heads, self.k_tokens)

    def _undefined(self, kind: str, rows: int, heads: int) -> _Content:
        counts = None
        if kind in ("out", "dq", "dkv"):
            counts = np.zeros(self._counts_shape(kind, rows, heads), np.int16)
        return _Content(np.full((rows, heads), UNDEFINED), counts, np.zeros((rows, heads), np.bool_))

    def _zero(self, place: Slice) -> _Content:
        content = self._get(place, defined=False)
        content.cells[:] = ZERO
        if content.counts is not None:
            content.counts[:] = 0
        content.finished[:] = False
        return content

    def _get(self, place: Slice, defined: bool = True) -> _Content:
        content = self.buffers[place.buffer]
        index = (slice(*place.rows), slice(*place.heads))
        if defined and (content.cells[index] == UNDEFINED).any():
            self.fail(f"{place} is read before it is written")
        counts = None if content.counts is None else content.counts[(slice(None), *index)].copy()
        return _Content(content.cells[index].copy(), counts, content.finished[index].copy())

    def _set(self, place: Slice, new: _Content) -> None:
        content = self.buffers[place.buffer]
        index = (slice(*place.rows), slice(*place.heads))
        content.cells[index] = new.cells
        content.finished[index] = new.finished
        if content.counts is not None:
            assert new.counts is not None
            content.counts[(slice(None), *index)] = new.counts

    def _check_access(self, step: Step | None) -> None:
        assert step is not None
        touched = list(slices(step))
        for place, how in touched:
            buffer = self.program.buffer.get(place.buffer)
            if buffer is None:
                self.fail(f"there is no buffer {place.buffer}")
            for (begin, end), size in ((place.rows, buffer.rows), (place.heads, buffer.heads)):
                if not 0 <= begin <= end <= size:
                    self.fail(f"{place} lies outside its buffer of {buffer.rows} rows and {buffer.heads} heads")
            if how != "read" and buffer.role == "input":
                self.fail(f"{place} is the caller's and may not be written")
            if how != "read" and buffer.name in self.ends or how == "update" and buffer.role == "output":
                self.fail(f"{place} is written after it was done, or added to where only results go")
            if how != "read" and self._shared_with(buffer.name) and not isinstance(step, Copy | Finish):
                self.fail(f"{place} may share memory with {self._shared_with(buffer.name)}")
            for name, moving, sent in self.in_flight:
                if _overlap(place, moving) and (how != "read" or not sent):
                    verb = "sends" if sent else "receives"
                    self.fail(f"{place} is touched while post {name} still {verb} {moving}")
        written = [place for place, how in touched if how != "read"]
        for n, place in enumerate(written):
            others = written[:n] + [other for other, how in touched if how == "read"]
            if any(_overlap(place, other) for other in others):
                self.fail(f"{place} is written and used otherwise by the same step")

    def _shared_with(self, name: str) -> str:
        return next((b.name for b in self.program.buffers if b.becomes == name), "")

    def _note_end(self, src: Slice, dst: Slice) -> None:
        """An output that scratch becomes is written only from there, in place, and the scratch is then done."""
        source, target = self.program.buffer[src.buffer], self.program.buffer[dst.buffer]
        shared = self._shared_with(target.name)
        if shared and (shared != source.name or (src.rows, src.heads) != (dst.rows, dst.heads)):
            self.fail(f"{dst} shares memory with {shared} and may only be copied from the same place there")
        if source.becomes and target.name != source.becomes and target.role == "output":
            self.fail(f"{src} becomes {source.becomes}, not {target.name}")

    def _same_kind(self, src: Slice, dst: Slice) -> None:
        kinds = [self.program.buffer[place.buffer].kind for place in (src, dst)]
        shapes = [[b - a for a, b in (place.rows, place.heads)] for place in (src, dst)]
        if kinds[0] != kinds[1] or shapes[0] != shapes[1]:
            self.fail("source and target differ in kind or shape")

    def _attend(self, step: Attend) -> None:
        pairs = self._pairs(step, backward=False)
        buffer = self.program.buffer[step.out.buffer]
        if buffer.dtype != ("input" if step.final else "partial"):
            self.fail("a final result is in the input's dtype, any other in that of partial results")
        if buffer.kind != "out" or (step.carry and step.final):
            self.fail("the result goes where no result goes")
        q = self._get(step.q)
        if step.carry:
            old = self._get(step.out)
            if not ((old.cells == q.cells) | (old.cells == ZERO)).all() or old.finished.any():
                self.fail("carries on from other rows, or from what is finished")
            assert old.counts is not None
            pairs = pairs + old.counts
        finished = np.full(q.cells.shape, step.final)
        self._set_like(step.out, _Content(q.cells, pairs, finished))

    def _attend_grad(self, step: AttendGrad) -> None:
        if not np.array_equal(self._get(step.q).cells, self._get(step.rows).cells):
            self.fail("q and what is known of its rows are not the same rows")
        pairs = self._pairs(step, backward=True)
        kv = self._get(step.kv)
        heads = kv.cells.shape[1]
        by_key = np.zeros(self._counts_shape("kv", len(kv.cells), heads), np.int16)
        q_positions = _expand(step.q_positions)
        shown = _table_pairs(self.problem.mask, step.q_positions, step.k_positions, True)
        group = self.problem.heads // self.problem.kv_heads
        first = step.heads[0]
        for head in range(*step.heads):
            key_head = (head - first) * heads // (step.heads[1] - first)
            by_key[:, :, key_head, head % group][:, :, q_positions] += shown.transpose(0, 2, 1)
        for place, cells, counts, add, kind in (
            (step.dq, self._get(step.q).cells, pairs, step.add_dq, "dq"),
            (step.dkv, kv.cells, by_key, step.add_dkv, "dkv"),
        ):
            buffer = self.program.buffer[place.buffer]
            if buffer.kind != kind or (add and buffer.dtype != "partial"):
                self.fail(f"{place} cannot take these gradients: sums are kept in the dtype of partial results")
            if add:
                old = self._get(place)
                if not ((old.cells == cells) | (old.cells == ZERO)).all():
                    self.fail(f"adds to {place}, which holds other rows")
                assert old.counts is not None
                counts = counts + old.counts
            self._set_like(place, _Content(cells, counts, np.zeros(cells.shape, np.bool_)))

    def _set_like(self, place: Slice, content: _Content) -> None:
        if tuple(b - a for a, b in (place.rows, place.heads)) != content.cells.shape:
            self.fail(f"{place} does not have the shape of its source")
        self._set(place, content)

    def _pairs(self, step: Attend | AttendGrad, backward: bool) -> Counts:
        """What this step computes, [batch, q rows, heads, keys], after checking that its rows are what it says."""
        q, kv, problem = self._get(step.q), self._get(step.kv), self.problem
        kinds = tuple(self.program.buffer[place.buffer].kind for place in (step.q, step.kv))
        if kinds != ("q", "kv"):
            self.fail(f"attends {kinds[0]} to {kinds[1]}")
        q_positions, k_positions = _expand(step.q_positions), _expand(step.k_positions)
        heads = np.arange(*step.heads)
        if len(heads) != q.cells.shape[1] or len(q_positions) != len(q.cells) or len(k_positions) != len(kv.cells):
            self.fail("names other rows or heads than it takes")
        if not (q.cells == q_positions[:, None] * problem.heads + heads).all():
            self.fail("its queries are not at the positions and heads that it names")
        if kv.cells.size and not (kv.cells // problem.kv_heads == k_positions[:, None]).all():
            self.fail("its keys are not at the positions that it names")
        key_heads = kv.cells[0] % problem.kv_heads if len(kv.cells) else np.zeros(0, np.int64)
        if len(key_heads):
            per_key = len(heads) // max(1, len(key_heads))
            group = problem.heads // problem.kv_heads
            if per_key * len(key_heads) != len(heads) or not (np.repeat(key_heads, per_key) == heads // group).all():
                self.fail("its key heads do not serve its query heads")
            if not (kv.cells % problem.kv_heads == key_heads).all():
                self.fail("its keys mix heads")
        shown = _table_pairs(problem.mask, step.q_positions, step.k_positions, False)
        out = np.zeros((self.batch, len(q_positions), len(heads), self.k_tokens), np.int16)
        out[..., k_positions] += shown[:, :, None, :]
        return out

    def _add(self, step: Add) -> None:
        self._same_kind(step.src, step.dst)
        new, old = self._get(step.src), self._get(step.dst)
        if new.counts is None or old.counts is None or self.program.buffer[step.src.buffer].kind == "out":
            self.fail("only gradients are added")
        nobody = (old.cells == ZERO) | (new.cells == ZERO)
        if not (nobody | (old.cells == new.cells)).all():
            self.fail("adds rows to other rows")
        cells = np.where(old.cells == ZERO, new.cells, old.cells)
        self._set(step.dst, _Content(cells, old.counts + new.counts, old.finished))

    def _finish(self, step: Finish) -> None:
        self._same_kind(step.src, step.dst)
        self._note_end(step.src, step.dst)
        content = self._get(step.src)
        if self.program.buffer[step.src.buffer].kind != "out" or content.finished.any():
            self.fail("finishes what is no partial result")
        heads = np.arange(*step.heads)
        named = (content.cells % self.problem.heads == heads) if len(heads) == content.cells.shape[1] else None
        if named is None or not (named | (content.cells == ZERO)).all():
            self.fail("its heads are not those that it names")
        content.finished[:] = True
        self._set(step.dst, content)

    def _post(self, step: Post) -> None:
        if step.name in self.posts and not self.posts[step.name].waited:
            self.fail(f"post {step.name} is made again before it was waited for")
        if step.name in self.posts:
            self.fail(f"two posts are called {step.name}")
        members = self.program.group.get(step.group)
        if members is None:
            self.fail(f"there is no group {step.group}")
        for part in (*step.sends, *step.recvs):
            if part.peer not in members:
                self.fail(f"rank {part.peer} is not in group {step.group}")
        contents = [self._get(part.slice) for part in step.sends]
        self.posts[step.name] = _Posted(step, len(self.posts), contents=contents)
        self.in_flight += [(step.name, part.slice, True) for part in step.sends]
        self.in_flight += [(step.name, part.slice, False) for part in step.recvs]

    def _arrive(self, step: Wait) -> None:
        post = self.posts[step.post]
        post.waited = True
        self.in_flight = [entry for entry in self.in_flight if entry[0] != step.post]
        for part, match in zip(post.step.recvs, post.matches, strict=True):
            assert match is not None
            other, sent = match
            self._set(part.slice, other.contents[other.step.sends.index(sent)])


def _run(ranks: list[_Rank]) -> None:
    """Let every rank go as far as it can until all are done, or none can go on."""
    groups = {(name, members): 0 for rank in ranks for name, members in rank.program.groups}
    for name, members in groups:
        for member in members:
            if not 0 <= member < len(ranks) or ranks[member].program.group.get(name) != members:
                raise VerificationError(f"group {name}: rank {member} does not agree that it has the ranks {members}")
    progress = True
    while progress:
        progress = False
        for rank in ranks:
            while (step := rank.step) is not None:
                if isinstance(step, Wait):
                    post = rank.posts.get(step.post)
                    if post is None or post.waited:
                        rank.fail("there is nothing to wait for")
                    if not post.complete:
                        break
                rank.take()
                progress = True
        progress |= _complete(ranks)
    stuck = [rank for rank in ranks if rank.step is not None]
    if stuck:
        places = "; ".join(f"rank {r.program.rank} at step {r.at} ({r.step})" for r in stuck)
        raise VerificationError(f"deadlock: {places}")
    for rank in ranks:
        for post in rank.posts.values():
            if not post.complete:
                rank.fail(f"post {post.step.name} is never completed by the other side")


def _complete(ranks: list[_Rank]) -> bool:
    """Complete what posts can be: begun, with all parts met by posts that have begun. Whether any was."""
    begun: list[dict[str, list[_Posted]]] = []
    for rank in ranks:
        mine: dict[str, list[_Posted]] = defaultdict(list)
        for post in rank.posts.values():
            queue = mine[post.step.group]
            if not queue or queue[-1].complete:
                queue.append(post)
        begun.append(mine)
    sent = _by_pair(begun, sends=True)
    awaited = _by_pair(begun, sends=False)
    completed = False
    for n, rank in enumerate(ranks):
        for queue in begun[n].values():
            post = queue[-1]
            if post.complete:
                continue
            me = rank.program.rank
            outgoing = all(
                _nth(awaited, post.step.group, me, part.peer, _index(sent, post, part, me, part.peer))
                for part in post.step.sends
            )
            post.matches = [
                _nth(sent, post.step.group, part.peer, me, _index(awaited, post, part, part.peer, me))
                for part in post.step.recvs
            ]
            if not outgoing or not all(post.matches):
                continue
            for part, match in zip(post.step.recvs, post.matches, strict=True):
                assert match is not None
                _check_match(rank, part, ranks[part.peer], match[1])
            if post.step.collective:
                _check_collective(ranks, rank, post)
            post.complete = completed = True
    return completed


_Pairs = dict[tuple[str, int, int], list[tuple[_Posted, Part]]]


def _by_pair(begun: list[dict[str, list[_Posted]]], sends: bool) -> _Pairs:
    """The parts between two ranks of a group, in order."""
    out: _Pairs = defaultdict(list)
    for rank, groups in enumerate(begun):
        for group, queue in groups.items():
            for post in queue:
                for part in post.step.sends if sends else post.step.recvs:
                    out[(group, rank, part.peer) if sends else (group, part.peer, rank)].append((post, part))
    return out


def _index(pairs: _Pairs, post: _Posted, part: Part, source: int, target: int) -> int:
    return next(n for n, (p, other) in enumerate(pairs[post.step.group, source, target]) if p is post and other is part)


def _nth(pairs: _Pairs, group: str, source: int, target: int, n: int) -> tuple[_Posted, Part] | None:
    found = pairs.get((group, source, target), [])
    return found[n] if n < len(found) else None


def _check_match(rank: _Rank, part: Part, other: _Rank, sent: Part) -> None:
    mine, theirs = rank.program.buffer[part.slice.buffer], other.program.buffer[sent.slice.buffer]
    shapes = [[b - a for a, b in (p.slice.rows, p.slice.heads)] for p in (part, sent)]
    if shapes[0] != shapes[1] or (mine.kind, mine.dtype) != (theirs.kind, theirs.dtype):
        rank.fail(f"receives {part.slice} and rank {part.peer} sends {sent.slice}: not the same shape, kind and dtype")
    if part.slice.heads != (0, mine.heads):
        rank.fail(f"receives into some heads of {part.slice.buffer}: messages are whole rows")


def _check_collective(ranks: list[_Rank], rank: _Rank, post: _Posted) -> None:
    """Every rank of the group makes this call with equal parts for all, in the order of the group."""
    members = rank.program.group[post.step.group]
    forms = set()
    for member in members:
        begun = [p for p in ranks[member].posts.values() if p.step.group == post.step.group]
        mine = [p for p in rank.posts.values() if p.step.group == post.step.group]
        place = mine.index(post)
        theirs = begun[place].step if place < len(begun) else None
        forms.add(None if theirs is None else theirs.collective)
    peers = [[part.peer for part in side] for side in (post.step.sends, post.step.recvs)]
    cells = {part.slice.cells for part in (*post.step.sends, *post.step.recvs)}
    if forms != {post.step.collective} or peers != [list(members)] * 2 or len(cells) != 1:
        rank.fail(f"post {post.step.name} is no {post.step.collective}: the ranks or their parts differ")
    if post.step.collective == "all_gather" and len({part.slice for part in post.step.sends}) != 1:
        rank.fail("an all_gather sends one slice to all")
    sides = [post.step.recvs] + ([post.step.sends] if post.step.collective == "all_to_all" else [])
    for side in sides:
        ends = [(part.slice.buffer, part.slice.rows[0]) for part in side[1:]]
        if ends != [(part.slice.buffer, part.slice.rows[1]) for part in side[:-1]]:
            rank.fail(f"the parts of an {post.step.collective} do not lie one after another")


def _overlap(a: Slice, b: Slice) -> bool:
    return a.buffer == b.buffer and all(
        max(x[0], y[0]) < min(x[1], y[1]) for x, y in ((a.rows, b.rows), (a.heads, b.heads))
    )


def _expand(ranges: Ranges) -> Ints:
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(r.start, r.stop, r.step) for r in ranges)])


@lru_cache(maxsize=64)
def _visible(problem: Problem, rank: int, by_key: bool) -> Counts:
    """[batch, own rows, the other side's positions], from the mask's definition alone."""
    own = _expand((problem.k if by_key else problem.q)[rank])
    other = np.arange(sum(problem.q_lengths if by_key else problem.k_lengths))
    i, j = (other[None, :], own[:, None]) if by_key else (own[:, None], other[None, :])
    rows = [problem.mask.visible(i, j, batch) for batch in range(problem.mask.batch_rows or 1)]
    return np.stack([np.broadcast_to(shown, (len(own), len(other))) for shown in rows]).astype(np.int16)


@lru_cache(maxsize=8192)
def _table_pairs(mask: Mask, q_positions: Ranges, k_positions: Ranges, by_key: bool) -> Counts:
    """How often the table that kernels walk holds each pair, [batch, q rows, k rows]."""
    work = worklist(mask, q_positions, k_positions)
    sizes = [sum(map(len, ranges)) for ranges in (q_positions, k_positions)]
    out = np.zeros((mask.batch_rows or 1, *sizes), np.int16)
    for batch, q, k, shown in _tiles(work.by_key if by_key else work.by_query, by_key):
        out[slice(None) if batch < 0 else batch, q, k] += shown
    return out


def _tiles(table: Table, by_key: bool) -> Iterator[tuple[int, slice, slice, npt.NDArray[np.bool_]]]:
    for s, (batch, row, rows, position, step) in enumerate(table.segments.tolist()):
        mine = position + step * np.arange(rows)
        for first, n, start, stride, lo, hi in table.spans[table.indptr[s] : table.indptr[s + 1]].tolist():
            other = start + stride * np.arange(n)
            i, j = (other[:, None], mine[None, :]) if by_key else (mine[:, None], other[None, :])
            bounded = lo > -UNBOUNDED or hi < UNBOUNDED
            shown = (
                (lo <= j - i) & (j - i <= hi) if bounded else np.ones(np.broadcast_shapes(i.shape, j.shape), np.bool_)
            )
            own, others = slice(row, row + rows), slice(first, first + n)
            yield (batch, others, own, shown) if by_key else (batch, own, others, shown)
