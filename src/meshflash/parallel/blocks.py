"""The blocks of a model, entries of its ModuleLists: what is gathered, or computed again, one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn


def blocks(model: nn.Module) -> list[nn.Module]:
    """All of them, inner ones first.

    >>> [type(block).__name__ for block in blocks(nn.Sequential(nn.ModuleList([nn.Linear(1, 1), nn.ReLU()])))]
    ['ReLU', 'Linear']
    """
    lists = (part for part in model.modules() if isinstance(part, nn.ModuleList))
    found = dict.fromkeys(block for part in lists for block in part)
    return [block for block in reversed(found) if not isinstance(block, nn.ModuleList | nn.ModuleDict)]


def inner_blocks(model: nn.Module) -> list[nn.Module]:
    """Those that no other is in."""
    found = blocks(model)
    return [block for block in found if not any(part is not block and part in found for part in block.modules())]


def own_blocks(model: nn.Module) -> list[nn.Module]:
    """Those that share no weight with modules outside of them, inner ones first."""
    everywhere = weight_uses(model.modules())
    return [
        block
        for block in blocks(model)
        if all(everywhere[weight] == number for weight, number in weight_uses(block.modules()).items())
    ]


def weight_uses(modules: Iterable[nn.Module]) -> Counter[int]:
    """How often modules have each weight as their own, by its identity."""
    named = (module.named_parameters(recurse=False, remove_duplicate=False) for module in modules)
    return Counter(id(p) for weights in named for _, p in weights)
