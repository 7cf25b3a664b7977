"""Where a program's own buffers lie: scratch and packed copies in an arena, what is saved in memory of its own.

In memory a field is `[rows, batch, heads, width]`, so that any run of rows is one message; kernels see it
as `[batch, rows, heads, width]`, or `[batch, heads, rows]` where it has no width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshflash.core.program import Buffer, Dtype, Field, Post, Program, Sizes, Slice, fields_of
from meshflash.engine.memory import ALIGNMENT
from meshflash.kernels.contract import accumulator_dtype


@dataclass(frozen=True)
class Setting:
    """What a bound program depends on besides its steps and its mask."""

    batch: int
    dim: int
    value_dim: int
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    device: torch.device
    kernel: str
    deterministic: bool
    lse_gradient: bool = False

    @property
    def sizes(self) -> Sizes:
        """For counting bytes."""
        partial = accumulator_dtype(self.dtype).itemsize
        return Sizes(self.batch, self.dim, self.value_dim, self.dtype.itemsize, partial, self.reduce_dtype.itemsize)

    def torch_dtype(self, dtype: Dtype) -> torch.dtype:
        """What a program's word for a dtype means here."""
        if dtype == "partial":
            return accumulator_dtype(self.dtype)
        return self.reduce_dtype if dtype == "reduce" else self.dtype


@dataclass(frozen=True)
class _Piece:
    """One field: where it begins, and its shape in memory."""

    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class Placement:
    """The buffers of one program in one setting: `bytes` of an arena, of which it uses `used`, and `saved` bytes.

    What is saved lies as the buffers `kept` of the forward do, in both passes. Where messages are `pulled` by
    peers, all that is sent lies in the arena.
    """

    def __init__(self, program: Program, setting: Setting, kept: tuple[Buffer, ...] = (), pulled: bool = False) -> None:
        self.program, self.setting, self.pulled = program, setting, pulled
        self._pieces: dict[tuple[Any, str], _Piece] = {}
        self.bytes = self.used = 0
        for buffer in kept:
            self._place(buffer.name, buffer, buffer.rows, buffer.heads)
        self.saved, self.bytes, self.used = self.bytes, 0, 0
        sizes = setting.sizes
        for buffer in program.buffers:
            if buffer.role == "scratch" and not program.shares(buffer, sizes):
                self._place(buffer.name, buffer, buffer.rows, buffer.heads)
        for step in program.steps:
            if isinstance(step, Post):
                for part in self.staged(step):
                    self._place(
                        (step.name, part), program.buffer[part.buffer], *part.shape, without_lse=part.without_lse
                    )

    def _place(self, key: Any, held: Buffer, rows: int, heads: int, without_lse: bool = False) -> None:
        setting = self.setting
        for field in fields_of(held.kind, without_lse):
            shape = (rows, setting.batch, heads) + ((setting.sizes.width(field),) if field.width else ())
            dtype = setting.torch_dtype("partial" if field.always_partial else held.dtype)
            piece = _Piece(self.bytes, shape, dtype)
            self._pieces[key, field.name] = piece
            self.used += piece.bytes
            self.bytes += -(-piece.bytes // ALIGNMENT) * ALIGNMENT

    def staged(self, post: Post) -> list[Slice]:
        """The slices of a post that are sent by way of a packed copy."""
        return self.program.staged(post, self.setting.sizes, self.pulled)

    def begins(self, post: Post, place: Slice, field: Field) -> int:
        """The byte of the arena at which a message begins that a post sends."""
        if place in self.staged(post):
            return self._pieces[(post.name, place), field.name].begin
        piece = self._pieces[place.buffer, field.name]
        rows = max(1, piece.shape[0])
        return piece.begin + place.rows[0] * (piece.bytes // rows)

    def message(self, memory: Tensor, key: Any, field: Field, place: Slice) -> Tensor:
        """Rows of a field as one flat message."""
        whole = self._tensor(memory, key, field)
        return whole[slice(*place.rows)].view(-1) if key == place.buffer else whole.view(-1)

    def view(self, memory: Tensor, place: Slice, field: Field) -> Tensor:
        """Rows and heads of a field of scratch, or of what is saved, as kernels take them."""
        return as_kernels_take(self._tensor(memory, place.buffer, field)[slice(*place.rows), :, slice(*place.heads)])

    def strided(
        self, place: Slice, field: Field, flat: bool
    ) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]:
        """The same of a buffer, or whole rows as a flat message: dtype, size, strides and offset in its memory."""
        piece = self._pieces[place.buffer, field.name]
        _, batch, heads, *last = piece.shape
        width = last[0] if last else 1
        (a, b), (c, d) = place.rows, place.heads
        row = batch * heads * width
        offset = piece.begin // piece.dtype.itemsize + a * row + c * width
        if flat:
            return piece.dtype, ((b - a) * row,), (1,), offset
        if last:
            return piece.dtype, (batch, b - a, d - c, width), (heads * width, row, width, 1), offset
        return piece.dtype, (batch, d - c, b - a), (heads, 1, row), offset

    def copy(self, memory: Tensor, key: Any, field: Field) -> Tensor:
        """All of a packed copy, as kernels take it."""
        return as_kernels_take(self._tensor(memory, key, field))

    def _tensor(self, memory: Tensor, key: Any, field: Field) -> Tensor:
        piece = self._pieces[key, field.name]
        return memory[piece.begin : piece.begin + piece.bytes].view(piece.dtype).view(piece.shape)


def as_kernels_take(x: Tensor) -> Tensor:
    """`[rows, batch, heads, width]` as `[batch, rows, heads, width]`; without a width as `[batch, heads, rows]`."""
    return x.transpose(0, 1) if x.ndim == 4 else x.permute(1, 2, 0)
