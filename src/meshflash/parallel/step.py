"""Gradient accumulation over micro-batches, and the micro-batches of each optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.parallel.loss import IGNORE_INDEX, count_tokens, gradient_scale, next_tokens, reduce_sum
from meshflash.parallel.mesh import reduce_mesh, size
from meshflash.parallel.weights import synchronized
from meshflash.sharding import shard

#: The layouts that can be given by name.
LAYOUTS = ("auto", "zigzag", "striped", "contiguous", "balanced")

#: The keyword arguments of a call of the model, `labels` among them.
Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Accumulated:
    """The losses of a step; `accumulate` makes it.

    Args:
        loss: The mean loss over the labels of all ranks, as a single device would compute it.
        tokens: The number of labels of all ranks.
        local_sum: The sum of this rank's losses.
    """

    loss: Tensor
    tokens: Tensor
    local_sum: Tensor


def accumulate(model: nn.Module, batches: Sequence[Batch], mesh: DeviceMesh | None = None) -> Accumulated:
    """Run forward and backward of a step's micro-batches; gradients are those of the mean loss over all labels.

    Every label weighs the same, whatever the lengths, ignored labels and micro-batches of each rank. Gradients are
    reduced once, in the backward of the last micro-batch.

    Args:
        model: The model. It is called with each batch as keyword arguments and must return the *sum* of the losses of
            this rank's labels, as the models of `meshflash.models` do.
        batches: The micro-batches of this rank.
        mesh: A mesh of `init_mesh`; None is a single device.

    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weight = nn.Parameter(torch.ones(()))
    ...
    ...     def forward(self, x, labels):
    ...         return (self.weight * x).where(labels != -100, 0.0).sum()
    >>> model = Model()
    >>> one = dict(x=torch.tensor([1.0, 2.0]), labels=torch.tensor([1, 1]))
    >>> other = dict(x=torch.tensor([6.0, 9.0]), labels=torch.tensor([1, -100]))
    >>> float(accumulate(model, [one, other]).loss), float(model.weight.grad)
    (3.0, 3.0)
    """
    batches = pad_micro_batches(batches, mesh)
    count = count_tokens((batch["labels"] for batch in batches), mesh)
    scale = gradient_scale(count, mesh)
    lost: Tensor | None = None
    for n, batch in enumerate(batches):
        with synchronized(model, last=n == len(batches) - 1):
            loss = model(**batch)
            (loss * scale).backward()
        lost = loss.detach().double() if lost is None else lost + loss.detach()
    assert lost is not None
    return Accumulated(reduce_sum(lost, mesh) / count.clamp(min=1), count, lost)


def shard_batch(
    tokens: Tensor,
    mesh: DeviceMesh,
    *,
    labels: Tensor | None = None,
    mask: Mask | None = None,
    layout: Layout | str = "zigzag",
) -> dict[str, Any]:
    """Return the arguments of a model of `meshflash.models` on this rank: its shard of whole sequences.

    All ranks of cp pass the same sequences.

    Args:
        tokens: The samples of this data rank, `[batch, tokens]`.
        mesh: A mesh of `init_mesh`.
        labels: The label of each token, for the whole sequences; by default `next_tokens`.
        mask: The mask over the whole sequence; causal by default.
        layout: Which tokens each rank of cp gets: a `Layout`, or "zigzag", "striped", "contiguous" or "balanced".
    """
    mask = Mask.causal() if mask is None else mask
    labels = next_tokens(tokens, mask) if labels is None else labels
    layout = resolve_layout(layout, mask, tokens.shape[1], size(mesh, "cp"))
    local = {name: shard(x, layout, mesh["cp"]) for name, x in (("tokens", tokens), ("labels", labels))}
    return {**local, "mask": mask, "layout": layout}


def resolve_layout(layout: Layout | str, mask: Mask, tokens: int, ranks: int) -> Layout:
    """Return a layout, given as such or by its name.

    Args:
        layout: A layout, or the name of one.
        mask: The mask, by which "auto" chooses and a balanced layout is built.
        tokens: The tokens of the whole sequence.
        ranks: The number of ranks that share it.

    >>> resolve_layout("zigzag", Mask.causal(), 8, 2).name
    'zigzag'
    """
    if isinstance(layout, Layout):
        return layout
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: expected a Layout, or one of {', '.join(LAYOUTS)}")
    if layout in ("auto", "balanced"):
        return getattr(Layout, layout)(mask, tokens, ranks)
    return getattr(Layout, layout)(tokens, ranks)


def micro_batches(loader: Iterable[Batch], number: int = 1, mesh: DeviceMesh | None = None) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each step; the last step takes the remaining ones.

    A rank whose loader ends early continues with blank batches, so that all ranks take the same number of steps.

    Args:
        loader: The micro-batches of this rank.
        number: The number of micro-batches in a step.
        mesh: A mesh of `init_mesh`; None is a single device.

    >>> [len(group) for group in micro_batches([dict(labels=torch.ones(1)) for _ in range(5)], 2)]
    [2, 2, 1]
    """
    if number < 1:
        raise ValueError(f"number={number}: expected at least 1")
    source, last = iter(loader), None
    while True:
        group = [batch for _, batch in zip(range(number), source, strict=False)]
        if not _max_over_ranks(len(group), mesh):
            return
        if group:
            last = group[-1]
        elif last is not None:
            group = [blank_batch(last)]
        yield group


def blank_batch(batch: Batch) -> Batch:
    """Return a batch of the same shape in which all labels are ignored.

    Args:
        batch: The arguments of a call of the model, `labels` among them.

    >>> blank_batch(dict(tokens=torch.tensor([1, 2]), labels=torch.tensor([2, 3])))["labels"].tolist()
    [-100, -100]
    """
    return {**batch, "labels": torch.full_like(batch["labels"], IGNORE_INDEX)}


def pad_micro_batches(batches: Sequence[Batch], mesh: DeviceMesh | None) -> list[Batch]:
    """Return the micro-batches, padded with blank ones to the same number on all ranks.

    Without padding, ranks with more micro-batches would hang in collectives that the others never call.

    Args:
        batches: The micro-batches of this rank, at least one.
        mesh: A mesh of `init_mesh`; None is a single device.
    """
    most = _max_over_ranks(len(batches), mesh)
    if _max_over_ranks(int(not batches), mesh):  # a collective, so that all ranks raise
        raise ValueError(
            "accumulate: a rank has no batch; give each at least one, blank_batch(...) where its samples ended"
        )
    return [*batches, *[blank_batch(batches[-1])] * (most - len(batches))]


def _max_over_ranks(number: int, mesh: DeviceMesh | None) -> int:
    """Return the maximum of a number over all ranks with different samples or tokens."""
    if mesh is None or reduce_mesh(mesh).size() == 1:
        return number
    largest = torch.tensor(number, device=mesh.device_type)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=reduce_mesh(mesh).get_group())
    return int(largest)
