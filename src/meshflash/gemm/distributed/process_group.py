"""Distributed GEMMs without a heap: a local GEMM and the collective of a process group, one after the other.

This serves every dtype and device that the group serves. The group's library chooses the order of sums; all ranks get
the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshflash.comm.transports.process_group import dist
from meshflash.gemm.distributed.problem import DistributedGemm
from meshflash.gemm.launch import Epilogue, run
from meshflash.gemm.plan import GemmProblem, choose

# torch renames these collectives; the old names warn in later versions
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def run_with_group(problem: DistributedGemm, group: Any, mode: str, a: Tensor, b: Tensor) -> Tensor:
    """Compute this rank's share of C from its shards of A and B, with the collectives of a process group."""
    rank = dist.get_rank(group)

    def multiply(x: Tensor, dtype: torch.dtype) -> Tensor:
        plan = choose(GemmProblem.of(x, b, problem.precision), mode)
        return run(plan, x, b, problem.precision, Epilogue(dtype))[0]

    if problem.collective == "all_scatter":
        columns = multiply(a, problem.out_dtype)
        return gather_rows(columns.T, problem.sizes, group).T.contiguous()
    if problem.collective == "ag_gemm":
        return multiply(gather_rows(a, problem.sizes, group), problem.out_dtype)
    sums = multiply(a, problem.reduce_dtype)
    if problem.collective == "all_reduce":
        dist.all_reduce(sums, group=group)
        return sums.to(problem.out_dtype)
    # pad the shards of rows to one size, which reduce-scatter requires
    padded = sums.new_zeros(problem.world, max(problem.sizes), problem.n)
    for shard, rows in zip(padded, sums.split(problem.sizes), strict=True):
        shard[: len(rows)] = rows
    mine = torch.empty_like(padded[0])
    _reduce_scatter(mine, padded.flatten(0, 1), group=group)
    return mine[: problem.sizes[rank]].to(problem.out_dtype)


def gather_rows(rows: Tensor, sizes: tuple[int, ...], group: Any) -> Tensor:
    """All-gather rows of uneven counts: padded to one size for the collective, which not all backends do otherwise."""
    padded = rows.new_zeros(max(sizes), rows.shape[1])
    padded[: len(rows)] = rows
    gathered = padded.new_empty(len(sizes) * len(padded), padded.shape[1])
    _all_gather(gathered, padded, group=group)
    if not len(padded):
        return gathered
    return torch.cat([x[:size] for x, size in zip(gathered.split(len(padded)), sizes, strict=True)])
