"""A pool: its tables and their optimizers, opened to train or to be read."""
