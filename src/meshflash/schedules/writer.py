"""What every builder writes with: steps in order, and buffers that grow to their largest use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from meshflash.core import rows
from meshflash.core.problem import Problem
from meshflash.core.program import (
    KEY_KINDS,
    SAVES,
    Add,
    Attend,
    AttendGrad,
    Buffer,
    Copy,
    Direction,
    Dtype,
    Finish,
    Interval,
    Part,
    Post,
    Program,
    Ranges,
    Slice,
    Step,
    Wait,
    slices,
)
from meshflash.core.rows import Rows

__all__ = ["SAVES", "Writer", "parts", "pieces"]


class Writer:
    """Writes the program of one rank. The caller's tensors are there from the start."""

    def __init__(self, name: str, direction: Direction, problem: Problem, rank: int) -> None:
        self.name, self.direction, self.problem, self.rank = name, direction, problem, rank
        self.steps: list[Step] = []
        #: All of them are of all ranks; the posts of one do not wait for those of another.
        self.groups = ["mesh"]
        self._buffers: dict[str, Buffer] = {}
        self._posts: set[str] = set()
        self._totals: list[tuple[Slice, str]] = []
        q_rows, k_rows = problem.q_lengths[rank], problem.k_lengths[rank]
        self.q_rows, self.k_rows = q_rows, k_rows
        caller = [("q", "q", q_rows, "input"), ("kv", "kv", k_rows, "input")]
        if direction == "forward":
            caller += [("out", "out", q_rows, "output")]
        else:
            caller += [
                ("out", "out", q_rows, "input"),
                ("dout", "dout", q_rows, "input"),
                ("dq", "dq", q_rows, "output"),
                ("dkv", "dkv", k_rows, "output"),
            ]
        for buffer, kind, n, role in caller:
            heads = self._heads(kind)
            self._buffers[buffer] = Buffer(buffer, kind, n, heads, role="input" if role == "input" else "output")

    def scratch(
        self, name: str, kind: str, n: int, dtype: Dtype = "input", heads: int | None = None, becomes: str = ""
    ) -> Slice:
        """Room for n rows in a scratch buffer of this name, which is as large as its largest use."""
        heads = self._heads(kind) if heads is None else heads
        new = Buffer(name, kind, n, heads, dtype, "scratch", becomes)
        old = self._buffers.get(name, new)
        assert (old.kind, old.dtype, old.heads) == (kind, dtype, heads), f"{name} is used in two ways"
        self._buffers[name] = replace(old, rows=max(n, old.rows))
        return Slice(name, (0, n), (0, heads))

    def keep(self, name: str, kind: str, n: int, heads: int) -> None:
        """A buffer that a forward saves for its backward."""
        self._buffers[name] = Buffer(name, kind, n, heads, role="saved")

    def total(self, output: str, in_parts: bool) -> Slice:
        """Where an output is made: a sum of partial results if it comes in parts, else the output itself."""
        if not in_parts:
            return self.own(output)
        buffer = self._buffers[output]
        made = self.scratch(f"{output}.sum", buffer.kind, buffer.rows, "partial", becomes=output)
        self._totals.append((made, output))
        return made

    def settle(self) -> None:
        """The sums become the outputs."""
        for made, output in self._totals:
            target = self.own(output)
            self.steps.append(Finish(made, target, target.heads) if output == "out" else Copy(made, target))

    def own(self, name: str, taken: Interval | None = None, heads: Interval | None = None) -> Slice:
        """Rows and heads of a caller's tensor; all of them by default."""
        buffer = self._buffers[name]
        return Slice(name, taken or (0, buffer.rows), heads or (0, buffer.heads))

    def attend(
        self,
        kv: Slice,
        k_positions: Ranges,
        out: Slice,
        heads: Interval | None = None,
        carry: bool = False,
        final: bool = False,
    ) -> None:
        """Attend with those of our queries that see any of these keys; with all of them unless we carry."""
        taken = self._seeing(k_positions, carry)
        if taken[0] == taken[1] and carry:
            return
        self.steps.append(
            Attend(
                self.own("q", taken, heads),
                kv,
                replace(out, rows=taken),
                rows.positions(self.problem.q[self.rank], (taken,)),
                k_positions,
                heads or (0, self.problem.heads),
                carry,
                final,
            )
        )

    def attend_grad(
        self,
        kv: Slice,
        k_positions: Ranges,
        dq: Slice,
        dkv: Slice,
        heads: Interval | None = None,
        add_dq: bool = False,
    ) -> None:
        """The gradients of the same; those of the keys are overwritten."""
        taken = self._seeing(k_positions, add_dq)
        self.steps.append(
            AttendGrad(
                self.own("q", taken, heads),
                self.own("out", taken, heads),
                self.own("dout", taken, heads),
                kv,
                replace(dq, rows=taken),
                dkv,
                rows.positions(self.problem.q[self.rank], (taken,)),
                k_positions,
                heads or (0, self.problem.heads),
                add_dq,
            )
        )

    def post(self, post: Post) -> None:
        """Post what is not empty."""
        sends = tuple(part for part in post.sends if part.slice.cells)
        recvs = tuple(part for part in post.recvs if part.slice.cells)
        if sends or recvs:
            self._posts.add(post.name)
            self.steps.append(replace(post, sends=sends, recvs=recvs))

    def wait(self, name: str) -> None:
        """Wait for a post, if it moved anything and was not waited for before."""
        if name in self._posts:
            self._posts.remove(name)
            self.steps.append(Wait(name))

    def each(self, kind: type[Copy] | type[Add], pairs: Iterable[tuple[Slice, Slice]]) -> None:
        """Copy or add the first of each pair to the second."""
        self.steps += [kind(src, dst) for src, dst in pairs if src.cells]

    def program(self, saves: tuple[str, ...] = ()) -> Program:
        """What was written."""
        world = self.problem.world
        used = {place.buffer for step in self.steps for place, _ in slices(step)}
        found = {"q", "kv", "out"} if self.direction == "backward" else set()
        return Program(
            self.name,
            self.direction,
            self.rank,
            world,
            tuple(
                buffer
                for name, buffer in self._buffers.items()
                if name in used or (buffer.role != "scratch" and name not in found)
            ),
            tuple(self.steps),
            tuple((name, tuple(range(world))) for name in self.groups),
            saves,
        )

    def _seeing(self, k_positions: Ranges, some: bool) -> Interval:
        return self.problem.q_rows(self.rank, k_positions) if some else (0, self.q_rows)

    def _heads(self, kind: str) -> int:
        return self.problem.kv_heads if kind in KEY_KINDS else self.problem.heads


def parts(peer: int, within: Slice, held: Rows, wanted: Rows) -> tuple[Part, ...]:
    """The wanted rows of a slice that holds `held`, packed, as parts for one peer."""
    return tuple(Part(peer, part) for part in pieces(within, held, wanted))


def pieces(within: Slice, held: Rows, wanted: Rows) -> list[Slice]:
    """The wanted rows of a slice that holds `held`, packed: a slice for each run of them."""
    first = within.rows[0]
    return [replace(within, rows=(first + begin, first + end)) for begin, end in rows.places(wanted, held)]
