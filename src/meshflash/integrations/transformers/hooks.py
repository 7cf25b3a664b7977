"""Hooks that cut a sequence before a model or a stack of layers, and put results together behind it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from meshflash.groups import group_of
from meshflash.integrations._replicas import arguments_of
from meshflash.integrations.transformers.attention import Sequence, SequenceMask, Stack, shard_tree
from meshflash.integrations.transformers.batches import BatchShard
from meshflash.sharding import shard, unshard


def is_rotary(module: nn.Module) -> bool:
    """Return whether a module computes rotary embeddings of positions.

    Args:
        module: The module.
    """
    return "RotaryEmbedding" in type(module).__name__


def hook_rotary_embeddings(model: nn.Module, stack: Stack) -> None:
    """Compute rotary embeddings of all positions and keep this rank's: frequencies may depend on the last position.

    Args:
        model: The model.
        stack: The stack; `positions` are those of the forward under way.
    """

    def use_all_positions(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if stack.is_suspended:
            return None
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": stack.positions}
        return (args[0], stack.positions, *args[2:]), kwargs

    def keep_own(module: nn.Module, args: Any, out: Any) -> Any:
        return out if stack.is_suspended or stack.sequence is None else shard_tree(out, stack.sequence, -2)

    for module in model.modules():
        if is_rotary(module):
            stack.handles.append(module.register_forward_pre_hook(use_all_positions, with_kwargs=True))
            stack.handles.append(module.register_forward_hook(keep_own))


def hook_layers(layers: nn.ModuleList, stack: Stack) -> None:
    """Cut hidden states before the first of some layers, and gather them after the last one.

    Args:
        layers: The layers.
        stack: Their stack.
    """
    first, last = layers[0], layers[-1]

    def cut(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if stack.is_suspended:
            return None
        given = arguments_of(layer, args, kwargs)
        hidden = next(iter(inspect.signature(layer.forward).parameters))
        sequence = _sequence_of(given, stack)
        if layer is first:
            sequence = sequence or stack.share(given[hidden].shape[1], None)
            stack.sequence = sequence
            stack.check_same(type(layer).__name__, given[hidden])
            given[hidden] = shard(given[hidden], sequence.layout, sequence.mesh)
        assert sequence is not None
        for name, dim in (("position_embeddings", -2), ("position_ids", -1)):
            if given.get(name) is not None:
                given[name] = shard_tree(given[name], sequence, dim)
        if given.get("encoder_hidden_states") is not None:
            given["encoder_hidden_states"] = shard_tree(given["encoder_hidden_states"], _memory_of(layer, given), 1)
        return (given.pop(hidden),), given  # activation checkpointing wants hidden states by position

    def gather(layer: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        if stack.is_suspended:
            return None
        sequence = _sequence_of(kwargs, stack)
        assert sequence is not None
        hidden = out[0] if isinstance(out, tuple) else out
        whole = unshard(hidden, sequence.layout, sequence.mesh)
        return (whole, *out[1:]) if isinstance(out, tuple) else whole

    def _memory_of(layer: nn.Module, given: Mapping[str, Any]) -> Sequence:
        mask = given.get("encoder_attention_mask")
        keys = mask.keys if isinstance(mask, SequenceMask) else None
        keys = keys or (None if stack.memory is None else stack.memory.sequence)
        if keys is None:
            raise ValueError(f"{type(layer).__name__} attends to a sequence that is not sharded")
        return keys

    stack.handles += [layer.register_forward_pre_hook(cut, with_kwargs=True) for layer in layers]
    stack.handles.append(last.register_forward_hook(gather, with_kwargs=True))


def _sequence_of(given: Mapping[str, Any], stack: Stack) -> Sequence | None:
    """Return the sequence of a call: its mask's, because a later forward may have begun when layers run again."""
    mask = given.get("attention_mask")
    own = mask.queries if isinstance(mask, SequenceMask) else None
    return own or stack.sequence


def join_outputs(outputs: Any, batch: BatchShard, whole: bool) -> Any:
    """Return a model's outputs with the loss of the whole batch on each rank.

    Args:
        outputs: The outputs of this rank.
        batch: The batch that the outputs are of.
        whole: Whether outputs of tokens are gathered.
    """
    sequence = batch.sequence
    if getattr(outputs, "loss", None) is not None:
        outputs.loss = sum_over(outputs.loss, sequence.mesh)
    own = sequence.layout.lengths[group_of(sequence.mesh)[1]]

    def gathered(name: str, x: Any) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(gathered(name, y) for y in x)
        if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[1] != own:
            return x
        if whole:
            return unshard(x, sequence.layout, sequence.mesh)
        if x.ndim == 2 and x.requires_grad and sequence.mesh.size() > 1:
            raise ValueError(
                f"context_parallel: the model returns {name} of each token, from which a loss can be computed; pass "
                'outputs="whole", so that it is that of all tokens'
            )
        return x

    for name, x in list(outputs.items()):
        if name != "loss" and x is not None:
            outputs[name] = gathered(name, x)
    return outputs


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks. Its gradient is the sum of the ranks' gradients, as a replica with the whole batch has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def sum_over(x: Tensor, mesh: Any) -> Tensor:
    """Return the sum of a tensor over the ranks of a mesh, with its gradient.

    Args:
        x: The tensor of this rank.
        mesh: A DeviceMesh of one dimension.
    """
    result: Tensor = x if mesh.size() == 1 else _SumOverRanks.apply(x, mesh.get_group())
    return result
