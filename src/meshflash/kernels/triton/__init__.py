"""Portable attention kernels in Triton: NVIDIA and AMD GPUs, and CPUs through the interpreter."""
