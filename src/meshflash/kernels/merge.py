"""Merge partial results by their LSE, and other row-wise passes over results and their gradients.

Sums are in the accumulator's dtype. Empty rows (LSE -inf) have weight 0, and whatever their `out` holds, NaN included,
never reaches a result. On GPUs each function is one fused Triton kernel; float64 runs in plain torch.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from meshflash.kernels.contract import HALF, Outputs
from meshflash.kernels.launches import Launches


def merge_(
    out_BTHE: Tensor,
    lse_BHT: Tensor,
    other_BTHE: Tensor | None,
    other_lse_BHT: Tensor,
    launches: Launches | None = None,
) -> None:
    """Merge another partial result over other keys into this one, in place; without `other_BTHE` it is a sink."""
    merge((out_BTHE, lse_BHT), (other_BTHE, other_lse_BHT), (out_BTHE, lse_BHT), launches)


def merge(mine: Outputs, other: tuple[Tensor | None, Tensor], into: Outputs, launches: Launches | None = None) -> None:
    """Merge two partial results over different keys, into tensors of any dtype, which may be `mine`.

    `launches` are the recorded launches of merges of the same shapes, here and below.
    """
    (out_BTHE, lse_BHT), (other_BTHE, other_lse_BHT), (into_BTHE, into_lse_BHT) = mine, other, into
    if _fused(out_BTHE, lse_BHT, other_BTHE, other_lse_BHT, into_BTHE, into_lse_BHT):
        from meshflash.kernels.triton import rowwise

        rowwise.merge(out_BTHE, lse_BHT, other_BTHE, other_lse_BHT, into_BTHE, into_lse_BHT, launches)
        return
    total = torch.logaddexp(lse_BHT, other_lse_BHT)
    reference = total.masked_fill(total == -torch.inf, 0.0)
    sums = into_BTHE if into_BTHE.dtype == total.dtype else torch.empty_like(into_BTHE, dtype=total.dtype)
    torch.mul(_without_empty(out_BTHE, lse_BHT), _per_row(torch.exp(lse_BHT - reference)), out=sums)
    if other_BTHE is not None:
        values = _without_empty(other_BTHE, other_lse_BHT).to(sums.dtype)
        sums.addcmul_(values, _per_row(torch.exp(other_lse_BHT - reference)))
    if sums is not into_BTHE:
        into_BTHE.copy_(sums)
    into_lse_BHT.copy_(total)


def merge_gradient(
    dout_BTHE: Tensor | None, dlse_BHT: Tensor | None, part: Outputs, merged: Outputs
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of one partial result's (out, lse), given those of the merged result.

    At most one of the given gradients is None. Without `dout_BTHE` the gradient of the partial out is 0: None.
    """
    (part_BTHE, part_lse_BHT), (out_BTHE, lse_BHT) = part, merged
    if _fused(dout_BTHE, dlse_BHT, *part, *merged):
        from meshflash.kernels.triton import rowwise

        dpart = torch.empty_like(part_BTHE, memory_format=torch.contiguous_format)
        dpart_lse = torch.empty_like(part_lse_BHT, memory_format=torch.contiguous_format)
        rowwise.merge_gradient(dout_BTHE, dlse_BHT, *part, *merged, dpart, dpart_lse)
        return None if dout_BTHE is None else dpart, dpart_lse
    empty = part_lse_BHT == -torch.inf
    weight = torch.exp(part_lse_BHT - lse_BHT).masked_fill(empty, 0.0)
    if dout_BTHE is None:
        assert dlse_BHT is not None
        return None, (weight * dlse_BHT).masked_fill(empty, 0.0)
    dout = dout_BTHE.to(weight.dtype)
    inner = (dout * (part_BTHE.to(weight.dtype) - out_BTHE)).sum(dim=-1).transpose(1, 2)
    inner = inner if dlse_BHT is None else inner + dlse_BHT
    dpart = (dout * _per_row(weight)).masked_fill(_per_row(empty), 0.0)
    return dpart.to(part_BTHE.dtype), (weight * inner).masked_fill(empty, 0.0).contiguous()


def delta(
    out_BTHE: Tensor,
    dout_BTHE: Tensor,
    lse_BHT: Tensor,
    dlse_BHT: Tensor | None,
    launches: Launches | None = None,
) -> Tensor:
    """Return delta of each row, sum(dout * out) minus dlse unless it is None, in the dtype of lse."""
    delta_BHT = torch.empty_like(lse_BHT, memory_format=torch.contiguous_format)
    delta_(delta_BHT, out_BTHE, dout_BTHE, lse_BHT, dlse_BHT, launches)
    return delta_BHT


def delta_(
    delta_BHT: Tensor,
    out_BTHE: Tensor,
    dout_BTHE: Tensor,
    lse_BHT: Tensor,
    dlse_BHT: Tensor | None = None,
    launches: Launches | None = None,
) -> None:
    """Write delta, as `delta` returns it, into a tensor of the dtype of lse."""
    if _fused(out_BTHE, dout_BTHE, lse_BHT, dlse_BHT):
        from meshflash.kernels.triton import rowwise

        rowwise.delta(out_BTHE, dout_BTHE, lse_BHT, dlse_BHT, delta_BHT, launches)
        return
    torch.sum(dout_BTHE.to(lse_BHT.dtype) * out_BTHE, dim=-1, out=delta_BHT.transpose(1, 2))
    if dlse_BHT is not None:
        # the LSE of an empty row is -inf whatever the inputs are, so its gradient has no meaning
        delta_BHT.sub_(dlse_BHT).masked_fill_(lse_BHT == -torch.inf, 0.0)


def add_sinks_(out_BTHE: Tensor, lse_BHT: Tensor, sink_logits_H: Tensor) -> None:
    """Add each head's sink logit to the softmax of a result over all keys, in place."""
    merge_(out_BTHE, lse_BHT, None, sink_logits_H.to(lse_BHT.dtype)[None, :, None].expand_as(lse_BHT))


def _fused(*tensors: Tensor | None) -> bool:
    """Whether the fused Triton kernels support these tensors."""
    is_supported = all(x is None or (x.is_cuda and x.dtype in (torch.float32, *HALF)) for x in tensors)
    return is_supported and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _without_empty(x_BTHE: Tensor, lse_BHT: Tensor) -> Tensor:
    """The output of a partial result, with 0 in its empty rows."""
    empty = lse_BHT == -torch.inf
    if x_BTHE.device.type == "cpu" and not empty.any():  # saves a pass; on a GPU the check would synchronize
        return x_BTHE
    return x_BTHE.masked_fill(_per_row(empty), 0.0)


def _per_row(x_BHT: Tensor) -> Tensor:
    """A value of each row, shaped to broadcast over `[B, T, H, E]`."""
    return x_BHT.transpose(1, 2).unsqueeze(-1)
