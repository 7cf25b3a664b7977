"""The oracle: dense attention, written for clarity; the only dense code that calls can reach.

It evaluates the mask by `Mask.visible` and never reads tiles, so that it can check them. As a kernel it computes in
float64 whatever the inputs' dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshflash.core.mask import Mask
from meshflash.kernels import dropout
from meshflash.kernels.contract import Features, Grads, Inputs, Kernel, KernelRequest, Outputs, Rows, new_outputs
from meshflash.kernels.merge import merge_


def dense_attention(
    q_BTHD: Tensor, k_BSKD: Tensor, v_BSKE: Tensor, mask: Mask, features: Features, q_offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) in the dtype of the inputs, differentiable by autograd.

    Args:
        q_BTHD: The queries.
        k_BSKD: The keys.
        v_BSKE: The values.
        mask: Which keys each query sees.
        features: The other parameters of the call.
        q_offset: The position of the first query; keys begin at position 0.
    """
    positions = (range(q_offset, q_offset + q_BTHD.shape[1]),), (range(k_BSKD.shape[1]),)
    s_BHTS, _, visible, keep = _scores(q_BTHD, k_BSKD, mask, *positions, features)
    lse_BHT = torch.logsumexp(s_BHTS, dim=-1)
    if features.sink_logits_H is not None:
        lse_BHT = torch.logaddexp(lse_BHT, features.sink_logits_H.to(lse_BHT.dtype)[None, :, None])
    p_BHTS = _probabilities(s_BHTS, lse_BHT, visible)
    out = torch.einsum("bhts,bshe->bthe", p_BHTS * keep, _per_query_head(v_BSKE, q_BTHD))
    return out, lse_BHT


class Reference(Kernel):
    """Dense attention in float64, which the tests compare other kernels with."""

    name = "reference"
    summary = "dense float64, the oracle: O(T^2) memory"

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        return None

    def forward(self, x: Inputs, outputs: Outputs | None = None, carry: Outputs | None = None) -> Outputs:
        out_BTHE, lse_BHT = outputs or new_outputs(x.q_BTHD, x.v_BSKE)
        q, k, v, work = x.q_BTHD.double(), x.k_BSKD.double(), x.v_BSKE.double(), x.work
        s, _, visible, keep = _scores(q, k, work.mask, work.q_ranges, work.k_ranges, x.features)
        lse = torch.logsumexp(s, dim=-1)
        out = torch.einsum("bhts,bshe->bthe", _probabilities(s, lse, visible) * keep, _per_query_head(v, q))
        if carry is not None:
            merge_(out, lse, carry[0].double(), carry[1].double())
        if x.features.sink_logits_H is not None:
            sink = x.features.sink_logits_H.double()[None, :, None].expand_as(lse)
            merge_(out, lse, torch.zeros_like(out), sink)
        out_BTHE.copy_(out)
        lse_BHT.copy_(lse)
        return out_BTHE, lse_BHT

    def backward(self, x: Inputs, rows: Rows, grads: Grads | None = None) -> Grads:
        grads = grads or Grads.like(x.q_BTHD, x.k_BSKD, x.v_BSKE)
        q, k, v, work = x.q_BTHD.double(), x.k_BSKD.double(), x.v_BSKE.double(), x.work
        dout = rows.dout_BTHE.double()
        s, slope, visible, keep = _scores(q, k, work.mask, work.q_ranges, work.k_ranges, x.features)
        p = _probabilities(s, rows.lse_BHT.double(), visible)
        dp = torch.einsum("bthe,bshe->bhts", dout, _per_query_head(v, q)) * keep
        ds = p * (dp - rows.delta_BHT.double()[..., None]) * slope * x.features.scale
        heads = (k.shape[2], q.shape[2] // k.shape[2])
        dq = torch.einsum("bhts,bshd->bthd", ds, _per_query_head(k, q))
        dk = torch.einsum("bhts,bthd->bshd", ds, q).unflatten(2, heads).sum(3)
        dv = torch.einsum("bhts,bthe->bshe", p * keep, dout).unflatten(2, heads).sum(3)
        grads.dq_BTHD.copy_(dq + grads.dq_BTHD if grads.add_dq else dq)
        grads.dk_BSKD.copy_(dk + grads.dk_BSKD if grads.add_dkv else dk)
        grads.dv_BSKE.copy_(dv + grads.dv_BSKE if grads.add_dkv else dv)
        return grads


def _scores(
    q_BTHD: Tensor,
    k_BSKD: Tensor,
    mask: Mask,
    q_ranges: tuple[range, ...],
    k_ranges: tuple[range, ...],
    features: Features,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Masked scores, the slope of the softcap, the mask, and the factor of dropout; `[B, H, T, S]`."""
    device, dtype = q_BTHD.device, q_BTHD.dtype
    i, j = (_positions(ranges, device) for ranges in (q_ranges, k_ranges))
    i_T1, j_1S = i[:, None], j[None, :]
    batch, heads = q_BTHD.shape[0], q_BTHD.shape[2]
    i_host, j_host = i_T1.cpu().numpy(), j_1S.cpu().numpy()
    rows = [torch.as_tensor(mask.visible(i_host, j_host, b)) for b in range(mask.batch_rows or 1)]
    visible = torch.stack(rows).to(device)[:, None].expand(batch, heads, -1, -1)

    s = torch.einsum("bthd,bshd->bhts", q_BTHD * features.scale, _per_query_head(k_BSKD, q_BTHD))
    slope = torch.ones_like(s)
    if features.softcap:
        capped = torch.tanh(s / features.softcap)
        s, slope = capped * features.softcap, 1 - capped * capped
    if features.alibi_slopes_BH is not None:
        s = s - features.alibi_slopes_BH.to(dtype)[:, :, None, None] * (i_T1 - j_1S).abs()
    keep = torch.ones((), dtype=dtype, device=device)
    if features.dropout:
        b = torch.arange(batch, device=device)[:, None, None, None] + features.batch_offset
        h = torch.arange(heads, device=device)[None, :, None, None] + features.head_offset
        kept = dropout.keep(features.seed, b, h, i_T1, j_1S, features.dropout)
        keep = kept.to(dtype) / (1 - features.dropout)
    return s.masked_fill(~visible, -torch.inf), slope, visible, keep


def _probabilities(s_BHTS: Tensor, lse_BHT: Tensor, visible: Tensor) -> Tensor:
    lse = lse_BHT.masked_fill(lse_BHT == -torch.inf, 0.0)
    return torch.exp(s_BHTS - lse[..., None]).masked_fill(~visible, 0.0)


def _per_query_head(x_BSKD: Tensor, q_BTHD: Tensor) -> Tensor:
    return x_BSKD.repeat_interleave(q_BTHD.shape[2] // x_BSKD.shape[2], dim=2)


def _positions(ranges: tuple[range, ...], device: torch.device) -> Tensor:
    parts = [torch.arange(r.start, r.stop, r.step, device=device) for r in ranges]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)
