"""`context_parallel` with torch's signature: shard buffers in place, and run SDPA over the ranks of a mesh.

A `TorchFunctionMode` of this thread sees every call of `torch.nn.functional.scaled_dot_product_attention`, whatever
name it was imported by. No function is patched, and other threads are not affected.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from meshflash.api import attention
from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.engine.group_context import group_context
from meshflash.groups import group_of
from meshflash.integrations.sdpa import call_with_tokens_first, check_shapes
from meshflash.parallel.step import resolve_layout
from meshflash.sharding import shard, unshard

#: What the mode computes over ranks.
SDPA = (
    functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)
#: Functions of torch in Python that leave the mode before they reach SDPA or a layer that runs again.
PYTHON_FUNCTIONS = (
    Tensor.backward,
    torch.autograd.backward,
    torch.autograd.grad,
    functional.multi_head_attention_forward,
)
#: The names by which they ask whether a mode is active.
ASKS_FOR_MODES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
#: The shape of the tensor by which a backward knows the context of its forward; no attention saves such a tensor.
MARKER = (0, 3, 1, 4, 1, 5)


@contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[Tensor] | None = None,
    layout: Layout | str = "zigzag",
    schedule: str = "auto",
    mask: Mask | None = None,
) -> Iterator[ContextParallel]:
    """Shard buffers in place, and compute every `scaled_dot_product_attention` of this thread over the ranks.

    It replaces `torch.distributed.tensor.experimental.context_parallel`, for any number of tokens. Run the backward
    inside of the context too, as there.

    Args:
        mesh: The ranks that share the sequence: a DeviceMesh of one dimension, or a process group.
        buffers: The tensors that hold whole sequences, the same on all ranks: token ids, labels, positions, rotary
            embeddings. Inside of the context each holds this rank's tokens. Tensors that require gradients are refused.
        buffer_seq_dims: The dimension of each buffer that holds the tokens.
        no_restore_buffers: The buffers that stay sharded when the context ends. All others hold the whole sequence
            again.
        layout: The layout, or its name: "zigzag", "striped", "contiguous", or "balanced" for a mask.
        schedule: The schedule of attention over the ranks, as in `meshflash.attention`.
        mask: A mask for all calls, by positions in the whole sequence, such as `Mask.documents(lengths)`. A call with
            is_causal=True is causal too. None means none.

    Yields:
        A `ContextParallel`, which has the layout.
    """
    buffers = [] if buffers is None else list(buffers)
    dims = [] if buffer_seq_dims is None else list(buffer_seq_dims)
    kept = {id(x) for x in no_restore_buffers or ()}
    if mask is not None and not isinstance(mask, Mask):
        raise ValueError(f"context_parallel: mask must be a meshflash.Mask, got {type(mask).__name__}")
    tokens = _count_tokens(buffers, dims)
    if not kept <= {id(x) for x in buffers}:
        raise ValueError("context_parallel: no_restore_buffers must be a part of buffers")
    if tokens is None and not isinstance(layout, Layout):
        raise ValueError(
            "context_parallel: without buffers the number of tokens is not known; pass layout=, such as "
            "meshflash.Layout.zigzag(tokens, ranks)"
        )
    if not isinstance(layout, Layout):
        assert tokens is not None
        layout = resolve_layout(layout, Mask.causal() if mask is None else mask, tokens, group_of(mesh)[2])
    parts = [shard(x.detach(), layout, mesh, dim).contiguous() for x, dim in zip(buffers, dims, strict=True)]
    wholes = [x.detach() for x in buffers]
    mode = ContextParallel(mesh, layout, schedule, mask)
    _replace(buffers, parts)
    try:
        with mode:
            yield mode
    finally:
        restored = [(x, whole) for x, whole in zip(buffers, wholes, strict=True) if id(x) not in kept]
        _replace([x for x, _ in restored], [whole for _, whole in restored])


@torch.no_grad()
def context_parallel_unshard(
    mesh: Any, buffers: Sequence[Tensor], seq_dims: Sequence[int], *, layout: Layout | None = None
) -> list[Tensor]:
    """Gather tensors of this rank's tokens, such as outputs, and return whole ones without gradients.

    `meshflash.unshard` does the same with gradients.

    Args:
        mesh: The ranks that share the sequence.
        buffers: The tensors of this rank's tokens.
        seq_dims: The dimension of each tensor that holds the tokens.
        layout: The layout. None means that of the `context_parallel` around this call.
    """
    if layout is None:
        mode = _active()
        if mode is None:
            raise ValueError(
                "context_parallel_unshard: call it inside of context_parallel, or pass layout=, which the context "
                "has: `with context_parallel(...) as cp`, then layout=cp.layout"
            )
        layout = mode.layout
    if len(buffers) != len(seq_dims):
        raise ValueError(f"context_parallel_unshard: {len(buffers)} buffers and {len(seq_dims)} seq_dims")
    return [unshard(x, layout, mesh, dim) for x, dim in zip(buffers, seq_dims, strict=True)]


class ContextParallel(TorchFunctionMode):
    """What computes `scaled_dot_product_attention` over ranks; `context_parallel` makes it and enters it.

    Args:
        mesh: The ranks.
        layout: The positions of each rank.
        schedule: The schedule of attention.
        mask: The mask of all calls, or None.
    """

    def __init__(self, mesh: Any, layout: Layout, schedule: str, mask: Mask | None) -> None:
        super().__init__()
        self.mesh, self.layout, self.schedule, self.mask = mesh, layout, schedule, mask

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return what `torch.utils.checkpoint` enters in the forward and when it runs a layer again.

        Pass it as `context_fn` where the backward runs outside of the context. Inside, checkpointing needs nothing.
        """
        return nullcontext(), self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SDPA:
            return self._attend(*args, **kwargs)
        if func in PYTHON_FUNCTIONS:
            if func is functional.multi_head_attention_forward:
                self._check_multi_head_attention(args, kwargs)
            with self:
                return _without_asking(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute one call of SDPA over the ranks."""
        try:
            if attn_mask is not None:
                raise ValueError(
                    "attn_mask: a tensor holds this rank's pairs only; drop it and pass its rule to the context: "
                    "context_parallel(..., mask=meshflash.Mask.documents(lengths)), or any other meshflash.Mask"
                )
            if dropout_p:
                raise ValueError(
                    f"dropout_p={dropout_p}: SDPA has no seed, so each rank would drop different pairs; set it to 0, "
                    "or call meshflash.attention(..., dropout=, seed=) with the same seed on all ranks"
                )
            if not torch.compiler.is_compiling():
                _refuse_reentrant_checkpoint()
            check_shapes(query, key, value, enable_gqa)
            if query.shape[-2] != key.shape[-2]:
                raise ValueError(
                    f"query has {query.shape[-2]} tokens, key {key.shape[-2]}: cross-attention is not supported in "
                    "context_parallel; call meshflash.attention(..., layout=, k_layout=)"
                )
        except ValueError as error:
            self._tell_others(error)
            raise
        rule = self.mask if self.mask is not None else Mask.full()
        if is_causal:
            rule = Mask.causal() if self.mask is None else Mask.causal() & self.mask

        def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            made: Tensor = attention(
                q, k, v, mesh=self.mesh, layout=self.layout, schedule=self.schedule, mask=rule, scale=scale
            )
            return made

        out = call_with_tokens_first(compute, query, key, value)
        if not out.requires_grad or torch.compiler.is_compiling():
            return out
        marked: Tensor = _Marked.apply(out)
        return marked

    def _check_multi_head_attention(self, args: Any, kwargs: Any) -> None:
        """Raise ValueError if `nn.MultiheadAttention` would compute weights, and so attend without SDPA."""
        given = inspect.signature(functional.multi_head_attention_forward).bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["need_weights"]:
            error = ValueError("nn.MultiheadAttention: pass need_weights=False; weights of all pairs never exist here")
            self._tell_others(error)
            raise error

    def _tell_others(self, error: ValueError) -> None:
        """Let the other ranks raise now instead of waiting for this one."""
        group, _, world = group_of(self.mesh)
        if world > 1 and not torch.compiler.is_compiling():
            group_context(group).broadcast_error(error)


class _Marked(torch.autograd.Function):
    """The identity. Its backward raises an error if activation checkpointing ran the layer again without the mode.

    The forward saves a tensor that only it saves. Checkpointing replaces saved tensors by those of the second run in
    the same order, and compares their number and shapes first.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.new_empty(MARKER))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        if saved.shape != MARKER:
            raise RuntimeError(
                "context_parallel: activation checkpointing ran a layer again outside of the context, over this rank's "
                "tokens alone; call backward inside of the context, or pass context_fn=cp.checkpoint_contexts to "
                "checkpoint, with `context_parallel(...) as cp`"
            )
        return grad


def _count_tokens(buffers: list[Tensor], dims: list[int]) -> int | None:
    """Return the number of tokens of all buffers, or None without buffers. Raise ValueError for what cannot be cut."""
    if len(buffers) != len(dims):
        raise ValueError(f"context_parallel: {len(buffers)} buffers and {len(dims)} buffer_seq_dims; give one for each")
    for n, (x, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not isinstance(x, Tensor) or isinstance(x, DTensor):
            raise ValueError(f"context_parallel: buffers[{n}] must be a plain tensor, got {type(x).__name__}")
        if isinstance(x, nn.Parameter) or x.requires_grad:
            raise ValueError(
                f"context_parallel: buffers[{n}] requires gradients, whose shape would change with it; call "
                "meshflash.shard(x, layout, mesh), through which gradients flow"
            )
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"context_parallel: buffer_seq_dims[{n}]={dim}, and the buffer has {x.ndim} dimensions")
        if any(x is other for other in buffers[:n]):
            raise ValueError(f"context_parallel: buffers[{n}] is in buffers before; give each buffer once")
    lengths = [x.shape[dim] for x, dim in zip(buffers, dims, strict=True)]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"context_parallel: buffers hold {lengths} tokens; all must have as many. Slice longer ones first, such as "
            "rotary embeddings of the longest sequence"
        )
    return lengths[0] if lengths else None


@torch.no_grad()
def _replace(buffers: list[Tensor], values: list[Tensor]) -> None:
    """Let tensors hold other values of another shape.

    Storage is swapped, not written: views of a buffer, and other tensors that share its memory, keep their values.
    """
    for x, value in zip(buffers, values, strict=True):
        x.data = value
        if not x.is_inference():  # a graph that saved x from before must raise an error, not use other values
            torch.autograd.graph.increment_version(x)


def _active() -> ContextParallel | None:
    """Return the innermost context of this thread, or None."""
    modes = torch.overrides._get_current_function_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, ContextParallel)), None)


@lru_cache
def _without_asking(function: Any) -> Callable[..., Any]:
    """Return a copy of a function of torch that runs with modes on, where the original calls them and leaves them.

    In a backward that leaves the mode, checkpointing would run a layer again without it, on this rank's tokens alone.
    """
    names = [name for name in ASKS_FOR_MODES if name in function.__code__.co_names]
    if not names or function.__closure__:
        raise RuntimeError(f"context_parallel: {function.__qualname__} of torch {torch.__version__} is not known")
    known = {**function.__globals__, **{name: lambda *_: False for name in names}}
    copy = FunctionType(function.__code__, known, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _refuse_reentrant_checkpoint() -> None:
    """Raise ValueError inside of a reentrant checkpoint, which notices no difference between its two runs."""
    if torch.is_grad_enabled():  # its forward has no gradients
        return
    code, frame = CheckpointFunction.forward.__code__, sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            raise ValueError("context_parallel: checkpoint(..., use_reentrant=True) is not supported; pass False")
        frame = frame.f_back  # type: ignore[assignment]
