"""TrainingCXL's evaluation (IEEE Micro 2023) as real runs on dialled media; see __main__.py."""
