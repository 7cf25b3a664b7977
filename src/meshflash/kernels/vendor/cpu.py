"""The flash kernel that torch ships for CPUs, wrapped to the contract."""

from __future__ import annotations

import torch
from torch import Tensor

from meshflash.kernels.contract import HALF, KernelRequest, Outputs, Rows
from meshflash.kernels.vendor.rectangles import Rectangles

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"


class Vendor(Rectangles):
    """torch's flash attention for CPUs. The registry makes the one instance."""

    name = "vendor"
    summary = "torch's CPU flash attention: full, causal, documents, GQA"
    op_has_derivative = True

    def missing(self) -> str | None:
        return None if hasattr(torch, _FORWARD) else f"this torch has no {_FORWARD}"

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        if request.device.type != "cpu":
            return f"the device {request.device.type}; it runs on cpu"
        if request.head_dim != request.value_dim:
            return f"a value dim of {request.value_dim} with a head dim of {request.head_dim}"
        reason = super().unsupported_reason(request)
        if reason:
            return reason
        needs_partials = request.partial or request.features.sink_logits_H is not None or not request.work.disjoint
        if request.dtype in HALF and needs_partials:
            return f"float32 partial results for {request.dtype} inputs, which this mask, a sink or other ranks need"
        return None

    def attend(self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKE: Tensor, causal: bool, scale: float) -> Outputs:
        q, k, v = q_BTHD.transpose(1, 2), k_BSKD.transpose(1, 2), v_BSKE.transpose(1, 2)
        out, lse = torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal, scale=scale)
        return out.transpose(1, 2), lse

    def gradients(
        self, q_BTHD: Tensor, k_BSKD: Tensor, v_BSKE: Tensor, rows: Rows, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads_first = (x.transpose(1, 2) for x in (rows.dout_BTHE, q_BTHD, k_BSKD, v_BSKE, rows.out_BTHE))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads_first, rows.lse_BHT, 0.0, causal, scale=scale
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
