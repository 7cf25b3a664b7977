"""Activations that a backward computes again instead of keeping them, block by block."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshflash.engine import op as _op  # noqa: F401 the op has to be there
from meshflash.parallel.blocks import inner_blocks

KINDS = ("full", "selective")


def recompute(model: nn.Module, kind: str = "full") -> nn.Module:
    """Let each block of a model (entries of its ModuleLists) keep little for its backward; the model is changed.

    Of blocks within blocks those that hold no others: shards of what is computed again must not change meanwhile.

    Args:
        model: with blocks.
        kind: "full" keeps the input of each block and computes all of it again; "selective" keeps the result of its
            attention besides, which is what takes longest at long sequences and is small.
    """
    if kind not in KINDS:
        raise ValueError(f"recompute={kind!r}: expected one of {', '.join(KINDS)}")
    for block in inner_blocks(model):
        _wrap(block, kind)
    return model


def _wrap(block: nn.Module, kind: str) -> None:
    """The block's forward, computed again in its backward. Its name in the model, and so its weights', stay."""
    forward = block.forward
    options: dict[str, Any] = {}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)

    block.forward = again


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator is torch.ops.meshflash.attention.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
