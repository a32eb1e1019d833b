"""How long opening a pool takes that was killed with its log full, over log and table sizes. See __main__.py."""
