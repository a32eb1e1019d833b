"""What is simulated and measured: shapes, stores, and how far the loop looks ahead."""

from __future__ import annotations

from dataclasses import replace

from placement_check.configurations import CONFIGURATIONS as PLANNED
from placement_check.configurations import Configuration

_BY_NAME = {each.name: each for each in PLANNED}
_KAGGLE = _BY_NAME["in place, kaggle"]
_MISSING = _BY_NAME["log store, kaggle, a fifth of the ids uniform"]


def _windows(*windows: int) -> list[Configuration]:
    """Of the workload that misses so many rows that training waits for them unless they are fetched ahead. Its log is
    small, so that it is soon in steady state."""
    return [
        replace(_MISSING, name=f"{_MISSING.name}, window of {window}", window=window, steps=60, log_bytes=64 << 20)
        for window in windows
    ]


CONFIGURATIONS = (
    _KAGGLE,
    replace(_KAGGLE, name="in place, kaggle, captured ahead", capture_ahead=True),
    _BY_NAME["in place, rm1 (80 ids a bag)"],
    _BY_NAME["in place, rm3 (20 ids a bag, wide network)"],
    _BY_NAME["log store, kaggle, scratchpad of 4%"],
    *_windows(1, 2, 8),
    _BY_NAME["log store, rm1 (80 ids a bag)"],
    _BY_NAME["log store, uniform ids"],
)
