"""An autograd op with a hand-written backward that is recorded before its forward runs.

Activation checkpointing stops recomputing a block as soon as all its saved tensors exist. An op that saves its inputs
first therefore never recomputes its own forward when it is the last op of the block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class AutogradOp(ABC):
    """A differentiable function of one input and several weights; subclasses run both passes without autograd."""

    @abstractmethod
    def empty_output(self, x: Tensor, *weights: Tensor | None) -> Tensor:
        """Return a tensor with the output's shape and dtype that costs no memory and no time (an expanded scalar)."""

    @abstractmethod
    def forward(self, x: Tensor, *weights: Tensor | None) -> Tensor:
        """Return the output."""

    @abstractmethod
    def backward(self, dy: Tensor, wanted: Sequence[bool], x: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
        """Return the gradients of x and of each weight; None where `wanted` is False."""


def apply_op(op: AutogradOp, x: Tensor, *weights: Tensor | None) -> Tensor:
    """Run an op and record its backward where gradients are enabled.

    Args:
        op: The op.
        x: Its input.
        weights: Its weights; None for one that is missing.
    """
    if not torch.is_grad_enabled():
        return op.forward(x, *weights)
    return _Forward.apply(_SaveAndBackward.apply(op, x, *weights), op, (x, *weights))


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a GEMM of x runs in: autocast's dtype if autocast is on, else the dtype of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _SaveAndBackward(torch.autograd.Function):
    """Save the inputs and run the backward. Its output is an empty tensor that only routes the gradient here.

    Saving is a separate autograd node from computing: during recomputation torch raises out of the block once the last
    tensor is saved, so `_Forward` of the last op does not run again.
    """

    @staticmethod
    def forward(ctx: Any, op: AutogradOp, x: Tensor, *weights: Tensor | None) -> Tensor:
        ctx.op = op
        ctx.save_for_backward(x, *weights)
        return op.empty_output(x, *weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        return None, *ctx.op.backward(dy, ctx.needs_input_grad[1:], x, *weights)


class _Forward(torch.autograd.Function):
    """Compute the output; pass its gradient to the empty output of `_SaveAndBackward`."""

    @staticmethod
    def forward(ctx: Any, empty: Tensor, op: AutogradOp, tensors: tuple[Any, ...]) -> Tensor:
        return op.forward(*tensors)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy, None, None
