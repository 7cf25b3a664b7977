"""Products of matrices: Stream-K kernels, the choice between them and torch's own, and their gradients."""

from meshflash.gemm.api import matmul
from meshflash.gemm.fused import FusedGemm
from meshflash.gemm.fused_plan import FusedPlan
from meshflash.gemm.planning import Plan

__all__ = ["FusedGemm", "FusedPlan", "Plan", "matmul"]
