"""Rates of fused products, as tables have them."""

from __future__ import annotations

from meshflash.gemm import configs
from meshflash.gemm.distributed.plan import FusedConfig, FusedPlan, key_of
from meshflash.gemm.distributed.problem import FusedProduct
from meshflash.gemm.rates import Rate


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
