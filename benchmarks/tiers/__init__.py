"""Three tiers with the plan's settings, beside two with all else equal. See __main__.py."""
