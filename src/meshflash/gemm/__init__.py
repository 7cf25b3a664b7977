"""Matrix multiplication: Stream-K kernels, the choice between them and torch's, and GEMMs fused with collectives."""

from meshflash.gemm.api import matmul
from meshflash.gemm.distributed.api import FusedGemm
from meshflash.gemm.distributed.plan import FusedPlan
from meshflash.gemm.plan import Plan

__all__ = ["FusedGemm", "FusedPlan", "Plan", "matmul"]
