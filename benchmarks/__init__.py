"""Benchmarks that feed docs/benchmarks.md. Run them from a checkout: `python -m benchmarks NAME`."""
