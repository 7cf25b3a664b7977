"""Attention in Triton behind the contract: NVIDIA and AMD GPUs, and CPUs by Triton's interpreter."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from meshflash.kernels.contract import (
    HALF,
    Features,
    Grads,
    Inputs,
    Kernel,
    KernelRequest,
    Outputs,
    Rows,
    accumulator_dtype,
    new_outputs,
)
from meshflash.kernels.dropout import threshold
from meshflash.kernels.hopper import launch as hopper_launch
from meshflash.kernels.triton.block_tables import Blocks, blocks, runs
from meshflash.kernels.triton.configs import MAX_DIM, PORTABLE, Config, config, has_descriptors
from meshflash.kernels.triton.launch import LEAST_SCALE, described, fits, launch

#: What says how many rows blocks of the kernels in Gluon have.
Sizes = hopper_launch.Forward | hopper_launch.Backward | hopper_launch.Queries


class Triton(Kernel):
    """Attention in Triton."""

    name = "triton"
    summary = "Triton: NVIDIA and AMD GPUs, every feature; on CPUs with TRITON_INTERPRET=1"

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def missing(self) -> str | None:
        return None if find_spec("triton") else "triton, which is not installed"

    def unsupported_reason(self, ask: KernelRequest) -> str | None:
        if ask.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "the device cpu, unless TRITON_INTERPRET=1 is set from the start"
        if ask.device.type not in ("cpu", "cuda"):
            return f"the device {ask.device.type}"
        if ask.dtype == torch.float64:
            return "float64"
        if max(ask.head_dim, ask.value_dim) > MAX_DIM:
            return f"head dims above {MAX_DIM}"
        return None

    def serving(self, ask: KernelRequest) -> Kernel:
        return Triton(ask.deterministic) if ask.deterministic != self.deterministic else self

    def rated_as(self, ask: KernelRequest) -> str:
        return self.name if hopper_launch.may_serve(ask) else PORTABLE

    def forward(self, x: Inputs, outputs: Outputs | None = None, carry: Outputs | None = None) -> Outputs:
        from meshflash.kernels.triton.forward import forward

        out, lse = outputs or new_outputs(x.q_BTHD, x.v_BSKE)
        q, k, v = (_rows_in_line(y) for y in (x.q_BTHD, x.k_BSKD, x.v_BSKE))
        config = _config("forward", x)
        gluon = hopper_launch.forward_config(x, q, k, v)
        served, tables = _tables(x, False, config, gluon)
        if gluon and served:
            hopper_launch.forward(x, q, k, v, (out, lse), carry, gluon, served)
        if not len(tables):
            return out, lse
        carried, carried_lse = (out, lse) if carry is None else carry
        features = x.features
        sinks, slopes = features.sink_logits_H, features.alibi_slopes_BH
        parts = _parts(q, k, v)
        in_blocks = _in_blocks(parts, (k, v), config.block_n)
        launch(
            *(forward, tables, q.shape[2]),
            *(q, k, v, *(in_blocks or (k, v)), out, lse, carried, carried_lse),
            q if sinks is None else sinks.contiguous(),
            q if slopes is None else slopes,
            *(tables.tiles, tables.spans),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *lse.stride()),
            *(*carried.stride()[:3], *carried_lse.stride(), *_strides(slopes)),
            *_numbers(features),
            **_constants(x, parts, config),
            HAS_CARRY=carry is not None,
            HAS_SINKS=sinks is not None,
            DESCRIPTORS=in_blocks is not None,
            PLAIN=_plain(x) and x.features.scale >= LEAST_SCALE,
        )
        return out, lse

    def backward(self, x: Inputs, rows: Rows, grads: Grads | None = None) -> Grads:
        from meshflash.kernels.triton.backward import by_keys, by_queries

        grads = grads or Grads.like(x.q_BTHD, x.k_BSKD, x.v_BSKE)
        q, k, v, dout = (_rows_in_line(y) for y in (x.q_BTHD, x.k_BSKD, x.v_BSKE, rows.dout_BTHE))
        slopes = x.features.alibi_slopes_BH
        given = (q, k, v, dout, rows.lse_BHT, rows.delta_BHT)
        strides = [n for y in given[:4] for n in y.stride()[:3]] + [*rows.lse_BHT.stride(), *rows.delta_BHT.stride()]
        parts = _parts(q, k, v, dout)
        gluon = hopper_launch.backward_config(x, self.deterministic, grads, q, k, v, dout)
        atomic = not self.deterministic
        dq = grads.dq_BTHD
        config = _config("by_keys", x)
        served, tables = _tables(x, True, config, gluon)
        sums = None
        if gluon and served:
            if atomic:
                tiled = served.even and not len(tables) and not grads.add_dq
                sums = hopper_launch.Sums(q, grads, tiled, gluon.block_m)
                dq = sums.room
            hopper_launch.backward(x, q, k, v, dout, *given[4:], grads, sums, gluon, served)
        elif atomic and not grads.add_dq:
            dq = torch.zeros_like(q, dtype=accumulator_dtype(q.dtype), memory_format=torch.contiguous_format)
        if len(tables):
            in_blocks = _in_blocks(parts, (q, dout, dq) if atomic else (q, dout, q), config.block_m)
            launch(
                *(by_keys, tables, k.shape[2]),
                *(*given, *(in_blocks or (q, dout, dq)), dq, grads.dk_BSKD, grads.dv_BSKE),
                *(q if slopes is None else slopes, tables.tiles, tables.spans),
                *(*strides, *dq.stride()[:3], *grads.dk_BSKD.stride()[:3], *grads.dv_BSKE.stride()[:3]),
                *_strides(slopes),
                *_numbers(x.features),
                **_constants(x, parts, config),
                DESCRIPTORS=in_blocks is not None,
                LOWER=tables.lower,
                UPPER=tables.upper or tables.edge,
                ATOMIC=atomic,
                ADD=grads.add_dkv,
            )
        if sums:
            sums.finish(x.features.scale)
            return grads
        if atomic:
            if dq is not grads.dq_BTHD:
                grads.dq_BTHD.copy_(dq)
            return grads
        config = _config("by_queries", x)
        second = hopper_launch.QUERIES[q.shape[-1]] if gluon else None
        served, tables = _tables(x, False, config, second)
        if second and served:
            hopper_launch.queries(x, *given, grads, second, served)
        if len(tables):
            in_blocks = _in_blocks(parts, (k, v), config.block_n)
            launch(
                *(by_queries, tables, q.shape[2]),
                *(*given, *(in_blocks or (k, v)), dq),
                *(q if slopes is None else slopes, tables.tiles, tables.spans),
                *(*strides, *dq.stride()[:3], *_strides(slopes)),
                *_numbers(x.features),
                **_constants(x, parts, config),
                DESCRIPTORS=in_blocks is not None,
                LOWER=tables.lower,
                UPPER=tables.upper,
                ADD=grads.add_dq,
            )
        return grads


def _tables(x: Inputs, by_key: bool, config: Config, gluon: Sizes | None) -> tuple[Blocks | None, Blocks]:
    """The blocks that kernels in Gluon serve, where there are any, and those that are left."""
    batch, device = x.q_BTHD.shape[0], x.q_BTHD.device
    size = config.block_n if by_key else config.block_m
    if gluon is None:
        return None, blocks(x.work, by_key, size, batch, device)
    sizes = (gluon.block_n, gluon.block_m) if by_key else (gluon.block_m, gluon.block_n)
    served, rest = runs(x.work, by_key, *sizes, size, batch, device, filled=by_key, grid=by_key)
    return served if len(served) else None, rest


#: A width in parts, each a power of two of at least 16 or 0, as products want.
Parts = tuple[int, int]


@cache
def parts_of(width: int) -> Parts:
    """A width as one power of two, with zeros behind it, or as two that are exactly it.

    >>> [parts_of(width) for width in (8, 48, 64, 72, 80, 96, 112, 192, 256)]
    [(16, 0), (32, 16), (64, 0), (128, 0), (64, 16), (64, 32), (128, 0), (128, 64), (256, 0)]
    """
    half = whole(width) // 2
    rest = width - half
    exact = half >= 16 and 16 <= rest < half and not rest & (rest - 1)
    return (half, rest) if exact else (whole(width), 0)


def whole(width: int) -> int:
    """The least power of two that holds a width, and that products take."""
    return max(16, 1 << (width - 1).bit_length())


def _parts(*tensors: Tensor) -> tuple[Parts, Parts]:
    """The parts of the width of keys and of that of values, for these tensors of rows."""
    dim, value_dim = tensors[0].shape[-1], tensors[2].shape[-1]
    if _lined(*tensors):
        return parts_of(dim), parts_of(value_dim)
    return (whole(dim), 0), (whole(value_dim), 0)


def _lined(*tensors: Tensor) -> bool:
    """Whether rows begin at multiples of 16 elements, as the compiler can see; parts of others it gets wrong."""
    return all(x.data_ptr() % 16 == 0 and not any(n % 16 for n in x.stride()[:3]) for x in tensors)


def _in_blocks(parts: tuple[Parts, Parts], tensors: tuple[Tensor, ...], rows: int) -> tuple[Any, ...] | None:
    """Tensors as descriptors of blocks of so many rows; None where the GPU has none, or one of them does not fit."""
    if not _descriptors_serve(tensors[0]) or parts[0][1] or parts[1][1] or not all(fits(x) for x in tensors):
        return None
    widths = {tensors[0].shape[-1]: parts[0][0], tensors[1].shape[-1]: parts[1][0]}
    return tuple(described(x, [1, rows, 1, widths[x.shape[-1]]]) for x in tensors)


def _descriptors_serve(x: Tensor) -> bool:
    return x.dtype in HALF and has_descriptors(x.device)


def _plain(x: Inputs) -> bool:
    """Whether scores are products and no more."""
    return not x.features.softcap and x.features.alibi_slopes_BH is None


def _config(direction: str, x: Inputs) -> Config:
    plain = _plain(x) and not x.features.dropout
    return config(direction, max(x.q_BTHD.shape[-1], x.v_BSKE.shape[-1]), x.q_BTHD.dtype, x.q_BTHD.device, plain)


def _constants(x: Inputs, parts: tuple[Parts, Parts], config: Config) -> dict[str, Any]:
    (d1, d2), (e1, e2) = parts
    features = x.features
    return dict(
        GROUP=x.q_BTHD.shape[2] // x.k_BSKD.shape[2],
        D=x.q_BTHD.shape[-1],
        D1=d1,
        D2=d2,
        E=x.v_BSKE.shape[-1],
        E1=e1,
        E2=e2,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        SOFTCAP=features.softcap > 0,
        ALIBI=features.alibi_slopes_BH is not None,
        DROPOUT=features.dropout > 0,
        PRECISION="ieee",
        INTERPRETED=x.q_BTHD.device.type == "cpu",
        num_warps=config.warps,
        num_stages=config.stages,
        **({"maxnreg": config.registers} if config.registers else {}),
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
