"""The state of a process: its tree of values, its random numbers, what its bits depend on."""
