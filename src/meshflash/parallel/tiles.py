"""MLPs over slices of tokens: what a token's hidden units are worth never exists for all tokens at once.

The backward computes a slice's hidden units again and adds its share of the weights' gradients in float32 or more. To
autograd it is one step: weights are gathered once, and their gradients come once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

from meshflash.parallel.loss import wide_product
from meshflash.parallel.one_step import Step, computed_in, run_step

#: From what the first projections say of a token to its hidden units.
Activation = Callable[..., Tensor]


class TiledMLP(nn.Module):
    """What an MLP is that `tile_mlp` finds: its forward calls `tiled_mlp` where it is to have several tiles."""

    #: How many slices its tokens are computed in.
    tiles: int = 1


def tile_mlp(model: nn.Module, tiles: int) -> nn.Module:
    """Let the MLPs of a model compute their tokens in so many slices, forward and backward; the model is changed.

    Results and gradients are those of all tokens at once. A backward computes hidden units again: two ninths more
    products for a gated MLP, a sixth for a plain one, and no more than it does under `recompute` anyway. Hooks of the
    projections are not called.

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
            f"tiles: {type(model).__name__} has no meshflash.parallel.tiles.TiledMLP; make its MLP one, with a forward "
            "that calls tiled_mlp"
        )
    for part in found:
        part.tiles = tiles
    return model


def tiled_mlp(x: Tensor, inside: Sequence[nn.Module], outside: nn.Module, activation: Activation, tiles: int) -> Tensor:
    """`outside(activation(*(project(x) for project in inside)))` over slices of the tokens.

    Args:
        x: `[..., dim]`; tokens need not be a multiple of tiles.
        inside: linear layers to the hidden units; over ranks of `tp` each has some of these.
        outside: the linear layer back; over ranks of `tp` their results are added, once for all slices.
        activation: of what each token's hidden units are told, one by one.
        tiles: how many slices.
    """
    for layer in (*inside, outside):
        if type(layer) is not nn.Linear:
            raise ValueError(
                f"tiles: an MLP in tiles takes the weights of its nn.Linear themselves; got {type(layer).__name__}. "
                "Shard the MLP or its block as one (wrap=), or leave it in one piece"
            )
    layers: list[Any] = [*inside, outside]
    mesh = _divided(layers)
    out: Any = layers[-1]
    if mesh is not None:  # every rank's hidden units have their say in the gradient of x
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        x = whole.to_local(grad_placements=[Partial()])
    weights = [_local(w) for layer in layers for w in (layer.weight, layer.bias)]
    bias = None
    if mesh is not None:  # once, to the sum over ranks
        bias, weights[-1] = weights[-1], None
    sliced = _Slices(activation, tiles, computed_in(x))
    y = run_step(sliced, x.reshape(-1, x.shape[-1]), *weights)
    if mesh is not None:
        y = DTensor.from_local(y, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()
    if bias is not None:
        y = y + bias.to(y.dtype)
    found: Tensor = y.reshape(*x.shape[:-1], out.weight.shape[0])
    return found


class _Slices(Step):
    """The computation. Weights are those of the first projections, then the last one's, each with its bias or None."""

    def __init__(self, activation: Activation, tiles: int, dtype: torch.dtype) -> None:
        self.activation, self.tiles, self.dtype = activation, tiles, dtype

    def place(self, x: Tensor, *weights: Tensor | None) -> Tensor:
        last: Any = weights[-2]
        return x.new_zeros((), dtype=self.dtype).expand(len(x), len(last))

    def forward(self, x: Tensor, *weights: Tensor | None) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            *inside, last, bias = self._cast(weights)
            y = x.new_empty(len(x), len(last), dtype=self.dtype)
            for rows in self._rows(x):
                hidden = self.activation(*self._projected(x[rows].to(self.dtype), inside))
                if bias is None:
                    torch.mm(hidden, last.T, out=y[rows])
                else:
                    torch.addmm(bias, hidden, last.T, out=y[rows])
        return y

    def backward(self, dy: Tensor, wanted: Sequence[bool], x: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
        """Gradients of x and of the weights, those that are wanted."""
        want_x, *want = wanted
        dx = torch.empty_like(x) if want_x else None
        sums = [
            torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) if w is not None and needed else None
            for w, needed in zip(weights, want, strict=True)
        ]
        with torch.autocast(x.device.type, enabled=False):
            *inside, last, _ = self._cast(weights)
            for rows in self._rows(x):
                x_rows, dy_rows = x[rows].to(self.dtype), dy[rows]
                said = [one.requires_grad_() for one in self._projected(x_rows, inside)]
                with torch.enable_grad():
                    hidden = self.activation(*said)
                _add(sums[-2], dy_rows.T, hidden.detach())
                _add_rows(sums[-1], dy_rows)
                grads = torch.autograd.grad(hidden, said, dy_rows @ last)
                del hidden, said
                for n, grad in enumerate(grads):
                    _add(sums[2 * n], grad.T, x_rows)
                    _add_rows(sums[2 * n + 1], grad)
                if dx is not None:
                    dx[rows] = self._back(grads, inside)
        done = (
            None if total is None or w is None else total.to(w.dtype) for total, w in zip(sums, weights, strict=True)
        )
        return [dx, *done]

    def _rows(self, x: Tensor) -> Iterator[slice]:
        step = max(1, -(-len(x) // self.tiles))
        return (slice(begin, begin + step) for begin in range(0, len(x), step))

    def _cast(self, weights: Sequence[Tensor | None]) -> list[Any]:
        return [None if w is None else w.detach().to(self.dtype) for w in weights]

    def _projected(self, x: Tensor, inside: Sequence[Any]) -> list[Tensor]:
        return [functional.linear(x, w, b) for w, b in zip(inside[::2], inside[1::2], strict=True)]

    def _back(self, grads: Sequence[Tensor], inside: Sequence[Any]) -> Tensor:
        total = grads[0] @ inside[0]
        for grad, weight in zip(grads[1:], inside[2::2], strict=True):
            total = torch.addmm(total, grad, weight)
        return total


def _add(total: Tensor | None, a: Tensor, b: Tensor) -> None:
    """Add a product, in the dtype of the sum."""
    if total is None:
        return
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += wide_product(a, b, total.dtype)


def _add_rows(total: Tensor | None, rows: Tensor) -> None:
    if total is not None:
        total += rows.sum(0, dtype=total.dtype)


def _local(weight: Tensor | None) -> Tensor | None:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _divided(layers: Sequence[Any]) -> Any:
    """The ranks that share the hidden units, or None where each has all of them."""
    weights = [layer.weight for layer in layers]
    cut = [w.placements if isinstance(w, DTensor) else (Replicate(),) for w in weights]
    if all(placements == (Replicate(),) for placements in cut):
        return None
    if cut != [(Shard(0),)] * (len(cut) - 1) + [(Shard(1),)]:
        raise ValueError(
            "tiles: expected weights that ColwiseParallel and RowwiseParallel divide over one axis, as tensor_plan "
            f"does; got {', '.join(map(str, cut))}"
        )
    return weights[0].device_mesh
