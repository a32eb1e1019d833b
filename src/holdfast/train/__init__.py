"""Training: checkpoints of the dense part, the loop, and a run as its TOML file describes it."""
