"""Correctness checks on this machine: schedules, layouts, masks and features over ranks, against a float64 oracle."""
