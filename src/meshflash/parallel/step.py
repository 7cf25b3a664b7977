"""One optimizer step's gradients from several micro-batches, and the micro-batches of each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as _distributed
from torch.distributed.device_mesh import DeviceMesh

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.parallel.loss import IGNORED, count_tokens, gradient_scale, next_tokens, total
from meshflash.parallel.mesh import size, summed
from meshflash.parallel.weights import synchronized
from meshflash.sharding import shard

dist: Any = _distributed  # torch does not declare all that it exports here

#: Layouts by name.
LAYOUTS = ("zigzag", "striped", "contiguous", "balanced")

#: What a model is called with: its keyword arguments, `labels` among them.
Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Accumulated:
    """The loss that one device would have had, a mean over tokens; how many tokens counted; and this rank's own sum."""

    loss: Tensor
    tokens: Tensor
    own: Tensor


def accumulate(model: nn.Module, batches: Sequence[Batch], mesh: DeviceMesh | None = None) -> Accumulated:
    """Forward and backward of a step's micro-batches: gradients of the mean over all their tokens, on all ranks.

    The model is called with each batch as keyword arguments and returns the *sum* of the losses of this rank's labels,
    as those of `meshflash.models` do. Whatever ranks and micro-batches have (other lengths, ignored labels, fewer
    micro-batches), each token that counts weighs the same. Gradients travel once, with the last micro-batch.

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
    batches = even_batches(batches, mesh)
    count = count_tokens((batch["labels"] for batch in batches), mesh)
    scale = gradient_scale(count, mesh)
    lost: Tensor | None = None
    for n, batch in enumerate(batches):
        with synchronized(model, last=n == len(batches) - 1):
            loss = model(**batch)
            (loss * scale).backward()
        lost = loss.detach().double() if lost is None else lost + loss.detach()
    assert lost is not None
    return Accumulated(total(lost, mesh) / count.clamp(min=1), count, lost)


def spread_batch(
    tokens: Tensor,
    mesh: DeviceMesh,
    *,
    labels: Tensor | None = None,
    mask: Mask | None = None,
    layout: Layout | str = "zigzag",
) -> dict[str, Any]:
    """What a model of `meshflash.models` is called with on this rank, from whole sequences that all ranks of cp have.

    Args:
        tokens: `[batch, tokens]`, this data rank's samples.
        mesh: of `init_mesh`.
        labels: of each token the next one, made before anything is spread; by default `next_tokens`.
        mask: over the whole sequence; causal by default.
        layout: which tokens each rank of cp gets, or the name of one: "zigzag", "striped", "contiguous", "balanced".
    """
    mask = Mask.causal() if mask is None else mask
    labels = next_tokens(tokens, mask) if labels is None else labels
    layout = named_layout(layout, mask, tokens.shape[1], size(mesh, "cp"))
    own = {name: shard(x, layout, mesh["cp"]) for name, x in (("tokens", tokens), ("labels", labels))}
    return {**own, "mask": mask, "layout": layout}


def named_layout(layout: Layout | str, mask: Mask, tokens: int, ranks: int) -> Layout:
    """A layout by its name.

    >>> named_layout("zigzag", Mask.causal(), 8, 2).name
    'zigzag'
    """
    if isinstance(layout, Layout):
        return layout
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: expected a Layout, or one of {', '.join(LAYOUTS)}")
    if layout == "balanced":
        return Layout.balanced(mask, tokens, ranks)
    found: Layout = getattr(Layout, layout)(tokens, ranks)
    return found


def micro_batches(loader: Iterable[Batch], number: int = 1, mesh: DeviceMesh | None = None) -> Iterator[list[Batch]]:
    """The micro-batches of each step, `number` of them; the last step takes what is left.

    Ranks whose samples end before those of others go on with blank batches, whose labels do not count: all ranks have
    the same number of steps.

    >>> [len(group) for group in micro_batches([dict(labels=torch.ones(1)) for _ in range(5)], 2)]
    [2, 2, 1]
    """
    if number < 1:
        raise ValueError(f"number={number}: expected at least 1")
    source, last = iter(loader), None
    while True:
        group = [batch for _, batch in zip(range(number), source, strict=False)]
        if not _most(len(group), mesh):
            return
        if group:
            last = group[-1]
        elif last is not None:
            group = [blank(last)]
        yield group


def blank(batch: Batch) -> Batch:
    """A batch of the same shape of which no label counts.

    >>> blank(dict(tokens=torch.tensor([1, 2]), labels=torch.tensor([2, 3])))["labels"].tolist()
    [-100, -100]
    """
    return {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}


def even_batches(batches: Sequence[Batch], mesh: DeviceMesh | None) -> list[Batch]:
    """As many micro-batches on all ranks, by blank ones: else some would wait in collectives for the others."""
    most = _most(len(batches), mesh)
    if _most(int(not batches), mesh):  # asked of all ranks, so that all raise
        raise ValueError("accumulate: a rank has no batch; give each at least one, blank(...) where its samples ended")
    return [*batches, *[blank(batches[-1])] * (most - len(batches))]


def _most(number: int, mesh: DeviceMesh | None) -> int:
    """The largest of all ranks' numbers."""
    if mesh is None or summed(mesh).size() == 1:
        return number
    largest = torch.tensor(number, device=mesh.device_type)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=summed(mesh).get_group())
    return int(largest)
