"""GEMM kernels: Stream-K in Triton, a warp-specialized one for Hopper, and those fused with communication."""
