"""Attention in Triton behind the contract: NVIDIA and AMD GPUs, and CPUs by Triton's interpreter."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from meshflash.kernels.contract import (
    HALF,
    Ask,
    Features,
    Grads,
    Inputs,
    Kernel,
    Outputs,
    Rows,
    accumulator_dtype,
    new_outputs,
)
from meshflash.kernels.dropout import threshold
from meshflash.kernels.triton_tables import blocks

#: The widest head that the configurations below serve.
MAX_DIM = 256


@dataclass(frozen=True)
class Config:
    """How a kernel is launched: query and key rows of a block, warps, stages of the pipeline."""

    block_m: int
    block_n: int
    warps: int
    stages: int


#: (pass, widest head) -> configuration for half precision: forward, gradients by keys, gradients by queries.
#: Up to 128 the first two are the best of six or seven tried on an H200 at 16,384 tokens; the rest are guesses.
CONFIGS = {
    ("forward", 64): Config(128, 64, 4, 3),
    ("forward", 128): Config(128, 128, 8, 3),
    ("forward", 256): Config(64, 64, 8, 2),
    ("by_keys", 64): Config(64, 128, 8, 3),
    ("by_keys", 128): Config(64, 128, 8, 3),
    ("by_keys", 256): Config(32, 64, 8, 1),
    ("by_queries", 64): Config(128, 64, 8, 3),
    ("by_queries", 128): Config(128, 64, 8, 2),
    ("by_queries", 256): Config(64, 32, 8, 1),
}
#: float32 takes twice the shared memory and has no tensor cores in full precision.
FULL_PRECISION = Config(32, 32, 4, 1)
#: Interpreted, small blocks show every edge at small shapes.
INTERPRETED = Config(32, 32, 1, 1)


class Triton(Kernel):
    """Attention in Triton."""

    name = "triton"
    summary = "Triton: NVIDIA and AMD GPUs, every feature; on CPUs with TRITON_INTERPRET=1"

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def missing(self) -> str | None:
        return None if find_spec("triton") else "triton, which is not installed"

    def lacks(self, ask: Ask) -> str | None:
        if ask.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "the device cpu, unless TRITON_INTERPRET=1 is set from the start"
        if ask.device not in ("cpu", "cuda"):
            return f"the device {ask.device}"
        if ask.dtype == torch.float64:
            return "float64"
        if max(ask.head_dim, ask.value_dim) > MAX_DIM:
            return f"head dims above {MAX_DIM}"
        return None

    def serving(self, ask: Ask) -> Kernel:
        return Triton(ask.deterministic) if ask.deterministic != self.deterministic else self

    def forward(self, x: Inputs, outputs: Outputs | None = None, carry: Outputs | None = None) -> Outputs:
        from meshflash.kernels.triton_forward import forward

        out, lse = outputs or new_outputs(x.q_BTHD, x.v_BSKE)
        q, k, v = (_rows_in_line(y) for y in (x.q_BTHD, x.k_BSKD, x.v_BSKE))
        config = _config("forward", x)
        tables = blocks(x.work, False, config.block_m, q.shape[0], q.device)
        if not len(tables):
            return out, lse
        carried, carried_lse = (out, lse) if carry is None else carry
        sinks, slopes = x.features.sink_logits_H, x.features.alibi_slopes_BH
        forward[(len(tables), q.shape[2])](
            *(q, k, v, out, lse, carried, carried_lse),
            q if sinks is None else sinks.contiguous(),
            q if slopes is None else slopes,
            *(tables.tiles, tables.spans),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *lse.stride()),
            *(*carried.stride()[:3], *carried_lse.stride(), *_strides(slopes)),
            *_numbers(x.features),
            **_constants(x, config),
            HAS_CARRY=carry is not None,
            HAS_SINKS=sinks is not None,
        )
        return out, lse

    def backward(self, x: Inputs, rows: Rows, grads: Grads | None = None) -> Grads:
        from meshflash.kernels.triton_backward import by_keys, by_queries

        grads = grads or Grads.like(x.q_BTHD, x.k_BSKD, x.v_BSKE)
        q, k, v, dout = (_rows_in_line(y) for y in (x.q_BTHD, x.k_BSKD, x.v_BSKE, rows.dout_BTHE))
        slopes = x.features.alibi_slopes_BH
        batch, device = q.shape[0], q.device
        given = (q, k, v, dout, rows.lse_BHT, rows.delta_BHT)
        strides = [n for y in given[:4] for n in y.stride()[:3]] + [*rows.lse_BHT.stride(), *rows.delta_BHT.stride()]
        atomic = not self.deterministic
        dq = grads.dq_BTHD
        if atomic and not grads.add_dq:
            dq = torch.zeros_like(q, dtype=accumulator_dtype(q.dtype), memory_format=torch.contiguous_format)
        config = _config("by_keys", x)
        tables = blocks(x.work, True, config.block_n, batch, device)
        if len(tables):
            by_keys[(len(tables), k.shape[2])](
                *(*given, dq, grads.dk_BSKD, grads.dv_BSKE, q if slopes is None else slopes),
                *(tables.tiles, tables.spans),
                *(*strides, *dq.stride()[:3], *grads.dk_BSKD.stride()[:3], *grads.dv_BSKE.stride()[:3]),
                *_strides(slopes),
                *_numbers(x.features),
                **_constants(x, config),
                ATOMIC=atomic,
                ADD=grads.add_dkv,
            )
        if atomic:
            if dq is not grads.dq_BTHD:
                grads.dq_BTHD.copy_(dq)
            return grads
        config = _config("by_queries", x)
        tables = blocks(x.work, False, config.block_m, batch, device)
        if len(tables):
            by_queries[(len(tables), q.shape[2])](
                *(*given, dq, q if slopes is None else slopes, tables.tiles, tables.spans),
                *(*strides, *dq.stride()[:3], *_strides(slopes)),
                *_numbers(x.features),
                **_constants(x, config),
                ADD=grads.add_dq,
            )
        return grads


def _config(direction: str, x: Inputs) -> Config:
    if x.q_BTHD.device.type == "cpu":
        return INTERPRETED
    if x.q_BTHD.dtype not in HALF:
        return FULL_PRECISION
    widest = max(x.q_BTHD.shape[-1], x.v_BSKE.shape[-1])
    return next(config for (name, most), config in CONFIGS.items() if name == direction and widest <= most)


def _constants(x: Inputs, config: Config) -> dict[str, Any]:
    dim, value_dim = x.q_BTHD.shape[-1], x.v_BSKE.shape[-1]
    features = x.features
    return dict(
        GROUP=x.q_BTHD.shape[2] // x.k_BSKD.shape[2],
        D=dim,
        DP=_padded(dim),
        E=value_dim,
        EP=_padded(value_dim),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        SOFTCAP=features.softcap > 0,
        ALIBI=features.alibi_slopes_BH is not None,
        DROPOUT=features.dropout > 0,
        PRECISION="ieee",
        INTERPRETED=x.q_BTHD.device.type == "cpu",
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _numbers(features: Features) -> tuple[Any, ...]:
    keep_scale = 1 / (1 - features.dropout)
    offsets = (features.batch_offset, features.head_offset)
    return features.scale, features.softcap, features.seed, *offsets, threshold(features.dropout), keep_scale


def _strides(slopes: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if slopes is None else slopes.stride()


def _rows_in_line(x: Tensor) -> Tensor:
    """Numbers of a row as neighbours, which the kernels take for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _padded(dim: int) -> int:
    """A power of two of at least 16, as products want."""
    return max(16, 1 << (dim - 1).bit_length())
