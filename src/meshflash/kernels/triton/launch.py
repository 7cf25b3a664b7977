"""Launch the portable Triton kernels: one CTA for each tile of the worklist and head, tensors by pointer or descriptor.

`launch_forward`, `launch_bwd_dkdv` and `launch_bwd_dq` run one pass over a table of tiles. The Triton kernel calls them
for a whole worklist, the Hopper kernel for the tiles that its own kernels do not serve.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshflash.kernels.contract import HALF, Features, Grads, Inputs, Outputs, Rows
from meshflash.kernels.dropout import threshold
from meshflash.kernels.launches import Launcher
from meshflash.kernels.triton.block_tables import TileTable
from meshflash.kernels.triton.configs import Config, config, has_descriptors

#: The smallest normal float32: a smaller softmax scale is 0, or nearly so, in the kernels.
MIN_SCALE = torch.finfo(torch.float32).tiny
#: Elements: a multiple of 16 bytes for every dtype. It stands for the stride of dimensions of size 1.
ALIGNED_STRIDE = 64
#: A head dim as two widths: powers of two of at least 16, as `tl.dot` wants; the second is 0 where one is enough.
Widths = tuple[int, int]


def launch_forward(launcher: Launcher, x: Inputs, outputs: Outputs, carry: Outputs | None, tables: TileTable) -> None:
    """Run the portable forward over a table of query tiles; without tiles, do nothing.

    Rows of q, k and v are contiguous. (out, lse) go to `outputs`; a `carry` is continued.
    """
    if not len(tables):
        return
    from meshflash.kernels.triton.forward import forward

    q, k, v = x.q_BTHD, x.k_BSKD, x.v_BSKE
    chosen = config_of("forward", x)
    (out, lse), (carried, carried_lse) = outputs, outputs if carry is None else carry
    features = x.features
    sinks, slopes = features.sink_logits_H, features.alibi_slopes_BH
    widths = _split_widths(q, k, v)
    descriptors = _make_descriptors(widths, (k, v), chosen.block_n)
    launcher.keep(tables.tiles, tables.spans)
    launcher.launch(
        forward,
        (len(tables), q.shape[2]),
        *(q, k, v, *(descriptors or (k, v)), out, lse, carried, carried_lse),
        q if sinks is None else sinks.contiguous(),
        q if slopes is None else slopes,
        *(tables.tiles, tables.spans),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *lse.stride()),
        *(*carried.stride()[:3], *carried_lse.stride(), *_slope_strides(slopes)),
        *_scalars(features),
        **_constants(x, widths, chosen),
        HAS_CARRY=carry is not None,
        HAS_SINKS=sinks is not None,
        USE_TMA=descriptors is not None,
        SCALE_IN_EXP=_has_plain_scores(x) and x.features.scale >= MIN_SCALE,
    )


def launch_bwd_dkdv(
    launcher: Launcher, x: Inputs, rows: Rows, grads: Grads, dq: Tensor, atomic: bool, tables: TileTable
) -> None:
    """Run the portable backward over a table of key tiles: dK and dV into `grads`; without tiles, do nothing.

    With `atomic` it also adds its share of dQ to `dq`, float32 sums.
    """
    if not len(tables):
        return
    from meshflash.kernels.triton.backward import bwd_dkdv

    q, dout = x.q_BTHD, rows.dout_BTHE
    chosen = config_of("bwd_dkdv", x)
    slopes = x.features.alibi_slopes_BH
    given = _tensors_of_backward(x, rows)
    widths = _split_widths(*given[:4])
    descriptors = _make_descriptors(widths, (q, dout, dq) if atomic else (q, dout, q), chosen.block_m)
    launcher.keep(tables.tiles, tables.spans)
    launcher.launch(
        bwd_dkdv,
        (len(tables), x.k_BSKD.shape[2]),
        *(*given, *(descriptors or (q, dout, dq)), dq, grads.dk_BSKD, grads.dv_BSKE),
        *(q if slopes is None else slopes, tables.tiles, tables.spans),
        *(*_input_strides(*given), *dq.stride()[:3], *grads.dk_BSKD.stride()[:3], *grads.dv_BSKE.stride()[:3]),
        *_slope_strides(slopes),
        *_scalars(x.features),
        **_constants(x, widths, chosen),
        USE_TMA=descriptors is not None,
        LOWER=tables.lower,
        UPPER=tables.upper or tables.partial_tiles,
        ATOMIC=atomic,
        ACCUMULATE=grads.add_dkv,
    )


def launch_bwd_dq(launcher: Launcher, x: Inputs, rows: Rows, grads: Grads, tables: TileTable) -> None:
    """Run the portable backward over a table of query tiles; without tiles, do nothing.

    dQ goes into `grads`, summed in a fixed order.
    """
    if not len(tables):
        return
    from meshflash.kernels.triton.backward import bwd_dq

    chosen = config_of("bwd_dq", x)
    slopes, dq = x.features.alibi_slopes_BH, grads.dq_BTHD
    given = _tensors_of_backward(x, rows)
    widths = _split_widths(*given[:4])
    descriptors = _make_descriptors(widths, (x.k_BSKD, x.v_BSKE), chosen.block_n)
    launcher.keep(tables.tiles, tables.spans)
    launcher.launch(
        bwd_dq,
        (len(tables), x.q_BTHD.shape[2]),
        *(*given, *(descriptors or (x.k_BSKD, x.v_BSKE)), dq),
        *(x.q_BTHD if slopes is None else slopes, tables.tiles, tables.spans),
        *(*_input_strides(*given), *dq.stride()[:3], *_slope_strides(slopes)),
        *_scalars(x.features),
        **_constants(x, widths, chosen),
        USE_TMA=descriptors is not None,
        LOWER=tables.lower,
        UPPER=tables.upper,
        ACCUMULATE=grads.add_dq,
    )


def _tensors_of_backward(x: Inputs, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return x.q_BTHD, x.k_BSKD, x.v_BSKE, rows.dout_BTHE, rows.lse_BHT, rows.delta_BHT


def config_of(direction: str, x: Inputs) -> Config:
    """Return the configuration of a pass for the inputs of a call."""
    plain = _has_plain_scores(x) and not x.features.dropout
    return config(direction, max(x.q_BTHD.shape[-1], x.v_BSKE.shape[-1]), x.q_BTHD.dtype, x.q_BTHD.device, plain)


def with_contiguous_rows(x: Inputs) -> Inputs:
    """Return inputs whose last dimension has stride 1, which the kernels rely on; others are copied."""
    if x.q_BTHD.stride(-1) == x.k_BSKD.stride(-1) == x.v_BSKE.stride(-1) == 1:
        return x
    q, k, v = (y if y.stride(-1) == 1 else y.contiguous() for y in (x.q_BTHD, x.k_BSKD, x.v_BSKE))
    return x._replace(q_BTHD=q, k_BSKD=k, v_BSKE=v)


@cache
def split_width(width: int) -> Widths:
    """Return a head dim as one power of two, padded with zeros, or as two that add up to it exactly.

    >>> [split_width(width) for width in (8, 48, 64, 72, 80, 96, 112, 192, 256)]
    [(16, 0), (32, 16), (64, 0), (128, 0), (64, 16), (64, 32), (128, 0), (128, 64), (256, 0)]
    """
    half = padded_width(width) // 2
    rest = width - half
    exact = half >= 16 and 16 <= rest < half and not rest & (rest - 1)
    return (half, rest) if exact else (padded_width(width), 0)


def padded_width(width: int) -> int:
    """Return the smallest power of two of at least 16, as `tl.dot` wants, that holds a head dim."""
    return max(16, 1 << (width - 1).bit_length())


def _split_widths(*tensors: Tensor) -> tuple[Widths, Widths]:
    """The two widths of the head dim of keys, and those of values, for the tensors of a launch."""
    dim, value_dim = tensors[0].shape[-1], tensors[2].shape[-1]
    if _rows_aligned(*tensors):
        return split_width(dim), split_width(value_dim)
    return (padded_width(dim), 0), (padded_width(value_dim), 0)


def _rows_aligned(*tensors: Tensor) -> bool:
    """Whether the compiler sees that rows begin at multiples of 16 elements; it miscompiles two widths of others."""
    return all(x.data_ptr() % 16 == 0 and not any(n % 16 for n in x.stride()[:3]) for x in tensors)


def _make_descriptors(widths: tuple[Widths, Widths], tensors: tuple[Tensor, ...], rows: int) -> tuple[Any, ...] | None:
    """Tensors as descriptors of blocks of `rows` rows; None where TMA is missing or cannot address one of them."""
    if not _supports_tma(tensors[0]) or widths[0][1] or widths[1][1] or not all(tma_aligned(x) for x in tensors):
        return None
    by_dim = {tensors[0].shape[-1]: widths[0][0], tensors[1].shape[-1]: widths[1][0]}
    return tuple(described(x, [1, rows, 1, by_dim[x.shape[-1]]]) for x in tensors)


def _supports_tma(x: Tensor) -> bool:
    return x.dtype in HALF and has_descriptors(x.device)


def _has_plain_scores(x: Inputs) -> bool:
    """Whether scores are `scale * q.k` alone."""
    return not x.features.softcap and x.features.alibi_slopes_BH is None


def _constants(x: Inputs, widths: tuple[Widths, Widths], config: Config) -> dict[str, Any]:
    (d1, d2), (e1, e2) = widths
    features = x.features
    return dict(
        GQA_RATIO=x.q_BTHD.shape[2] // x.k_BSKD.shape[2],
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


def _scalars(features: Features) -> tuple[Any, ...]:
    keep_scale = 1 / (1 - features.dropout)
    offsets = (features.batch_offset, features.head_offset)
    return features.scale, features.softcap, features.seed, *offsets, threshold(features.dropout), keep_scale


def _input_strides(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse_BHT: Tensor, delta_BHT: Tensor
) -> tuple[int, ...]:
    of_rows = (n for y in (q, k, v, dout) for n in y.stride()[:3])
    return *of_rows, *lse_BHT.stride(), *delta_BHT.stride()


def _slope_strides(slopes: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if slopes is None else slopes.stride()


def tma_aligned(x: Tensor) -> bool:
    """Whether TMA can address a tensor: rows of contiguous elements that begin at multiples of 16 bytes."""
    unit = 16 // x.element_size()
    strides = [stride for size, stride in zip(x.shape[:3], x.stride(), strict=False) if size > 1]
    is_aligned = x.data_ptr() % 16 == 0 and x.stride(-1) == 1
    return x.numel() > 0 and is_aligned and all(n > 0 and n % unit == 0 for n in strides)


def tma_strides(x: Tensor) -> list[int]:
    """Return the strides of a tensor as a descriptor takes them.

    The stride of a dimension of size 1 may be anything in torch; a descriptor wants a multiple of 16 bytes there too.
    """
    *outer, inner = x.stride()
    return [ALIGNED_STRIDE if size == 1 else stride for size, stride in zip(x.shape, outer, strict=False)] + [inner]


def described(x: Tensor, block: list[int]) -> Any:
    """Return a tensor descriptor that loads and stores blocks of this shape."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), tma_strides(x), block)
