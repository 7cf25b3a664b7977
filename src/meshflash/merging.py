"""Merge attention results over disjoint sets of keys by their log-sum-exp: one differentiable op.

The arithmetic is in `kernels.merge`; here are the public call, its checks and its autograd registration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshflash.arguments import refuse_forward_mode
from meshflash.kernels.contract import HALF, Outputs, accumulator_dtype
from meshflash.kernels.merge import merge, merge_gradient

_DTYPES = (*HALF, torch.float32, torch.float64)


def merge_partials(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge attention results of the same queries over disjoint sets of keys into the result over all keys.

    Args:
        parts: The `(out, lse)` pairs of `flash_attention(..., return_lse=True)`, one for each set of keys, such as a
            cached prefix and new tokens. `out` is `[batch, tokens, heads, dim]` and `lse` `[batch, heads, tokens]`,
            or packed `[tokens, heads, dim]` and `[heads, tokens]`. Pass sink logits to only one of the calls.

    Returns:
        `(out, lse)` in the dtypes of the parts. Sums are in the dtype of the LSE: float32, or float64 for float64.

    Gradients flow to every `out` and `lse`; there is no second derivative. A part that saw no key for a row has an LSE
    of -inf there and weight 0, whatever its `out` holds.

    >>> import torch
    >>> from meshflash import flash_attention
    >>> q, k, v = (torch.randn(1, 6, 2, 8) for _ in range(3))
    >>> parts = [flash_attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 4), slice(4, 6))]
    >>> out, lse = merge_partials(parts)
    >>> torch.allclose(out, flash_attention(q, k, v), atol=1e-5)
    True
    """
    packed = _check(parts)
    outs, lses = [out for out, _ in parts], [lse for _, lse in parts]
    if packed:
        outs, lses = [x.unsqueeze(0) for x in outs], [x.unsqueeze(0) for x in lses]
    out, lse = merge_op(outs, lses)
    return (out.squeeze(0), lse.squeeze(0)) if packed else (out, lse)


@torch.library.custom_op(
    "meshflash::merge", mutates_args=(), schema="(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)"
)
def merge_op(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the merged (out, lse)."""
    out, lse = final = _new(outs[0]), _new(lses[0])
    parts: list[tuple[Tensor | None, Tensor]] = list(zip(outs[1:], lses[1:], strict=True))
    *others, last = parts or [(None, torch.full_like(lse, -torch.inf))]
    sums = final if out.dtype == lse.dtype or not others else (torch.empty_like(out, dtype=lse.dtype), lse)
    total = outs[0], lses[0]
    for other in others:
        merge(total, other, sums)
        total = sums
    merge(total, last, final)
    return final


@merge_op.register_fake
def _(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    return _new(outs[0]), _new(lses[0])


@torch.library.custom_op(
    "meshflash::merge_backward",
    mutates_args=(),
    schema="(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, Tensor[] outs, Tensor[] lses) -> Tensor[]",
)
def merge_backward_op(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, outs: list[Tensor], lses: list[Tensor]
) -> list[Tensor]:
    """Return the gradients of every lse, followed by those of every out if there is a dout."""
    grads = [merge_gradient(dout, dlse, part, (out, lse)) for part in zip(outs, lses, strict=True)]
    return [dpart_lse for _, dpart_lse in grads] + [dpart for dpart, _ in grads if dpart is not None]


@merge_backward_op.register_fake
def _(
    dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, outs: list[Tensor], lses: list[Tensor]
) -> list[Tensor]:
    return [_new(x) for x in lses] + ([] if dout is None else [_new(x) for x in outs])


def _new(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[list[Tensor], list[Tensor]], output: Outputs) -> None:
    outs, lses = inputs
    ctx.save_for_backward(*output, *outs, *lses)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[list[Tensor | None], list[Tensor | None]]:
    out, lse, *rest = ctx.saved_tensors
    count = len(rest) // 2
    douts: list[Tensor | None] = [None] * count
    dlses: list[Tensor | None] = [None] * count
    # compute no gradients for parts that need none, such as a cached prefix
    wanted = [n for n, needs in enumerate(zip(*ctx.needs_input_grad, strict=True)) if any(needs)]
    if wanted and not (dout is None and dlse is None):
        parts = [rest[n] for n in wanted], [rest[count + n] for n in wanted]
        grads = merge_backward_op(dout, dlse, out, lse, *parts)
        for place, n in enumerate(wanted):
            dlses[n] = grads[place]
            douts[n] = None if dout is None else grads[len(wanted) + place]
    return douts, dlses


merge_op.register_autograd(_backward, setup_context=_setup)


def _check(parts: Any) -> bool:
    """Return whether the parts are packed; raise ValueError unless all are results of the same queries."""
    if not isinstance(parts, Sequence) or not parts:
        got = "none" if isinstance(parts, Sequence) else type(parts).__name__
        raise ValueError(f"parts: expected a list of (out, lse), at least one; got {got}")
    for n, part in enumerate(parts):
        if not isinstance(part, Sequence) or len(part) != 2 or not all(isinstance(x, Tensor) for x in part):
            raise ValueError(
                f"parts[{n}]: expected (out, lse), as flash_attention(..., return_lse=True) returns them; "
                f"got {type(part).__name__}"
            )
        out, lse = part
        _check_part(f"parts[{n}]", out, lse, parts[0][0])
    refuse_forward_mode("merge_partials", *(x for part in parts for x in part))
    return bool(parts[0][0].ndim == 3)


def _check_part(name: str, out: Tensor, lse: Tensor, first: Tensor) -> None:
    *batch, tokens, heads, _ = out.shape if out.ndim in (3, 4) else (0, 0, 0)
    if out.ndim not in (3, 4) or not out.shape[-1] or list(lse.shape) != [*batch, heads, tokens]:
        raise ValueError(
            f"{name}: expected out [batch, tokens, heads, dim] and lse [batch, heads, tokens], or packed "
            f"[tokens, heads, dim] and [heads, tokens]; got out {list(out.shape)}, lse {list(lse.shape)}"
        )
    if out.shape != first.shape:
        raise ValueError(
            f"{name}: parts are results of the same queries; got out {list(out.shape)}, "
            f"where that of parts[0] is {list(first.shape)}"
        )
    if out.dtype not in _DTYPES or out.dtype != first.dtype or lse.dtype != accumulator_dtype(out.dtype):
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise ValueError(
            f"{name}: outs must share one of the dtypes {names}, with an LSE in float32, or float64 for float64; "
            f"got out {out.dtype}, lse {lse.dtype}, and out {first.dtype} in parts[0]"
        )
    if not out.device == lse.device == first.device:
        raise ValueError(
            f"{name}: parts must be on one device; got out {out.device}, lse {lse.device}, "
            f"and out {first.device} in parts[0]"
        )
