"""The kernel contract: attention on one device over a worklist, forward and backward, and what a kernel supports.

Shapes, here and in every kernel: B batch, T query tokens, S key tokens, H query heads, K key heads,
G = H / K, D head dim, E value dim. Inputs are `[B, T, H, D]`; LSE and delta are `[B, H, T]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from meshflash.core.lengths import UNBOUNDED
from meshflash.core.tiles import Worklist
from meshflash.kernels.launches import Launches, Numbers

Pass = Literal["forward", "backward"]
HALF = (torch.float16, torch.bfloat16)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of partial results, sums and the LSE: float64 for float64 inputs, else float32.

    Args:
        dtype: The dtype of the inputs.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class Features:
    """The parameters of one call besides q, k and v; positions and heads are global.

    A score is `softcap * tanh(scale * q.k / softcap) - slope * |i - j|`.

    Args:
        scale: The factor of q.k.
        softcap: The bound of the scores; 0 means no bound.
        dropout: The probability that a (query, key) pair is dropped. Kept probabilities are divided by `1 - dropout`.
        seed: The seed of the dropout.
        batch_offset: The global number of the first batch row, for dropout.
        head_offset: The global number of the first query head, for dropout.
        alibi_slopes_BH: The ALiBi slope of each batch row and head, or None.
        sink_logits_H: The sink logit of each head, which joins the softmax without a value, or None. If rows are
            computed over several calls, only the last one gets it.
    """

    scale: float
    softcap: float = 0.0
    dropout: float = 0.0
    seed: int = 0
    batch_offset: int = 0
    head_offset: int = 0
    alibi_slopes_BH: Tensor | None = None
    sink_logits_H: Tensor | None = None

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors among the parameters."""
        return tuple(x for x in (self.alibi_slopes_BH, self.sink_logits_H) if x is not None)

    @cached_property
    def numbers(self) -> Numbers:
        """The numbers that differ between equal calls, by the name of the kernels' parameter."""
        return {"seed": self.seed} if self.dropout else {}


class Inputs(NamedTuple):
    """The inputs of one call. The engine makes it.

    Args:
        q_BTHD: The queries.
        k_BSKD: The keys.
        v_BSKE: The values.
        work: The worklist: the visible (query, key) pairs to compute.
        features: The parameters of the call besides tensors and mask.
        launches: The recorded launches of earlier calls that were equal but for their tensors, or None.
        sm_margin: The SMs that a persistent kernel leaves free for messages in flight. Other kernels ignore it: their
            CTAs end one by one, and those of messages take their place.
    """

    q_BTHD: Tensor
    k_BSKD: Tensor
    v_BSKE: Tensor
    work: Worklist
    features: Features
    launches: Launches | None = None
    sm_margin: int = 0


#: (out_BTHE, lse_BHT)
Outputs = tuple[Tensor, Tensor]


def empty_contiguous_like(x: Tensor) -> Tensor:
    """Allocate a contiguous tensor of the shape, dtype and device of another one.

    Args:
        x: The other tensor.
    """
    # naming a memory format doubles the time of the call
    return torch.empty_like(x) if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)


def new_outputs(q_BTHD: Tensor, v_BSKE: Tensor) -> Outputs:
    """Allocate the final (out, lse) of a call.

    Args:
        q_BTHD: The queries, which give the shape and the dtype.
        v_BSKE: The values, which give the value dim.
    """
    batch, tokens, heads, dim = q_BTHD.shape
    value_dim = v_BSKE.shape[-1]
    if value_dim == dim and q_BTHD.is_contiguous():
        out_BTHE = torch.empty_like(q_BTHD)  # the fastest way to allocate
    else:
        out_BTHE = q_BTHD.new_empty(batch, tokens, heads, value_dim)
    return out_BTHE, q_BTHD.new_empty(batch, heads, tokens, dtype=accumulator_dtype(q_BTHD.dtype))


class Rows(NamedTuple):
    """The results of query rows over all keys, and their gradients, which a backward reads.

    Args:
        out_BTHE: The results.
        dout_BTHE: The gradients of the results.
        lse_BHT: The log-sum-exp of the scores of each row.
        delta: `sum(dout * out) - dlse` of each row; None for a kernel whose `reads_delta` is False.
    """

    out_BTHE: Tensor
    dout_BTHE: Tensor
    lse_BHT: Tensor
    delta: Tensor | None

    @property
    def delta_BHT(self) -> Tensor:  # noqa: N802 - shapes are part of names
        """Return delta, for a kernel that reads it."""
        assert self.delta is not None, "delta is None: this kernel declares that it does not read delta"
        return self.delta


class Grads(NamedTuple):
    """The buffers that gradients go to.

    Args:
        dq_BTHD: The gradients of the queries.
        dk_BSKD: The gradients of the keys.
        dv_BSKE: The gradients of the values.
        add_dq: Whether to add to dQ, which is then in the accumulator's dtype, instead of overwriting it.
        add_dkv: Whether to add to dK and dV, which are then in the accumulator's dtype, instead of overwriting them.
    """

    dq_BTHD: Tensor
    dk_BSKD: Tensor
    dv_BSKE: Tensor
    add_dq: bool = False
    add_dkv: bool = False

    @staticmethod
    def like(q_BTHD: Tensor, k_BSKD: Tensor, v_BSKE: Tensor) -> Grads:
        """Allocate the final gradients of q, k and v.

        Args:
            q_BTHD: The queries.
            k_BSKD: The keys.
            v_BSKE: The values.
        """
        return Grads(empty_contiguous_like(q_BTHD), empty_contiguous_like(k_BSKD), empty_contiguous_like(v_BSKE))


@dataclass(frozen=True, eq=False)
class KernelRequest:
    """Everything about a call that decides which kernel can serve it, without its tensors.

    Args:
        direction: The pass, "forward" or "backward".
        device: The device of the tensors.
        dtype: The dtype of the inputs.
        head_dim: The head dim of queries and keys.
        value_dim: The head dim of values.
        work: The worklist of the call.
        features: The parameters of the call besides tensors and mask.
        partial: Whether results are continued or summed over several calls, in the accumulator's dtype.
        lse_gradient: Whether the LSE has a gradient.
        deterministic: Whether the backward must give the same bits twice.
        batch: The number of batch rows.
        heads: The number of query heads.
        gqa: Whether several query heads share a KV head.
        is_step: Whether the call is a step of a schedule, of which a layer may have several.
    """

    direction: Pass
    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    work: Worklist
    features: Features
    partial: bool = False
    lse_gradient: bool = False
    deterministic: bool = False
    batch: int = 1
    heads: int = 1
    gqa: bool = False
    is_step: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """Return a key of everything but the worklist, under which a choice is cached.

        Of each feature it holds only whether the call uses it: values may change in every call.
        """
        features = tuple(x > 0 if isinstance(x, float | int) else x is None for x in vars(self.features).values())
        sizes = (self.head_dim, self.value_dim, self.batch, self.heads)
        modes = (self.partial, self.lse_gradient, self.deterministic, self.gqa, self.is_step)
        return self.direction, self.device, self.dtype, sizes, modes, features


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, as a table of rates predicts its time.

    Args:
        pairs: The visible (query, key) pairs of one head and batch row.
        keys: The number of keys that the last query sees.
        causal: Whether the mask hides keys of some queries.
        every_batch_row: Whether the launch serves every batch row, or one.
    """

    pairs: float
    keys: int
    causal: bool
    every_batch_row: bool = True


class Kernel(ABC):
    """Attention on one device over a worklist, forward and backward; the registry holds one instance of each."""

    name: str
    summary: str
    #: Whether the backward reads delta; other kernels compute it themselves.
    reads_delta = True
    #: Host time of what torch's autograd records besides that op, where `has_torch_autograd`.
    torch_autograd_seconds = 0.0

    def has_torch_autograd(self, x: Inputs) -> bool:
        """Return whether `forward` of this call is one torch op with a derivative that `backward` would compute.

        torch's own autograd then needs no Python in the backward.

        Args:
            x: The inputs of the call.
        """
        return False

    def missing(self) -> str | None:
        """Return why this kernel cannot run on this machine at all, or None."""
        return None

    def release(self) -> None:
        """Free the device memory that this kernel keeps between calls; by default it keeps none."""
        return

    @abstractmethod
    def unsupported_reason(self, request: KernelRequest) -> str | None:
        """Return what this kernel does not support of a call, as a noun phrase, or None if it supports the call.

        Args:
            request: The call, without its tensors.
        """

    def off_reason(self, request: KernelRequest) -> tuple[str, bool] | None:
        """Return why this kernel is off here although it supports a call, and whether the user can change that.

        "auto" tells the user, because a slower kernel serves the call. By default a kernel is never off.

        Args:
            request: The call, without its tensors.
        """
        return None

    def serving(self, request: KernelRequest) -> Kernel:
        """Return the instance that serves a call: this one, or one of the same name with other settings.

        Args:
            request: The call, without its tensors.
        """
        return self

    def launches(self, request: KernelRequest) -> tuple[Launch, ...]:
        """Return the launches of a call, to predict its time; by default one launch for the whole worklist.

        Args:
            request: The call, without its tensors.
        """
        segments, spans = request.work.by_query.segments, request.work.by_query.spans
        queries = int(segments[:, 2].sum())
        if not queries or not len(spans):
            return ()
        bound = bool((spans[:, 4] > -UNBOUNDED).any() or (spans[:, 5] < UNBOUNDED).any())
        keys = max(1, round(request.work.pairs / queries * (2 if bound else 1)))
        return (Launch(request.work.pairs / (request.work.mask.batch_rows or 1), keys, bound),)

    @abstractmethod
    def forward(self, x: Inputs, outputs: Outputs | None = None, carry: Outputs | None = None) -> Outputs:
        """Compute and return every row of (out, lse).

        Rows that see no key get 0 and -inf.

        Args:
            x: The inputs of the call.
            outputs: Where the results go. `out` in the accumulator's dtype is a partial result, in the inputs' dtype
                the final one. By default the kernel allocates final, contiguous results.
            carry: The (out, lse) of earlier calls over other keys, in the accumulator's dtype, which is continued. It
                may be the same tensors as `outputs`.
        """

    @abstractmethod
    def backward(self, x: Inputs, rows: Rows, grads: Grads | None = None) -> Grads:
        """Compute and return this worklist's share of the gradients.

        Args:
            x: The inputs of the call.
            rows: The results of the query rows over all keys, and their gradients.
            grads: The buffers of the gradients; by default the kernel allocates final ones.
        """
