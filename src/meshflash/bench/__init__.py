"""Benchmarks of the command line: cases, candidates, checks, timing, records, tables and plots."""
