"""What a run's TOML file says: its sections, and what each of them describes."""
