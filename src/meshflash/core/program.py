"""Programs: what one rank does in one pass, as frozen steps on named buffers.

A schedule builds programs, the verifier proves them, the engine runs them, `plan` draws them; each of
them reads only what is written here. Tiles are not part of a program: a step names the positions of
its rows, and the tables are bound at call time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

Direction = Literal["forward", "backward"]
#: "input" is that of q, k and v; "partial" float32 (float64 for float64); "reduce" what gradients travel in.
Dtype = Literal["input", "partial", "reduce"]
#: Inputs and outputs are the caller's tensors; scratch comes from a pool; what is saved lives from a forward to its
#: backward, which only reads it.
Role = Literal["input", "output", "scratch", "saved"]
Ranges = tuple[range, ...]
Interval = tuple[int, int]


@dataclass(frozen=True)
class Field:
    """One tensor of a buffer, `[batch, rows, heads, width]`; without a width `[batch, heads, rows]`."""

    name: str
    width: Literal["dim", "value_dim", ""]
    always_partial: bool = False


#: What each kind of buffer holds for its rows.
KINDS: dict[str, tuple[Field, ...]] = {
    "q": (Field("q", "dim"),),
    "kv": (Field("k", "dim"), Field("v", "value_dim")),
    "out": (Field("out", "value_dim"), Field("lse", "", always_partial=True)),
    "dout": (Field("dout", "value_dim"), Field("delta", "", always_partial=True)),
    "dq": (Field("dq", "dim"),),
    "dkv": (Field("dk", "dim"), Field("dv", "value_dim")),
}
#: Those of which one number a row, the LSE or delta, may be left out.
LSE_KINDS = frozenset({"out", "dout"})
#: What a forward leaves for a backward where it keeps nothing but what every backward needs.
SAVES = ("q", "kv", "out")
#: The kinds whose heads are key heads; those of all others are query heads.
KEY_KINDS = frozenset({"kv", "dkv"})


def fields_of(kind: str, without_lse: bool = False) -> tuple[Field, ...]:
    """The fields of a kind; of bare rows, the first."""
    return KINDS[kind][:1] if without_lse else KINDS[kind]


@dataclass(frozen=True)
class Sizes:
    """The numbers that turn rows and heads into bytes."""

    batch: int = 1
    dim: int = 64
    value_dim: int = 64
    input_bytes: int = 2
    partial_bytes: int = 4
    reduce_bytes: int = 4

    def width(self, field: Field) -> int:
        """Elements of a field for one row and head."""
        return {"dim": self.dim, "value_dim": self.value_dim, "": 1}[field.width]

    def row_bytes(self, kind: str, dtype: Dtype, without_lse: bool = False) -> int:
        """Bytes of one row of one head, over the batch."""
        each = {"input": self.input_bytes, "partial": self.partial_bytes, "reduce": self.reduce_bytes}
        return self.batch * sum(
            self.width(field) * each["partial" if field.always_partial else dtype]
            for field in fields_of(kind, without_lse)
        )


@dataclass(frozen=True)
class Buffer:
    """Room for rows x heads of one kind.

    Scratch that `becomes` an output shares its memory where their dtypes agree, and copying it there is
    then nothing.
    """

    name: str
    kind: str
    rows: int
    heads: int
    dtype: Dtype = "input"
    role: Role = "scratch"
    becomes: str = ""

    def bytes(self, sizes: Sizes) -> int:
        """What it takes."""
        return self.rows * self.heads * sizes.row_bytes(self.kind, self.dtype)


@dataclass(frozen=True)
class Slice:
    """Some rows and heads of a buffer, counted within the buffer.

    Rows `without_lse` are results without their LSE, or gradients of results without their delta. The rank that copies
    or receives them does not know these values.
    """

    buffer: str
    rows: Interval
    heads: Interval
    without_lse: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """How many rows and heads."""
        return self.rows[1] - self.rows[0], self.heads[1] - self.heads[0]

    @property
    def cells(self) -> int:
        """Rows times heads."""
        return (self.rows[1] - self.rows[0]) * (self.heads[1] - self.heads[0])

    @property
    def index(self) -> tuple[slice, slice]:
        """For arrays of rows and heads."""
        return slice(*self.rows), slice(*self.heads)

    def overlaps(self, other: Slice) -> bool:
        """Whether the two share rows and heads; their buffers may be two names of one memory."""
        return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in ((self.rows, other.rows), (self.heads, other.heads)))

    def __str__(self) -> str:
        suffix = " without LSE" if self.without_lse else ""
        return f"{self.buffer}[{self.rows[0]}:{self.rows[1]}, {self.heads[0]}:{self.heads[1]}]{suffix}"


@dataclass(frozen=True)
class Attend:
    """Attention of query rows over key rows, into (out, lse).

    `q_positions` and `k_positions` say where the rows stand in the sequence, `heads` which query heads
    of the whole they are. With `carry` the result continues what `out` holds; without, it overwrites.
    `final` makes it the result itself: in the input's dtype, with sink logits.
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


@dataclass(frozen=True)
class AttendGrad:
    """The gradients of the same: of the query rows and of the key rows, each overwritten or added to.

    `out` holds the results of the query rows over all keys, `dout` the gradients of those.
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


@dataclass(frozen=True)
class Part:
    """What goes to, or comes from, one other rank."""

    peer: int
    slice: Slice


@dataclass(frozen=True)
class Post:
    """Begin to move. The parts between two ranks match in the order of their posts within a group.

    All parts of a post move at once, and the posts of a group one after another. A `collective` says
    that every rank of the group makes this post with equal parts: "all_gather" (each sends one slice to
    all others) or "all_to_all"; a transport may then use one call for it.
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


@dataclass(frozen=True)
class Wait:
    """Wait until a post has moved all it sends and receives."""

    post: str

    def __str__(self) -> str:
        return f"wait {self.post}"


@dataclass(frozen=True)
class Copy:
    """Overwrite with other rows of the same kind; dtypes may differ."""

    src: Slice
    dst: Slice

    def __str__(self) -> str:
        return f"copy {self.src} -> {self.dst}"


@dataclass(frozen=True)
class Add:
    """Add other rows of the same kind; dtypes may differ. Partial results are merged by their LSE."""

    src: Slice
    dst: Slice

    def __str__(self) -> str:
        return f"add {self.src} -> {self.dst}"


@dataclass(frozen=True)
class Clear:
    """Set to nothing: 0, and an LSE of -inf."""

    dst: Slice

    def __str__(self) -> str:
        return f"clear {self.dst}"


@dataclass(frozen=True)
class Finish:
    """Turn a partial (out, lse) into the result: sink logits join, and the dtype becomes the input's."""

    src: Slice
    dst: Slice
    heads: Interval

    def __str__(self) -> str:
        return f"finish {self.src} -> {self.dst}"


@dataclass(frozen=True)
class Delta:
    """Complete gradients of results that came bare, where those results are."""

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
    """What one rank does in one pass. `name` is for people.

    `groups` lists, by name, the ranks that this one shares a group with, itself included, in their
    order. A forward `saves` these buffers; a backward finds them under the same names: the caller's, and
    buffers of its own whose role is "saved".
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
        """The buffers of which rows are bare somewhere: of the caller's, the LSE is not made, and delta not read."""
        return frozenset(place.buffer for step in self.steps for place, _ in slices(step) if place.without_lse)

    def fields(self, part: Slice) -> tuple[Field, ...]:
        """What a slice holds for each of its rows."""
        return fields_of(self.buffer[part.buffer].kind, part.without_lse)

    def slice_bytes(self, part: Slice, sizes: Sizes) -> int:
        """What a slice takes, and what moving it moves."""
        buffer = self.buffer[part.buffer]
        return part.cells * sizes.row_bytes(buffer.kind, buffer.dtype, part.without_lse)

    def shares(self, buffer: Buffer, sizes: Sizes) -> bool:
        """Whether scratch is the memory of the output that it becomes."""
        if not buffer.becomes:
            return False
        output = self.buffer[buffer.becomes]
        return sizes.row_bytes(buffer.kind, buffer.dtype) == sizes.row_bytes(output.kind, output.dtype)

    def staged(self, post: Post, sizes: Sizes, pulled: bool = False) -> list[Slice]:
        """The slices of a post that are sent by way of a packed copy.

        Messages are rows of the whole batch and of all heads, one after another: scratch lies like that.
        A caller's tensor does only with a batch of 1. One slice is packed once for all its peers. Where peers pull
        messages out of our scratch, all that lies elsewhere is packed.
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
        """The bytes that come from each other rank."""
        out: dict[int, int] = {}
        for step in self.steps:
            for part in step.recvs if isinstance(step, Post) else ():
                if part.peer != self.rank:
                    out[part.peer] = out.get(part.peer, 0) + self.slice_bytes(part.slice, sizes)
        return out

    def scratch_bytes(self, sizes: Sizes, pulled: bool = False) -> int:
        """The scratch that a run holds: buffers, and packed copies of what is sent."""
        held = sum(b.bytes(sizes) for b in self.buffers if b.role == "scratch" and not self.shares(b, sizes))
        posts = (step for step in self.steps if isinstance(step, Post))
        return held + sum(self.slice_bytes(part, sizes) for post in posts for part in self.staged(post, sizes, pulled))

    def saved_bytes(self, sizes: Sizes) -> int:
        """What a forward leaves for its backward beyond the caller's tensors."""
        return sum(b.bytes(sizes) for b in self.buffers if b.role == "saved")

    def text(self) -> str:
        """One line for each buffer and step.

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
        """All of it, for `from_json`."""
        return json.dumps(_encode(self))

    @staticmethod
    def from_json(text: str) -> Program:
        """The program that `to_json` wrote.

        >>> program = Program("", "forward", 0, 1, (), (Wait("kv"),), (("mesh", (0,)),))
        >>> Program.from_json(program.to_json()) == program
        True
        """
        program = _decode(json.loads(text))
        if not isinstance(program, Program):
            raise ValueError("Program.from_json: this is not a program that to_json wrote")
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
            raise ValueError(f"Program.from_json: {kind!r} is no part of a program")
        return _CODED[kind](**{name: _decode(item) for name, item in content.items()})
    return value


def slices(step: Step) -> Iterator[tuple[Slice, Literal["read", "write", "update"]]]:
    """What a step reads and writes at once; of a post, what it begins to."""
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
