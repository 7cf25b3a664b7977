"""The placement of a program's buffers: scratch and packed copies in an arena, saved buffers in their own memory.

A field has the layout `[rows, batch, heads, width]` in memory, so any run of rows is one contiguous message. Kernels
take views of it: `[batch, rows, heads, width]`, or `[batch, heads, rows]` for a field without a width.
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
    """Everything that a bound program depends on besides its steps and its mask. `compile_spec` makes it.

    Args:
        batch: The number of batch rows.
        dim: The head dim of queries and keys.
        value_dim: The head dim of values.
        dtype: The dtype of the inputs.
        reduce_dtype: The dtype in which gradients of keys and values travel and are reduced.
        device: The device of the tensors.
        kernel: The requested kernel, or "auto".
        deterministic: Whether the backward must give the same bits twice.
        lse_gradient: Whether the LSE has a gradient.
    """

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
        """Return the sizes by which a program counts bytes."""
        partial = accumulator_dtype(self.dtype).itemsize
        return Sizes(self.batch, self.dim, self.value_dim, self.dtype.itemsize, partial, self.reduce_dtype.itemsize)

    def torch_dtype(self, dtype: Dtype) -> torch.dtype:
        """Return the torch dtype of a program's dtype.

        Args:
            dtype: The name of the dtype in programs: "input", "partial" or "reduce".
        """
        if dtype == "partial":
            return accumulator_dtype(self.dtype)
        return self.reduce_dtype if dtype == "reduce" else self.dtype


@dataclass(frozen=True)
class _Piece:
    """The place of one field: the byte at which it begins, and its shape and dtype in memory."""

    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class Placement:
    """The offsets of a program's buffers for one setting. A `MeshExecutable` makes one for each pass.

    `bytes` is the size of the arena, `used` the same without padding, and `saved` the size of the saved buffers.

    Args:
        program: The program.
        setting: The shapes, dtypes and device.
        kept: The saved buffers of the forward; both passes place them alike.
        pulled: Whether peers read messages from the arena. Then everything that the program sends lies in it.
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
        """Return the slices of a post that are packed into a copy before they are sent.

        Args:
            post: A post of the program.
        """
        return self.program.staged(post, self.setting.sizes, self.pulled)

    def begins(self, post: Post, place: Slice, field: Field) -> int:
        """Return the byte of the arena at which a message begins.

        Args:
            post: The post that sends the message.
            place: The slice that it sends.
            field: The field of the slice.
        """
        if place in self.staged(post):
            return self._pieces[(post.name, place), field.name].begin
        piece = self._pieces[place.buffer, field.name]
        rows = max(1, piece.shape[0])
        return piece.begin + place.rows[0] * (piece.bytes // rows)

    def message(self, memory: Tensor, key: Any, field: Field, place: Slice) -> Tensor:
        """Return rows of a field, or a whole packed copy, as a flat message.

        Args:
            memory: The arena, or the memory of saved buffers.
            key: The name of the buffer, or (post, slice) of a packed copy.
            field: The field.
            place: The slice that is sent or received.
        """
        whole = self._tensor(memory, key, field)
        return whole[slice(*place.rows)].view(-1) if key == place.buffer else whole.view(-1)

    def view(self, memory: Tensor, place: Slice, field: Field) -> Tensor:
        """Return rows and heads of a field of a scratch or saved buffer, as kernels take them.

        Args:
            memory: The arena, or the memory of saved buffers.
            place: The slice of the buffer.
            field: The field.
        """
        return as_kernels_take(self._tensor(memory, place.buffer, field)[slice(*place.rows), :, slice(*place.heads)])

    def strided(
        self, place: Slice, field: Field, flat: bool
    ) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]:
        """Return (dtype, size, strides, offset) of the view of a slice, for `as_strided` on its memory.

        Args:
            place: The slice of the buffer.
            field: The field.
            flat: Whether to view whole rows as a flat message, instead of as kernels take them.
        """
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
        """Return a whole packed copy, as kernels take it.

        Args:
            memory: The arena.
            key: (post, slice) of the packed copy.
            field: The field.
        """
        return as_kernels_take(self._tensor(memory, key, field))

    def _tensor(self, memory: Tensor, key: Any, field: Field) -> Tensor:
        piece = self._pieces[key, field.name]
        return memory[piece.begin : piece.begin + piece.bytes].view(piece.dtype).view(piece.shape)


def as_kernels_take(x: Tensor) -> Tensor:
    """Return a view `[batch, rows, heads, width]`, or `[batch, heads, rows]` of a field without a width.

    Args:
        x: The field as it lies in memory, `[rows, batch, heads, width]` or `[rows, batch, heads]`.
    """
    return x.transpose(0, 1) if x.ndim == 4 else x.permute(1, 2, 0)
