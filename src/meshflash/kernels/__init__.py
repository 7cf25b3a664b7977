"""Attention on one device over a worklist: the contract, the kernels, and the choice between them."""
