"""Rows of the rate tables for fused GEMM + collective runs."""

from __future__ import annotations

from meshflash.gemm import configs
from meshflash.gemm.distributed.plan import FusedConfig, FusedPlan, rate_layout
from meshflash.gemm.distributed.problem import DistributedGemm
from meshflash.gemm.rates import Rate


def config_list(plan: FusedPlan) -> tuple[int, ...]:
    """Return the configuration of a plan with its comm SMs, as a rate table stores it."""
    return tuple(configs.to_list(FusedConfig.of(plan.tiling, plan.num_comm_sms)))


def make_rate(
    problem: DistributedGemm,
    dtype_name: str,
    mode: str,
    ranks_per_device: int,
    config: tuple[int, ...],
    milliseconds: float,
) -> Rate:
    """Return the rate of a variant from its time; TFLOP/s count the whole GEMM, the same for all variants."""
    sizes = (problem.m, problem.n, problem.k)
    tflops = 2e-9 * problem.m * problem.n * problem.k / milliseconds
    return Rate(mode, dtype_name, rate_layout(problem, ranks_per_device), *sizes, tflops, config)
