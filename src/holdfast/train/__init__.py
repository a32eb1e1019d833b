"""Training: checkpoints of the dense part, the loop, its metrics and traces."""
