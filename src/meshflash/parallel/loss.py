"""A loss that matches a single device on any mesh: a sum over tokens divided by the global number of labels.

Averaging per-rank means would weigh a token by how many other tokens its rank has. So losses here are sums, and labels
are counted beforehand, over all ranks and all micro-batches of a gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshflash.core.mask import Mask
from meshflash.parallel.mesh import reduce_mesh

#: The label of a token without a loss; the value of torch's `ignore_index`.
IGNORE_INDEX = -100
#: The most logits that exist at a time unless `tokens` is given: 2^27 elements are 512 MiB in float32.
MAX_LOGITS = 1 << 27


def next_tokens(tokens: Tensor, mask: Mask | None = None) -> Tensor:
    """Return next-token labels of whole sequences; call it before the sequences are sharded.

    The last token of the sequence, and of each document, gets IGNORE_INDEX.

    Args:
        tokens: Token ids, `[..., tokens]`.
        mask: The attention mask, whose documents end labels.

    >>> next_tokens(torch.tensor([[5, 6, 7, 8, 9]]), Mask.documents([2, 3])).tolist()
    [[6, -100, 8, 9, -100]]
    """
    labels = torch.full_like(tokens, IGNORE_INDEX)
    labels[..., :-1] = tokens[..., 1:]
    if mask is not None and mask.documents_nodes:
        places = torch.from_numpy(mask.positions_in_document(tokens.shape[-1])).to(tokens.device)
        ends = torch.zeros_like(places, dtype=torch.bool)
        ends[..., :-1] = places[..., 1:] == 0
        labels = labels.masked_fill(ends | _padding(mask, tokens), IGNORE_INDEX)
    return labels


def _padding(mask: Mask, tokens: Tensor) -> Tensor:
    """Return whether each token is padding behind the last document: `[tokens]`, or `[rows, tokens]`."""
    node = mask.documents_node
    assert node is not None
    lengths = [int(node.q_cuts(row)[-1]) for row in range(node.rows or 1)]
    found = torch.arange(tokens.shape[-1])[None, :] >= torch.tensor(lengths)[:, None]
    return (found if node.rows is not None else found[0]).to(tokens.device)


def count_tokens(labels: Tensor | Iterable[Tensor], mesh: DeviceMesh | None = None) -> Tensor:
    """Count the labels that are not ignored, over all ranks of a mesh.

    Args:
        labels: The labels of one micro-batch, or of all micro-batches of a step.
        mesh: A mesh of `init_mesh`; None counts this rank only.

    >>> int(count_tokens([torch.tensor([1, -100]), torch.tensor([3, 4])]))
    3
    """
    parts = [labels] if isinstance(labels, Tensor) else list(labels)
    device = parts[0].device if parts else torch.device(mesh.device_type if mesh is not None else "cpu")
    count = torch.zeros((), dtype=torch.int64, device=device)
    for part in parts:
        count += (part != IGNORE_INDEX).sum()
    return reduce_sum(count, mesh)


def reduce_sum(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Sum a tensor over the ranks with different samples or tokens; ranks along `tp` hold the same value.

    Args:
        x: The tensor of this rank; it is not changed.
        mesh: A mesh of `init_mesh`; None is a single device.
    """
    if mesh is not None and reduce_mesh(mesh).size() > 1:
        x = x.clone()
        dist.all_reduce(x, group=reduce_mesh(mesh).get_group())
    return x


def gradient_scale(count: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    """Return the factor for a rank's loss sum that makes gradients those of the mean over all `count` tokens.

    DDP and `fully_shard` average gradients over ranks, so the factor contains the number of ranks. It is 0 if no token
    counts.

    Args:
        count: The global number of labels, from `count_tokens`.
        mesh: A mesh of `init_mesh`; None is a single device.
    """
    ranks = 1 if mesh is None else reduce_mesh(mesh).size()
    return torch.where(count > 0, ranks / count.clamp(min=1).double(), 0.0)


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, tokens: int | None = None, group: Any = None
) -> Tensor:
    """Return the summed cross-entropy of `hidden @ weight.T` without materializing all logits.

    The forward computes the logits of a tile of tokens and turns them into gradients at once. GEMMs run in the dtype of
    the inputs and accumulate in float32 or wider. The result is exact. The backward only scales the saved gradients of
    `hidden` and `weight`.

    Args:
        hidden: The final hidden states, `[..., dim]`.
        weight: The weight of the head, `[vocabulary, dim]`. A DTensor sharded over its rows stays sharded.
        labels: The labels, `[...]`; IGNORE_INDEX marks tokens without a loss.
        tokens: The number of tokens in a tile; by default the number that makes 134 million logits.
        group: The process group over which the rows of a plain weight are sharded, in rank order.

    >>> hidden, weight = torch.randn(2, 3, 4), torch.randn(7, 4)
    >>> labels = torch.tensor([[0, 6, -100], [1, 2, 3]])
    >>> got = cross_entropy_sum(hidden, weight, labels, tokens=2)
    >>> want = torch.nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    >>> torch.allclose(got, want)
    True
    """
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels: expected {list(hidden.shape[:-1])}, the tokens of hidden; got {list(labels.shape)}")
    if tokens is not None and tokens < 1:
        raise ValueError(f"tokens={tokens}: expected at least 1")
    vocabulary, ranks, first = len(weight), 1, 0
    if isinstance(weight, DTensor):
        weight, group, first, ranks = _local(weight)
    elif group is not None:
        rows: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(rows, len(weight), group)
        vocabulary, ranks, first = sum(rows), len(rows), sum(rows[: dist.get_rank(group)])
    if isinstance(hidden, DTensor):
        hidden = hidden.full_tensor()
    known = (labels == IGNORE_INDEX) | ((labels >= 0) & (labels < vocabulary))
    torch._assert_async(known.all(), f"labels: expected 0 to {vocabulary - 1}, or {IGNORE_INDEX} to ignore a token")
    # every rank must use the same tile, since the tiles contain collectives
    tokens = tokens or max(1, MAX_LOGITS // max(1, -(-vocabulary // ranks)))
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
    return _CrossEntropy.apply(hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), tokens, first, group)


class _CrossEntropy(torch.autograd.Function):
    """The loss and its gradients in one forward pass; the vocabulary may be sharded over the ranks of a group."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, tokens: int, first: int, group: Any
    ) -> Tensor:
        kind = hidden.device.type
        sums = torch.promote_types(torch.float32, torch.promote_types(hidden.dtype, weight.dtype))
        if torch.is_autocast_enabled(kind):
            weight = weight.to(torch.get_autocast_dtype(kind))
        hidden = hidden.to(weight.dtype)
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        loss = torch.zeros((), dtype=sums, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if want_hidden else None
        d_weight = torch.zeros_like(weight, dtype=sums) if want_weight else None
        with torch.autocast(kind, enabled=False):
            for begin in range(0, len(hidden), tokens):
                rows = slice(begin, begin + tokens)
                x, label = hidden[rows], labels[rows]
                logits = wide_gemm(x, weight.T, sums)
                counts = label != IGNORE_INDEX
                mine = label - first
                here = counts & (mine >= 0) & (mine < len(weight))
                mine = mine.where(here, 0)
                row_max = logits.amax(-1) if len(weight) else logits.new_full((len(x),), float("-inf"))
                _reduce(row_max, group, "MAX")
                logits.sub_(row_max[:, None])
                # the logit of the label is nonzero on the one rank that has its row, so a sum finds it
                target = (
                    logits.gather(1, mine[:, None])[:, 0].where(here, 0.0) if len(weight) else torch.zeros_like(row_max)
                )
                p = logits.exp_()
                both = torch.stack((p.sum(-1), target))  # one all-reduce for both
                _reduce(both, group)
                row_sum, target = both
                loss += (row_sum.log() - target).where(counts, 0.0).sum()
                if not (want_hidden or want_weight):
                    continue
                p.div_(row_sum[:, None])  # softmax; d_logits = softmax - one_hot(label)
                if len(weight):
                    p.scatter_add_(1, mine[:, None], -here.to(sums)[:, None])
                d_logits = p.mul_(counts[:, None]).to(weight.dtype)
                if d_hidden is not None:
                    d_hidden[rows] = d_logits @ weight
                if d_weight is not None:
                    d_weight += wide_gemm(d_logits.T, x, sums)
        if d_hidden is not None:
            _reduce(d_hidden, group)
        ctx.save_for_backward(d_hidden, d_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = (None if x is None else x * grad.to(x.dtype) for x in ctx.saved_tensors)
        return d_hidden, d_weight, None, None, None, None


def wide_gemm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b, accumulated and returned in a wider dtype.

    Args:
        a: The left matrix.
        b: The right matrix, of the same dtype.
        dtype: The dtype of the accumulator and of the result.
    """
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _reduce(x: Tensor, group: Any, operation: str = "SUM") -> None:
    if group is not None:
        dist.all_reduce(x, getattr(dist.ReduceOp, operation), group=group)


def _local(weight: DTensor) -> tuple[Tensor, Any, int, int]:
    """Return (local rows, group of the other shards, index of the first local row, number of ranks) of a weight."""
    check_gathered(weight)
    (placement,) = weight.placements
    if not isinstance(placement, Shard) or placement.dim != 0:
        return weight.full_tensor(), None, 0, 1
    mesh = weight.device_mesh
    step = -(-weight.shape[0] // mesh.size())  # rows of a shard, as torch.chunk splits
    return weight.to_local(), mesh.get_group(), min(weight.shape[0], step * mesh.get_local_rank()), mesh.size()


def check_gathered(weight: DTensor) -> None:
    """Raise ValueError for a weight that FSDP shards: it is read outside of its module, so nothing gathers it."""
    if weight.device_mesh.mesh_dim_names != ("tp",):
        raise ValueError(
            "wrap: the weights of the embedding and the head are read outside of their modules; leave both to the rest "
            "of the model"
        )
