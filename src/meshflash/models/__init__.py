"""Models that run on any mesh, layout and schedule."""
