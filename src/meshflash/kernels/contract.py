"""What a kernel is: attention on one device over a worklist, and what it must say it cannot do.

Shapes, here and in every kernel: B batch, T query tokens, S key tokens, H query heads, K key heads,
G = H / K, D head dim, E value dim. Inputs are `[B, T, H, D]`; LSE and delta are `[B, H, T]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from meshflash.core.lengths import UNBOUNDED
from meshflash.core.tiles import Worklist

Pass = Literal["forward", "backward"]
HALF = (torch.float16, torch.bfloat16)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial results and the LSE are kept in: float64 for float64, float32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class Features:
    """The numbers of one call besides q, k and v. Positions and heads are global ones.

    A score is `softcap * tanh(scale * q.k / softcap) - slope * |i - j|`; 0 means no softcap. A kept
    probability is divided by `1 - dropout`. Each head's sink logit joins the softmax without a value:
    where rows are computed over several calls, only the last one gets `sink_logits_H`.
    """

    scale: float
    softcap: float = 0.0
    dropout: float = 0.0
    seed: int = 0
    batch_offset: int = 0
    head_offset: int = 0
    alibi_slopes_BH: Tensor | None = None
    sink_logits_H: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Inputs:
    """What one call computes: queries against keys and values, over a worklist."""

    q_BTHD: Tensor
    k_BSKD: Tensor
    v_BSKE: Tensor
    work: Worklist
    features: Features


#: (out_BTHE, lse_BHT)
Outputs = tuple[Tensor, Tensor]


def new_outputs(q_BTHD: Tensor, v_BSKE: Tensor) -> Outputs:
    """Room for the final (out, lse)."""
    batch, tokens, heads, _ = q_BTHD.shape
    out_BTHE = q_BTHD.new_empty(batch, tokens, heads, v_BSKE.shape[-1])
    return out_BTHE, q_BTHD.new_empty(batch, heads, tokens, dtype=accumulator_dtype(q_BTHD.dtype))


@dataclass(frozen=True, eq=False)
class Rows:
    """What a backward knows of its query rows, over all the keys that there are: delta = sum(dout * out) - dlse.

    Where the kernel has said that it does not read delta, there may be none.
    """

    out_BTHE: Tensor
    dout_BTHE: Tensor
    lse_BHT: Tensor
    delta: Tensor | None

    @property
    def delta_BHT(self) -> Tensor:  # noqa: N802 - shapes are part of names
        """Delta, for a kernel that reads it."""
        assert self.delta is not None, "this kernel said that it does not read delta"
        return self.delta


@dataclass(frozen=True, eq=False)
class Grads:
    """Where gradients go. What is added to is in the accumulator's dtype; the rest is overwritten."""

    dq_BTHD: Tensor
    dk_BSKD: Tensor
    dv_BSKE: Tensor
    add_dq: bool = False
    add_dkv: bool = False

    @staticmethod
    def like(q_BTHD: Tensor, k_BSKD: Tensor, v_BSKE: Tensor) -> Grads:
        """Room for the final gradients of q, k and v."""
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BTHD, k_BSKD, v_BSKE))
        return Grads(dq, dk, dv)


@dataclass(frozen=True, eq=False)
class KernelRequest:
    """What one call asks of a kernel. `partial` results are continued or summed, in the accumulator's dtype."""

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

    @property
    def key(self) -> tuple[Any, ...]:
        """All of it but the worklist, by which a choice can be remembered."""
        x = self.features
        asked = (x.scale > 0, x.softcap > 0, x.dropout > 0, x.alibi_slopes_BH is None, x.sink_logits_H is None)
        sizes = (self.head_dim, self.value_dim, self.batch, self.heads)
        ways = (self.partial, self.lse_gradient, self.deterministic)
        return self.direction, self.device, self.dtype, sizes, ways, asked


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel in the words of a table of rates: so many visible pairs for a head and batch row.

    `keys` are those that the last query sees, or all; what is not for every batch row is for one.
    """

    pairs: float
    keys: int
    causal: bool
    every_batch_row: bool = True


class Kernel(ABC):
    """Attention on one device over a worklist, forward and backward."""

    name: str
    summary: str
    #: Whether its backward reads delta, or works it out for itself.
    reads_delta = True

    def missing(self) -> str | None:
        """Why this kernel cannot run on this machine at all, or None."""
        return None

    @abstractmethod
    def unsupported_reason(self, ask: KernelRequest) -> str | None:
        """What this kernel lacks for a call, in words that follow "lacks", or None if it can do it."""

    def serving(self, ask: KernelRequest) -> Kernel:
        """This kernel as it serves a call; another one of the same name where it must go about it otherwise."""
        return self

    def launches(self, ask: KernelRequest) -> tuple[Launch, ...]:
        """What a call amounts to, for predicting its time; by default a single launch for all of the worklist."""
        segments, spans = ask.work.by_query.segments, ask.work.by_query.spans
        queries = int(segments[:, 2].sum())
        if not queries or not len(spans):
            return ()
        bound = bool((spans[:, 4] > -UNBOUNDED).any() or (spans[:, 5] < UNBOUNDED).any())
        keys = max(1, round(ask.work.pairs / queries * (2 if bound else 1)))
        return (Launch(ask.work.pairs / (ask.work.mask.batch_rows or 1), keys, bound),)

    @abstractmethod
    def forward(self, x: Inputs, outputs: Outputs | None = None, carry: Outputs | None = None) -> Outputs:
        """Compute every row of (out, lse), into `outputs` where they are given, and return them.

        `out` in the accumulator's dtype is a partial result, in the input's dtype the final one; what the
        kernel makes itself is final, contiguous and new. `carry` is the (out, lse) of earlier calls over
        other keys, in the accumulator's dtype, and is continued; it may be the very tensors that are
        written. Rows that see no key get 0 and -inf.
        """

    @abstractmethod
    def backward(self, x: Inputs, rows: Rows, grads: Grads | None = None) -> Grads:
        """Compute this worklist's share of the gradients, into `grads` where they are given, and return them."""
