"""Training on an accelerator: three ways to reach the rows of a pool from a device, with the same numbers."""
