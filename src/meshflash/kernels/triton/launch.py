"""How Triton kernels are started: a grid over blocks and heads, tensors as descriptors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshflash.kernels.triton.block_tables import Blocks

#: Below this a scale is 0, or nearly, in float32.
LEAST_SCALE = torch.finfo(torch.float32).tiny
#: Numbers of any dtype that take a multiple of 16 bytes.
LINED = 64


def launch(kernel: Any, tables: Blocks, heads: int, *arguments: Any, **constants: Any) -> None:
    """One instance for each block and head, on the device of the tables, whichever is current."""
    with torch.cuda.device_of(tables.tiles):
        kernel[(len(tables), heads)](*arguments, **constants)


def fits(x: Tensor) -> bool:
    """Whether a descriptor can describe it: rows, and that they begin at multiples of 16 bytes."""
    unit = 16 // x.element_size()
    strides = [stride for size, stride in zip(x.shape[:3], x.stride(), strict=False) if size > 1]
    lined = x.data_ptr() % 16 == 0 and x.stride(-1) == 1
    return x.numel() > 0 and lined and all(n > 0 and n % unit == 0 for n in strides)


def strides_of(x: Tensor) -> list[int]:
    """Its strides as descriptors take them: of dimensions of one, whose own may be any, a multiple of 16 bytes."""
    *outer, inner = x.stride()
    return [LINED if size == 1 else stride for size, stride in zip(x.shape, outer, strict=False)] + [inner]


def described(x: Tensor, block: list[int]) -> Any:
    """A tensor as a descriptor of blocks."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), strides_of(x), block)
