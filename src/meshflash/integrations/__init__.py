"""Calling conventions of other projects: torch's SDPA signature, and drop-in names in `compat`."""
