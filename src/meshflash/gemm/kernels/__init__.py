"""GEMM kernels: Stream-K in Triton, a warp-specialized one for Hopper, and kernels fused with communication."""
