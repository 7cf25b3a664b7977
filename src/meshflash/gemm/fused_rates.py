"""Rates of fused products, and how what was measured joins the table that is in use."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from meshflash.gemm import configs, rates
from meshflash.gemm.fused_plan import FusedConfig, FusedPlan, FusedProduct, key_of
from meshflash.gemm.rates import Rate, Table
from meshflash.kernels.rates import identity


def numbers_of(plan: FusedPlan) -> tuple[int, ...]:
    """The configuration of a plan with its movers, as a table has it."""
    return tuple(configs.written(FusedConfig.of(plan.blocks, plan.movers)))


def rate_of(
    product: FusedProduct, numbers: str, mode: str, sharing: int, config: tuple[int, ...], milliseconds: float
) -> Rate:
    """What a table says of a variant that took so long: TFLOP/s are those of the whole product, in all variants."""
    sizes = (product.m, product.n, product.k)
    tflops = 2e-9 * product.m * product.n * product.k / milliseconds
    return Rate(mode, numbers, key_of(product, sharing), *sizes, tflops, config)


def merged(old: Iterable[Rate], new: Iterable[Rate]) -> tuple[Rate, ...]:
    """All rates, of which a new one takes the place of that of the same mode, numbers, layout and sizes.

    >>> from dataclasses import replace
    >>> slow, fast = (Rate("bulk", "bfloat16", "ag_gemm/4/1", 8, 8, 8, tflops) for tflops in (1.0, 2.0))
    >>> merged([slow, replace(slow, layout="nn")], [fast]) == (replace(slow, layout="nn"), fast)
    True
    """

    def name(rate: Rate) -> tuple[str | int, ...]:
        return rate.mode, rate.numbers, rate.layout, rate.m, rate.n, rate.k

    new = tuple(new)
    again = {name(rate) for rate in new}
    return (*(rate for rate in old if name(rate) not in again), *new)


def add(new: Iterable[Rate], device: torch.device, measured_with: dict[str, str]) -> Path:
    """Write the user's own table of a device: what is in use there now, and these rates. Where it lies."""
    about, known = identity(device), rates.known(device)
    path = rates.file_of(about[0])
    rates.write(Table(*about, merged(known.table.rates if known else (), new), measured_with), path)
    return path
