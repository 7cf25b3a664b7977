"""Programs: the frozen steps of one rank in one pass (forward or backward), on named buffers.

Schedules build programs, the verifier proves them, the engine runs them and `viz` draws them; all of them read only
the classes here. Tiles are not part of a program: a step names the positions of its rows, and the engine binds the tile
tables when it runs.

    buffers   q, kv, out, ...     rows x heads of one kind; the caller's tensors, scratch, or saved for the backward
    compute   Attend, AttendGrad, Finish, Delta
    move      Post (start sends and receives), Wait (until they are complete)
    rows      Copy, Add, Clear
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
#: "input" is the dtype of q, k and v; "partial" is float32 (float64 for float64 inputs); "reduce" is the dtype in which
#: gradients travel between ranks.
Dtype = Literal["input", "partial", "reduce"]
#: "input" and "output" are the caller's tensors; "scratch" comes from a pool and ends with the pass; "saved" lives from
#: a forward to its backward, which only reads it.
Role = Literal["input", "output", "scratch", "saved"]
Ranges = tuple[range, ...]
Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a buffer: `[batch, rows, heads, width]`, or `[batch, heads, rows]` if `width` is "".

    Args:
        name: The name of the tensor, such as "k".
        width: The size of the last dim, by its name in `Sizes`; "" for one element per row and head.
        always_partial: Whether it has the "partial" dtype in every buffer. The LSE and delta are never rounded to half
            precision.
    """

    name: str
    width: Literal["dim", "value_dim", ""]
    always_partial: bool = False


#: The tensors of each kind of buffer.
KINDS: dict[str, tuple[Field, ...]] = {
    "q": (Field("q", "dim"),),
    "kv": (Field("k", "dim"), Field("v", "value_dim")),
    "out": (Field("out", "value_dim"), Field("lse", "", always_partial=True)),
    "dout": (Field("dout", "value_dim"), Field("delta", "", always_partial=True)),
    "dq": (Field("dq", "dim"),),
    "dkv": (Field("dk", "dim"), Field("dv", "value_dim")),
}
#: Kinds whose LSE or delta, one element per row and head, may be left out of a message.
LSE_KINDS = frozenset({"out", "dout"})
#: The buffers that a forward saves if it saves no buffers of its own: all that any backward needs.
SAVES = ("q", "kv", "out")
#: Kinds whose heads are key heads; all other kinds have query heads.
KEY_KINDS = frozenset({"kv", "dkv"})


def fields_of(kind: str, without_lse: bool = False) -> tuple[Field, ...]:
    """Return the fields of a kind.

    Args:
        kind: A key of `KINDS`.
        without_lse: Leave out the LSE or delta.
    """
    return KINDS[kind][:1] if without_lse else KINDS[kind]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that turn rows and heads into bytes.

    Args:
        batch: The number of batch rows.
        dim: The head dim of queries and keys.
        value_dim: The head dim of values.
        input_bytes: The bytes of an element of the inputs.
        partial_bytes: The bytes of an element of partial results.
        reduce_bytes: The bytes of an element of sums that travel between ranks.
    """

    batch: int = 1
    dim: int = 64
    value_dim: int = 64
    input_bytes: int = 2
    partial_bytes: int = 4
    reduce_bytes: int = 4

    def width(self, field: Field) -> int:
        """Return the elements of a field for one row and head.

        Args:
            field: A field of `KINDS`.
        """
        return {"dim": self.dim, "value_dim": self.value_dim, "": 1}[field.width]

    def row_bytes(self, kind: str, dtype: Dtype, without_lse: bool = False) -> int:
        """Return the bytes of one row of one head, over the batch.

        Args:
            kind: A key of `KINDS`.
            dtype: The dtype of the buffer.
            without_lse: Leave out the LSE or delta.
        """
        each = {"input": self.input_bytes, "partial": self.partial_bytes, "reduce": self.reduce_bytes}
        return self.batch * sum(
            self.width(field) * each["partial" if field.always_partial else dtype]
            for field in fields_of(kind, without_lse)
        )


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory for rows x heads of one kind. `Writer` declares buffers; the engine allocates them.

    Args:
        name: The name of the buffer in its program.
        kind: The kind of its rows, a key of `KINDS`.
        rows: The number of rows.
        heads: The number of heads.
        dtype: The dtype of its elements: that of the inputs, of partial results, or of reductions.
        role: Whether it is a tensor of the caller, scratch, or saved for the backward.
        becomes: The output that scratch becomes, or "". It shares the output's memory if their dtypes agree; copying
            it there is then free.
    """

    name: str
    kind: str
    rows: int
    heads: int
    dtype: Dtype = "input"
    role: Role = "scratch"
    becomes: str = ""

    def bytes(self, sizes: Sizes) -> int:
        """Return the bytes of the buffer.

        Args:
            sizes: The sizes of this call.
        """
        return self.rows * self.heads * sizes.row_bytes(self.kind, self.dtype)


@dataclass(frozen=True, slots=True)
class Slice:
    """Intervals of rows and heads of a buffer, counted within the buffer.

    Args:
        buffer: The name of the buffer.
        rows: The first row, and the end of the rows.
        heads: The first head, and the end of the heads.
        without_lse: Whether to leave out the LSE of results, or the delta of their gradients; the target does not get
            them.
    """

    buffer: str
    rows: Interval
    heads: Interval
    without_lse: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of heads."""
        return self.rows[1] - self.rows[0], self.heads[1] - self.heads[0]

    @property
    def cells(self) -> int:
        """Rows times heads."""
        return (self.rows[1] - self.rows[0]) * (self.heads[1] - self.heads[0])

    @property
    def index(self) -> tuple[slice, slice]:
        """The index of these rows and heads in an array of [rows, heads]."""
        return slice(*self.rows), slice(*self.heads)

    def overlaps(self, other: Slice) -> bool:
        """Return whether two slices share rows and heads. Buffers are not compared: two names may share one memory.

        Args:
            other: The slice to compare with.
        """
        return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in ((self.rows, other.rows), (self.heads, other.heads)))

    def __str__(self) -> str:
        suffix = " without LSE" if self.without_lse else ""
        return f"{self.buffer}[{self.rows[0]}:{self.rows[1]}, {self.heads[0]}:{self.heads[1]}]{suffix}"


@dataclass(frozen=True, slots=True)
class Attend:
    """Attention of query rows over key rows, into (out, LSE).

    Args:
        q: The query rows.
        kv: The key and value rows.
        out: The rows of the results.
        q_positions: The positions of the query rows in the sequence.
        k_positions: The positions of the key rows in the sequence.
        heads: The query heads, in the numbering of the whole problem.
        carry: Whether the online softmax continues from what `out` holds; otherwise `out` is overwritten.
        final: Whether to write the result itself, in the input's dtype and with sink logits, instead of a partial one.
    """

    q: Slice
    kv: Slice
    out: Slice
    q_positions: Ranges
    k_positions: Ranges
    heads: Interval
    carry: bool = False
    final: bool = False

    def __str__(self) -> str:
        how = "final " if self.final else "carry " if self.carry else ""
        return f"attend {how}{self.q} x {self.kv} -> {self.out}"


@dataclass(frozen=True, slots=True)
class AttendGrad:
    """The gradients of attention of query rows over key rows: dq and dkv, each overwritten or added to.

    Args:
        q: The query rows.
        out: The final results of the query rows, over all keys.
        dout: The gradients of these results.
        kv: The key and value rows.
        dq: The rows that receive dQ.
        dkv: The rows that receive dK and dV.
        q_positions: The positions of the query rows in the sequence.
        k_positions: The positions of the key rows in the sequence.
        heads: The query heads, in the numbering of the whole problem.
        add_dq: Whether to add to `dq` instead of overwriting it.
        add_dkv: Whether to add to `dkv` instead of overwriting it.
    """

    q: Slice
    out: Slice
    dout: Slice
    kv: Slice
    dq: Slice
    dkv: Slice
    q_positions: Ranges
    k_positions: Ranges
    heads: Interval
    add_dq: bool = False
    add_dkv: bool = False

    def __str__(self) -> str:
        dq, dkv = ("+=" if add else "=" for add in (self.add_dq, self.add_dkv))
        return f"attend_grad {self.q} x {self.kv}: {self.dq} {dq}, {self.dkv} {dkv}"


@dataclass(frozen=True, slots=True)
class Part:
    """A slice that a post sends to, or receives from, the rank `peer`."""

    peer: int
    slice: Slice


@dataclass(frozen=True, slots=True)
class Post:
    """Start sends and receives. Parts between two ranks match in the order of their posts within a group.

    All parts of a post move at once; the posts of a group move one after another.

    Args:
        name: The name that a `Wait` refers to.
        sends: The parts to send.
        recvs: The parts to receive.
        group: The name of the group of ranks.
        collective: "all_gather" or "all_to_all" if every rank of the group makes this post with equal parts, so that a
            transport may use one collective call. In an all-gather each rank sends one slice to all others.
    """

    name: str
    sends: tuple[Part, ...]
    recvs: tuple[Part, ...]
    group: str = "mesh"
    collective: Literal["", "all_gather", "all_to_all"] = ""

    def __str__(self) -> str:
        out = [f"{part.slice} -> rank {part.peer}" for part in self.sends]
        back = [f"{part.slice} <- rank {part.peer}" for part in self.recvs]
        form = f" {self.collective}" if self.collective else ""
        group = "" if self.group == "mesh" else f" in {self.group}"
        return f"post {self.name}{form}{group}: " + ", ".join(out + back)


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until all sends and receives of the named post are complete."""

    post: str

    def __str__(self) -> str:
        return f"wait {self.post}"


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the rows `src` to the rows `dst` of the same kind; dtypes may differ."""

    src: Slice
    dst: Slice

    def __str__(self) -> str:
        return f"copy {self.src} -> {self.dst}"


@dataclass(frozen=True, slots=True)
class Add:
    """Add the rows `src` to the rows `dst` of the same kind; dtypes may differ. Partial results merge by their LSE."""

    src: Slice
    dst: Slice

    def __str__(self) -> str:
        return f"add {self.src} -> {self.dst}"


@dataclass(frozen=True, slots=True)
class Clear:
    """Set the rows `dst` to the empty sum: 0, with an LSE of -inf."""

    dst: Slice

    def __str__(self) -> str:
        return f"clear {self.dst}"


@dataclass(frozen=True, slots=True)
class Finish:
    """Turn a partial (out, LSE) into the result: add sink logits, and round to the input's dtype.

    Args:
        src: The partial results.
        dst: The rows of the output.
        heads: The query heads, in the numbering of the whole problem.
    """

    src: Slice
    dst: Slice
    heads: Interval

    def __str__(self) -> str:
        return f"finish {self.src} -> {self.dst}"


@dataclass(frozen=True, slots=True)
class Delta:
    """Compute delta = sum(dout * out) for gradients that arrived without it, on the rank that holds the results."""

    out: Slice
    dout: Slice

    def __str__(self) -> str:
        return f"delta {self.out} . {self.dout}"


Step = Attend | AttendGrad | Post | Wait | Copy | Add | Clear | Finish | Delta
STEPS: dict[str, type[Step]] = {
    kind.__name__: kind for kind in (Attend, AttendGrad, Post, Wait, Copy, Add, Clear, Finish, Delta)
}


@dataclass(frozen=True)
class Program:
    """The steps of one rank in one pass. `Writer.program` makes it.

    Args:
        name: The name of the schedule, for people; nothing depends on it.
        direction: The pass, "forward" or "backward".
        rank: The rank that runs the program.
        world: The number of ranks.
        buffers: The buffers that the steps use: the caller's tensors, scratch, and buffers saved for the backward.
        steps: The steps, in the order in which they run.
        groups: The name of each group, with its ranks in order, this rank included.
        saves: The names of the buffers that a forward saves for its backward, which finds them under the same names:
            the caller's tensors, and buffers whose role is "saved".
    """

    name: str
    direction: Direction
    rank: int
    world: int
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    groups: tuple[tuple[str, tuple[int, ...]], ...]
    saves: tuple[str, ...] = ()

    @cached_property
    def buffer(self) -> dict[str, Buffer]:
        """The buffers by name."""
        return {buffer.name: buffer for buffer in self.buffers}

    @cached_property
    def group(self) -> dict[str, tuple[int, ...]]:
        """The groups by name."""
        return dict(self.groups)

    @cached_property
    def without_lse(self) -> frozenset[str]:
        """The buffers that some step uses without LSE or delta; the engine skips these fields of out and dout."""
        return frozenset(place.buffer for step in self.steps for place, _ in slices(step) if place.without_lse)

    def fields(self, part: Slice) -> tuple[Field, ...]:
        """Return the fields that a slice holds for each of its rows.

        Args:
            part: A slice of a buffer of this program.
        """
        return fields_of(self.buffer[part.buffer].kind, part.without_lse)

    def slice_bytes(self, part: Slice, sizes: Sizes) -> int:
        """Return the bytes of a slice, which are also the bytes of a message that moves it.

        Args:
            part: A slice of a buffer of this program.
            sizes: The sizes of this call.
        """
        buffer = self.buffer[part.buffer]
        return part.cells * sizes.row_bytes(buffer.kind, buffer.dtype, part.without_lse)

    def shares(self, buffer: Buffer, sizes: Sizes) -> bool:
        """Return whether a scratch buffer shares the memory of the output that it becomes.

        Args:
            buffer: A buffer of this program.
            sizes: The sizes of this call.
        """
        if not buffer.becomes:
            return False
        output = self.buffer[buffer.becomes]
        return sizes.row_bytes(buffer.kind, buffer.dtype) == sizes.row_bytes(output.kind, output.dtype)

    def staged(self, post: Post, sizes: Sizes, pulled: bool = False) -> list[Slice]:
        """Return the slices of a post that are sent from a packed copy, each once for all of its peers.

        A message is contiguous rows of the whole batch and all heads. Scratch has this layout; a caller's tensor has it
        only for a batch of 1. All other slices are packed first.

        Args:
            post: A post of this program.
            sizes: The sizes of this call.
            pulled: Whether peers read messages out of our scratch, so that slices of other buffers are packed as well.
        """
        out: dict[Slice, None] = {}
        for part in post.sends:
            buffer = self.buffer[part.slice.buffer]
            by_rows = buffer.role in ("scratch", "saved") and not self.shares(buffer, sizes)
            by_rows |= sizes.batch == 1 and all(field.width for field in self.fields(part.slice))
            by_rows &= not pulled or buffer.role == "scratch"
            if not by_rows or part.slice.heads != (0, buffer.heads):
                out[part.slice] = None
        return list(out)

    def received(self, sizes: Sizes) -> dict[int, int]:
        """Return the bytes that this rank receives from each other rank.

        Args:
            sizes: The sizes of this call.
        """
        out: dict[int, int] = {}
        for step in self.steps:
            for part in step.recvs if isinstance(step, Post) else ():
                if part.peer != self.rank:
                    out[part.peer] = out.get(part.peer, 0) + self.slice_bytes(part.slice, sizes)
        return out

    def scratch_bytes(self, sizes: Sizes) -> int:
        """Return the bytes of scratch that a run holds: scratch buffers and packed messages."""
        held = sum(b.bytes(sizes) for b in self.buffers if b.role == "scratch" and not self.shares(b, sizes))
        posts = (step for step in self.steps if isinstance(step, Post))
        return held + sum(self.slice_bytes(part, sizes) for post in posts for part in self.staged(post, sizes))

    def saved_bytes(self, sizes: Sizes) -> int:
        """Return the bytes that a forward saves for its backward beyond the caller's tensors.

        Args:
            sizes: The sizes of this call.
        """
        return sum(b.bytes(sizes) for b in self.buffers if b.role == "saved")

    def text(self) -> str:
        """Return a listing with one line for each buffer and step.

        >>> print(Program("", "forward", 0, 1, (Buffer("q", "q", 4, 2, role="input"),), (Wait("kv"),), ()).text())
        forward of rank 0 of 1
          input q: q, 4 rows, 2 heads, input
            0  wait kv
        """
        title = f"{self.direction} of rank {self.rank} of {self.world}"
        lines = [f"{self.name}, {title}" if self.name else title]
        for b in self.buffers:
            becomes = f", becomes {b.becomes}" if b.becomes else ""
            lines.append(f"  {b.role} {b.name}: {b.kind}, {b.rows} rows, {b.heads} heads, {b.dtype}{becomes}")
        lines += [f"  {n:3d}  {step}" for n, step in enumerate(self.steps)]
        if self.saves:
            lines.append(f"  saves {', '.join(self.saves)}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the program as JSON, for `from_json`."""
        return json.dumps(_encode(self))

    @staticmethod
    def from_json(text: str) -> Program:
        """Return the program that `to_json` wrote; raise ValueError for other JSON.

        Args:
            text: The JSON text.

        >>> program = Program("", "forward", 0, 1, (), (Wait("kv"),), (("mesh", (0,)),))
        >>> Program.from_json(program.to_json()) == program
        True
        """
        program = _decode(json.loads(text))
        if not isinstance(program, Program):
            raise ValueError("Program.from_json(text): expected the JSON of a program, as to_json writes it")
        return program


_CODED: dict[str, type[Any]] = {
    **STEPS,
    **{kind.__name__: kind for kind in (Program, Buffer, Slice, Part)},
}


def _encode(value: Any) -> Any:
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    kind = type(value).__name__
    if kind in _CODED:
        return {kind: {field.name: _encode(getattr(value, field.name)) for field in fields(value)}}
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "range":
            return range(*content)
        if kind not in _CODED:
            raise ValueError(f"Program.from_json(text): unknown type {kind!r}; expected JSON as to_json writes it")
        return _CODED[kind](**{name: _decode(item) for name, item in content.items()})
    return value


def slices(step: Step) -> Iterator[tuple[Slice, Literal["read", "write", "update"]]]:
    """Yield every slice of a step and how the step accesses it; for a post, until the wait."""
    match step:
        case Attend():
            yield step.q, "read"
            yield step.kv, "read"
            yield step.out, "update" if step.carry else "write"
        case AttendGrad():
            yield step.q, "read"
            yield step.out, "read"
            yield step.dout, "read"
            yield step.kv, "read"
            yield step.dq, "update" if step.add_dq else "write"
            yield step.dkv, "update" if step.add_dkv else "write"
        case Post():
            for part in step.sends:
                yield part.slice, "read"
            for part in step.recvs:
                yield part.slice, "write"
        case Copy() | Finish():
            yield step.src, "read"
            yield step.dst, "write"
        case Add():
            yield step.src, "read"
            yield step.dst, "update"
        case Clear():
            yield step.dst, "write"
        case Delta():
            yield step.out, "read"
            yield step.dout, "update"
