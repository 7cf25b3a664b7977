"""Training runs: data and its order, configurations, the loop, checkpoints."""
