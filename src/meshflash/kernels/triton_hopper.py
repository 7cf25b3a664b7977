"""The kernels by specialized warps behind what the Triton kernel asks of them: which calls they serve, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshflash.kernels.contract import Grads, Inputs, Outputs
from meshflash.kernels.triton_configs import Config, specialized
from meshflash.kernels.triton_launch import described, fits, in_rows, launch, launch_with_scratch
from meshflash.kernels.triton_tables import Blocks

#: Below this a scale is 0, or nearly, in float32.
LEAST_SCALE = torch.finfo(torch.float32).tiny


def plain(x: Inputs) -> bool:
    """Whether scores are products and no more, with a scale above 0."""
    features = x.features
    return features.scale >= LEAST_SCALE and not features.softcap and features.alibi_slopes_BH is None


def configs(directions: Sequence[str], x: Inputs, *tensors: Tensor) -> list[Config | None]:
    """How specialized warps serve passes over these tensors of rows; None for one that they do not."""
    dim, device = x.q_BTHD.shape[-1], x.q_BTHD.device
    found = [specialized(direction, dim, x.q_BTHD.dtype, device) for direction in directions]
    if any(found) and (dim != x.v_BSKE.shape[-1] or not plain(x) or x.features.dropout or not all(map(fits, tensors))):
        return [None] * len(found)
    return found


def forward(x: Inputs, q: Tensor, k: Tensor, v: Tensor, outputs: Outputs, carry: Outputs | None, config: Config,
            tables: Blocks) -> None:  # fmt: skip
    """(out, lse) of the blocks."""
    from meshflash.kernels.triton_specialized import forward

    (out, lse), sinks = outputs, x.features.sink_logits_H
    carried, carried_lse = outputs if carry is None else carry
    (k_rows, k_at), (v_rows, v_at) = in_rows(k, config.block_n), in_rows(v, config.block_n)
    launch_with_scratch(
        *(forward, tables, q.shape[2], q, k_rows, v_rows, out, lse, carried, carried_lse),
        *(q if sinks is None else sinks.contiguous(), tables.tiles, tables.spans),
        *(q.shape[1], *q.stride()[:3], *k_at, *v_at, *out.stride()[:3], *lse.stride()),
        *(*carried.stride()[:3], *carried_lse.stride(), x.features.scale),
        **_constants(x, config, tables),
        HAS_CARRY=carry is not None,
        HAS_SINKS=sinks is not None,
    )


class Backward:
    """Gradients by specialized warps."""

    def __init__(self, x: Inputs, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor) -> None:
        self.x, self.q, self.k, self.v, self.dout = x, q, k, v, dout
        self.lse, self.delta = lse.contiguous(), delta.contiguous()

    def _aligned(self, tables: Blocks) -> bool:
        """Whether descriptors of one dimension, which begin at multiples of 16 bytes, serve for lse and delta."""
        bases = self.lse.data_ptr() | self.delta.data_ptr()
        return tables.aligned and self.q.shape[1] % 4 == 0 and bases % 16 == 0 and self.lse.numel() < 2**31

    def by_keys(self, config: Config, tables: Blocks, grads: Grads) -> None:
        """(dK, dV) of the blocks."""
        from meshflash.kernels.triton_specialized import by_keys

        rows = config.block_m
        (q_rows, q_at), (dout_rows, dout_at) = in_rows(self.q, rows), in_rows(self.dout, rows)
        numbers = [self.lse, self.delta]
        # heads of 64 got NaN by descriptors of one dimension in this loop, in four configurations, by Triton 3.6 on an
        # H200, and the right numbers by pointers; why is not known
        if aligned := self._aligned(tables) and self.q.shape[-1] == 128:
            numbers = [described(y.view(-1), [rows]) for y in numbers]
        dk, dv = grads.dk_BSKD, grads.dv_BSKE
        launch_with_scratch(
            *(by_keys, tables, self.k.shape[2], self.k, self.v, q_rows, dout_rows, *numbers, dk, dv),
            *(tables.tiles, tables.spans, self.q.shape[1], self.k.shape[1]),
            *(*self.k.stride()[:3], *self.v.stride()[:3], *q_at, *dout_at, *dk.stride()[:3], *dv.stride()[:3]),
            self.x.features.scale,
            **_constants(self.x, config, tables),
            ALIGNED=aligned,
            ADD=grads.add_dkv,
        )

    def by_queries(self, config: Config, tables: Blocks, grads: Grads) -> None:
        """DQ of the blocks."""
        from meshflash.kernels.triton_specialized import by_queries, in_blocks

        tokens, heads = self.q.shape[1:3]
        numbers: tuple[Tensor, ...] = (self.lse, self.delta)
        if not (aligned := self._aligned(tables)):
            numbers = self.lse.new_empty(2, len(tables), heads, config.block_m).unbind()
            rows = (self.lse, self.delta, *numbers, tables.tiles, tokens)
            launch(in_blocks, tables, heads, *rows, BLOCK_M=config.block_m)
        (k_rows, k_at), (v_rows, v_at) = in_rows(self.k, config.block_n), in_rows(self.v, config.block_n)
        dq = grads.dq_BTHD
        launch_with_scratch(
            *(by_queries, tables, self.q.shape[2], self.q, self.dout, k_rows, v_rows, *numbers, dq),
            *(tables.tiles, tables.spans, self.q.shape[1], *self.q.stride()[:3], *self.dout.stride()[:3]),
            *(*k_at, *v_at, *dq.stride()[:3], self.x.features.scale, numbers[0].numel()),
            **_constants(self.x, config, tables),
            ALIGNED=aligned,
            ADD=grads.add_dq,
        )


def _constants(x: Inputs, config: Config, tables: Blocks) -> dict[str, Any]:
    return dict(
        GROUP=x.q_BTHD.shape[2] // x.k_BSKD.shape[2],
        D=x.q_BTHD.shape[-1],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        LOWER=tables.lower,
        UPPER=tables.upper,
        SINGLE=tables.single,
        INTERPRETED=x.q_BTHD.device.type == "cpu",
        num_warps=config.warps,
        num_stages=config.stages,
    )
