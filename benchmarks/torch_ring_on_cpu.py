"""torch's ring attention on CPUs: its own loop over ranks around torch's CPU flash kernel.

`torch.distributed.tensor.experimental.context_parallel` dispatches the attention kernels of GPUs only. Here the kernel
of CPUs is added to them. All else is torch's: sharding, load balancing, rotation of keys and values, merging, backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

SEQUENCE_DIM = 2


def register() -> None:
    """Add the CPU's flash attention and its backward to the kernels that `context_parallel` dispatches."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    private: Any = _attention
    private.custom_ops[FORWARD] = _on_local_tensors(_forward)
    private.custom_ops[BACKWARD] = _on_local_tensors(_backward)


FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _on_local_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a handler of DTensor's dispatcher that calls a function with the mesh and local tensors."""

    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mesh = next(x.device_mesh for x in args if isinstance(x, DTensor))
        local = [x.to_local() if isinstance(x, DTensor) else x for x in args]
        named = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in kwargs.items()}
        return tuple(
            DTensor.from_local(x, mesh, [Shard(SEQUENCE_DIM)], run_check=False) for x in function(mesh, *local, **named)
        )

    return handle


def _forward(
    mesh: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    private: Any = _attention
    if attn_mask is not None:  # on a GPU the kernel that takes masks is chosen, and raises
        return private._scaled_dot_product_ring_efficient_attention(mesh, query, key, value, attn_bias=attn_mask)
    return private._templated_ring_attention(
        mesh.get_group(),
        SEQUENCE_DIM,
        FORWARD,
        query,
        key,
        value,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
    )


def _backward(
    mesh: Any,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    private: Any = _attention
    grads = private._templated_ring_attention_backward(
        mesh.get_group(),
        SEQUENCE_DIM,
        BACKWARD,
        grad_out,
        "grad_out",
        query,
        key,
        value,
        out,
        logsumexp,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
    )
    return grads[:3]
