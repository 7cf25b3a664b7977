"""The symmetric heap: memory of the same size on every rank that kernels of all ranks read and write."""
