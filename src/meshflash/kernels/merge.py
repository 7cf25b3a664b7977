"""Merging partial results by their LSE, in the accumulator's dtype. Empty parts weigh nothing."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(out_BTHE: Tensor, lse_BHT: Tensor, other_BTHE: Tensor, other_lse_BHT: Tensor) -> None:
    """Merge another partial result over other keys into this one, in place."""
    total = torch.logaddexp(lse_BHT, other_lse_BHT)
    reference = torch.where(total == -torch.inf, 0.0, total)
    mine = torch.exp(lse_BHT - reference).transpose(1, 2).unsqueeze(-1)
    theirs = torch.exp(other_lse_BHT - reference).transpose(1, 2).unsqueeze(-1)
    out_BTHE.mul_(mine).addcmul_(other_BTHE.to(out_BTHE.dtype), theirs)
    lse_BHT.copy_(total)


def add_sinks_(out_BTHE: Tensor, lse_BHT: Tensor, sink_logits_H: Tensor) -> None:
    """Let each head's sink logit join the softmax of a result over all keys, in place."""
    sink = sink_logits_H.to(lse_BHT.dtype)[None, :, None].expand_as(lse_BHT)
    merge_(out_BTHE, lse_BHT, out_BTHE.new_zeros(()).expand_as(out_BTHE), sink)
