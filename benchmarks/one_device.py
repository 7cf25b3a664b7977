"""What one device computes with a model of Transformers, and how far ranks that share its sequences are from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100
#: Gradients that are smaller than this part of the largest one are compared with this part of it.
SMALL = 1e-2
#: Logits, loss and the gradient of each parameter.
Result = tuple[Tensor, Tensor, list[Tensor]]


def one_device(model: nn.Module, parts: list[dict[str, Tensor]]) -> Result:
    """Return logits, loss and gradients of batches that one device computes one after another.

    The loss is the mean over the labels of all of them. The logits of several documents are put together to the two
    rows that they were cut from.

    Args:
        model: The model.
        parts: The batches; packed documents are batches of their own.
    """
    model.zero_grad()
    counts = [num_labels(model, p["labels"]) for p in parts]
    total, logits = torch.zeros((), dtype=torch.float64), []
    for part, count in zip(parts, counts, strict=True):
        out = model(**part)
        if count:
            share = out.loss * (count / sum(counts))
            share.backward()
            total += share.detach()
        logits.append(out.logits.detach())
    return join_documents(logits), total, gradients(model)


def join_documents(logits: list[Tensor]) -> Tensor:
    """Return the logits of a batch from those of its documents, or of micro-batches one below the other.

    Args:
        logits: One tensor for each document or micro-batch; documents have one row each.
    """
    if logits[0].shape[0] > 1 or len(logits) == 1:
        return torch.cat(logits)
    half = len(logits) // 2
    return torch.cat([torch.cat(row, 1) for row in (logits[:half], logits[half:])])


def gradients(model: nn.Module) -> list[Tensor]:
    """Return a copy of the gradient of each parameter; zeros where it has none.

    Args:
        model: The model.
    """
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def differences(ours: Result, theirs: Result, keep: Tensor | None) -> dict[str, float]:
    """Return the largest errors of logits, loss and gradients, relative to the largest value of each.

    Args:
        ours: The result over ranks.
        theirs: The result of one device.
        keep: The tokens whose logits are compared; None means all.
    """
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


def shifts_labels(model: Any) -> bool:
    """Return whether a model's loss takes the label of a token from the next one.

    Args:
        model: The model.
    """
    return getattr(model, "loss_type", "") in ("ForCausalLM", "ForConditionalGeneration")


def num_labels(model: Any, labels: Tensor) -> int:
    """Return the number of labels that a model's loss counts.

    Args:
        model: The model.
        labels: Its labels.
    """
    return int((labels[:, 1:] if shifts_labels(model) else labels).ne(IGNORED).sum())
