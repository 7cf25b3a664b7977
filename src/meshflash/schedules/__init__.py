"""Schedules: pure functions from a problem to programs. One module for each family; no other package names one."""
