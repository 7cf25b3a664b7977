"""Activations that a backward computes again instead of keeping them, block by block; what is kept may be offloaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshflash.engine import op as _op  # noqa: F401 the op has to be there
from meshflash.parallel.blocks import inner_blocks
from meshflash.parallel.offload import Call, Kept, store_of
from meshflash.parallel.overlay import Overlay, lay_over
from meshflash.runtime.devices import CPU

KINDS = ("full", "selective")


def recompute(model: nn.Module, kind: str = "full", offload: bool = False) -> nn.Module:
    """Let each block of a model (entries of its ModuleLists) keep little for its backward; the model is changed.

    Of blocks within blocks those that hold no others: shards of what is computed again must not change meanwhile.

    Args:
        model: with blocks.
        kind: "full" keeps the input of each block and computes all of it again; "selective" keeps the result of its
            attention besides, which is what takes longest at long sequences and is small.
        offload: keep it in pinned memory of the host. It is copied off while the block computes, and brought back one
            block ahead of the backward that needs it; the last block's stays on the device, for it is needed first.
            Tensors that a block gets inside of other objects than tuples, lists and dicts stay where they are.
    """
    if kind not in KINDS:
        raise ValueError(f"recompute={kind!r}: expected one of {', '.join(KINDS)}")
    found = inner_blocks(model)
    if not found:
        raise ValueError(f"recompute: {type(model).__name__} has no blocks; put its layers into an nn.ModuleList")
    for block in found:
        lay_over(block, _Again, _again=(kind, offload))
    return model


class _Again(Overlay):
    """A block's forward that is computed again in its backward, with the same random numbers."""

    _again: tuple[str, bool]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        kind, offload = self._again
        selective: dict[str, Any] = {}
        if kind == "selective":
            selective["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        device = _device(args, kwargs) if offload else None
        if device is None:
            return checkpoint(forward, *args, use_reentrant=False, **selective, **kwargs)
        call = store_of(device).call()
        contexts: dict[str, Any] = {name: partial(_offloaded, call) for name in selective}
        inputs = _Inputs(forward, call, args, kwargs)
        # torch asks its arguments for the kind of device
        return checkpoint(inputs, torch.empty(0, device=device), use_reentrant=False, **contexts)


class _Inputs:
    """A block's forward: at first with its very inputs, which it holds no longer, then with what was kept of them."""

    def __init__(self, forward: Callable[..., Any], call: Call, args: Any, kwargs: Any) -> None:
        self._forward, self._call = forward, call
        self._first: Any = args, kwargs
        leaves, self._form = tree_flatten((args, kwargs))
        self._learning = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
        self._leaves = [call.keep(x) for x in leaves]

    def __call__(self, _: Tensor) -> Any:
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
        else:
            found = [self._again(x, learning) for x, learning in zip(self._leaves, self._learning, strict=True)]
            args, kwargs = tree_unflatten(found, self._form)
        return self._forward(*args, **kwargs)

    def _again(self, x: Any, learning: bool) -> Any:
        return self._call.recall(x).requires_grad_(learning) if isinstance(x, Kept) else x


class _Keep(TorchDispatchMode):
    """Keeps results of attention on the host."""

    def __init__(self, call: Call, kept: list[Any]) -> None:
        super().__init__()
        self._call, self._kept = call, kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _attends(func):
            # autograd makes results of this very call out of these tensors; what is kept must not know of it
            self._kept.append(tree_map(lambda x: self._call.keep(x.detach()), out))
        return out


class _Recall(TorchDispatchMode):
    """Results of attention as they were kept, in order, however often they are asked for."""

    def __init__(self, call: Call, kept: list[Any]) -> None:
        super().__init__()
        self._call, self._kept, self._next = call, kept, 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _attends(func):
            return func(*args, **(kwargs or {}))
        self._next += 1
        return tree_map(self._call.recall, self._kept[self._next - 1])


def _offloaded(call: Call) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    kept: list[Any] = []
    return _Keep(call, kept), _Recall(call, kept)


def _attends(operator: Any) -> bool:
    return operator is torch.ops.meshflash.attention.default


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _attends(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _device(args: Any, kwargs: Any) -> torch.device | None:
    """The device of a call's tensors: an accelerator, if one has any of them."""
    devices = [x.device for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and not x.is_meta]
    return next((device for device in devices if device.type != CPU), devices[0] if devices else None)
