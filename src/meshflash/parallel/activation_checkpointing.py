"""Activation checkpointing for each block of a model, optionally offloaded to the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshflash.engine import op as _op  # noqa: F401 registers the op that _is_attention compares with
from meshflash.parallel.blocks import innermost_blocks
from meshflash.parallel.forward_wrapper import ForwardWrapper, wrap_forward
from meshflash.parallel.offload import BlockActivations, OffloadedTensor, offload_store
from meshflash.runtime.devices import CPU

KINDS = ("full", "selective")


def apply_activation_checkpointing(model: nn.Module, kind: str = "full", offload: bool = False) -> nn.Module:
    """Checkpoint each block of a model (the entries of its ModuleLists); the model is changed in place and returned.

    Of nested blocks only the innermost are checkpointed: sharded weights of an outer block would be freed and gathered
    again while the block is recomputed.

    Args:
        model: A model whose layers are in an `nn.ModuleList`.
        kind: "full" saves the input of each block and recomputes the whole block in its backward. "selective" also
            saves the output of attention, which is small and takes longest to recompute at long sequences.
        offload: Whether to keep what is saved in pinned host memory. Copies to the host overlap the block's forward,
            and copies back run one block ahead of the backward. The activations of the last block stay on the device,
            because its backward comes first. Tensors inside objects other than tuples, lists and dicts are not
            offloaded.
    """
    if kind not in KINDS:
        raise ValueError(f"activation_checkpointing={kind!r}: expected one of {', '.join(KINDS)}")
    found = innermost_blocks(model)
    if not found:
        raise ValueError(
            f"activation_checkpointing: {type(model).__name__} has no blocks; put its layers into an nn.ModuleList"
        )
    for block in found:
        wrap_forward(block, _CheckpointedForward, _checkpointing=(kind, offload))
    return model


class _CheckpointedForward(ForwardWrapper):
    """A block's forward that the backward recomputes, with the same random state."""

    _checkpointing: tuple[str, bool]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        kind, offload = self._checkpointing
        selective: dict[str, Any] = {}
        if kind == "selective":
            selective["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        device = _device(args, kwargs) if offload else None
        if device is None:
            return checkpoint(forward, *args, use_reentrant=False, **selective, **kwargs)
        saved = offload_store(device).begin_block()
        contexts: dict[str, Any] = {name: partial(_offload_contexts, saved) for name in selective}
        inputs = _OffloadedInputs(forward, saved, args, kwargs)
        # torch infers the device whose random state it saves from the arguments, so it needs a tensor there
        return checkpoint(inputs, torch.empty(0, device=device), use_reentrant=False, **contexts)


class _OffloadedInputs:
    """A block's forward with offloaded inputs.

    The first call uses the original inputs and drops its references to them. Later calls, which recompute the block,
    load the inputs from the host.
    """

    def __init__(self, forward: Callable[..., Any], saved: BlockActivations, args: Any, kwargs: Any) -> None:
        self._forward, self._saved = forward, saved
        self._first: Any = args, kwargs
        leaves, self._tree = tree_flatten((args, kwargs))
        self._requires_grad = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
        self._leaves = [saved.offload(x) for x in leaves]

    def __call__(self, _: Tensor) -> Any:
        if self._first is not None:
            (args, kwargs), self._first = self._first, None
        else:
            found = [self._load(x, needs) for x, needs in zip(self._leaves, self._requires_grad, strict=True)]
            args, kwargs = tree_unflatten(found, self._tree)
        return self._forward(*args, **kwargs)

    def _load(self, x: Any, requires_grad: bool) -> Any:
        return self._saved.load(x).requires_grad_(requires_grad) if isinstance(x, OffloadedTensor) else x


class _OffloadAttention(TorchDispatchMode):
    """During the forward: offload the outputs of attention."""

    def __init__(self, saved: BlockActivations, outputs: list[Any]) -> None:
        super().__init__()
        self._saved, self._outputs = saved, outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_attention(func):
            # autograd turns these very tensors into outputs of this call: keep a detached alias, or the graph would
            # hold a reference to itself
            self._outputs.append(tree_map(lambda x: self._saved.offload(x.detach()), out))
        return out


class _LoadAttention(TorchDispatchMode):
    """During recomputation: return the saved outputs of attention in order, as often as the block is recomputed."""

    def __init__(self, saved: BlockActivations, outputs: list[Any]) -> None:
        super().__init__()
        self._saved, self._outputs, self._next = saved, outputs, 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_attention(func):
            return func(*args, **(kwargs or {}))
        self._next += 1
        return tree_map(self._saved.load, self._outputs[self._next - 1])


def _offload_contexts(saved: BlockActivations) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of the forward and of the recomputation, which share the list of saved outputs."""
    outputs: list[Any] = []
    return _OffloadAttention(saved, outputs), _LoadAttention(saved, outputs)


def _is_attention(operator: Any) -> bool:
    return operator is torch.ops.meshflash.attention.default


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_attention(operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _device(args: Any, kwargs: Any) -> torch.device | None:
    """Return the device of a call's tensors; an accelerator if any of them is on one."""
    devices = [x.device for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and not x.is_meta]
    return next((device for device in devices if device.type != CPU), devices[0] if devices else None)
