"""Attention on one device as one `torch.library` op with its own backward: the autograd boundary.

The op takes tensors and plain values. A mask travels as a text and tensors of document lengths, so
that compiled code does not depend on the lengths. Arguments are checked by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshflash.core.mask import Mask
from meshflash.core.tiles import worklist
from meshflash.kernels.contract import Ask, Features, Grads, Inputs, Kernel, Pass, Rows, new_outputs
from meshflash.kernels.registry import choose, tell_spies

#: What both ops take after their own tensors.
_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? sink_logits, Tensor? alibi_slopes, Tensor? seed, Tensor[] documents, "
    "str mask, float scale, float softcap, float dropout, SymInt q_offset, SymInt batch_offset, SymInt head_offset, "
    "str kernel, bool deterministic"
)


def inputs(
    q_BTHD: Tensor,
    k_BSKD: Tensor,
    v_BSKE: Tensor,
    mask: Mask,
    features: Features,
    q_offset: int = 0,
) -> Inputs:
    """What a kernel takes, for queries from position q_offset on and keys from 0 on."""
    q_tokens, k_tokens = q_BTHD.shape[1], k_BSKD.shape[1]
    mask.check(q_tokens, k_tokens, q_BTHD.shape[0], q_offset)
    q_ranges, k_ranges = (range(q_offset, q_offset + q_tokens),), (range(k_tokens),)
    reads_positions = features.alibi_slopes_BH is not None or features.dropout > 0
    work = worklist(mask, q_ranges, k_ranges, reads_positions)
    return Inputs(q_BTHD, k_BSKD, v_BSKE, work, features)


def forward(x: Inputs, kernel: str = "auto", deterministic: bool = False) -> tuple[Tensor, Tensor]:
    """(out, lse) by the kernel of this name."""
    chosen = _choose(x, kernel, "forward", deterministic)
    if not x.q_BTHD.shape[0]:
        return new_outputs(x.q_BTHD, x.v_BSKE)
    return chosen.forward(x)


def backward(
    x: Inputs,
    out_BTHE: Tensor,
    lse_BHT: Tensor,
    dout_BTHE: Tensor | None,
    dlse_BHT: Tensor | None,
    kernel: str = "auto",
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsink_logits) from the gradients of out and lse, either of which may be None."""
    dout = torch.zeros_like(out_BTHE) if dout_BTHE is None else dout_BTHE
    delta_BHT = (dout.to(lse_BHT.dtype) * out_BTHE).sum(dim=-1).transpose(1, 2).contiguous()
    if dlse_BHT is not None:
        # the LSE of an empty row is -inf whatever the inputs are: what comes back there has no meaning
        delta_BHT = (delta_BHT - dlse_BHT).masked_fill(lse_BHT == -torch.inf, 0.0)
    chosen = _choose(x, kernel, "backward", deterministic, lse_gradient=dlse_BHT is not None)
    if x.q_BTHD.shape[0]:
        grads = chosen.backward(x, Rows(out_BTHE, dout, lse_BHT, delta_BHT))
    else:
        grads = Grads.like(x.q_BTHD, x.k_BSKD, x.v_BSKE)
    dq, dk, dv = grads.dq_BTHD, grads.dk_BSKD, grads.dv_BSKE
    sink_logits = x.features.sink_logits_H
    if sink_logits is None:
        return dq, dk, dv, None
    weight = torch.exp(sink_logits.to(lse_BHT.dtype)[None, :, None] - lse_BHT)
    weight = weight.masked_fill(lse_BHT == -torch.inf, 0.0)
    return dq, dk, dv, -(weight * delta_BHT).sum(dim=(0, 2)).to(sink_logits.dtype)


def without_autocast(q_BTHD: Tensor) -> AbstractContextManager[Any]:
    """Autocast has had its say in the inputs' dtype; inside, it would round float32 accumulators."""
    device = q_BTHD.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _choose(x: Inputs, name: str, direction: Pass, deterministic: bool, lse_gradient: bool = False) -> Kernel:
    ask = Ask(
        direction=direction,
        device=x.q_BTHD.device.type,
        dtype=x.q_BTHD.dtype,
        head_dim=x.q_BTHD.shape[-1],
        value_dim=x.v_BSKE.shape[-1],
        work=x.work,
        features=x.features,
        lse_gradient=lse_gradient,
        deterministic=deterministic,
    )
    kernel = choose(name, ask)
    tell_spies(kernel, direction)
    return kernel


def _unpack_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_logits: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    documents: Sequence[Tensor],
    text: str,
    scale: float,
    softcap: float,
    dropout: float,
    q_offset: int,
    batch_offset: int,
    head_offset: int,
    kernel: str,
    deterministic: bool,
) -> tuple[Inputs, str, bool]:
    mask = _mask(text, tuple(_frozen(lengths) for lengths in documents))
    number = 0 if seed is None else int(seed)
    features = Features(scale, softcap, dropout, number, batch_offset, head_offset, alibi_slopes, sink_logits)
    return inputs(q, k, v, mask, features, q_offset), kernel, deterministic


def _frozen(lengths: Tensor) -> tuple[bytes, str, torch.Size]:
    array = lengths.cpu().numpy()
    return array.tobytes(), array.dtype.str, lengths.shape


@lru_cache(maxsize=256)
def _mask(text: str, documents: tuple[tuple[bytes, str, torch.Size], ...]) -> Mask:
    """The mask of an op's arguments: cached, for what a mask knows of itself is worked out only once."""
    return Mask.unpack(text, [np.frombuffer(data, dtype).reshape(shape) for data, dtype, shape in documents])


@torch.library.custom_op("meshflash::attention", mutates_args=(), schema=f"({_CALL}) -> (Tensor, Tensor)")
def attention_op(*call: Any) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    x, kernel, deterministic = _unpack_call(*call)
    with without_autocast(x.q_BTHD):
        return forward(x, kernel, deterministic)


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return new_outputs(q, v)


@torch.library.custom_op(
    "meshflash::attention_backward",
    mutates_args=(),
    schema=f"(Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, {_CALL}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def attention_backward_op(
    out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, *call: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsink_logits), the last one empty where there are no sink logits."""
    x, kernel, deterministic = _unpack_call(*call)
    with without_autocast(x.q_BTHD):
        dq, dk, dv, dsink = backward(x, out, lse, dout, dlse, kernel, deterministic)
    return dq, dk, dv, out.new_empty(0) if dsink is None else dsink


@attention_backward_op.register_fake
def _(
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_logits: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = Grads.like(q, k, v)
    return (
        grads.dq_BTHD,
        grads.dk_BSKD,
        grads.dv_BSKE,
        out.new_empty(0) if sink_logits is None else torch.empty_like(sink_logits),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, documents, plain = inputs[:6], inputs[6], inputs[7:]
    ctx.save_for_backward(*output, *tensors, *documents)
    ctx.plain = plain
    ctx.set_materialize_grads(False)


def _backward_op(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    out, lse, *rest = ctx.saved_tensors
    tensors, documents = rest[:6], rest[6:]
    dq, dk, dv, dsink = attention_backward_op(out, lse, dout, dlse, *tensors, documents, *ctx.plain)
    dsink = None if tensors[3] is None else dsink
    return dq, dk, dv, dsink, None, None, [None] * len(documents), *[None] * len(ctx.plain)


attention_op.register_autograd(_backward_op, setup_context=_setup)
