"""FlashAttention of CS336: attention on `[..., tokens, dim]`; a causal mask aligns the first query and key.

`FlashAttentionTorch.apply(q, k, v, is_causal)` runs the tiled kernel, `FlashAttentionTriton.apply` the Triton kernel.
Both save their inputs, the output and one tensor of shape `q.shape[:-1]`, the log-sum-exp.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from meshflash.core.mask import Mask
from meshflash.engine import local, op
from meshflash.engine.spec import AttentionSpec, CallTensors
from meshflash.kernels.contract import Features
from meshflash.kernels.reference import dense_attention
from meshflash.kernels.tiled import Tiled


class FlashAttentionTorch(torch.autograd.Function):
    """FlashAttention-2 in plain PyTorch, as an autograd function.

    >>> q = k = v = torch.randn(2, 5, 8)
    >>> FlashAttentionTorch.apply(q, k, v, True).shape
    torch.Size([2, 5, 8])
    """

    @classmethod
    def apply(cls, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Any:
        """Compute attention of `[..., tokens, dim]` tensors.

        Args:
            q: The queries, `[..., tokens, dim]`.
            k: The keys, `[..., tokens, dim]`.
            v: The values, `[..., tokens, dim]`.
            is_causal: Whether the mask is causal.
        """
        return super().apply(q, k, v, is_causal)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        return _forward(ctx, q, k, v, is_causal, "tiled")

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        spec, x = _spec(q, k, v, ctx.is_causal, ctx.kernel)
        batch, tokens = x.q.shape[:2]
        out, dout = (y.reshape(batch, tokens, 1, v.shape[-1]) for y in (out, dout))
        dq, dk, dv, _ = op.attend_backward(spec, x, (out, lse.reshape(batch, 1, tokens), None), dout, None)
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape), None


class FlashAttentionTriton(FlashAttentionTorch):
    """FlashAttention-2 in Triton, as an autograd function: on GPUs, or on CPUs with TRITON_INTERPRET=1."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        return _forward(ctx, q, k, v, is_causal, "triton")


def _forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, kernel: str) -> Tensor:
    out, lse = op.attend(*_spec(q, k, v, is_causal, kernel))
    out = out.view(*q.shape[:-1], v.shape[-1])
    ctx.save_for_backward(q, k, v, out, lse.view(q.shape[:-1]))
    ctx.is_causal, ctx.kernel = is_causal, kernel
    return out


FlashAttentionFunction = FlashAttentionTorch


def get_flashattention_autograd_function_pytorch() -> type[FlashAttentionTorch]:
    """Return the class in plain PyTorch."""
    return FlashAttentionTorch


def get_flashattention_autograd_function_triton() -> type[FlashAttentionTriton]:
    """Return the class in Triton."""
    return FlashAttentionTriton


@torch.no_grad()
def flash_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, block_size: int = 64
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of attention on `[..., tokens, dim]` tensors.

    Args:
        q: The queries, `[..., tokens, dim]`.
        k: The keys, `[..., tokens, dim]`.
        v: The values, `[..., tokens, dim]`.
        is_causal: Whether the mask is causal.
        block_size: The number of queries and keys in a block.

    >>> q = k = v = torch.randn(1, 2, 5, 8)
    >>> out, lse = flash_attention_forward(q, k, v, True, block_size=2)
    >>> out.shape, lse.shape
    (torch.Size([1, 2, 5, 8]), torch.Size([1, 2, 5]))
    """
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: expected at least 1")
    (q_BTHD, k_BSKD, v_BSKE), mask, scale = _one_head(q, k, v, is_causal)
    x = local.inputs(q_BTHD, k_BSKD, v_BSKE, mask, Features(scale))
    with op.without_autocast(q_BTHD):
        out, lse = Tiled(block_size).forward(x)
    return out.view(*q.shape[:-1], v.shape[-1]), lse.view(q.shape[:-1])


def standard_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Compute dense attention of `[..., tokens, dim]` tensors: the baseline of benchmarks.

    Args:
        q: The queries, `[..., tokens, dim]`.
        k: The keys, `[..., tokens, dim]`.
        v: The values, `[..., tokens, dim]`.
        is_causal: Whether the mask is causal.
    """
    inputs, mask, scale = _one_head(q, k, v, is_causal)
    out, _ = dense_attention(*inputs, mask, Features(scale))
    return out.view(*q.shape[:-1], v.shape[-1])


def _spec(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, kernel: str) -> tuple[AttentionSpec, CallTensors]:
    inputs, mask, scale = _one_head(q, k, v, is_causal)
    deterministic = torch.are_deterministic_algorithms_enabled()
    return AttentionSpec(mask, scale, kernel=kernel, deterministic=deterministic), CallTensors(*inputs)


def _one_head(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[tuple[Tensor, Tensor, Tensor], Mask, float]:
    """Return the inputs as `[batch, tokens, 1, dim]`, the mask and the scale."""
    if q.ndim < 2 or not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        raise ValueError(
            f"expected q, k and v of shape [..., tokens, dim] with the same leading dimensions; got "
            f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"expected the same dim in q and k and the same tokens in k and v; got "
            f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"expected q, k and v of one floating-point dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    mask = Mask.causal() if is_causal else Mask.full()
    batch = math.prod(q.shape[:-2])
    q, k, v = (x.reshape(batch, x.shape[-2], 1, x.shape[-1]) for x in (q, k, v))
    return (q, k, v), mask, q.shape[-1] ** -0.5
