"""Schedules: pure functions from a problem to programs. One file for a family; none is known outside."""
