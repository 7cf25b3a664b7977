"""Find the blocks of a model: the entries of its ModuleLists.

Sharding gathers the weights of one block at a time, and activation checkpointing recomputes one block at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return all blocks of a model, inner blocks before the blocks that contain them.

    >>> [type(block).__name__ for block in blocks(nn.Sequential(nn.ModuleList([nn.Linear(1, 1), nn.ReLU()])))]
    ['ReLU', 'Linear']
    """
    lists = (part for part in model.modules() if isinstance(part, nn.ModuleList))
    found = dict.fromkeys(block for part in lists for block in part)
    return [block for block in reversed(found) if not isinstance(block, nn.ModuleList | nn.ModuleDict)]


def innermost_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that contain no other block."""
    found = blocks(model)
    return [block for block in found if not any(part is not block and part in found for part in block.modules())]


def unshared_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that share no weight with modules outside of them, inner blocks first."""
    everywhere = count_weight_uses(model.modules())
    return [
        block
        for block in blocks(model)
        if all(everywhere[weight] == number for weight, number in count_weight_uses(block.modules()).items())
    ]


def count_weight_uses(modules: Iterable[nn.Module]) -> Counter[int]:
    """Count how many of the modules own each weight directly; keys are the `id` of a weight."""
    named = (module.named_parameters(recurse=False, remove_duplicate=False) for module in modules)
    return Counter(id(p) for weights in named for _, p in weights)
