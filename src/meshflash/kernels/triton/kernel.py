"""The portable Triton kernel behind the contract: NVIDIA and AMD GPUs, and CPUs through Triton's interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from meshflash.kernels.contract import (
    Grads,
    Inputs,
    Kernel,
    KernelRequest,
    Outputs,
    Rows,
    accumulator_dtype,
    new_outputs,
)
from meshflash.kernels.triton.block_tables import TileTable, make_tile_table
from meshflash.kernels.triton.configs import MAX_DIM
from meshflash.kernels.triton.launch import (
    config_of,
    contiguous_rows,
    launch_bwd_dkdv,
    launch_bwd_dq,
    launch_forward,
)


class Triton(Kernel):
    """The portable Triton kernel; the registry makes one, and `serving` another for deterministic calls."""

    name = "triton"
    summary = "portable Triton: NVIDIA and AMD GPUs, every feature; on CPUs with TRITON_INTERPRET=1"

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def missing(self) -> str | None:
        return None if find_spec("triton") else "triton, which is not installed"

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        if request.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "the device cpu, unless TRITON_INTERPRET=1 is set from the start"
        if request.device.type not in ("cpu", "cuda"):
            return f"the device {request.device.type}"
        if request.dtype == torch.float64:
            return "float64"
        if max(request.head_dim, request.value_dim) > MAX_DIM:
            return f"head dims above {MAX_DIM}"
        return None

    def serving(self, request: KernelRequest) -> Kernel:
        return type(self)(request.deterministic) if request.deterministic != self.deterministic else self

    def forward(self, x: Inputs, outputs: Outputs | None = None, carry: Outputs | None = None) -> Outputs:
        out, lse = outputs or new_outputs(x.q_BTHD, x.v_BSKE)
        q, k, v = contiguous_rows(x.q_BTHD, x.k_BSKD, x.v_BSKE)
        launch_forward(x, q, k, v, (out, lse), carry, _tables(x, "forward"))
        return out, lse

    def backward(self, x: Inputs, rows: Rows, grads: Grads | None = None) -> Grads:
        grads = grads or Grads.like(x.q_BTHD, x.k_BSKD, x.v_BSKE)
        q, k, v, dout = contiguous_rows(x.q_BTHD, x.k_BSKD, x.v_BSKE, rows.dout_BTHE)
        given = (x, q, k, v, dout, rows, grads)
        atomic = not self.deterministic
        dq = dq_sums(q, grads) if atomic else grads.dq_BTHD
        launch_bwd_dkdv(*given, dq, atomic, _tables(x, "bwd_dkdv"))
        if self.deterministic:
            launch_bwd_dq(*given, _tables(x, "bwd_dq"))
        elif dq is not grads.dq_BTHD:
            grads.dq_BTHD.copy_(dq)
        return grads


def dq_sums(q: Tensor, grads: Grads) -> Tensor:
    """Return the buffer that atomics add dQ to: the caller's sums where dQ is added to, else zeros like `q`."""
    if grads.add_dq:
        return grads.dq_BTHD
    return torch.zeros_like(q, dtype=accumulator_dtype(q.dtype), memory_format=torch.contiguous_format)


def _tables(x: Inputs, direction: str) -> TileTable:
    """The whole worklist in tiles of the size that the pass is configured for."""
    by_key = direction == "bwd_dkdv"
    chosen = config_of(direction, x)
    size = chosen.block_n if by_key else chosen.block_m
    return make_tile_table(x.work, by_key, size, x.q_BTHD.shape[0], x.q_BTHD.device)
