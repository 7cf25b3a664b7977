"""How Triton kernels are started: a grid over blocks and heads, tensors as descriptors, scratch memory."""

from __future__ import annotations

from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor

from meshflash.kernels.triton_tables import Blocks

#: How far apart the batch rows and the heads of a tensor are in a descriptor of two dimensions: in rows (batch, head)
#: and in columns (batch, head).
Coordinates = tuple[int, int, int, int]


def launch(kernel: Any, tables: Blocks, heads: int, *arguments: Any, **constants: Any) -> None:
    """One instance for each block and head, on the device of the tables, whichever is current."""
    with torch.cuda.device_of(tables.tiles):
        kernel[(len(tables), heads)](*arguments, **constants)


def launch_with_scratch(kernel: Any, tables: Blocks, heads: int, *arguments: Any, **constants: Any) -> None:
    """The same for a kernel that makes descriptors itself, which takes memory; what others set for that stays."""
    import triton

    def memory(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=tables.tiles.device)

    context = copy_context()
    context.run(triton.set_allocator, memory)
    context.run(launch, kernel, tables, heads, *arguments, **constants)


def fits(x: Tensor) -> bool:
    """Whether a descriptor can describe it: rows, and that they begin at multiples of 16 bytes."""
    unit = 16 // x.element_size()
    strides = [stride for size, stride in zip(x.shape[:3], x.stride(), strict=False) if size > 1]
    return x.numel() > 0 and x.data_ptr() % 16 == 0 and all(n > 0 and n % unit == 0 for n in strides)


def described(x: Tensor, block: list[int]) -> Any:
    """A tensor as a descriptor of blocks."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


def in_rows(x_BTHD: Tensor, rows: int) -> tuple[Any, Coordinates]:
    """A tensor as a descriptor of two dimensions, tokens one below the other, and where batch rows and heads are."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    batch, tokens, heads, width = x_BTHD.shape
    of_batch, of_token, of_head, _ = x_BTHD.stride()
    (rows_b, columns_b), (rows_h, columns_h) = divmod(of_batch, of_token), divmod(of_head, of_token)
    height = (batch - 1) * rows_b + (heads - 1) * rows_h + tokens
    across = (batch - 1) * columns_b + (heads - 1) * columns_h + width
    descriptor = TensorDescriptor(x_BTHD, [height, across], [of_token, 1], [rows, width])
    return descriptor, (rows_b, rows_h, columns_b, columns_h)
