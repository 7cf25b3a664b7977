"""Compare a model over several ranks with one device: outputs, loss and the gradient of every parameter."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from integrations.transformers.tiny_models import batch_of, build, documents_of
from meshflash.integrations.transformers import context_parallel

#: Largest errors, relative to the largest value.
LIMITS = {torch.float64: 1e-12, torch.float32: 2e-5}
IGNORED = -100
#: Gradients that are smaller than this part of the largest one are compared with this part of it.
SMALL = 1e-2


class Float64(TorchFunctionMode):
    """Compute in float64 where Transformers asks for float32 whatever a model's dtype is: norms, rotations, losses."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        if func is torch.Tensor.float:
            return args[0].double()
        casts = (torch.Tensor.to, torch.Tensor.type, torch.Tensor.softmax, torch.softmax, torch.zeros, torch.arange)
        kwargs = dict(kwargs or {})
        if func in (*casts, nn.functional.softmax):
            args, kwargs = tuple(map(wide, args)), {name: wide(x) for name, x in kwargs.items()}
        return func(*args, **kwargs)


def checkpoint(model: Any) -> None:
    """Make layers run again in the backward, in float64 where they did so before: no mode is active in a backward."""
    is_wide = next(model.parameters()).dtype is torch.float64
    options = dict(context_fn=lambda: (nullcontext(), Float64() if is_wide else nullcontext()))
    model.gradient_checkpointing_enable(dict(use_reentrant=False, **options))


def one_device(model: nn.Module, name: str, case: str, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return logits, loss and gradients of one device; packed documents are computed one after another."""
    model.zero_grad()
    shifts = _shifts(model)
    parts = documents_of(name, case, batch)
    counts = [int((p["labels"][:, 1:] if shifts else p["labels"]).ne(IGNORED).sum()) for p in parts]
    total, logits = torch.zeros((), dtype=torch.float64), []
    for part, count in zip(parts, counts, strict=True):
        out = model(**part)
        if count:
            share = out.loss * (count / sum(counts))
            share.backward()
            total += share.detach()
        logits.append(out.logits.detach())
    if len(parts) > 1:
        half = len(parts) // 2
        logits = [torch.cat([torch.cat(rows, 1) for rows in (logits[:half], logits[half:])])]
    return logits[0], total, gradients(model)


def sharded(model: nn.Module, sharding: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return logits of all tokens, loss and gradients of a model over ranks."""
    model.zero_grad()
    out = model(**batch)
    out.loss.backward()
    logits = out.logits.detach()
    return logits, out.loss.detach(), gradients(model)


def gradients(model: nn.Module) -> list[Tensor]:
    """Return a copy of the gradient of each parameter; zeros where it has none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def differences(ours: Any, theirs: Any, keep: Tensor | None) -> dict[str, float]:
    """Return the largest errors of logits, loss and gradients, relative to the largest value of each."""
    mine, want = (x[0] if keep is None else x[0][keep] for x in (ours, theirs))
    top = max(float(g.abs().max()) for g in theirs[2])
    grads = [
        float((a - b).abs().max()) / max(float(b.abs().max()), SMALL * top)
        for a, b in zip(ours[2], theirs[2], strict=True)
    ]
    return dict(
        logits=float((mine - want).abs().max() / want.abs().max()),
        loss=abs(float(ours[1]) - float(theirs[1])) / abs(float(theirs[1])),
        gradients=max(grads),
    )


def compare(
    mesh: DeviceMesh,
    name: str,
    case: str,
    dtype: torch.dtype,
    checkpointing: bool = False,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, float]:
    """Return the differences of a model over the ranks of a mesh to one device."""
    batch = batch_of(name, case, dtype)
    model = build(name, dtype, **(options or {}))
    ours = copy.deepcopy(model)
    theirs = one_device(model, name, case, batch)
    if checkpointing:
        checkpoint(ours)
    sharding = context_parallel(ours, mesh, outputs="whole", average_gradients=True, **arguments)
    mine = sharded(ours, sharding, batch)
    keep = None
    mask = batch.get("attention_mask")
    if mask is not None and mine[0].shape[:2] == mask.shape:
        keep = mask.bool()
    return differences(mine, theirs, keep)


def _shifts(model: Any) -> bool:
    return getattr(model, "loss_type", "") in ("ForCausalLM", "ForConditionalGeneration")


def run(
    rank: int, world: int, group: Any, name: str, case: str, dtype: torch.dtype, arguments: dict[str, Any]
) -> dict[str, float]:
    """Compare on one rank of a pool."""
    mesh = DeviceMesh.from_group(group, "cpu") if group is not None else None
    assert mesh is not None
    if dtype is torch.float64:
        with Float64():
            return compare(mesh, name, case, dtype, **arguments)
    return compare(mesh, name, case, dtype, **arguments)
