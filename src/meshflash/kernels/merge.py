"""Merging partial results by their LSE, and what else is done row by row to results and their gradients.

Sums are in the accumulator's dtype. Empty parts, of LSE -inf, weigh nothing, and what their `out` holds,
NaN included, never reaches a result. On GPUs each function is one fused pass, in float64 plain torch.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from meshflash.kernels.contract import HALF, Outputs


def merge_(out_BTHE: Tensor, lse_BHT: Tensor, other_BTHE: Tensor | None, other_lse_BHT: Tensor) -> None:
    """Merge another partial result over other keys into this one, in place. Without values it is a sink."""
    merge((out_BTHE, lse_BHT), (other_BTHE, other_lse_BHT), (out_BTHE, lse_BHT))


def merge(mine: Outputs, other: tuple[Tensor | None, Tensor], into: Outputs) -> None:
    """Write two results over different keys as one, into tensors of any dtype, which may be `mine`."""
    (out_BTHE, lse_BHT), (other_BTHE, other_lse_BHT), (into_BTHE, into_lse_BHT) = mine, other, into
    if _fused(out_BTHE, lse_BHT, other_BTHE, other_lse_BHT, into_BTHE, into_lse_BHT):
        from meshflash.kernels.triton import rowwise

        rowwise.merge(out_BTHE, lse_BHT, other_BTHE, other_lse_BHT, into_BTHE, into_lse_BHT)
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
    """The gradients of one part's (out, lse) from those of the merged ones, of which at most one is None.

    Without a dout that of the part's out is None: it is 0.
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


def delta(out_BTHE: Tensor, dout_BTHE: Tensor, lse_BHT: Tensor, dlse_BHT: Tensor | None) -> Tensor:
    """What a backward needs of each row: sum(dout * out), less dlse where there is one; in the dtype of lse."""
    delta_BHT = torch.empty_like(lse_BHT, memory_format=torch.contiguous_format)
    delta_(delta_BHT, out_BTHE, dout_BTHE, lse_BHT, dlse_BHT)
    return delta_BHT


def delta_(
    delta_BHT: Tensor, out_BTHE: Tensor, dout_BTHE: Tensor, lse_BHT: Tensor, dlse_BHT: Tensor | None = None
) -> None:
    """The same, into a tensor of the dtype of lse."""
    if _fused(out_BTHE, dout_BTHE, lse_BHT, dlse_BHT):
        from meshflash.kernels.triton import rowwise

        rowwise.delta(out_BTHE, dout_BTHE, lse_BHT, dlse_BHT, delta_BHT)
        return
    torch.sum(dout_BTHE.to(lse_BHT.dtype) * out_BTHE, dim=-1, out=delta_BHT.transpose(1, 2))
    if dlse_BHT is not None:
        # the LSE of an empty row is -inf whatever the inputs are: what comes back there has no meaning
        delta_BHT.sub_(dlse_BHT).masked_fill_(lse_BHT == -torch.inf, 0.0)


def add_sinks_(out_BTHE: Tensor, lse_BHT: Tensor, sink_logits_H: Tensor) -> None:
    """Let each head's sink logit join the softmax of a result over all keys, in place."""
    merge_(out_BTHE, lse_BHT, None, sink_logits_H.to(lse_BHT.dtype)[None, :, None].expand_as(lse_BHT))


def _fused(*tensors: Tensor | None) -> bool:
    """Whether the Triton kernels serve these tensors."""
    fits = all(x is None or (x.is_cuda and x.dtype in (torch.float32, *HALF)) for x in tensors)
    return fits and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _without_empty(x_BTHE: Tensor, lse_BHT: Tensor) -> Tensor:
    """The values of a part, 0 in its empty rows."""
    empty = lse_BHT == -torch.inf
    if x_BTHE.device.type == "cpu" and not empty.any():  # a pass less; on other devices the host would wait
        return x_BTHE
    return x_BTHE.masked_fill(_per_row(empty), 0.0)


def _per_row(x_BHT: Tensor) -> Tensor:
    """One number for each row of a `[B, T, H, E]`."""
    return x_BHT.transpose(1, 2).unsqueeze(-1)
