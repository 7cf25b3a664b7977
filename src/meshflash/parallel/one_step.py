"""What autograd sees as one step: a computation with a backward of its own, which is there before its result is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Step(ABC):
    """A function of a tensor and weights, and its gradients. Both run without autograd."""

    @abstractmethod
    def place(self, x: Tensor, *weights: Tensor | None) -> Tensor:
        """Something of the shape and dtype of the result that takes no memory and no time."""

    @abstractmethod
    def forward(self, x: Tensor, *weights: Tensor | None) -> Tensor:
        """The result."""

    @abstractmethod
    def backward(self, dy: Tensor, wanted: Sequence[bool], x: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
        """Gradients of x and of the weights, those that are wanted."""


def run_step(step: Step, x: Tensor, *weights: Tensor | None) -> Tensor:
    """The result, with gradients where they are asked for."""
    if not torch.is_grad_enabled():
        return step.forward(x, *weights)
    y: Tensor = _Values.apply(_Gradients.apply(step, x, *weights), step, (x, *weights))
    return y


def computed_in(x: Tensor) -> torch.dtype:
    """The dtype that products of x are in: autocast's, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _Gradients(torch.autograd.Function):
    """All that the backward needs and does. Its result is an empty place for `_Values`, whose gradient comes here.

    They are apart so that what is saved is saved before anything is computed: a block that computes itself again for
    its backward ends when all that was saved is there, and so leaves its last step out.
    """

    @staticmethod
    def forward(ctx: Any, step: Step, x: Tensor, *weights: Tensor | None) -> Tensor:
        ctx.step = step
        ctx.save_for_backward(x, *weights)
        return step.place(x, *weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        return None, *ctx.step.backward(dy, ctx.needs_input_grad[1:], x, *weights)


class _Values(torch.autograd.Function):
    """The result, with the gradients of the place that it takes."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, step: Step, tensors: tuple[Any, ...]) -> Tensor:
        return step.forward(*tensors)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy, None, None
