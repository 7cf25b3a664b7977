"""Optimizers with sharded state, and gradient norms over a mesh."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate

from meshflash.parallel.mesh import reduce_mesh
from meshflash.parallel.weights import parameters


def sharded_optimizer(
    model: nn.Module,
    optimizer: type[torch.optim.Optimizer],
    mesh: DeviceMesh,
    *,
    groups: list[dict[str, Any]] | None = None,
    **options: Any,
) -> torch.optim.Optimizer:
    """Return an optimizer whose state is sharded over ranks (ZeRO-1), for a model of `replicate`.

    One rank updates each weight and broadcasts it. A weight that several modules share counts once, and a frozen weight
    is left out. The optimizer of a model of `shard` is sharded already: the result is then a plain optimizer.

    Args:
        model: The model whose weights learn.
        optimizer: The optimizer class, as `torch.optim.AdamW`.
        mesh: A mesh of `init_mesh`.
        groups: Parameter groups as optimizers take them; by default one group of all weights that learn.
        options: Arguments of the optimizer, as `lr`.

    >>> from meshflash import shutdown
    >>> from meshflash.parallel.mesh import init_mesh
    >>> type(sharded_optimizer(nn.Linear(2, 2), torch.optim.SGD, init_mesh(), lr=0.1)).__name__
    'SGD'
    >>> shutdown()
    """
    learning = list(parameters(model))
    ranks, weights = reduce_mesh(mesh), learning if groups is None else groups
    if ranks.size() == 1 or any(isinstance(p, DTensor) for p in learning):
        return optimizer(weights, **options)
    return ZeroRedundancyOptimizer(weights, optimizer, process_group=ranks.get_group(), **options)


@torch.no_grad()
def gradient_norm(weights: nn.Module | Iterable[nn.Parameter] | Tensor, norm: float = 2.0) -> Tensor:
    """Return the norm of all gradients over the mesh, as a single device would compute it. All ranks must call it.

    Args:
        weights: A model, its parameters, or one parameter; gradients may be DTensors on any mesh.
        norm: The order of the norm; `math.inf` is the largest absolute value.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> layer.weight.grad = torch.full((1, 1), -3.0)
    >>> float(gradient_norm(layer))
    3.0
    """
    grads = [p.grad for p in _all(weights) if p.grad is not None]
    if not grads:
        return torch.zeros(())
    device = grads[0].device
    powers: dict[tuple[Any, ...], Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=device))
    for grad in grads:
        groups: tuple[Any, ...] = ()
        if isinstance(grad, DTensor):  # reduce over the axes along which it is sharded
            cut = [n for n, placement in enumerate(grad.placements) if not isinstance(placement, Replicate)]
            groups = tuple(grad.device_mesh.get_group(n) for n in cut)
            grad = grad.to_local()
        if not grad.numel():  # an empty shard still takes part in the all-reduce
            grad = grad.new_zeros(1)
        found = torch.linalg.vector_norm(grad, norm, dtype=torch.promote_types(grad.dtype, torch.float32)).double()
        if math.isinf(norm):
            powers[groups] = torch.maximum(powers[groups], found)
        else:
            powers[groups] = powers[groups] + found**norm
    for groups, power in powers.items():
        for group in groups:
            dist.all_reduce(power, dist.ReduceOp.MAX if math.isinf(norm) else dist.ReduceOp.SUM, group=group)
    if math.isinf(norm):
        return torch.stack(list(powers.values())).max()
    return torch.stack(list(powers.values())).sum() ** (1.0 / norm)


@torch.no_grad()
def clip_grad_norm(weights: nn.Module | Iterable[nn.Parameter] | Tensor, max_norm: float, norm: float = 2.0) -> Tensor:
    """Scale gradients down to a norm of at most `max_norm` over the mesh; return the norm before. All ranks call it.

    Args:
        weights: A model, its parameters, or one parameter.
        max_norm: The largest norm that the gradients keep.
        norm: The order of the norm.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_grad_norm: max_norm={max_norm}; expected more than 0")
    weights = list(_all(weights))
    found = gradient_norm(weights, norm)
    scale = (max_norm / (found + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch's clip_grad_norm_
    for p in weights:
        if p.grad is not None:
            grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            grad.mul_(scale.to(grad))
    return found


def _all(weights: nn.Module | Iterable[nn.Parameter] | Tensor) -> Iterable[Any]:
    if isinstance(weights, Tensor):
        return [weights]
    return parameters(weights) if isinstance(weights, nn.Module) else weights
