"""The Writer: how every schedule builder writes a program, step by step, on buffers that grow as needed.

A builder asks for slices of buffers, appends steps on them, and calls `program()` at the end:

    w = Writer("mine", "forward", problem, rank)
    out = w.accumulator("out", partial=True)          # float32 partial results
    w.post(Post("kv 1", sends, recvs))                # communication starts
    w.attend(w.own("kv"), problem.k[rank], out)       # compute overlaps with it
    w.wait("kv 1")
    w.attend(received, positions, out, carry=True)    # continue the online softmax
    w.finalize()                                      # out.sum becomes out
    return w.program(SAVES)

The Writer drops empty messages and the waits for them, so builders need no special cases for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

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

__all__ = ["SAVES", "Writer", "make_slice", "parts", "pieces"]

#: The most slices, and sets of slices, that steps share.
MAX_SHARED = 1 << 14
#: Sets of more slices than this are not shared: they rarely are the same again.
MAX_SHARED_PIECES = 2


class Writer:
    """The program of one rank while it is written. Each builder makes one.

    The buffers of the caller's tensors exist from the start: q, kv and out in a forward; q, kv, out, dout, dq and dkv
    in a backward.

    Args:
        name: The name of the program, for people.
        direction: "forward" or "backward".
        problem: The positions that every rank holds, and the mask.
        rank: The rank that runs the program.
    """

    def __init__(self, name: str, direction: Direction, problem: Problem, rank: int) -> None:
        self.name, self.direction, self.problem, self.rank = name, direction, problem, rank
        self.steps: list[Step] = []
        #: Names of groups. Every group has all ranks; posts of one group do not wait for posts of another.
        self.groups = ["mesh"]
        self._buffers: dict[str, Buffer] = {}
        #: Posts that nothing has waited for yet.
        self._posts: set[str] = set()
        self._positions: dict[Interval, Ranges] = {}
        #: (scratch, name of the output): partial sums that `finalize` turns into outputs.
        self._accumulators: list[tuple[Slice, str]] = []
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
        """Return the first rows of a scratch buffer, and make or grow the buffer as needed.

        Calls with one name share one buffer, which gets the size of the largest request.

        Args:
            name: The name of the buffer.
            kind: The kind of its rows, a key of `core.program.KINDS`.
            n: The number of rows of this use.
            dtype: The dtype of its elements.
            heads: The number of heads; all heads of this kind by default.
            becomes: The output that this buffer turns into and may share memory with.
        """
        if heads is None:
            heads = self._heads(kind)
        old = self._buffers.get(name)
        if old is None:
            self._buffers[name] = Buffer(name, kind, n, heads, dtype, "scratch", becomes)
        else:
            same = old.kind == kind and old.dtype == dtype and old.heads == heads
            assert same, f"{name} is used with two kinds or shapes"
            if n > old.rows:
                self._buffers[name] = replace(old, rows=n)
        return make_slice(name, 0, n, (0, heads))

    def save_buffer(self, name: str, kind: str, n: int, heads: int) -> None:
        """Declare a buffer that the forward saves for its backward.

        Args:
            name: The name of the buffer, the same in both programs.
            kind: The kind of its rows.
            n: The number of rows.
            heads: The number of heads.
        """
        self._buffers[name] = Buffer(name, kind, n, heads, role="saved")

    def accumulator(self, output: str, partial: bool) -> Slice:
        """Return the buffer in which an output is computed.

        Args:
            output: The name of the output.
            partial: Whether several steps contribute. If so, they sum up in float32 scratch until `finalize`;
                otherwise the one step writes the output itself.
        """
        if not partial:
            return self.own(output)
        buffer = self._buffers[output]
        made = self.scratch(f"{output}.sum", buffer.kind, buffer.rows, "partial", becomes=output)
        self._accumulators.append((made, output))
        return made

    def finalize(self) -> None:
        """Turn the accumulators into the outputs: one rounding to the input's dtype, at the very end."""
        for made, output in self._accumulators:
            target = self.own(output)
            self.steps.append(Finish(made, target, target.heads) if output == "out" else Copy(made, target))

    def own(self, name: str, taken: Interval | None = None, heads: Interval | None = None) -> Slice:
        """Return rows and heads of a buffer that exists; all of them by default.

        Args:
            name: The name of the buffer.
            taken: The rows, counted within the buffer.
            heads: The heads, counted within the buffer.
        """
        buffer = self._buffers[name]
        begin, end = taken or (0, buffer.rows)
        return make_slice(name, begin, end, heads or (0, buffer.heads))

    def attend(
        self,
        kv: Slice,
        k_positions: Ranges,
        out: Slice,
        heads: Interval | None = None,
        carry: bool = False,
        final: bool = False,
        q_rows: Interval | None = None,
    ) -> None:
        """Append attention of our queries over some keys.

        Without `carry` it takes all queries, since it must initialize every row of `out`. With `carry` it takes the
        rows from the first to the last query that sees any of the keys, and appends nothing if there are none.

        Args:
            kv: The keys and values.
            k_positions: The positions of these keys.
            out: The accumulator or output, with all rows of our queries.
            heads: The query heads; all by default.
            carry: Continue the online softmax from what `out` holds.
            final: Write the result itself instead of a partial result.
            q_rows: The rows from the first to the last query that sees any of the keys, if the caller knows them.
        """
        taken = self._query_rows(k_positions, carry) if q_rows is None else q_rows
        if taken[0] == taken[1] and carry:
            return
        self.steps.append(
            Attend(
                self.own("q", taken, heads),
                kv,
                take_rows(out, *taken),
                self._q_positions(taken),
                k_positions,
                heads or (0, self.problem.heads),
                carry,
                final,
            )
        )

    def attend_own(self, out: Slice, final: bool) -> None:
        """Append the first attention of a forward: our queries over our own keys, or over no keys if none is visible.

        It always runs, since it initializes the accumulator for every query.

        Args:
            out: The accumulator or output, with all rows of our queries.
            final: Write the result itself instead of a partial result.
        """
        own = self.problem.rows_needed(self.rank, self.rank)
        kv = self.own("kv") if own else self.own("kv", (0, 0))
        self.attend(kv, self.problem.k[self.rank] if own else (), out, final=final)

    def attend_grad(
        self,
        kv: Slice,
        k_positions: Ranges,
        dq: Slice,
        dkv: Slice,
        heads: Interval | None = None,
        add_dq: bool = False,
        q_rows: Interval | None = None,
    ) -> None:
        """Append the gradients of attention of our queries over some keys; `dkv` is overwritten.

        Args:
            kv: The keys and values.
            k_positions: The positions of these keys.
            dq: The accumulator of the gradient of our queries.
            dkv: The buffer for our share of the gradients of these keys and values.
            heads: The query heads; all by default.
            add_dq: Add to `dq` instead of overwriting it; then only queries that see the keys take part.
            q_rows: The rows from the first to the last query that sees any of the keys, if the caller knows them.
        """
        taken = self._query_rows(k_positions, add_dq) if q_rows is None else q_rows
        self.steps.append(
            AttendGrad(
                self.own("q", taken, heads),
                self.own("out", taken, heads),
                self.own("dout", taken, heads),
                kv,
                take_rows(dq, *taken),
                dkv,
                self._q_positions(taken),
                k_positions,
                heads or (0, self.problem.heads),
                add_dq,
            )
        )

    def post(self, post: Post, drop_empty: bool = True) -> None:
        """Append a post without its empty parts; append nothing if all parts are empty.

        Args:
            post: The post.
            drop_empty: Whether to look for empty parts. `parts` makes none.
        """
        if drop_empty and not all(part.slice.cells for part in (*post.sends, *post.recvs)):
            sends, recvs = (tuple(part for part in parts if part.slice.cells) for parts in (post.sends, post.recvs))
            post = replace(post, sends=sends, recvs=recvs)
        if post.sends or post.recvs:
            self._posts.add(post.name)
            self.steps.append(post)

    def wait(self, name: str) -> None:
        """Append a wait for a post, unless the post was empty or has been waited for."""
        if name in self._posts:
            self._posts.remove(name)
            self.steps.append(Wait(name))

    def append_each(self, kind: type[Copy] | type[Add], pairs: Iterable[tuple[Slice, Slice]]) -> None:
        """Append a copy or an addition for each pair of (source, target) that is not empty."""
        self.steps.extend([kind(src, dst) for src, dst in pairs if src.cells])

    def program(self, saves: tuple[str, ...] = ()) -> Program:
        """Return the program, without buffers that no step uses.

        Args:
            saves: The buffers that a forward leaves for its backward.
        """
        world = self.problem.world
        # A backward that reads saved buffers has no use for the caller's q, kv and out; the others always stay.
        optional = {"q", "kv", "out"} if self.direction == "backward" else set()
        unused = {name for name, buffer in self._buffers.items() if buffer.role == "scratch" or name in optional}
        for step in self.steps:
            if not unused:  # most buffers are found in the first few steps
                break
            unused.difference_update([place.buffer for place, _ in slices(step)])
        return Program(
            self.name,
            self.direction,
            self.rank,
            world,
            tuple(buffer for name, buffer in self._buffers.items() if name not in unused),
            tuple(self.steps),
            tuple((name, tuple(range(world))) for name in self.groups),
            saves,
        )

    def _q_positions(self, taken: Interval) -> Ranges:
        """Return the positions of some of our queries; most steps take the same few intervals."""
        if taken not in self._positions:
            self._positions[taken] = rows.positions(self.problem.q[self.rank], (taken,))
        return self._positions[taken]

    def _query_rows(self, k_positions: Ranges, only_seeing: bool) -> Interval:
        return self.problem.q_rows(self.rank, k_positions) if only_seeing else (0, self.q_rows)

    def _heads(self, kind: str) -> int:
        return self.problem.kv_heads if kind in KEY_KINDS else self.problem.heads


def parts(peer: int, within: Slice, held: Rows, wanted: Rows) -> tuple[Part, ...]:
    """Return the wanted rows of a packed slice as parts for one peer.

    Args:
        peer: The rank that receives or sends the rows.
        within: The slice, which holds the rows `held`, packed in order.
        held: The rows of the shard that the slice holds.
        wanted: The rows of the shard to take; a subset of `held`.
    """
    make = _make_parts if len(wanted) <= MAX_SHARED_PIECES else _make_parts.__wrapped__
    return make(peer, within.buffer, within.rows[0], within.heads, within.without_lse, held, wanted)


def pieces(within: Slice, held: Rows, wanted: Rows) -> tuple[Slice, ...]:
    """Return the wanted rows of a packed slice: one slice for each contiguous run of them.

    Args:
        within: The slice, which holds the rows `held`, packed in order.
        held: The rows of the shard that the slice holds.
        wanted: The rows of the shard to take; a subset of `held`.
    """
    make = _make_pieces if len(wanted) <= MAX_SHARED_PIECES else _make_pieces.__wrapped__
    return make(within.buffer, within.rows[0], within.heads, within.without_lse, held, wanted)


def take_rows(within: Slice, begin: int, end: int) -> Slice:
    """Return other rows of the buffer of a slice.

    Args:
        within: The slice.
        begin: The first row, counted within the buffer.
        end: The end of the rows.
    """
    return make_slice(within.buffer, begin, end, within.heads, within.without_lse)


@lru_cache(maxsize=MAX_SHARED)
def make_slice(buffer: str, begin: int, end: int, heads: Interval, without_lse: bool = False) -> Slice:
    """Return a slice. Equal slices are one object: the steps of a large ring name the same few again and again.

    Args:
        buffer: The name of the buffer.
        begin: The first row.
        end: The end of the rows.
        heads: The first head, and the end of the heads.
        without_lse: Whether to leave out the LSE of results, or the delta of their gradients.
    """
    return Slice(buffer, (begin, end), heads, without_lse)


@lru_cache(maxsize=MAX_SHARED)
def _make_parts(
    peer: int, buffer: str, first: int, heads: Interval, without_lse: bool, held: Rows, wanted: Rows
) -> tuple[Part, ...]:
    make = _make_pieces if len(wanted) <= MAX_SHARED_PIECES else _make_pieces.__wrapped__
    return tuple([Part(peer, piece) for piece in make(buffer, first, heads, without_lse, held, wanted)])


@lru_cache(maxsize=MAX_SHARED)
def _make_pieces(
    buffer: str, first: int, heads: Interval, without_lse: bool, held: Rows, wanted: Rows
) -> tuple[Slice, ...]:
    places = rows.places(wanted, held)
    return tuple([make_slice(buffer, first + begin, first + end, heads, without_lse) for begin, end in places])
