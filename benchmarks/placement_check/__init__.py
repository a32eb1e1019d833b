"""Whether `holdfast plan` tells how long a step takes: predicted beside measured. See __main__.py."""
