"""The check of `verify=True`: compare some rows of a result with plain attention over the keys of all ranks.

Every rank computes the chosen rows of all ranks over its own keys, one block at a time, in float64 with the oracle's
code. Partial results are merged by their LSE. All ranks raise if one of them is wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as _distributed

from meshflash.core import rows
from meshflash.core.mask import Mask
from meshflash.core.tiles import worklist
from meshflash.engine.executable import Plan
from meshflash.kernels.contract import Features, Inputs
from meshflash.kernels.merge import add_sinks_
from meshflash.kernels.reference import Reference

dist: Any = _distributed  # torch does not declare all that it exports here

#: The number of rows that are checked on each rank.
ROWS = 16
#: The number of keys that the oracle takes at a time; it holds all pairs of a block in memory.
BLOCK = 1024
#: The largest error that rounding in a dtype explains, relative to the largest value.
ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class WrongResultError(RuntimeError):
    """A result differs from plain attention by more than rounding explains; `check_rows` raises it."""


@torch.no_grad()
def check_rows(
    plan: Plan,
    group: Any,
    rank: int,
    mask: Mask,
    features: Features,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Compare up to ROWS rows of each rank with plain attention. All ranks call it, and all raise the same error.

    Args:
        plan: The schedule and the layouts of the call.
        group: The process group, or None on one rank.
        rank: This rank in the group.
        mask: The mask of the call.
        features: The parameters of the call besides tensors and mask.
        q: This rank's queries.
        k: This rank's keys.
        v: This rank's values.
        out: This rank's output, which is checked.
        lse: This rank's LSE, which is checked.

    Raises:
        WrongResultError: A row of some rank is wrong.
        ValueError: The inputs of some rank hold NaN or infinity, so that nothing can be checked.
    """
    world = plan.q.world
    _check_finite(group, world, {"q": q, "k": k, "v": v, "sink_logits": features.sink_logits_H})
    problem = plan.problem(mask, q.shape[2], k.shape[2])
    chosen = [_spread(n) for n in problem.q_lengths]
    positions = tuple(
        r
        for other in range(world)
        for row in chosen[other]
        for r in rows.positions(problem.q[other], ((row, row + 1),))
    )
    mine = torch.tensor(chosen[rank], dtype=torch.int64, device=q.device)
    queries = [q.new_empty(q.shape[0], len(taken), *q.shape[2:], dtype=torch.float64) for taken in chosen]
    queries[rank].copy_(q[:, mine])
    for other, part in enumerate(queries):
        _broadcast(part, other, group)
    total, total_lse = _attend(torch.cat(queries, dim=1), positions, problem.k[rank], mask, features, k, v)
    if group is not None:
        max_lse = total_lse.clone()
        dist.all_reduce(max_lse, dist.ReduceOp.MAX, group=group)
        weight = torch.exp(total_lse - max_lse.masked_fill(max_lse == -torch.inf, 0.0))
        total.mul_(weight.transpose(1, 2).unsqueeze(-1))
        dist.all_reduce(total, group=group)
        dist.all_reduce(weight, group=group)
        total.div_(weight.masked_fill(weight == 0, 1.0).transpose(1, 2).unsqueeze(-1))
        total_lse = max_lse + torch.log(weight)
    if features.sink_logits_H is not None:
        add_sinks_(total, total_lse, features.sink_logits_H)
    before = sum(len(taken) for taken in chosen[:rank])
    want = total[:, before : before + len(mine)]
    error = _error(out[:, mine].double(), want)
    both = torch.stack([error, _error(lse[:, :, mine].double(), total_lse[:, :, before : before + len(mine)])])
    worst = both.max().reshape(1).repeat(world)
    if group is not None:
        dist.all_gather(list(worst.split(1)), both.max().reshape(1), group=group)
    allowed = ALLOWED[q.dtype]
    wrong = [other for other, value in enumerate(worst.tolist()) if not value <= allowed]
    if wrong:
        raise WrongResultError(
            f"verify: rank {wrong[0]} of the group is off by {worst[wrong[0]]:.1e} of the largest value, where "
            f"{q.dtype} allows {allowed:.0e}; schedule {plan.schedule}, layout {plan.q.name}, mask {mask}. "
            "Please report this"
        )


def _check_finite(group: Any, world: int, tensors: dict[str, Tensor | None]) -> None:
    """Raise ValueError, the same on all ranks, that names every rank and tensor with NaN or infinity.

    A sink logit of -inf is allowed: it means that there is no sink.
    """
    some = next(x for x in tensors.values() if x is not None)
    found = torch.zeros(len(tensors), 2, dtype=torch.float64, device=some.device)
    for n, (name, x) in enumerate(tensors.items()):
        if x is not None:
            infinite = x.isposinf() if name == "sink_logits" else x.isinf()
            found[n, 0], found[n, 1] = x.isnan().sum(), infinite.sum()
    of_ranks = [torch.empty_like(found) for _ in range(world)]
    if group is None:
        of_ranks = [found]
    else:
        dist.all_gather(of_ranks, found, group=group)
    held = [
        f"{name} of rank {rank if group is None else dist.get_global_rank(group, rank)} holds {int(count)} {what}"
        for rank, counts in enumerate(of_ranks)
        for name, row in zip(tensors, counts.tolist(), strict=True)
        for what, count in zip(("NaN", "inf"), row, strict=True)
        if count
    ]
    if held:
        raise ValueError(
            f"verify: {'; '.join(held)}. Attention of numbers that are not finite cannot be checked; find out where "
            "they come from, or call without verify=True"
        )


def _spread(n: int) -> list[int]:
    """Return up to ROWS of n rows, evenly spaced, with the first and the last."""
    if n <= ROWS:
        return list(range(n))
    return [row * (n - 1) // (ROWS - 1) for row in range(ROWS)]


def _attend(
    q: Tensor,
    positions: tuple[range, ...],
    keys: tuple[range, ...],
    mask: Mask,
    features: Features,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of these queries over this rank's keys, without sink logits."""
    features = replace(features, sink_logits_H=None)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf)
    for begin in range(0, k.shape[1], BLOCK):
        end = min(begin + BLOCK, k.shape[1])
        work = worklist(mask, positions, rows.positions(keys, ((begin, end),)))
        Reference().forward(Inputs(q, k[:, begin:end], v[:, begin:end], work, features), (out, lse), (out, lse))
    return out, lse


def _broadcast(x: Tensor, source: int, group: Any) -> None:
    if group is not None and x.numel():
        dist.broadcast(x, group=group, group_src=source)


def _error(value: Tensor, want: Tensor) -> Tensor:
    """Return the largest difference relative to the largest value; inf if only one of two values is infinite."""
    if not want.numel():
        return want.new_zeros(())
    same = value == want
    difference = (value - want).abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf)
    largest = want.masked_fill(want == -torch.inf, 0.0).abs().max()
    return difference.max() / largest.clamp(min=1.0)
