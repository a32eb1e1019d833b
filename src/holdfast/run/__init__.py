"""A run as its TOML file describes it, and what builds source, pool, model and Trainer from it."""
