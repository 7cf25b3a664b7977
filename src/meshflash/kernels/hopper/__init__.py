"""Warp-specialized attention kernels in Gluon for Hopper (sm_90)."""
