"""The flash kernel that torch ships for CPUs, through aten, wrapped to the contract.

It knows rectangles, whole or causal, and nothing else: a worklist is cut into them, and where rows
take part in several, their partial results are merged here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshflash.core.tiles import Rectangle
from meshflash.kernels.contract import (
    HALF,
    Ask,
    Grads,
    Inputs,
    Kernel,
    Outputs,
    Rows,
    accumulator_dtype,
    new_outputs,
)
from meshflash.kernels.merge import add_sinks_, merge_

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"


class Vendor(Kernel):
    """torch's own flash attention on the CPU."""

    name = "vendor"
    summary = "torch's CPU flash attention: full, causal, documents, GQA"

    def missing(self) -> str | None:
        return None if hasattr(torch.ops.aten, _FORWARD) else f"this torch has no aten::{_FORWARD}"

    def lacks(self, ask: Ask) -> str | None:
        if ask.device != "cpu":
            return f"the device {ask.device}; it runs on cpu"
        if ask.head_dim != ask.value_dim:
            return f"a value dim of {ask.value_dim} with a head dim of {ask.head_dim}"
        for name, wanted in (
            ("softcap", bool(ask.features.softcap)),
            ("ALiBi", ask.features.alibi_slopes_BH is not None),
            ("dropout by position", bool(ask.features.dropout)),
            ("gradients through the LSE", ask.lse_gradient),
        ):
            if wanted:
                return name
        rectangles = ask.work.rectangles
        if rectangles is None:
            return "windows, and positions that step differently in queries and keys"
        if ask.features.scale <= 0 and any(r.causal for r in rectangles):
            return "a scale of 0 or below with a causal mask, for it masks before it scales"
        parts = ask.partial or ask.features.sink_logits_H is not None or not ask.work.disjoint
        if ask.dtype in HALF and parts:
            return f"float32 partial results for {ask.dtype} inputs, which this mask, a sink or other ranks need"
        return None

    def forward(self, x: Inputs, outputs: Outputs | None = None, carry: Outputs | None = None) -> Outputs:
        rectangles = x.work.rectangles
        assert rectangles is not None
        sinks = x.features.sink_logits_H
        whole = carry is None and _alone(x) and rectangles[0].q == slice(0, x.q_BTHD.shape[1])
        if whole and outputs is None and sinks is None:
            out, lse = _forward(x, rectangles[0])
            return out.contiguous(), lse.contiguous()
        out_BTHE, lse_BHT = outputs or new_outputs(x.q_BTHD, x.v_BSKE)
        if carry is not None:
            out_BTHE.copy_(carry[0])
            lse_BHT.copy_(carry[1])
        elif not whole:
            out_BTHE.zero_()
            lse_BHT.fill_(-torch.inf)
        once = carry is None and x.work.disjoint
        for r in rectangles:
            out, lse = _forward(x, r)
            out_rows, lse_rows = out_BTHE[_batch(r), r.q], lse_BHT[_batch(r), :, r.q]
            if once:
                out_rows.copy_(out)
                lse_rows.copy_(lse)
            else:
                merge_(out_rows, lse_rows, out, lse)
        if sinks is not None:
            add_sinks_(out_BTHE, lse_BHT, sinks)
        return out_BTHE, lse_BHT

    def backward(self, x: Inputs, rows: Rows, grads: Grads | None = None) -> Grads:
        rectangles = x.work.rectangles
        assert rectangles is not None
        everything = (slice(0, x.q_BTHD.shape[1]), slice(0, x.k_BSKD.shape[1]))
        if grads is None and _alone(x) and (rectangles[0].q, rectangles[0].k) == everything:
            dq, dk, dv = (part.contiguous() for part in _backward(x, rows, rectangles[0]))
            return Grads(dq, dk, dv)
        grads = grads or Grads.like(x.q_BTHD, x.k_BSKD, x.v_BSKE)
        targets = ((grads.dq_BTHD, grads.add_dq), (grads.dk_BSKD, grads.add_dkv), (grads.dv_BSKE, grads.add_dkv))
        dtype = accumulator_dtype(x.q_BTHD.dtype)
        sums = []
        for target, add in targets:
            once = add or target.dtype == dtype or x.work.disjoint
            sums.append(target if once else torch.empty_like(target, dtype=dtype))
            if not add:
                sums[-1].zero_()
        for r in rectangles:
            for total, part, place in zip(sums, _backward(x, rows, r), (r.q, r.k, r.k), strict=True):
                total[_batch(r), place] += part
        for (target, _), total in zip(targets, sums, strict=True):
            if target is not total:
                target.copy_(total)
        return grads


def _forward(x: Inputs, r: Rectangle) -> Outputs:
    """(out, lse) of one rectangle."""
    batch, q, k = _batch(r), r.q, r.k
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _heads_first(x.q_BTHD[batch, q]),
        _heads_first(x.k_BSKD[batch, k]),
        _heads_first(x.v_BSKE[batch, k]),
        is_causal=r.causal,
        scale=x.features.scale,
    )
    return out.transpose(1, 2), lse


def _backward(x: Inputs, rows: Rows, r: Rectangle) -> list[Tensor]:
    """(dq, dk, dv) of one rectangle."""
    batch, q, k = _batch(r), r.q, r.k
    parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _heads_first(rows.dout_BTHE[batch, q]),
        _heads_first(x.q_BTHD[batch, q]),
        _heads_first(x.k_BSKD[batch, k]),
        _heads_first(x.v_BSKE[batch, k]),
        _heads_first(rows.out_BTHE[batch, q]),
        rows.lse_BHT[batch, :, q],
        0.0,
        r.causal,
        scale=x.features.scale,
    )
    return [part.transpose(1, 2) for part in parts]


def _alone(x: Inputs) -> bool:
    """Whether there is one rectangle, and it is that of every batch row."""
    rectangles = x.work.rectangles
    return rectangles is not None and len(rectangles) == 1 and (rectangles[0].batch < 0 or x.q_BTHD.shape[0] == 1)


def _batch(r: Rectangle) -> slice:
    return slice(None) if r.batch < 0 else slice(r.batch, r.batch + 1)


def _heads_first(x_BTHD: Tensor) -> Tensor:
    """`[B, H, T, D]`; the op reads a row as D neighbouring numbers, whatever its stride says."""
    return (x_BTHD if x_BTHD.stride(-1) == 1 else x_BTHD.contiguous()).transpose(1, 2)
