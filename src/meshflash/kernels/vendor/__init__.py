"""Vendor kernels behind the contract: torch on CPUs, cuDNN and FlashAttention 2, 3 and 4 on GPUs."""
