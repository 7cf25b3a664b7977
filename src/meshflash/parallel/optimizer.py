"""Optimizers whose state is spread over ranks, and norms of gradients over a mesh."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as _distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate

from meshflash.parallel.mesh import summed
from meshflash.parallel.weights import parameters

dist: Any = _distributed  # torch does not declare all that it exports here


def sharded_optimizer(
    model: nn.Module,
    optimizer: type[torch.optim.Optimizer],
    mesh: DeviceMesh,
    *,
    groups: list[dict[str, Any]] | None = None,
    **options: Any,
) -> torch.optim.Optimizer:
    """An optimizer of which each rank keeps and computes a part (ZeRO-1), for a model that `replicate` laid out.

    Each weight is updated by one rank and sent to the others; one that several modules share counts once, a frozen one
    not at all. Where `shard` spread the weights their optimizer is spread already: it is then a plain one. `groups` are
    weights with options of their own, as optimizers take them; by default all that learn.

    >>> from meshflash import shutdown
    >>> from meshflash.parallel.mesh import init_mesh
    >>> type(sharded_optimizer(nn.Linear(2, 2), torch.optim.SGD, init_mesh(), lr=0.1)).__name__
    'SGD'
    >>> shutdown()
    """
    learning = list(parameters(model))
    ranks, weights = summed(mesh), learning if groups is None else groups
    if ranks.size() == 1 or any(isinstance(p, DTensor) for p in learning):
        return optimizer(weights, **options)
    return ZeroRedundancyOptimizer(weights, optimizer, process_group=ranks.get_group(), **options)


@torch.no_grad()
def gradient_norm(weights: nn.Module | Iterable[nn.Parameter] | Tensor, norm: float = 2.0) -> Tensor:
    """The norm of all gradients as one device would have it, wherever their parts lie. All ranks call it.

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
        if isinstance(grad, DTensor):  # its parts are on ranks of those axes that it is cut along
            cut = [n for n, placement in enumerate(grad.placements) if not isinstance(placement, Replicate)]
            groups = tuple(grad.device_mesh.get_group(n) for n in cut)
            grad = grad.to_local()
        if not grad.numel():  # a rank's part may be empty; its ranks wait for it all the same
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
def clip_grad_norm(weights: nn.Module | Iterable[nn.Parameter] | Tensor, most: float, norm: float = 2.0) -> Tensor:
    """Scale gradients down where their norm over the mesh is more than `most`. Returns that norm. All ranks call it."""
    if not most > 0:
        raise ValueError(f"clip_grad_norm: most={most}; expected more than 0")
    weights = list(_all(weights))
    found = gradient_norm(weights, norm)
    scale = (most / (found + 1e-6)).clamp(max=1.0)
    for p in weights:
        if p.grad is not None:
            grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            grad.mul_(scale.to(grad))
    return found


def _all(weights: nn.Module | Iterable[nn.Parameter] | Tensor) -> Iterable[Any]:
    if isinstance(weights, Tensor):
        return [weights]
    return parameters(weights) if isinstance(weights, nn.Module) else weights
