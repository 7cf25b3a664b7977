"""The public GEMM, `matmul`: argument checks, choice of a plan, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshflash.engine.cache import cache
from meshflash.engine.op import PLAIN, modes_watch
from meshflash.gemm.launch import ACTIVATIONS, Epilogue, run
from meshflash.gemm.plan import MODES, PRECISIONS, GemmProblem, Plan, choose
from meshflash.kernels.launches import Launches


@overload
def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = ...,
    activation: str | None = ...,
    mode: str = ...,
    precision: str = ...,
    out_dtype: torch.dtype | None = ...,
    return_plan: Literal[False] = ...,
) -> Tensor: ...
@overload
def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = ...,
    activation: str | None = ...,
    mode: str = ...,
    precision: str = ...,
    out_dtype: torch.dtype | None = ...,
    return_plan: Literal[True],
) -> tuple[Tensor, Plan]: ...
def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    mode: str = "auto",
    precision: str = "ieee",
    out_dtype: torch.dtype | None = None,
    return_plan: bool = False,
) -> Tensor | tuple[Tensor, Plan]:
    """Return `activation(a @ b + bias)` of two matrices, with gradients.

    Args:
        a: The left operand `[m, k]`, with any strides.
        b: The right operand `[k, n]`, with the dtype and on the device of `a`.
        bias: A vector `[n]` that is added to every row, of any floating dtype.
        activation: None, "relu", "gelu" (by erf, as torch's default) or "silu"; it is applied in float32.
        mode: "stream_k", "data_parallel" or "split_k" run our kernel, "torch" runs torch's. "auto" takes the mode that
            was fastest at the nearest shape measured on such a device, and torch where none was. Every run of our
            kernel on a device gives the same bits.
        precision: How GPUs multiply float32 operands: "ieee" for full precision, or "tf32".
        out_dtype: The dtype of the result; by default that of the operands. Accumulators are float32 either way.
        return_plan: Whether to also return the `Plan`: mode, tiles, CTAs and the reason for the choice.

    >>> a, b = torch.ones(2, 3), torch.ones(3, 4)
    >>> out, plan = matmul(a, b, bias=torch.full((4,), -5.0), activation="relu", return_plan=True)
    >>> out.shape, out.max().item(), plan.mode
    (torch.Size([2, 4]), 0.0, 'torch')

    """
    key = _call_key(a, b, bias, activation, mode, precision, out_dtype)
    try:
        known: _Compiled | None = None if key is None else cache.get(key)
    except TypeError:  # an argument without a hash is not valid, and `_check` says what is
        known = None
    if known is None:
        _check(a, b, bias, activation, mode, precision, out_dtype)
        known = _compile(a, b, precision, mode)
        if key is not None:
            cache.put(key, known)
    plan, launches = known
    dtype = out_dtype or a.dtype
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (a, b, bias)):
        out = _Matmul.apply(a, b, bias, activation, mode, precision, dtype, known)
    else:
        out, _ = run(plan, a, b, precision, Epilogue(dtype, bias, activation), launches)
    return (out, plan) if return_plan else out


class _Compiled(NamedTuple):
    """A GEMM compiled for its shapes: its plan and its recorded launches. The engine's cache keeps it."""

    plan: Plan
    launches: Launches


def _compile(a: Tensor, b: Tensor, precision: str, mode: str) -> _Compiled:
    return _Compiled(choose(GemmProblem.of(a, b, precision), mode), Launches())


def _call_key(
    a: Tensor, b: Tensor, bias: Tensor | None, activation: Any, mode: Any, precision: Any, out_dtype: Any
) -> tuple[Any, ...] | None:
    """Return what identifies a call but for its tensors' values; None for tensors that a mode or subclass observes."""
    if torch.compiler.is_compiling() or modes_watch() or type(a) not in PLAIN or type(b) not in PLAIN:
        return None
    if a.layout != torch.strided or b.layout != torch.strided or a.is_meta or b.is_meta:
        return None
    # TMA needs addresses that are multiples of 16 bytes
    is_aligned = not (a.data_ptr() | b.data_ptr()) % 16
    key: tuple[Any, ...] = (
        "matmul",
        a.shape,
        a.stride(),
        a.dtype,
        a.device,
        b.shape,
        b.stride(),
        b.dtype,
        b.device,
        is_aligned,
    )
    if bias is not None:
        key = (*key, bias.shape, bias.stride(), bias.dtype, bias.device)
    return *key, activation, mode, precision, out_dtype


class _Matmul(torch.autograd.Function):
    """`matmul` with gradients; the GEMMs of the backward are planned for their own shapes."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        activation: str | None,
        mode: str,
        precision: str,
        dtype: torch.dtype,
        compiled: _Compiled,
    ) -> Tensor:
        # the gradient of relu follows from its output; gelu and silu need their input
        needs_preactivation = activation in ("gelu", "silu")
        epilogue = Epilogue(dtype, bias, activation, needs_preactivation)
        out, preactivation = run(compiled.plan, a, b, precision, epilogue, compiled.launches)
        ctx.save_for_backward(a, b, out if activation == "relu" else preactivation)
        ctx.spec = activation, mode, precision, None if bias is None else bias.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        a, b, saved = ctx.saved_tensors
        activation, mode, precision, bias_dtype = ctx.spec
        dx = dout if activation is None else _GRADIENTS[activation](dout, saved)
        dbias = dx.sum(0, dtype=torch.promote_types(dx.dtype, torch.float32)).to(bias_dtype) if bias_dtype else None
        dx = dx.to(a.dtype)

        def multiply(x: Tensor, y: Tensor) -> Tensor:
            return matmul(x, y, mode=mode, precision=precision)

        da = multiply(dx, b.T) if ctx.needs_input_grad[0] else None
        db = multiply(a.T, dx) if ctx.needs_input_grad[1] else None
        return da, db, dbias if ctx.needs_input_grad[2] else None, *(None,) * 5


#: Gradient of the pre-activation, from the gradient of the output and the saved tensor (the output for relu).
_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda dout, out: torch.ops.aten.threshold_backward(dout, out, 0),
    "gelu": torch.ops.aten.gelu_backward,
    "silu": torch.ops.aten.silu_backward,
}


def _check(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    activation: str | None,
    mode: str,
    precision: str,
    out_dtype: torch.dtype | None,
) -> None:
    """Raise ValueError for invalid arguments, with the remedy."""
    for name, x in (("a", a), ("b", b)):
        if x.dim() != 2:
            raise ValueError(f"{name} has {x.dim()} dims: expected a matrix; write {name}.flatten(0, -2) or similar")
        if not x.dtype.is_floating_point or x.dtype.itemsize == 1:
            raise ValueError(f"{name} is {x.dtype}: write {name}.bfloat16(), .half(), .float() or .double()")
    if a.shape[1] != b.shape[0]:
        remedy = "; write b.T" if a.shape[1] == b.shape[1] else ""
        raise ValueError(
            f"a is {tuple(a.shape)} and b is {tuple(b.shape)}: expected as many columns of a as rows of b{remedy}"
        )
    if a.dtype != b.dtype:
        raise ValueError(f"a is {a.dtype} and b is {b.dtype}: write b.to(a.dtype)")
    if a.device != b.device:
        raise ValueError(f"a is on {a.device} and b on {b.device}: write b.to(a.device)")
    if bias is not None and (bias.shape != b.shape[1:] or not bias.dtype.is_floating_point or bias.device != a.device):
        raise ValueError(
            f"bias is {bias.dtype} of {tuple(bias.shape)} on {bias.device}: "
            f"expected a floating dtype of shape ({b.shape[1]},) on {a.device}"
        )
    for name, value, known in (("mode", mode, ("auto", *MODES)), ("precision", precision, PRECISIONS)):
        if value not in known:
            raise ValueError(f"{name} {value!r}: expected one of {', '.join(known)}")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: expected None or one of {', '.join(ACTIVATIONS)}")
    # a float64 result of float32 sums would have made-up trailing bits
    too_wide = out_dtype == torch.float64 and a.dtype != torch.float64
    if out_dtype is not None and (not out_dtype.is_floating_point or out_dtype.itemsize == 1 or too_wide):
        raise ValueError(f"out_dtype {out_dtype}: expected torch.float32, torch.bfloat16 or torch.float16")
