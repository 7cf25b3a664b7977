"""One rank of a verification: its program, run on symbols instead of numbers.

What a buffer holds is known by (position, head) for each of its cells, and for sums by how often each pair went in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np

from meshflash.core.coverage import Bools, Counts, Ints, Truth, distinct, expand, table_pairs
from meshflash.core.problem import Problem
from meshflash.core.program import (
    KEY_KINDS,
    KINDS,
    LSE_KINDS,
    SAVES,
    Add,
    Attend,
    AttendGrad,
    Clear,
    Copy,
    Delta,
    Finish,
    Post,
    Program,
    Slice,
    Step,
    Wait,
    slices,
)

#: What a cell holds besides (position, head): nothing yet, and a zero of nobody's.
UNDEFINED, ZERO = -1, -2


class VerificationError(ValueError):
    """What is wrong with a program, with its rank and step."""


@dataclass(eq=False)
class Content:
    """What some cells hold: [rows, heads] of (position, head), and [batch, rows, heads, ...] of counts.

    Counts are of keys for each query and head, and for gradients of keys of (query head in its group,
    query); other kinds have none. A result is `finished` once sink logits are in it. Rows are `without_lse` while their
    LSE or delta is not known.
    """

    cells: Ints
    counts: Counts | None
    finished: Bools
    without_lse: Bools

    def at(self, place: Slice) -> Content:
        """Some of these cells: the same memory."""
        index = place.index
        counts = None if self.counts is None else self.counts[(slice(None), *index)]
        return Content(self.cells[index], counts, self.finished[index], self.without_lse[index])

    def copy(self) -> Content:
        """The same in memory of its own."""
        counts = None if self.counts is None else self.counts.copy()
        return Content(self.cells.copy(), counts, self.finished.copy(), self.without_lse.copy())

    def put(self, new: Content, without_lse: bool = False) -> None:
        """Overwrite, with all that is held or with bare rows."""
        self.cells[:], self.finished[:], self.without_lse[:] = new.cells, new.finished, new.without_lse | without_lse
        if self.counts is not None:
            assert new.counts is not None
            self.counts[:] = new.counts

    def clear(self) -> None:
        """Hold nobody's zero."""
        self.cells[:], self.finished[:], self.without_lse[:] = ZERO, False, False
        if self.counts is not None:
            self.counts[:] = 0


#: A kind, and what is held of it.
Saved = tuple[str, Content]


@dataclass(eq=False)
class Posted:
    """A post on its way: what it sends, and for each part the post that it met."""

    rank: Rank
    step: Post
    contents: list[Content]
    met: list[Posted] = field(default_factory=list)
    arrived: dict[int, Content] = field(default_factory=dict)
    complete: bool = False
    waited: bool = False


class Rank:
    """One rank: its program, how far it is, and what its buffers hold."""

    def __init__(
        self,
        program: Program,
        problem: Problem,
        truth: Truth,
        tables: bool,
        found: Mapping[str, Saved | None],
    ) -> None:
        self.program, self.problem, self.truth, self.tables = program, problem, truth, tables
        #: what a forward saved, by name; the caller's own need no symbols
        self.found = found
        self.number = program.rank
        self.at = len(program.steps)  # nowhere yet
        self.group = problem.heads // problem.kv_heads
        self.posts: dict[str, Posted] = {}
        #: by memory: what moves, which post moves it, and whether it is sent
        self.in_flight: dict[str, list[tuple[Slice, str, bool]]] = defaultdict(list)
        self._check_program()
        #: scratch that becomes an output may be its memory; the cells that have become it are done
        self.memory = {b.name: b.becomes or b.name for b in program.buffers}
        self.source = {b.becomes: b.name for b in program.buffers if b.becomes}
        self.done = {b.name: np.zeros((b.rows, b.heads), np.bool_) for b in program.buffers if b.becomes}
        self.buffers = {b.name: self._new(b.kind, b.rows, b.heads) for b in program.buffers}
        for buffer in program.buffers:
            held = self.buffers[buffer.name]
            if buffer.role == "input":
                held.cells[:] = self._expected(buffer.kind)
                held.without_lse[:] = (
                    buffer.kind == "dout" and buffer.name in program.without_lse
                )  # its delta was not made then
                if buffer.kind == "out":
                    assert held.counts is not None
                    held.counts[:], held.finished[:] = self._wanted("out"), True
            elif buffer.role == "saved" and program.direction == "backward":
                saved = self.found[buffer.name]
                assert saved is not None
                held.put(saved[1])
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
            case Delta():
                self._delta(step)
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
            content = self.buffers[buffer.name]
            if buffer.role == "saved" and self.program.direction == "forward":
                self._check_saved(buffer.name, buffer.kind, content)
            if buffer.role != "output":
                continue
            known = (content.cells == self._expected(buffer.kind)) | (content.cells == ZERO)
            if not known.all():
                self.fail(f"output {buffer.name}: {int((~known).sum())} cells are not the rows they should be")
            if buffer.kind == "out" and not content.finished.all():
                self.fail("output out is not the finished result")
            if self.problem.lse and content.without_lse.any():
                self.fail("output out is without the LSE of some rows, and it is wanted")
            assert content.counts is not None
            difference = content.counts - self._wanted(buffer.kind)
            if difference.any():
                missing, extra = int((difference < 0).sum()), int((difference > 0).sum())
                self.fail(f"output {buffer.name}: {missing} pairs are missing, {extra} are repeated or not visible")

    def saved(self) -> dict[str, Saved | None]:
        """What is left for a backward."""
        buffers = self.program.buffer
        return {
            name: (buffers[name].kind, self.buffers[name]) if buffers[name].role == "saved" else None
            for name in self.program.saves
        }

    def _check_saved(self, name: str, kind: str, content: Content) -> None:
        """What a backward will find is all there, and results are what they must be."""
        if (content.cells < 0).any():
            self.fail(f"{name} is saved, and not all of it was written")
        if kind == "out" and not self._complete(content):
            self.fail(f"{name} is saved, and is not the finished result of its rows, with their LSE")

    def _complete(self, content: Content) -> bool:
        """Whether results are finished, and of all keys that their rows see."""
        assert content.counts is not None
        wanted = self.truth.visible[:, content.cells // self.problem.heads]
        return bool(content.finished.all() and not content.without_lse.any() and (content.counts == wanted).all())

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
        self._check_roles()
        for b in program.buffers:
            if b.kind not in KINDS or b.rows < 0 or b.heads < 1:
                self.fail(f"{b.name} is of no known kind, or of no size")
            lengths = problem.k_lengths if b.kind in KEY_KINDS else problem.q_lengths
            heads = problem.kv_heads if b.kind in KEY_KINDS else problem.heads
            own = (b.kind, lengths[self.number], heads, "input", "")
            if b.role in ("input", "output") and (b.name, b.rows, b.heads, b.dtype, b.becomes) != own:
                self.fail(f"the caller's buffer {b.name} does not have the shape and dtype of the problem")
            if b.becomes:
                target = program.buffer.get(b.becomes)
                if target is None or (target.role, target.kind) != ("output", b.kind) or b.dtype == "reduce":
                    self.fail(f"{b.name} cannot become {b.becomes}")
                if (target.rows, target.heads) != (b.rows, b.heads):
                    self.fail(f"{b.name} becomes {b.becomes} and has another shape")
                if sum(other.becomes == b.becomes for other in program.buffers) > 1:
                    self.fail(f"two buffers become {b.becomes}")

    def _check_roles(self) -> None:
        """The caller's buffers are there, and what is saved is saved once and found again."""
        program = self.program
        forward = program.direction == "forward"
        found = {b.name: b.role for b in program.buffers if b.role in ("input", "output")}
        saved = {b.name: b for b in program.buffers if b.role == "saved"}
        if forward:
            wanted = {"q": "input", "kv": "input", "out": "output"}
        else:
            wanted = {"dout": "input", "dq": "output", "dkv": "output"}
            wanted |= {name: "input" for name in SAVES if name in found and name in self.found}
        if found != wanted:
            self.fail(f"the caller's buffers are {found}, expected {wanted}")
        if len(set(program.saves)) != len(program.saves):
            self.fail("saves a buffer twice")
        needed = {"out", *saved}
        if not (needed <= set(program.saves) <= needed | set(SAVES) if forward else not program.saves):
            self.fail(f"saves {program.saves}, expected {sorted(needed) if forward else []}")
        for name, b in saved.items():
            if b.kind not in SAVES or b.dtype != "input" or b.becomes:
                self.fail(f"{name} cannot be saved: queries, keys and results are, in the input's dtype")
            there = self.found.get(name)
            if not forward and (there is None or there[1].cells.shape != (b.rows, b.heads)):
                self.fail(f"reads {name}, of which no forward saved so many rows and heads")
            if not forward and there is not None and there[0] != b.kind:
                self.fail(f"reads {name} as {b.kind}, which the forward saved as {there[0]}")

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

    def _new(self, kind: str, rows: int, heads: int) -> Content:
        counts: Counts | None = None
        if kind in ("out", "dq"):
            counts = np.zeros((self.truth.batch, rows, heads, self.truth.k_tokens), np.int16)
        elif kind == "dkv":
            counts = np.zeros((self.truth.batch, rows, heads, self.group, self.truth.q_tokens), np.int16)
        nothing = [np.zeros((rows, heads), np.bool_) for _ in range(2)]
        return Content(np.full((rows, heads), UNDEFINED), counts, *nothing)

    def _at(self, place: Slice) -> Content:
        return self.buffers[place.buffer].at(place)

    def _read(self, place: Slice) -> Content:
        content = self._at(place)
        if (content.cells == UNDEFINED).any():
            self.fail(f"{place} is read before it is written, or after it was finished")
        if content.without_lse.any() and not place.without_lse:
            self.fail(f"{place} is read with its LSE or delta, which are not known")
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
            if place.without_lse and not (isinstance(step, Copy | Post) and buffer.kind in LSE_KINDS):
                self.fail(f"{place}: results and their gradients can be copied and sent bare, and nothing else")
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
        if buffer.role == "saved" and self.program.direction == "backward":
            self.fail(f"{place} was saved and may not be written")
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
        if kinds[0] != kinds[1] or src.shape != dst.shape or src.without_lse != dst.without_lse:
            self.fail("source and target differ in kind or shape")

    def _become(self, src: Slice, dst: Slice) -> None:
        """Scratch that became an output is done: to write there would change the output, where they are one."""
        if self.program.buffer[src.buffer].becomes == dst.buffer:
            self.done[src.buffer][src.index] = True

    def _copy(self, step: Copy) -> None:
        self._check_alike(step.src, step.dst)
        self._at(step.dst).put(self._read(step.src), step.src.without_lse)
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

    def _delta(self, step: Delta) -> None:
        out, dout = self._read(step.out), self._read(replace(step.dout, without_lse=True))
        for place, kind in ((step.out, "out"), (step.dout, "dout")):
            buffer = self.program.buffer[place.buffer]
            if (buffer.kind, buffer.dtype) != (kind, "input"):
                self.fail(f"takes {buffer.name} ({buffer.kind}, {buffer.dtype}) for {kind} in the input's dtype")
        if not np.array_equal(out.cells, dout.cells) or not self._complete(out):
            self.fail("takes other rows, or what is not their finished result, for the results of its rows")
        if self.problem.lse:
            self.fail("a gradient may come by way of the LSE, and only the caller's delta has it")
        dout.without_lse[:] = False

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
        for place, kind in ((step.out, "out"), (step.dout, "dout")):
            buffer = self.program.buffer[place.buffer]
            if (buffer.kind, buffer.dtype) != (kind, "input") or not np.array_equal(q.cells, self._read(place).cells):
                self.fail("q and what is known of its rows are not the same rows")
        if not self._complete(self._read(step.out)):
            self.fail("what it takes for the results of its rows is not finished, or not of all keys that they see")
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

    def _operands(self, step: Attend | AttendGrad) -> tuple[Content, Content]:
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

    def _target(self, place: Slice, cells: Ints, add: bool) -> Content:
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
        self.posts[step.name] = Posted(self, step, [self._read(part.slice).copy() for part in step.sends])
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
            self._at(part.slice).put(post.arrived[n], part.slice.without_lse)
