"""The portable Triton kernel behind the contract: NVIDIA and AMD GPUs, and CPUs through Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from meshflash.kernels.contract import (
    Grads,
    Inputs,
    Kernel,
    KernelRequest,
    Outputs,
    Rows,
    new_outputs,
)
from meshflash.kernels.launches import Launcher, run
from meshflash.kernels.triton.block_tables import TileTable, make_tile_table
from meshflash.kernels.triton.configs import MAX_DIM
from meshflash.kernels.triton.launch import (
    config_of,
    launch_bwd_dkdv,
    launch_bwd_dq,
    launch_forward,
    with_contiguous_rows,
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
        features = x.features
        if outputs is None and carry is None:
            inputs: tuple[Tensor, ...] = (x.q_BTHD, x.k_BSKD, x.v_BSKE, *features.tensors)
            made: Sequence[Tensor] | None = None
            if x.launches is not None:
                made = x.launches.repeat(self.name, inputs, features.numbers)
            if made is None:
                made = run(x.launches, self.name, inputs, partial(self._forward, x, None, None), features.numbers)
            out, lse = made
            return out, lse
        outputs = outputs or new_outputs(x.q_BTHD, x.v_BSKE)
        others = () if carry is None or carry[0] is outputs[0] else carry
        inputs = (x.q_BTHD, x.k_BSKD, x.v_BSKE, *outputs, *others, *features.tensors)
        run(
            x.launches,
            (self.name, "forward", carry is None, x.sm_margin),
            inputs,
            partial(self._forward, x, outputs, carry),
            x.features.numbers,
        )
        return outputs

    def backward(self, x: Inputs, rows: Rows, grads: Grads | None = None) -> Grads:
        delta = rows.out_BTHE if rows.delta is None else rows.delta  # which is computed from out then
        inputs = (x.q_BTHD, x.k_BSKD, x.v_BSKE, rows.dout_BTHE, rows.lse_BHT, delta, *x.features.tensors)
        if grads is None:
            name: tuple[Any, ...] = self.name, "backward", rows.delta is None
            made: Sequence[Tensor] | None = None
            if x.launches is not None:
                made = x.launches.repeat(name, inputs, x.features.numbers)
            if made is None:
                made = run(x.launches, name, inputs, partial(self._backward, x, rows, None), x.features.numbers)
            dq, dk, dv = made
            return Grads(dq, dk, dv)
        launch = partial(self._backward, x, rows, grads)
        name = self.name, "backward", rows.delta is None, grads.add_dq, grads.add_dkv
        run(x.launches, name, (*inputs, *grads[:3]), launch, x.features.numbers)
        return grads

    def _forward(self, x: Inputs, outputs: Outputs | None, carry: Outputs | None, launcher: Launcher) -> Outputs:
        """Launch the forward, and return the outputs."""
        if outputs is None:
            q, (batch, tokens, heads, _) = x.q_BTHD, x.q_BTHD.shape
            out = launcher.result(batch, tokens, heads, x.v_BSKE.shape[-1], like=q)
            outputs = out, launcher.result(batch, heads, tokens, like=q, dtype=torch.float32)
        self._launch_forward(launcher, with_contiguous_rows(x), outputs, carry)
        return outputs

    def _backward(self, x: Inputs, rows: Rows, grads: Grads | None, launcher: Launcher) -> tuple[Tensor, ...]:
        """Launch the backward, and return the gradients."""
        if grads is None:
            dq, dk, dv = (launcher.result(*y.shape, like=y) for y in (x.q_BTHD, x.k_BSKD, x.v_BSKE))
            grads = Grads(dq, dk, dv)
        if rows.dout_BTHE.stride(-1) != 1:
            rows = rows._replace(dout_BTHE=rows.dout_BTHE.contiguous())
        self._launch_backward(launcher, with_contiguous_rows(x), rows, grads)
        return grads[:3]

    def _launch_forward(self, launcher: Launcher, x: Inputs, outputs: Outputs, carry: Outputs | None) -> None:
        """Launch the forward on inputs with contiguous rows."""
        launch_forward(launcher, x, outputs, carry, _tables(x, "forward"))

    def _launch_backward(self, launcher: Launcher, x: Inputs, rows: Rows, grads: Grads) -> None:
        """Launch the backward on inputs with contiguous rows."""
        atomic = not self.deterministic
        dq = dq_sums(launcher, x.q_BTHD, grads) if atomic else grads.dq_BTHD
        launch_bwd_dkdv(launcher, x, rows, grads, dq, atomic, _tables(x, "bwd_dkdv"))
        if self.deterministic:
            launch_bwd_dq(launcher, x, rows, grads, _tables(x, "bwd_dq"))
        elif dq is not grads.dq_BTHD:
            launcher.copy(grads.dq_BTHD, dq)


def dq_sums(launcher: Launcher, q: Tensor, grads: Grads) -> Tensor:
    """Return the buffer that atomics add dQ to: the caller's sums where dQ is added to, else zeros like `q`."""
    return grads.dq_BTHD if grads.add_dq else launcher.zeros(*q.shape, like=q)


def _tables(x: Inputs, direction: str) -> TileTable:
    """The whole worklist in tiles of the size that the pass is configured for."""
    by_key = direction == "bwd_dkdv"
    chosen = config_of(direction, x)
    size = chosen.block_n if by_key else chosen.block_m
    return make_tile_table(x.work, by_key, size, x.q_BTHD.shape[0], x.q_BTHD.device)
