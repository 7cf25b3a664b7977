"""The float64 oracle and FlashAttention's tolerance rule, for every comparison of results."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from meshflash import Mask, flash_attention
from meshflash.engine import local
from meshflash.kernels.contract import Features, Rows, accumulator_dtype
from meshflash.kernels.reference import dense_attention
from meshflash.kernels.tiled import Tiled

#: Allowed error of delta and dP together, in units in the last place (ulp) of the accumulator.
DELTA_UNITS = 4


@dataclass(frozen=True)
class Case:
    """One call of attention: shapes, mask and features. Tests and `fuzz` make cases."""

    mask: Mask = field(default_factory=Mask.full)
    batch: int = 2
    tokens: int = 37
    k_tokens: int | None = None
    heads: int = 2
    kv_heads: int | None = None
    dim: int = 16
    value_dim: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    dropout: float = 0.0
    q_offset: int = 0
    lse_gradient: bool = False
    dropout_seed: int = 1234
    #: (name, axis) of tensors (q, k, v or dout) whose values repeat along an axis, so that stride 0 is possible there.
    repeated: tuple[tuple[str, int], ...] = ()

    def inputs(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
        """Return fresh leaves: q, k, v and all other inputs that take gradients.

        Args:
            dtype: The dtype of the leaves.
            device: The device of the leaves.
            seed: The seed of their values.
        """
        generator = torch.Generator().manual_seed(seed)
        k_tokens = self.tokens if self.k_tokens is None else self.k_tokens
        kv_heads = self.kv_heads or self.heads
        shapes: dict[str, tuple[int, ...]] = {
            "q": (self.batch, self.tokens, self.heads, self.dim),
            "k": (self.batch, k_tokens, kv_heads, self.dim),
            "v": (self.batch, k_tokens, kv_heads, self.value_dim or self.dim),
        }
        if self.sinks:
            shapes["sink_logits"] = (self.heads,)
        leaves = {name: self.repeat(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
        return {name: x.to(device, dtype).requires_grad_() for name, x in leaves.items()}

    def repeat(self, name: str, x: Tensor) -> Tensor:
        """Repeat the first values of a tensor along its axes in `repeated`."""
        for axis in (axis for other, axis in self.repeated if other == name and x.numel()):
            x = x.narrow(axis, 0, 1).expand_as(x)
        return x.contiguous()

    def slopes(self, device: str = "cpu") -> Tensor | None:
        """Return the ALiBi slopes, one for each head, or None."""
        return torch.linspace(0.1, 0.6, self.heads, device=device) if self.alibi else None

    def options(self, leaves: dict[str, Tensor]) -> dict[str, Any]:
        """Return the arguments of `flash_attention` and `attention` that this case decides, except for q, k and v."""
        return dict(
            sink_logits=leaves.get("sink_logits"),
            mask=self.mask,
            scale=self.scale,
            softcap=self.softcap,
            alibi_slopes=self.slopes(leaves["q"].device.type),
            dropout=self.dropout,
            seed=self.dropout_seed if self.dropout else None,
            q_offset=self.q_offset,
        )

    def run(self, leaves: dict[str, Tensor], kernel: str = "auto") -> tuple[Tensor, Tensor]:
        """Return (out, lse) of `flash_attention`.

        Args:
            leaves: The inputs, from `inputs`.
            kernel: The kernel to use.
        """
        q, k, v = leaves["q"], leaves["k"], leaves["v"]
        return flash_attention(q, k, v, **self.options(leaves), kernel=kernel, return_lse=True)

    def features(self, leaves: dict[str, Tensor]) -> Features:
        """Return the features of this case in the form that kernels take."""
        q, slopes = leaves["q"], self.slopes(leaves["q"].device.type)
        return Features(
            scale=self.dim**-0.5 if self.scale is None else self.scale,
            softcap=self.softcap or 0.0,
            dropout=self.dropout,
            seed=self.dropout_seed if self.dropout else 0,
            alibi_slopes_BH=None if slopes is None else slopes.expand(q.shape[0], -1),
            sink_logits_H=leaves.get("sink_logits"),
        )

    def dense(self, leaves: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of dense attention from the mask's definition, in the dtype of the leaves."""
        q, k, v = leaves["q"], leaves["k"], leaves["v"]
        return dense_attention(q, k, v, self.mask, self.features(leaves), self.q_offset)


def upstream(out: Tensor, lse: Tensor, case: Case | None = None) -> tuple[Tensor, Tensor]:
    """Return fixed gradients of out and lse, from which every comparison starts.

    Args:
        out: A tensor of the shape, dtype and device of the output.
        lse: A tensor of the shape, dtype and device of the LSE.
        case: The case, whose `repeated` axes of dout apply.
    """
    generator = torch.Generator().manual_seed(7)
    dout = torch.randn(out.shape, generator=generator)
    if case is not None:
        dout = case.repeat("dout", dout)
    return dout.to(out), torch.randn(lse.shape, generator=generator).to(lse)


def gradients(outputs: tuple[Tensor, Tensor], leaves: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    """Return output, LSE and every gradient by name, for fixed upstream gradients.

    Args:
        outputs: The output and the LSE of a call.
        leaves: The inputs of the call that take gradients.
        case: The case.
    """
    out, lse = outputs
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    dout, dlse = upstream(out, lse, case)
    loss = (out * dout).sum() + ((finite * dlse).sum() if case.lse_gradient else 0.0)
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {
        "out": out.detach(),
        "lse": lse.detach(),
        **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)},
    }


def as_dtype(leaves: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the same values as leaves of another dtype."""
    return {name: x.detach().to(dtype).requires_grad_() for name, x in leaves.items()}


def references(case: Case, leaves: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the results of dense attention by name, in float64 and in the dtype of the leaves.

    Args:
        case: The case.
        leaves: The inputs of the call.
    """
    exact, plain = as_dtype(leaves, torch.float64), as_dtype(leaves, leaves["q"].dtype)
    return gradients(case.dense(exact), exact, case), gradients(case.dense(plain), plain, case)


@dataclass(frozen=True)
class Error:
    """The largest error of a result against the oracle, and the largest that is allowed."""

    error: float
    allowed: float


def check(
    got: dict[str, Tensor],
    case: Case,
    leaves: dict[str, Tensor],
    units: int = 8,
    shares: dict[str, float] | None = None,
) -> dict[str, Error]:
    """Compare outputs and gradients with the float64 oracle; raise AssertionError if an error exceeds the tolerance.

    The tolerance is the sum of

    - twice the error of plain PyTorch in the same dtype (three times with softcap or sinks);
    - twice the rounding of the values themselves, or half an ulp of the largest value if that is more;
    - `units` ulp of the accumulator at the largest value, at least 1. A gradient that is truly 0 is a difference of
      rounded values here, but exactly 0 in plain PyTorch. In float64 the oracle rounds too, so this term is 1e-12;
    - for dq, dk and dsink_logits, if the above is exceeded, the effect of the output's error on delta (`_by_delta`).
      FlashAttention computes delta from the rounded output, plain PyTorch does not. This matters for rows that see very
      few keys, where the rounding of delta may be all there is of dS.

    Empty rows must be exactly 0, with an LSE of -inf.

    Args:
        got: The results to check, by name.
        case: The case.
        leaves: The inputs of the call.
        units: The allowed ulp of the accumulator.
        shares: By name, the extra error from rounding each rank's share of a sum.
    """
    dtype = leaves["q"].dtype
    want, plain = references(case, leaves)
    unit = 1e-12 if dtype == torch.float64 else units * torch.finfo(torch.float32).eps
    factor = 3 if case.softcap or case.sinks else 2
    errors = {}
    for name, value in got.items():
        reference = want[name]
        _require(value.shape == reference.shape, f"{name}: shape {list(value.shape)}, expected {list(reference.shape)}")
        _require(not value.isnan().any(), f"{name} has NaN")
        empty = reference == -torch.inf
        _require(torch.equal(value == -torch.inf, empty), f"{name}: -inf in other places than expected")
        if name == "out":
            empty_rows = (want["lse"] == -torch.inf).transpose(1, 2)
            _require(bool((value[empty_rows] == 0).all()), "rows that see no key must be 0")
        error = _max_error(value, reference)
        rounded = reference.to(value.dtype)
        rounding = 2 * _max_error(rounded + 0.3 - 0.3, rounded.double())
        rounding = max(rounding, torch.finfo(value.dtype).eps / 2 * _largest(reference))
        allowed = factor * _max_error(plain[name], reference) + rounding + unit * max(1.0, _largest(reference))
        allowed += (shares or {}).get(name, 0.0)
        if error > allowed and name in ("dq", "dk", "dsink_logits"):
            allowed += _by_delta(got["out"], want, case, as_dtype(leaves, torch.float64))[name]
        _require(error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}")
        errors[name] = Error(error, allowed)
    return errors


def _by_delta(out: Tensor, want: dict[str, Tensor], case: Case, exact: dict[str, Tensor]) -> dict[str, float]:
    """Return how much the error of this output, and the rounding of delta, change each gradient through delta.

    Gradients are linear in delta, so a backward with the error of delta in place of delta gives the change.
    """
    dout, _ = upstream(want["out"], want["lse"], case)
    rounding = DELTA_UNITS * torch.finfo(accumulator_dtype(out.dtype)).eps
    off = ((out.double() - want["out"]) * dout).sum(-1)
    off += torch.copysign(rounding * (want["out"] * dout).abs().sum(-1), off)
    off = off.transpose(1, 2).contiguous()
    inputs = {name: x.detach() for name, x in exact.items()}
    x = local.inputs(inputs["q"], inputs["k"], inputs["v"], case.mask, case.features(inputs), case.q_offset)
    rows = Rows(want["out"], torch.zeros_like(dout), want["lse"], off)
    grads = Tiled().backward(x, rows)
    sinks = local.sink_gradient(inputs.get("sink_logits"), rows)
    found = {"dq": grads.dq_BTHD, "dk": grads.dk_BSKD, "dsink_logits": sinks}
    return {name: 1.1 * float(change.abs().max()) for name, change in found.items() if change is not None}


def _require(condition: bool, message: str) -> None:
    """Raise AssertionError unless the condition holds, also under `python -O`."""
    if not condition:
        raise AssertionError(message)


def _largest(reference: Tensor) -> float:
    finite = reference[reference > -torch.inf].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _max_error(value: Tensor, reference: Tensor) -> float:
    finite = reference > -torch.inf
    difference = (value.double() - reference)[finite].abs()
    return float(difference.max()) if difference.numel() else 0.0


__all__ = ["Case", "as_dtype", "check", "gradients", "replace"]
