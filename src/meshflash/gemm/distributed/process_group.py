"""Products of several ranks without a heap: torch's product, then the collective of a process group.

Any dtype and device that the group serves. Sums are in the order of the group's library, the same bits on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshflash.comm.transports.process_group import dist
from meshflash.gemm.distributed.problem import FusedProduct
from meshflash.gemm.launch import Epilogue, run
from meshflash.gemm.plan import Product, choose

# the older names warn in later versions of torch
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def run_by_group(product: FusedProduct, group: Any, mode: str, a: Tensor, b: Tensor) -> Tensor:
    """The product of the ranks of a group."""
    rank = dist.get_rank(group)

    def multiply(x: Tensor, dtype: torch.dtype) -> Tensor:
        plan = choose(Product.of(x, b, product.precision), mode)
        return run(plan, x, b, product.precision, Epilogue(dtype))[0]

    if product.collective == "all_scatter":
        columns = multiply(a, product.out_dtype)
        return gather_rows(columns.T, product.sizes, group).T.contiguous()
    if product.collective == "ag_gemm":
        return multiply(gather_rows(a, product.sizes, group), product.out_dtype)
    sums = multiply(a, product.reduce_dtype)
    if product.collective == "all_reduce":
        dist.all_reduce(sums, group=group)
        return sums.to(product.out_dtype)
    parts = sums.new_zeros(product.world, max(product.sizes), product.n)
    for part, rows in zip(parts, sums.split(product.sizes), strict=True):
        part[: len(rows)] = rows
    mine = torch.empty_like(parts[0])
    _reduce_scatter(mine, parts.flatten(0, 1), group=group)
    return mine[: product.sizes[rank]].to(product.out_dtype)


def gather_rows(rows: Tensor, sizes: tuple[int, ...], group: Any) -> Tensor:
    """The rows of all ranks: sent in equal parts, since not all groups take others."""
    part = rows.new_zeros(max(sizes), rows.shape[1])
    part[: len(rows)] = rows
    parts = part.new_empty(len(sizes) * len(part), part.shape[1])
    _all_gather(parts, part, group=group)
    return torch.cat([x[:size] for x, size in zip(parts.split(len(part)), sizes, strict=True)]) if len(part) else parts
