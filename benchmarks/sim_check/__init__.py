"""Whether the simulator tells how long a step takes, stage by stage: predicted beside measured. See __main__.py."""
