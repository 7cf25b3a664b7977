"""Compare a model over several ranks with one device: outputs, loss and the gradient of every parameter."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from benchmarks.one_device import gradients, one_device
from benchmarks.tiny_models import batch_of, build, documents_of
from meshflash.integrations.transformers import context_parallel

#: Gradients smaller than this part of the largest one are compared with this part of it: those of a key's bias are 0
#: but for rounding.
SMALL = {torch.float64: 1e-2, torch.float32: 1e-1}


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


def sharded(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return logits of all tokens, loss and gradients of a model over ranks."""
    model.zero_grad()
    out = model(**batch)
    out.loss.backward()
    return out.logits.detach(), out.loss.detach(), gradients(model)


def excess(ours: Any, theirs: Any, reference: Any, keep: Tensor | None) -> dict[str, float]:
    """Return how much larger than allowed the errors of logits, loss and gradients are; at most 1 is right.

    In float64 errors may be 1e-12 of the largest value. In float32 they may be twice those of one device in float32,
    plus twice what an addition of 0.3 loses, plus 32 roundings of the largest value: sums such as the loss are lucky.
    """
    top = max(float(g.abs().max()) for g in reference[2])

    def of(x: Tensor, plain: Tensor, ref: Tensor) -> float:
        size = max(float(ref.abs().max()), SMALL[x.dtype] * top)
        allowed = 1e-12 * size
        if x.dtype is not torch.float64:
            lost = (ref.float() + 0.3 - 0.3).double() - ref
            allowed = 2 * float((plain - ref).abs().max()) + 2 * float(lost.abs().max()) + 4e-6 * size
        return float((x - ref).abs().max()) / allowed

    logits = (x[0] if keep is None else x[0][keep] for x in (ours, theirs, reference))
    return dict(
        logits=of(*logits),
        loss=of(ours[1], theirs[1], reference[1]),
        gradients=max(of(*each) for each in zip(ours[2], theirs[2], reference[2], strict=True)),
    )


def run(
    rank: int, world: int, group: Any, name: str, case: str, dtype: torch.dtype, arguments: dict[str, Any]
) -> dict[str, float]:
    """Return the excess of a model over the ranks of a group, on one of them."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model, batch = build(name, dtype), batch_of(name, case, dtype)
    ours = copy.deepcopy(model)
    with Float64():
        parts = documents_of(name, case, batch_of(name, case, torch.float64))
        reference = one_device(copy.deepcopy(model).double(), parts)
    with Float64() if dtype is torch.float64 else nullcontext():
        theirs = reference if dtype is torch.float64 else one_device(model, documents_of(name, case, batch))
        context_parallel(ours, mesh, outputs="whole", average_gradients=True, **arguments)
        mine = sharded(ours, batch)
    mask = batch.get("attention_mask")
    keep = None
    if mask is not None and mine[0].shape[:2] == mask.shape:
        # padding on the left sees nothing in a causal model, nor does padding far from tokens in one of chunks or of
        # windows on both sides
        keep = mask.bool() if name in ("llama4", "modernbert") else mask.cumsum(1) > 0
    return excess(mine, theirs, reference, keep)
