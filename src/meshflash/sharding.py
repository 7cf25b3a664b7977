"""Split a sequence over ranks (`shard`) and gather it again (`unshard`): token ids, labels, images, activations.

`unshard` is an all-gather whose backward is a reduce-scatter; `shard` moves nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from meshflash.core.layout import Layout
from meshflash.engine.group_context import group_context
from meshflash.groups import group_of


def shard(x: Tensor, layout: Layout, mesh: Any = None, dim: int = 1) -> Tensor:
    """Return this rank's tokens of a whole sequence, in the order of the layout.

    Args:
        x: The whole sequence, present on every rank.
        layout: The positions that each rank holds.
        mesh: The ranks that share the sequence: a process group, or a DeviceMesh. None means the default group.
        dim: The dimension of x that holds the tokens.

    Returns:
        A copy of this rank's tokens, also on one rank: `shard(x, layout).requires_grad_()` leaves x unchanged.

    The gradient of x on a rank is nonzero only at that rank's own tokens.

    >>> shard(torch.arange(6).reshape(1, 6), Layout.contiguous(6, 1)).tolist()
    [[0, 1, 2, 3, 4, 5]]
    """
    _, rank, _ = _check(x, layout, mesh, dim, "shard")
    if x.shape[dim] != layout.tokens:
        raise ValueError(f"shard: x has {x.shape[dim]} tokens in dimension {dim}, the layout {layout.tokens}")
    held = layout.ranges[rank]
    if not held:
        return x.narrow(dim, 0, 0).clone()  # a view would share x's version counter and autograd identity
    # torch.cat copies even a single range: callers may modify the result or set requires_grad on it without touching x
    index = [slice(None)] * (dim % x.ndim)
    return torch.cat([x[(*index, slice(r.start, r.stop, r.step))] for r in held], dim=dim)


def unshard(x: Tensor, layout: Layout, mesh: Any = None, dim: int = 1) -> Tensor:
    """Gather each rank's tokens and return the whole sequence, in order, on every rank.

    Args:
        x: This rank's tokens.
        layout: The positions that each rank holds.
        mesh: The ranks that share the sequence: a process group, or a DeviceMesh. None means the default group.
        dim: The dimension of x that holds the tokens.

    Returns:
        The whole sequence, as a copy, also on one rank.

    The gradient of a token is the sum over the losses of all ranks, as for torch's all-gather. Half-precision gradients
    are summed in float32. If all ranks compute the same loss from the whole sequence, divide it by the number of ranks.

    >>> unshard(torch.arange(6).reshape(1, 6), Layout.contiguous(6, 1)).tolist()
    [[0, 1, 2, 3, 4, 5]]
    """
    name, rank, world = _check(x, layout, mesh, dim, "unshard")
    if x.shape[dim] != layout.lengths[rank]:
        raise ValueError(
            f"unshard: x has {x.shape[dim]} tokens in dimension {dim}, "
            f"the layout gives rank {rank} {layout.lengths[rank]}"
        )
    if world == 1:
        return x.index_select(dim, _places(layout, x.device))
    if torch.compiler.is_compiling():
        return unshard_op(x, layout.text(), name, rank, dim % x.ndim)
    return _Unshard.apply(x, layout, name, rank, dim % x.ndim)


class _Unshard(torch.autograd.Function):
    """All-gather of shards, padded to the longest one; the backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, name: str, rank: int, dim: int) -> Tensor:
        ctx.call = layout, name, rank, dim
        return _gather(x, layout, name, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _scatter(grad, *ctx.call), None, None, None, None


def _gather(x: Tensor, layout: Layout, name: str, dim: int) -> Tensor:
    """All-gather the tokens of all ranks and put them in order."""
    longest = max(layout.lengths)
    rows = x.movedim(dim, 0)
    padded = x.new_zeros(longest, *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in range(layout.world)]
    dist.all_gather(gathered, padded, group=group_context(name).group)
    joined = torch.cat([part[:length] for part, length in zip(gathered, layout.lengths, strict=True)])
    return joined.index_select(0, _places(layout, x.device)).movedim(0, dim).contiguous()


def _scatter(grad: Tensor, layout: Layout, name: str, rank: int, dim: int) -> Tensor:
    """Reduce-scatter the gradients of all ranks and return the sum at this rank's tokens."""
    rows = grad.movedim(dim, 0)
    longest = max(layout.lengths)
    sums = torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else grad.dtype
    parts = []
    for other, length in enumerate(layout.lengths):
        part = grad.new_zeros(longest, *rows.shape[1:], dtype=sums)
        part[:length] = rows.index_select(0, torch.from_numpy(layout.positions(other)).to(grad.device))
        parts.append(part)
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts, group=group_context(name).group)
    own = mine[: layout.lengths[rank]].movedim(0, dim)
    return own.to(grad.dtype).contiguous()


# The same two functions as ops: torch.compile cannot trace the lookup of a process group.
@torch.library.custom_op("meshflash::unshard", mutates_args=())
def unshard_op(x: Tensor, layout: str, group: str, rank: int, dim: int) -> Tensor:
    """Return the whole sequence."""
    return _gather(x, Layout.parse(layout), group, dim)


@torch.library.custom_op("meshflash::unshard_backward", mutates_args=())
def unshard_backward_op(grad: Tensor, layout: str, group: str, rank: int, dim: int) -> Tensor:
    """Return the gradient of this rank's tokens."""
    return _scatter(grad, Layout.parse(layout), group, rank, dim)


@unshard_op.register_fake
def _(x: Tensor, layout: str, group: str, rank: int, dim: int) -> Tensor:
    return _sized(x, Layout.parse(layout).tokens, dim)


@unshard_backward_op.register_fake
def _(grad: Tensor, layout: str, group: str, rank: int, dim: int) -> Tensor:
    return _sized(grad, Layout.parse(layout).lengths[rank], dim)


def _sized(x: Tensor, tokens: int, dim: int) -> Tensor:
    """Return a new tensor like x with `tokens` tokens in dimension `dim`."""
    return x.new_empty(*x.shape[:dim], tokens, *x.shape[dim + 1 :])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.call = inputs[1:]


unshard_op.register_autograd(
    lambda ctx, grad: (unshard_backward_op(grad, *ctx.call), None, None, None, None), setup_context=_setup
)


def _places(layout: Layout, device: torch.device) -> Tensor:
    """Return, for each position, its index in the concatenation of all ranks' tokens."""
    order = torch.cat([torch.from_numpy(layout.positions(rank)) for rank in range(layout.world)])
    return torch.argsort(order).to(device)


def _check(x: Any, layout: Any, mesh: Any, dim: int, name: str) -> tuple[str, int, int]:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(x).__name__}")
    if not isinstance(layout, Layout):
        raise ValueError(f"{name}: expected a meshflash.Layout, such as Layout.zigzag(tokens, world); got {layout!r}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{name}: dim={dim}, and x has {x.ndim} dimensions")
    group, rank, world = group_of(mesh)
    if layout.world != world:
        raise ValueError(f"{name}: the layout is for {layout.world} ranks, the group has {world}")
    return group, rank, world
