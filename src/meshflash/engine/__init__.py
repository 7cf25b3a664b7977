"""Runs attention on tensors: the autograd boundary and the `torch.library` op."""
