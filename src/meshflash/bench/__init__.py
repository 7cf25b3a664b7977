"""Benchmarks: cases, timing, memory, records and plots. Each is a command of the command line."""
