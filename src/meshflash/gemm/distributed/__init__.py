"""Distributed GEMMs: a GEMM fused with the collective that feeds it or that its output goes to."""
