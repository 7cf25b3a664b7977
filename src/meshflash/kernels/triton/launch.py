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
from meshflash.kernels.triton.block_tables import Blocks
from meshflash.kernels.triton.configs import Config, config, has_descriptors

#: The smallest normal float32: a smaller softmax scale is 0, or nearly so, in the kernels.
LEAST_SCALE = torch.finfo(torch.float32).tiny
#: Elements: a multiple of 16 bytes for every dtype. It stands for the stride of dimensions of size 1.
LINED = 64
#: A head dim as two widths: powers of two of at least 16, as `tl.dot` wants; the second is 0 where one is enough.
Parts = tuple[int, int]


def launch_forward(
    x: Inputs, q: Tensor, k: Tensor, v: Tensor, outputs: Outputs, carry: Outputs | None, tables: Blocks
) -> None:
    """Run the portable forward over a table of query tiles; without tiles, do nothing.

    q, k and v are those of `x` with contiguous rows. (out, lse) go to `outputs`; a `carry` is continued.
    """
    if not len(tables):
        return
    from meshflash.kernels.triton.forward import forward

    chosen = config_of("forward", x)
    (out, lse), (carried, carried_lse) = outputs, outputs if carry is None else carry
    features = x.features
    sinks, slopes = features.sink_logits_H, features.alibi_slopes_BH
    parts = _parts(q, k, v)
    in_blocks = _in_blocks(parts, (k, v), chosen.block_n)
    launch(
        *(forward, tables, q.shape[2]),
        *(q, k, v, *(in_blocks or (k, v)), out, lse, carried, carried_lse),
        q if sinks is None else sinks.contiguous(),
        q if slopes is None else slopes,
        *(tables.tiles, tables.spans),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *lse.stride()),
        *(*carried.stride()[:3], *carried_lse.stride(), *_strides(slopes)),
        *_numbers(features),
        **_constants(x, parts, chosen),
        HAS_CARRY=carry is not None,
        HAS_SINKS=sinks is not None,
        DESCRIPTORS=in_blocks is not None,
        PLAIN=_plain(x) and x.features.scale >= LEAST_SCALE,
    )


def launch_bwd_dkdv(
    x: Inputs, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: Rows, grads: Grads, dq: Tensor, atomic: bool,
    tables: Blocks,
) -> None:  # fmt: skip
    """Run the portable backward over a table of key tiles: dK and dV into `grads`; without tiles, do nothing.

    With `atomic` it also adds its share of dQ to `dq`, float32 sums.
    """
    if not len(tables):
        return
    from meshflash.kernels.triton.backward import by_keys

    chosen = config_of("by_keys", x)
    slopes = x.features.alibi_slopes_BH
    given = (q, k, v, dout, rows.lse_BHT, rows.delta_BHT)
    parts = _parts(q, k, v, dout)
    in_blocks = _in_blocks(parts, (q, dout, dq) if atomic else (q, dout, q), chosen.block_m)
    launch(
        *(by_keys, tables, k.shape[2]),
        *(*given, *(in_blocks or (q, dout, dq)), dq, grads.dk_BSKD, grads.dv_BSKE),
        *(q if slopes is None else slopes, tables.tiles, tables.spans),
        *(*_input_strides(*given), *dq.stride()[:3], *grads.dk_BSKD.stride()[:3], *grads.dv_BSKE.stride()[:3]),
        *_strides(slopes),
        *_numbers(x.features),
        **_constants(x, parts, chosen),
        DESCRIPTORS=in_blocks is not None,
        LOWER=tables.lower,
        UPPER=tables.upper or tables.edge,
        ATOMIC=atomic,
        ADD=grads.add_dkv,
    )


def launch_bwd_dq(
    x: Inputs, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: Rows, grads: Grads, tables: Blocks
) -> None:
    """Run the portable backward over a table of query tiles; without tiles, do nothing.

    dQ goes into `grads`, summed in a fixed order.
    """
    if not len(tables):
        return
    from meshflash.kernels.triton.backward import by_queries

    chosen = config_of("by_queries", x)
    slopes, dq = x.features.alibi_slopes_BH, grads.dq_BTHD
    given = (q, k, v, dout, rows.lse_BHT, rows.delta_BHT)
    parts = _parts(q, k, v, dout)
    in_blocks = _in_blocks(parts, (k, v), chosen.block_n)
    launch(
        *(by_queries, tables, q.shape[2]),
        *(*given, *(in_blocks or (k, v)), dq),
        *(q if slopes is None else slopes, tables.tiles, tables.spans),
        *(*_input_strides(*given), *dq.stride()[:3], *_strides(slopes)),
        *_numbers(x.features),
        **_constants(x, parts, chosen),
        DESCRIPTORS=in_blocks is not None,
        LOWER=tables.lower,
        UPPER=tables.upper,
        ADD=grads.add_dq,
    )


def launch(kernel: Any, tables: Blocks, heads: int, *arguments: Any, **constants: Any) -> None:
    """Launch one CTA for each tile and head, on the device of the tables, whichever device is current."""
    with torch.cuda.device_of(tables.tiles):
        kernel[(len(tables), heads)](*arguments, **constants)


def config_of(direction: str, x: Inputs) -> Config:
    """Return the configuration of a pass for the inputs of a call."""
    plain = _plain(x) and not x.features.dropout
    return config(direction, max(x.q_BTHD.shape[-1], x.v_BSKE.shape[-1]), x.q_BTHD.dtype, x.q_BTHD.device, plain)


def contiguous_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors whose last dimension has stride 1, which the kernels rely on; others are copied."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


@cache
def parts_of(width: int) -> Parts:
    """Return a head dim as one power of two, padded with zeros, or as two that add up to it exactly.

    >>> [parts_of(width) for width in (8, 48, 64, 72, 80, 96, 112, 192, 256)]
    [(16, 0), (32, 16), (64, 0), (128, 0), (64, 16), (64, 32), (128, 0), (128, 64), (256, 0)]
    """
    half = whole(width) // 2
    rest = width - half
    exact = half >= 16 and 16 <= rest < half and not rest & (rest - 1)
    return (half, rest) if exact else (whole(width), 0)


def whole(width: int) -> int:
    """Return the smallest power of two of at least 16, as `tl.dot` wants, that holds a head dim."""
    return max(16, 1 << (width - 1).bit_length())


def _parts(*tensors: Tensor) -> tuple[Parts, Parts]:
    """The two widths of the head dim of keys, and those of values, for the tensors of a launch."""
    dim, value_dim = tensors[0].shape[-1], tensors[2].shape[-1]
    if _lined(*tensors):
        return parts_of(dim), parts_of(value_dim)
    return (whole(dim), 0), (whole(value_dim), 0)


def _lined(*tensors: Tensor) -> bool:
    """Whether the compiler sees that rows begin at multiples of 16 elements; it miscompiles two widths of others."""
    return all(x.data_ptr() % 16 == 0 and not any(n % 16 for n in x.stride()[:3]) for x in tensors)


def _in_blocks(parts: tuple[Parts, Parts], tensors: tuple[Tensor, ...], rows: int) -> tuple[Any, ...] | None:
    """Tensors as descriptors of blocks of `rows` rows; None where TMA is missing or cannot address one of them."""
    if not _descriptors_serve(tensors[0]) or parts[0][1] or parts[1][1] or not all(fits(x) for x in tensors):
        return None
    widths = {tensors[0].shape[-1]: parts[0][0], tensors[1].shape[-1]: parts[1][0]}
    return tuple(described(x, [1, rows, 1, widths[x.shape[-1]]]) for x in tensors)


def _descriptors_serve(x: Tensor) -> bool:
    return x.dtype in HALF and has_descriptors(x.device)


def _plain(x: Inputs) -> bool:
    """Whether scores are `scale * q.k` alone."""
    return not x.features.softcap and x.features.alibi_slopes_BH is None


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


def _input_strides(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse_BHT: Tensor, delta_BHT: Tensor
) -> tuple[int, ...]:
    of_rows = (n for y in (q, k, v, dout) for n in y.stride()[:3])
    return *of_rows, *lse_BHT.stride(), *delta_BHT.stride()


def _strides(slopes: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if slopes is None else slopes.stride()


def fits(x: Tensor) -> bool:
    """Whether TMA can address a tensor: rows of contiguous elements that begin at multiples of 16 bytes."""
    unit = 16 // x.element_size()
    strides = [stride for size, stride in zip(x.shape[:3], x.stride(), strict=False) if size > 1]
    lined = x.data_ptr() % 16 == 0 and x.stride(-1) == 1
    return x.numel() > 0 and lined and all(n > 0 and n % unit == 0 for n in strides)


def strides_of(x: Tensor) -> list[int]:
    """Return the strides of a tensor as a descriptor takes them.

    The stride of a dimension of size 1 may be anything in torch; a descriptor wants a multiple of 16 bytes there too.
    """
    *outer, inner = x.stride()
    return [LINED if size == 1 else stride for size, stride in zip(x.shape, outer, strict=False)] + [inner]


def described(x: Tensor, block: list[int]) -> Any:
    """Return a tensor descriptor that loads and stores blocks of this shape."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), strides_of(x), block)
