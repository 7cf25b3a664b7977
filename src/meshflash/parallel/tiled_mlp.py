"""Tiled MLPs: compute the hidden units of one slice of tokens at a time, so they never exist for all tokens at once.

The backward recomputes the hidden units of a slice and accumulates weight gradients in float32 or wider. All slices are
one autograd op, so FSDP gathers the weights once and reduces their gradients once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

from meshflash.parallel.autograd_op import AutogradOp, apply_op, compute_dtype
from meshflash.parallel.loss import wide_gemm

#: Maps the outputs of the input projections to the hidden units.
Activation = Callable[..., Tensor]


class TiledMLP(nn.Module):
    """Base of MLPs that `tile_mlp` can tile: their forward calls `tiled_mlp` where `tiles` is more than 1."""

    #: The number of slices that the tokens are computed in.
    tiles: int = 1


def tile_mlp(model: nn.Module, tiles: int) -> nn.Module:
    """Tile all MLPs of a model, forward and backward; the model is changed in place and returned.

    Results and gradients do not change. The backward recomputes hidden units: two ninths more GEMM FLOPs for a gated
    MLP, a sixth for a plain one, and none more than activation checkpointing recomputes anyway. Hooks of the
    projections are not called.

    Args:
        model: A model with `TiledMLP` modules.
        tiles: The number of slices of the tokens.

    >>> from meshflash.models.layers import GatedMLP
    >>> mlp, x = GatedMLP(8, 32), torch.randn(2, 5, 8)
    >>> want = mlp(x)
    >>> torch.allclose(tile_mlp(mlp, 3)(x), want, atol=1e-6)
    True
    """
    if tiles < 1:
        raise ValueError(f"tiles={tiles}: expected at least 1")
    found = [part for part in model.modules() if isinstance(part, TiledMLP)]
    if not found:
        raise ValueError(
            f"tiles: {type(model).__name__} has no meshflash.parallel.tiled_mlp.TiledMLP; make its MLP one, with a "
            "forward that calls tiled_mlp"
        )
    for part in found:
        part.tiles = tiles
    return model


def tiled_mlp(
    x: Tensor, in_projections: Sequence[nn.Module], out_projection: nn.Module, activation: Activation, tiles: int
) -> Tensor:
    """Return `out_projection(activation(*(project(x) for project in in_projections)))`, computed in slices of tokens.

    Args:
        x: The input, `[..., dim]`; the number of tokens need not be a multiple of `tiles`.
        in_projections: The linear layers to the hidden units, which `tp` may shard.
        out_projection: The linear layer back. Under `tp` its outputs are reduced once for all slices.
        activation: An elementwise function of the outputs of the input projections.
        tiles: The number of slices.
    """
    for layer in (*in_projections, out_projection):
        if type(layer) is not nn.Linear:
            raise ValueError(
                f"tiles: a tiled MLP takes the weights of its nn.Linear themselves; got {type(layer).__name__}. "
                "Shard the MLP or its block as one (wrap=), or use tiles=1"
            )
    layers: list[Any] = [*in_projections, out_projection]
    mesh = _tensor_parallel_mesh(layers)
    out: Any = layers[-1]
    if mesh is not None:  # the gradient of x is a sum over the hidden units of all ranks
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        x = whole.to_local(grad_placements=[Partial()])
    weights = [_local(w) for layer in layers for w in (layer.weight, layer.bias)]
    bias = None
    if mesh is not None:  # the bias is added once, after the reduction over ranks
        bias, weights[-1] = weights[-1], None
    op = _TiledMLPOp(activation, tiles, compute_dtype(x))
    y = apply_op(op, x.reshape(-1, x.shape[-1]), *weights)
    if mesh is not None:
        y = DTensor.from_local(y, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.reshape(*x.shape[:-1], out.weight.shape[0])


class _TiledMLPOp(AutogradOp):
    """Forward and backward of a tiled MLP.

    Its weights are (weight, bias or None) of each input projection, then of the output projection.
    """

    def __init__(self, activation: Activation, tiles: int, dtype: torch.dtype) -> None:
        self.activation, self.tiles, self.dtype = activation, tiles, dtype

    def empty_output(self, x: Tensor, *weights: Tensor | None) -> Tensor:
        last: Any = weights[-2]
        return x.new_zeros((), dtype=self.dtype).expand(len(x), len(last))

    def forward(self, x: Tensor, *weights: Tensor | None) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            *in_weights, last, bias = self._cast(weights)
            y = x.new_empty(len(x), len(last), dtype=self.dtype)
            for rows in self._rows(x):
                hidden = self.activation(*self._projected(x[rows].to(self.dtype), in_weights))
                if bias is None:
                    torch.mm(hidden, last.T, out=y[rows])
                else:
                    torch.addmm(bias, hidden, last.T, out=y[rows])
        return y

    def backward(self, dy: Tensor, wanted: Sequence[bool], x: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
        """Recompute the hidden units of each slice and accumulate the gradients of x and of the weights."""
        want_x, *want = wanted
        dx = torch.empty_like(x) if want_x else None
        sums = [
            torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) if w is not None and needed else None
            for w, needed in zip(weights, want, strict=True)
        ]
        with torch.autocast(x.device.type, enabled=False):
            *in_weights, last, _ = self._cast(weights)
            for rows in self._rows(x):
                x_rows, dy_rows = x[rows].to(self.dtype), dy[rows]
                projected = [one.requires_grad_() for one in self._projected(x_rows, in_weights)]
                with torch.enable_grad():  # autograd differentiates the activation only; GEMMs are done by hand
                    hidden = self.activation(*projected)
                _add(sums[-2], dy_rows.T, hidden.detach())
                _add_rows(sums[-1], dy_rows)
                grads = torch.autograd.grad(hidden, projected, dy_rows @ last)
                del hidden, projected  # before the next GEMMs allocate
                for n, grad in enumerate(grads):
                    _add(sums[2 * n], grad.T, x_rows)
                    _add_rows(sums[2 * n + 1], grad)
                if dx is not None:
                    dx[rows] = self._back(grads, in_weights)
        done = (
            None if total is None or w is None else total.to(w.dtype) for total, w in zip(sums, weights, strict=True)
        )
        return [dx, *done]

    def _rows(self, x: Tensor) -> Iterator[slice]:
        step = max(1, -(-len(x) // self.tiles))
        return (slice(begin, begin + step) for begin in range(0, len(x), step))

    def _cast(self, weights: Sequence[Tensor | None]) -> list[Any]:
        return [None if w is None else w.detach().to(self.dtype) for w in weights]

    def _projected(self, x: Tensor, in_weights: Sequence[Any]) -> list[Tensor]:
        return [functional.linear(x, w, b) for w, b in zip(in_weights[::2], in_weights[1::2], strict=True)]

    def _back(self, grads: Sequence[Tensor], in_weights: Sequence[Any]) -> Tensor:
        total = grads[0] @ in_weights[0]
        for grad, weight in zip(grads[1:], in_weights[2::2], strict=True):
            total = torch.addmm(total, grad, weight)
        return total


def _add(total: Tensor | None, a: Tensor, b: Tensor) -> None:
    """Accumulate a @ b in the dtype of the sum."""
    if total is None:
        return
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += wide_gemm(a, b, total.dtype)


def _add_rows(total: Tensor | None, rows: Tensor) -> None:
    if total is not None:
        total += rows.sum(0, dtype=total.dtype)


def _local(weight: Tensor | None) -> Tensor | None:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _tensor_parallel_mesh(layers: Sequence[Any]) -> Any:
    """Return the mesh over which the hidden units are sharded, or None if every rank has all of them."""
    weights = [layer.weight for layer in layers]
    placements = [w.placements if isinstance(w, DTensor) else (Replicate(),) for w in weights]
    if all(each == (Replicate(),) for each in placements):
        return None
    if placements != [(Shard(0),)] * (len(placements) - 1) + [(Shard(1),)]:
        raise ValueError(
            "tiles: expected weights that ColwiseParallel and RowwiseParallel shard over one axis, as tensor_plan "
            f"does; got {', '.join(map(str, placements))}"
        )
    return weights[0].device_mesh
