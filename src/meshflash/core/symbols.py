"""The symbolic state of one rank: the verifier runs a program on it instead of on tensors.

A buffer of [rows, heads] becomes a `Content`. Each of its cells (one row of one head) holds

- a symbol: `position * heads + head` of the token that the cell stands for, or UNDEFINED, or ZERO;
- for results and gradients, the number of a sum (`sums.py`), which knows how often each pair has entered it.

Every step is first checked: its buffers exist, are initialized and are not in flight, and its operands stand at the
positions that it names. Then it is applied: symbols are copied, sums are added. A wrong program either fails a check
at the step that is wrong, or ends with sums whose pairs differ from the mask (`check_end`).

    kind        cell stands for            sum
    q, kv       its token and head         none: these are operands
    out, dq     a query and head           over keys
    dkv         a key and key head         over queries, for each query head of the GQA group
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np

from meshflash.core.contents import UNDEFINED, ZERO, Content, Saved, VerificationError
from meshflash.core.coverage import Bools, Ints, Visibility, distinct, expand, table_pairs
from meshflash.core.declarations import check_program
from meshflash.core.problem import Problem
from meshflash.core.program import (
    KEY_KINDS,
    LSE_KINDS,
    Add,
    Attend,
    AttendGrad,
    Clear,
    Copy,
    Delta,
    Finish,
    Interval,
    Post,
    Program,
    Ranges,
    Slice,
    Step,
    Wait,
    slices,
)
from meshflash.core.sums import COMPLETE, FIRST_UNKNOWN, Leaf, SymbolTable

#: From this many slices on, a step's slices are compared by marking their cells instead of pair by pair.
MANY_SLICES = 16


@dataclass(eq=False)
class Posted:
    """A post in flight. `Rank` makes it; `delivery.Mesh` matches it with the posts of its peers."""

    rank: Rank
    step: Post
    #: copies of the sent slices, as they were when the post was made
    contents: list[Content]
    #: the posts on the other side of its matched parts
    matched: set[Posted] = field(default_factory=set)
    num_matched: int = 0
    #: what has arrived, by the index of the receiving part
    arrived: dict[int, Content] = field(default_factory=dict)
    complete: bool = False
    waited: bool = False


class Rank:
    """The symbolic state of one rank: its program, the next step, and the content of its buffers.

    Args:
        program: The program of this rank.
        problem: The positions that every rank holds, and the mask.
        visibility: All visible pairs, from the mask's definition.
        tables: Whether to check the tile tables of each attend step against the mask.
        saved_inputs: The buffers that the forward saved, by name, for a backward. None stands for a caller's tensor.
        table: The sums and symbols that the cells of all ranks refer to.
    """

    def __init__(
        self,
        program: Program,
        problem: Problem,
        visibility: Visibility,
        tables: bool,
        saved_inputs: Mapping[str, Saved | None],
        table: SymbolTable,
    ) -> None:
        self.program, self.problem, self.visibility, self.tables = program, problem, visibility, tables
        self.saved_inputs, self.table = saved_inputs, table
        self.number = program.rank
        self.step_index = len(program.steps)  # at no step, so that errors of the checks below name none
        self.gqa_ratio = problem.heads // problem.kv_heads
        self.posts: dict[str, Posted] = {}
        #: memory -> (slice, post, whether it is sent): slices that a post still moves
        self.in_flight: dict[str, list[tuple[Slice, str, bool]]] = defaultdict(list)
        #: (symbols, sums) of results -> whether they are complete
        self._complete: dict[tuple[bytes, bytes], bool] = {}
        self.members = {name: frozenset(members) for name, members in program.groups}
        check_program(self)
        # Scratch that `becomes` an output shares its memory only if their dtypes agree, which a program does not know.
        # The checks must hold in both cases. `memory` maps both names to one memory, `scratch_of` maps an output to its
        # scratch, and `finalized` marks scratch cells that have become the output and must not change any more.
        self.memory = {b.name: b.becomes or b.name for b in program.buffers}
        self.scratch_of = {b.becomes: b.name for b in program.buffers if b.becomes}
        self.finalized = {b.name: np.zeros((b.rows, b.heads), np.bool_) for b in program.buffers if b.becomes}
        self.buffers = {b.name: Content.empty(b.kind, b.rows, b.heads) for b in program.buffers}
        #: memory -> [sent or received, rows, heads]: how many slices in flight hold each cell
        self.moving = {self.memory[b.name]: np.zeros((2, b.rows, b.heads), np.int16) for b in program.buffers}
        for buffer in program.buffers:
            held = self.buffers[buffer.name]
            if buffer.role == "input":
                held.cells[:] = self._expected_cells(buffer.kind)
                # The engine computes no delta for a dout that any step uses without it.
                held.without_lse[:] = buffer.kind == "dout" and buffer.name in program.without_lse
                if buffer.kind == "out":
                    assert held.sums is not None
                    held.sums[:], held.finished[:] = COMPLETE, True
            elif buffer.role == "saved" and program.direction == "backward":
                saved = self.saved_inputs[buffer.name]
                assert saved is not None
                held.put(saved[1])
                # Sums name positions, and the mask says which of them are visible: under another mask they differ.
                held.finished[:] &= table.mask == problem.mask
        self.step_index = 0

    def fail(self, message: str) -> NoReturn:
        """Raise VerificationError with the rank, the current step and a message."""
        place = ""
        if self.step_index < len(self.program.steps):
            place = f", step {self.step_index} ({self.program.steps[self.step_index]})"
        raise VerificationError(f"{self.program.direction} of rank {self.number}{place}: {message}")

    @property
    def step(self) -> Step | None:
        """The next step, or None at the end."""
        return self.program.steps[self.step_index] if self.step_index < len(self.program.steps) else None

    def blocked(self) -> bool:
        """Whether this rank cannot advance: it is at its end, or waits for a post that is not complete."""
        step = self.step
        if not isinstance(step, Wait):
            return step is None
        post = self.posts.get(step.post)
        if post is None or post.waited:
            self.fail("waits for a post that was not made, or that it has waited for already")
        return not post.complete

    def run_step(self) -> Step:
        """Check and apply the next step, and return it."""
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
                self._content(step.dst).clear()
            case Finish():
                self._finish(step)
            case Delta():
                self._delta(step)
            case _:
                self.fail("unknown step")
        self.step_index += 1
        return step

    def check_end(self) -> None:
        """Check the final state: no post is left, and every output holds each visible pair of its rows once."""
        for name, post in self.posts.items():
            if not post.waited:
                self.fail(f"post {name} is never waited for")
        for buffer in self.program.buffers:
            content = self.buffers[buffer.name]
            if buffer.role == "saved" and self.program.direction == "forward":
                self._check_saved(buffer.name, buffer.kind, content)
            if buffer.role != "output":
                continue
            # ZERO is a valid result of a row that sees nothing; the counts below check that it should be.
            cells, wanted = self.table.unify(content.cells, self._expected_cells(buffer.kind))
            right = (cells == wanted) | (cells == ZERO)
            if not right.all():
                self.fail(f"output {buffer.name}: {int((~right).sum())} cells do not hold the rows of this rank")
            if buffer.kind == "out" and not content.finished.all():
                self.fail("output out is not the finished result")
            if self.problem.lse and content.without_lse.any():
                self.fail("output out lacks the LSE of some rows, which the problem requests")
            assert content.sums is not None
            missing, extra = self.wrong_pairs(buffer.kind, wanted, content.sums)
            if missing or extra:
                self.fail(f"output {buffer.name}: {missing} pairs are missing, {extra} are repeated or not visible")

    def saved(self) -> dict[str, Saved | None]:
        """Return the content of the buffers that the forward saves, by name; None for the caller's tensors."""
        buffers = self.program.buffer
        return {
            name: (buffers[name].kind, self.buffers[name]) if buffers[name].role == "saved" else None
            for name in self.program.saves
        }

    def _check_saved(self, name: str, kind: str, content: Content) -> None:
        """A saved buffer must be written completely, and saved results must be final."""
        if ((content.cells == UNDEFINED) | (content.cells == ZERO)).any():
            self.fail(f"{name} is saved before all of it is written")
        if kind == "out" and not self._is_complete(content):
            self.fail(f"{name} is saved, but is not the finished result of its rows with their LSE")

    def _is_complete(self, content: Content) -> bool:
        """Whether all of these results are final and include every key that their rows see."""
        assert content.sums is not None
        if not content.finished.all() or content.without_lse.any():
            return False
        cells = self.table.resolve(content.cells)
        # Every gradient step of a ring asks the same of the same results.
        key = cells.tobytes(), content.sums.tobytes()
        if key not in self._complete:
            self._complete[key] = self.wrong_pairs("out", cells, content.sums) == (0, 0)
        return self._complete[key]

    def wrong_pairs(self, kind: str, cells: Ints, sums: Ints) -> tuple[int, int]:
        """Return how many visible pairs of some cells are missing in their sums, and how many are repeated.

        Cells whose sum holds a message of unknown content are left out.

        Args:
            kind: The kind of the rows: out, dq or dkv.
            cells: The symbols of the cells, [rows, heads].
            sums: Their sums, [rows, heads].
        """
        missing = extra = 0
        keys = kind in KEY_KINDS
        num_heads = self.problem.kv_heads if keys else self.problem.heads
        tokens = self.visibility.q_tokens if keys else self.visibility.k_tokens
        # Cells of one sum differ only in their row. The query heads of a GQA group count apart: added up, a pair that
        # one head repeats would hide a missing one.
        for number in np.unique(sums).tolist():
            if number == COMPLETE:
                continue
            of_sum = cells[sums == number]
            heads = of_sum % num_heads
            for head in np.unique(heads).tolist() if keys else [0]:
                positions = (of_sum[heads == head] if keys else of_sum) // num_heads
                group = range(head * self.gqa_ratio, (head + 1) * self.gqa_ratio) if keys else (None,)
                for query_head in group:
                    covered = self.table.covered(number, tokens, query_head)
                    if covered is None:
                        continue
                    rows, times = np.unique(positions, return_counts=True)
                    shown = self.visibility.of_keys(rows) if keys else self.visibility.of_queries(rows)
                    missing += int((shown[..., covered == 0].sum((0, 2)) * times).sum())
                    extra += int((shown[..., covered > 1].sum((0, 2)) * times).sum())
        return missing, extra

    def _expected_cells(self, kind: str) -> Ints:
        """Return the symbols of the caller's rows of this rank, [rows, heads]."""
        keys = kind in KEY_KINDS
        ranges = (self.problem.k if keys else self.problem.q)[self.number]
        heads = self.problem.kv_heads if keys else self.problem.heads
        return expand(ranges)[:, None] * heads + np.arange(heads)

    def _content(self, place: Slice) -> Content:
        return self.buffers[place.buffer].at(place)

    def _read(self, place: Slice) -> Content:
        """Return the content of a slice that a step reads; all of it must be initialized."""
        content = self._content(place)
        if (content.cells == UNDEFINED).any():
            self.fail(f"{place} is read before it is written, or after it was finished")
        if content.without_lse.any() and not place.without_lse:
            self.fail(f"{place} is read with its LSE or delta, which were not computed")
        return content

    def _check_access(self, step: Step) -> None:
        """Check every slice of a step: it exists, is not in flight, may be written, and overlaps no other one."""
        touched = list(slices(step))
        if isinstance(step, Finish):
            touched[0] = step.src, "update"  # the engine may add sink logits in place
        for place, how in touched:
            buffer = self.program.buffer.get(place.buffer)
            if buffer is None:
                self.fail(f"there is no buffer {place.buffer}")
            if place.without_lse and not (isinstance(step, Copy | Post) and buffer.kind in LSE_KINDS):
                self.fail(f"{place}: only copies and posts of out and dout may leave out the LSE or delta")
            for (begin, end), size in ((place.rows, buffer.rows), (place.heads, buffer.heads)):
                if not 0 <= begin <= end <= size:
                    self.fail(f"{place} lies outside its buffer of {buffer.rows} rows and {buffer.heads} heads")
            if how != "read":
                self._check_writable(step, place, how == "update")
            # Reading a slice that is being sent is safe; any other access races with the transport.
            moving = self.moving[self.memory[place.buffer]][(slice(how == "read", None), *place.index)]
            if moving.any():
                self._fail_in_flight(place, how == "read")
        self._check_overlaps(touched)

    def _fail_in_flight(self, place: Slice, is_read: bool) -> NoReturn:
        """Raise the error for a slice that a step touches while it moves."""
        for moving, name, sent in self.in_flight[self.memory[place.buffer]]:
            if not (sent and is_read) and place.overlaps(moving):
                verb = "sends" if sent else "receives"
                self.fail(f"{place} is touched while post {name} still {verb} {moving}")
        raise AssertionError(f"no post moves {place}")

    def _check_overlaps(self, touched: Sequence[tuple[Slice, str]]) -> None:
        """Check that no slice that a step writes overlaps another slice of the same step."""
        if len(touched) < MANY_SLICES:
            for n, (place, how) in enumerate(touched):
                for other, other_how in touched[:n]:
                    if other.buffer == place.buffer and (how, other_how) != ("read", "read") and place.overlaps(other):
                        self.fail(f"{place} is written and also used by the same step")
            return
        # A post may have a part for every rank, so pairs of slices are too many: mark the cells instead.
        marks: dict[str, Bools] = {}
        for place, how in touched:
            buffer = self.program.buffer[place.buffer]
            mark = marks.setdefault(place.buffer, np.zeros((2, buffer.rows, buffer.heads), np.bool_))
            if mark[(slice(how == "read", None), *place.index)].any():
                self.fail(f"{place} is written and also used by the same step")
            mark[(int(how != "read"), *place.index)] = True

    def _check_writable(self, step: Step, place: Slice, update: bool) -> None:
        """Check that a step may write here, whether or not scratch shares the memory of the output it becomes."""
        buffer, source = self.program.buffer[place.buffer], self.scratch_of.get(place.buffer)
        if buffer.role == "input":
            self.fail(f"{place} is the caller's and may not be written")
        if buffer.role == "saved" and self.program.direction == "backward":
            self.fail(f"{place} was saved and may not be written")
        if isinstance(step, Post) and (buffer.role == "output" or buffer.becomes):
            self.fail(f"{place} is, or may become, the caller's memory: receive into a scratch buffer instead")
        if buffer.role == "output" and update:
            self.fail(f"{place} is an output and cannot be added to")
        if source and not (isinstance(step, Copy | Finish) and step.src == replace(place, buffer=source)):
            self.fail(f"{place} may be the memory of {source}, and can only be written from the same place there")
        if buffer.becomes and self.finalized[buffer.name][place.index].any():
            self.fail(f"{place} is written after it became {buffer.becomes}")

    def _check_same_shape(self, src: Slice, dst: Slice) -> None:
        """Rows move between slices of one kind and shape, with their LSE or without."""
        kinds = [self.program.buffer[place.buffer].kind for place in (src, dst)]
        if kinds[0] != kinds[1] or src.shape != dst.shape or src.without_lse != dst.without_lse:
            self.fail("source and target differ in kind or shape")

    def _mark_finalized(self, src: Slice, dst: Slice) -> None:
        """Mark scratch cells that have become an output: they may share memory, so they must not be written again."""
        if self.program.buffer[src.buffer].becomes == dst.buffer:
            self.finalized[src.buffer][src.index] = True

    def _copy(self, step: Copy) -> None:
        self._check_same_shape(step.src, step.dst)
        self._content(step.dst).put(self._read(step.src), step.src.without_lse)
        self._mark_finalized(step.src, step.dst)

    def _add(self, step: Add) -> None:
        self._check_same_shape(step.src, step.dst)
        buffer, new, old = self.program.buffer[step.dst.buffer], self._read(step.src), self._read(step.dst)
        if buffer.kind not in ("dq", "dkv", "out") or buffer.dtype == "input" or (new.finished | old.finished).any():
            self.fail("only gradients and partial results are added, in the partial or the reduce dtype")
        theirs, mine = self.table.unify(new.cells, old.cells)
        if not ((theirs == ZERO) | (mine == ZERO) | (mine == theirs)).all():
            self.fail("adds rows of other positions or heads")
        assert new.sums is not None
        assert old.sums is not None
        # Adding to a zero gives the cell its token.
        old.cells[:] = np.where(mine == ZERO, theirs, mine)
        old.sums[:] = self.table.add(old.sums, new.sums)

    def _finish(self, step: Finish) -> None:
        self._check_same_shape(step.src, step.dst)
        content = self._read(step.src)
        source, target = (self.program.buffer[place.buffer] for place in (step.src, step.dst))
        if source.kind != "out" or (source.dtype, target.dtype) != ("partial", "input") or content.finished.any():
            self.fail("finish must turn a partial result into one in the input's dtype")
        heads, cells = np.arange(*step.heads), self.table.resolve(content.cells)
        # A symbol that is unknown here is bound to a row of this rank, and so to its head, at the end of the program.
        if (
            len(heads) != cells.shape[1]
            or not ((cells % self.problem.heads == heads) | (cells == ZERO) | (cells <= FIRST_UNKNOWN)).all()
        ):
            self.fail("its rows hold other heads than it names")
        result = self._content(step.dst)
        result.put(content)
        result.finished[:] = True
        content.cells[:] = UNDEFINED  # sink logits may have been added in place, so the partial result is spent
        self._mark_finalized(step.src, step.dst)

    def _delta(self, step: Delta) -> None:
        """Recompute delta = sum(dout * out) of rows that travelled without it, from the final results of these rows."""
        out, dout = self._read(step.out), self._read(replace(step.dout, without_lse=True))
        for place, kind in ((step.out, "out"), (step.dout, "dout")):
            buffer = self.program.buffer[place.buffer]
            if (buffer.kind, buffer.dtype) != (kind, "input"):
                self.fail(f"expected {kind} in the input's dtype, got {buffer.name} ({buffer.kind}, {buffer.dtype})")
        if not self._same(out.cells, dout.cells) or not self._is_complete(out):
            self.fail("out is not the finished result of the rows of dout")
        if self.problem.lse:
            self.fail("delta cannot be recomputed: the LSE may have a gradient, which only the caller's delta holds")
        dout.without_lse[:] = False

    def _attend(self, step: Attend) -> None:
        """Add the visible pairs of a step to the sums of its results, for every head alike."""
        cells, _ = self._operands(step)
        buffer = self.program.buffer[step.out.buffer]
        if buffer.kind != "out" or buffer.dtype != ("input" if step.final else "partial"):
            self.fail("a final result is in the input's dtype, any other in the dtype of partial results")
        if step.carry and step.final:
            self.fail("a final result cannot carry on from a partial one")
        out = self._result_cells(step.out, cells, step.carry)
        if step.carry and out.finished.any():
            self.fail(f"carries on from {step.out}, which is finished")
        out.finished[:] = step.final
        self._check_tables(step)
        self._add_pairs(out, "out", step, step.k_positions, step.heads)

    def _attend_grad(self, step: AttendGrad) -> None:
        """Add the visible pairs of a step to the sums of dq, and of dk and dv for each key head."""
        q_cells, k_cells = self._operands(step)
        for place, kind in ((step.out, "out"), (step.dout, "dout")):
            buffer = self.program.buffer[place.buffer]
            if (buffer.kind, buffer.dtype) != (kind, "input") or not self._same(q_cells, self._read(place).cells):
                self.fail("q, out and dout are not the same rows")
        if not self._is_complete(self._read(step.out)):
            self.fail("out is not the finished result of its rows over all keys that they see")
        for place, kind, add in ((step.dq, "dq", step.add_dq), (step.dkv, "dkv", step.add_dkv)):
            buffer = self.program.buffer[place.buffer]
            if buffer.kind != kind or (add and buffer.dtype != "partial"):
                self.fail(f"{place} cannot take these gradients: sums are kept in the dtype of partial results")
        dq = self._result_cells(step.dq, q_cells, step.add_dq)
        dkv = self._result_cells(step.dkv, k_cells, step.add_dkv)
        self._check_tables(step)
        self._add_pairs(dq, "dq", step, step.k_positions, step.heads)
        # One key head may be in several columns, each for some query heads of its GQA group.
        per_key = q_cells.shape[1] // k_cells.shape[1]
        for n in range(k_cells.shape[1]):
            first = step.heads[0] + n * per_key
            column = replace(step.dkv, rows=(0, len(k_cells)), heads=(n, n + 1))
            self._add_pairs(dkv.at(column), "dkv", step, step.q_positions, (first, first + per_key))

    def _add_pairs(self, to: Content, kind: str, step: Step, positions: Ranges, heads: Interval) -> None:
        """Add the visible pairs of each cell with some positions to its sum."""
        assert to.sums is not None
        leaf = Leaf(self.number, f"step {self.step_index} ({step})", to.cells.copy(), kind, positions, heads)
        to.sums[:] = self.table.add(to.sums, self.table.leaf(leaf))

    def _operands(self, step: Attend | AttendGrad) -> tuple[Ints, Ints]:
        """Return the symbols of a step's queries and keys, after checking that they are at the positions it names.

        Kernels mask by the named positions. If the rows stood elsewhere, the result would be silently wrong.
        """
        problem = self.problem
        for place, kind in ((step.q, "q"), (step.kv, "kv")):
            buffer = self.program.buffer[place.buffer]
            if (buffer.kind, buffer.dtype) != (kind, "input"):
                self.fail(f"expected {kind} in the input's dtype, got {buffer.name} ({buffer.kind}, {buffer.dtype})")
        q, kv = self._read(step.q), self._read(step.kv)
        q_positions, k_positions, heads = expand(step.q_positions), expand(step.k_positions), np.arange(*step.heads)
        if (len(q_positions), len(heads)) != q.cells.shape or len(k_positions) != len(kv.cells):
            self.fail("names another number of positions or heads than its slices have")
        if not distinct(step.q_positions) or not distinct(step.k_positions):
            self.fail("names a position twice")
        q_cells = q_positions[:, None] * problem.heads + heads
        if not self._same(q.cells, q_cells):
            self.fail("its queries are not at the positions and heads that it names")
        # Query heads are consecutive, so those of one key head must be consecutive, equally many, and of one GQA group.
        key_heads = kv.cells.shape[1]
        if not key_heads or len(heads) % key_heads:
            self.fail("its key heads do not divide its query heads")
        serving = heads[:: len(heads) // key_heads] // self.gqa_ratio
        if (heads // self.gqa_ratio != np.repeat(serving, len(heads) // key_heads)).any():
            self.fail("the query heads of one key head are in different GQA groups")
        k_cells = k_positions[:, None] * problem.kv_heads + serving
        if not self._same(kv.cells, k_cells):
            self.fail("its keys are not at the positions that it names, or their heads do not serve its queries")
        return q_cells, k_cells

    def _same(self, cells: Ints, wanted: Ints) -> bool:
        """Whether cells have these symbols; unknown ones get them."""
        return cells.shape == wanted.shape and np.array_equal(*self.table.unify(cells, wanted))

    def _check_tables(self, step: Attend | AttendGrad) -> None:
        """Check that the tile tables that a kernel walks hold the visible pairs of a step's rows, each once.

        These are `by_query` in a forward, and also `by_key` in a backward.
        """
        if not self.tables:
            return
        q, k = step.q_positions, step.k_positions
        shown = self.visibility.pairs(expand(q), expand(k))
        walked = (False,) if isinstance(step, Attend) else (False, True)
        if not all(np.array_equal(table_pairs(self.problem.mask, q, k, by_key), shown) for by_key in walked):
            self.fail("the tile tables of its rows do not hold each visible pair once")

    def _result_cells(self, place: Slice, cells: Ints, add: bool) -> Content:
        """Return the cells in which a step accumulates: their present content, or zeros if the step does not `add`.

        `cells` are the symbols that the slice must have: those of the queries or keys of the step.
        """
        content = self._read(place) if add else self._content(place)
        if content.cells.shape != cells.shape:
            self.fail(f"{place} does not have the shape of its source")
        if not add:
            content.clear()
        found, _ = self.table.unify(content.cells, cells)
        if not ((found == cells) | (found == ZERO)).all():
            self.fail(f"adds to {place}, which holds other rows")
        content.cells[:] = cells
        return content

    def _post(self, step: Post) -> None:
        """Start a post: copy what it sends, and mark all of its slices as in flight until the wait."""
        if step.name in self.posts:
            self.fail(f"two posts have the name {step.name}")
        members = self.members.get(step.group)
        if members is None:
            self.fail(f"there is no group {step.group}")
        parts = (*step.sends, *step.recvs)
        for part in parts:
            if part.peer not in members:
                self.fail(f"rank {part.peer} is not in group {step.group}")
        if not parts or not all(part.slice.cells for part in parts):
            self.fail("has no parts, or empty parts")
        for part in step.recvs:
            if part.slice.heads != (0, self.program.buffer[part.slice.buffer].heads):
                self.fail(f"receives into some heads of {part.slice.buffer}: a message must cover all heads")
        self.posts[step.name] = Posted(self, step, [self._read(part.slice).copy() for part in step.sends])
        for side, sent in ((step.sends, True), (step.recvs, False)):
            for part in side:
                memory = self.memory[part.slice.buffer]
                self.in_flight[memory].append((part.slice, step.name, sent))
                self.moving[memory][(int(not sent), *part.slice.index)] += 1

    def _wait(self, step: Wait) -> None:
        """End a post, which is complete: release its slices and store what has arrived."""
        post = self.posts[step.post]
        post.waited = True
        for memory in {self.memory[part.slice.buffer] for part in (*post.step.sends, *post.step.recvs)}:
            self.in_flight[memory] = [entry for entry in self.in_flight[memory] if entry[1] != step.post]
        for side, sent in ((post.step.sends, True), (post.step.recvs, False)):
            for part in side:
                self.moving[self.memory[part.slice.buffer]][(int(not sent), *part.slice.index)] -= 1
        for n, part in enumerate(post.step.recvs):
            self._content(part.slice).put(post.arrived[n], part.slice.without_lse)
