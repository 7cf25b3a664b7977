"""The loss of one device on any mesh: a sum over tokens, divided by how many tokens all ranks count together.

A mean on each rank, averaged over ranks, weighs tokens by how many others their rank happened to have. So losses here
are sums, and their number is counted before: over ranks, and over the micro-batches of an accumulation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as _distributed
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshflash.core.mask import Mask
from meshflash.parallel.mesh import summed

dist: Any = _distributed  # torch does not declare all that it exports here

#: The label of a token that does not count.
IGNORED = -100
#: How many logits are held at most, unless a number of tokens is given.
LOGITS = 1 << 27


def next_tokens(tokens: Tensor, mask: Mask | None = None) -> Tensor:
    """Labels for predicting the next token, of whole sequences, before they are spread over ranks.

    The last token has none, nor has the last one of each document.

    >>> next_tokens(torch.tensor([[5, 6, 7, 8, 9]]), Mask.documents([2, 3])).tolist()
    [[6, -100, 8, 9, -100]]
    """
    labels = torch.full_like(tokens, IGNORED)
    labels[..., :-1] = tokens[..., 1:]
    if mask is not None and mask.documents_nodes:
        places = torch.from_numpy(mask.positions_in_document(tokens.shape[-1])).to(tokens.device)
        ends = torch.zeros_like(places, dtype=torch.bool)
        ends[..., :-1] = places[..., 1:] == 0
        labels = labels.masked_fill(ends | _padding(mask, tokens), IGNORED)
    return labels


def _padding(mask: Mask, tokens: Tensor) -> Tensor:
    """Which tokens are behind the last document: `[tokens]`, or `[rows, tokens]`."""
    node = mask.documents_node
    assert node is not None
    lengths = [int(node.q_cuts(row)[-1]) for row in range(node.rows or 1)]
    found = torch.arange(tokens.shape[-1])[None, :] >= torch.tensor(lengths)[:, None]
    return (found if node.rows is not None else found[0]).to(tokens.device)


def count_tokens(labels: Tensor | Iterable[Tensor], mesh: DeviceMesh | None = None) -> Tensor:
    """How many labels count, on all ranks of a mesh together: of one micro-batch, or of all that a step accumulates.

    >>> int(count_tokens([torch.tensor([1, -100]), torch.tensor([3, 4])]))
    3
    """
    parts = [labels] if isinstance(labels, Tensor) else list(labels)
    device = parts[0].device if parts else torch.device(mesh.device_type if mesh is not None else "cpu")
    count = torch.zeros((), dtype=torch.int64, device=device)
    for part in parts:
        count += (part != IGNORED).sum()
    return total(count, mesh)


def total(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The sum of a number over the ranks with other samples or other tokens; those of `tp` have the same."""
    if mesh is not None and summed(mesh).size() > 1:
        x = x.clone()
        dist.all_reduce(x, group=summed(mesh).get_group())
    return x


def gradient_scale(count: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    """What a rank's sum of losses is multiplied by, so that gradients are those of the mean over all `count` tokens.

    DDP and `fully_shard` average gradients over ranks: the factor holds their number. Where no token counts it is 0.
    """
    ranks = 1 if mesh is None else summed(mesh).size()
    return torch.where(count > 0, ranks / count.clamp(min=1).double(), 0.0)


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, tokens: int | None = None, group: Any = None
) -> Tensor:
    """The sum over labels of the cross-entropy of `hidden @ weight.T`, without ever holding all logits.

    Logits of some tokens at a time are made, and turned into gradients at once, in the precision of the inputs with
    sums in float32 or more; so it is exact, and its backward only scales what the forward kept: the gradients of
    `hidden` and `weight`.

    Args:
        hidden: `[..., dim]`.
        weight: `[vocabulary, dim]`; a DTensor that is cut over its rows is worked on where it lies.
        labels: `[...]`; those of `IGNORED` do not count.
        tokens: how many at a time; by default as many as make 134 million logits.
        group: the ranks that the rows of a plain weight are spread over, in order.

    >>> hidden, weight = torch.randn(2, 3, 4), torch.randn(7, 4)
    >>> labels = torch.tensor([[0, 6, -100], [1, 2, 3]])
    >>> got = cross_entropy_sum(hidden, weight, labels, tokens=2)
    >>> want = torch.nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    >>> torch.allclose(got, want)
    True
    """
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels: expected {list(hidden.shape[:-1])}, as hidden has tokens; got {list(labels.shape)}")
    if tokens is not None and tokens < 1:
        raise ValueError(f"tokens={tokens}: expected at least 1")
    words, ranks, first = len(weight), 1, 0
    if isinstance(weight, DTensor):
        weight, group, first, ranks = _local(weight)
    elif group is not None:
        rows: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(rows, len(weight), group)
        words, ranks, first = sum(rows), len(rows), sum(rows[: dist.get_rank(group)])
    if isinstance(hidden, DTensor):
        hidden = hidden.full_tensor()
    known = (labels == IGNORED) | ((labels >= 0) & (labels < words))
    torch._assert_async(known.all(), f"labels: expected 0 to {words - 1}, or {IGNORED} for what does not count")
    tokens = tokens or max(1, LOGITS // max(1, -(-words // ranks)))  # the same on all ranks
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
    loss: Tensor = _CrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), tokens, first, group
    )
    return loss


class _CrossEntropy(torch.autograd.Function):
    """The loss and, at once, its gradients; rows of the weight may be spread over ranks of a group."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, tokens: int, first: int, group: Any
    ) -> Tensor:
        kind = hidden.device.type
        sums = torch.promote_types(torch.float32, torch.promote_types(hidden.dtype, weight.dtype))
        if torch.is_autocast_enabled(kind):
            weight = weight.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            return _CrossEntropy._both(ctx, hidden.to(weight.dtype), weight, labels, tokens, first, group, sums)

    @staticmethod
    def _both(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        tokens: int,
        first: int,
        group: Any,
        sums: torch.dtype,
    ) -> Tensor:
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        loss = torch.zeros((), dtype=sums, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if want_hidden else None
        d_weight = torch.zeros_like(weight, dtype=sums) if want_weight else None
        for begin in range(0, len(hidden), tokens):
            rows = slice(begin, begin + tokens)
            x, label = hidden[rows], labels[rows]
            logits = wide_product(x, weight.T, sums)
            counts = label != IGNORED
            mine = label - first
            here = counts & (mine >= 0) & (mine < len(weight))
            mine = mine.where(here, 0)
            top = logits.amax(-1) if len(weight) else logits.new_full((len(x),), float("-inf"))
            _reduce(top, group, "MAX")
            logits.sub_(top[:, None])
            target = logits.gather(1, mine[:, None])[:, 0].where(here, 0.0) if len(weight) else torch.zeros_like(top)
            p = logits.exp_()
            both = torch.stack((p.sum(-1), target))
            _reduce(both, group)
            loss += (both[0].log() - both[1]).where(counts, 0.0).sum()
            if not (want_hidden or want_weight):
                continue
            p.div_(both[0][:, None])
            if len(weight):
                p.scatter_add_(1, mine[:, None], -here.to(sums)[:, None])
            d_logits = p.mul_(counts[:, None]).to(weight.dtype)
            if d_hidden is not None:
                d_hidden[rows] = d_logits @ weight
            if d_weight is not None:
                d_weight += wide_product(d_logits.T, x, sums)
        if d_hidden is not None:
            _reduce(d_hidden, group)
        ctx.save_for_backward(d_hidden, d_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = (None if x is None else x * grad.to(x.dtype) for x in ctx.saved_tensors)
        return d_hidden, d_weight, None, None, None, None


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A product whose sums, and result, are of a wider dtype."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _reduce(x: Tensor, group: Any, operation: str = "SUM") -> None:
    if group is not None:
        dist.all_reduce(x, getattr(dist.ReduceOp, operation), group=group)


def _local(weight: DTensor) -> tuple[Tensor, Any, int, int]:
    """A weight's own rows, the group that has the others, how many are before them, and the number of ranks."""
    check_gathered(weight)
    (placement,) = weight.placements
    if not isinstance(placement, Shard) or placement.dim != 0:
        return weight.full_tensor(), None, 0, 1
    mesh = weight.device_mesh
    step = -(-weight.shape[0] // mesh.size())  # as torch.chunk cuts
    return weight.to_local(), mesh.get_group(), min(weight.shape[0], step * mesh.get_local_rank()), mesh.size()


def check_gathered(weight: DTensor) -> None:
    """ValueError for a weight in parts on ranks with other samples: it is read without a call of its module."""
    if weight.device_mesh.mesh_dim_names != ("tp",):
        raise ValueError(
            "wrap: the weights of the embedding and the head are read outside of their modules; leave both to the rest "
            "of the model"
        )
