"""Joules of a batch: declared power of what a system has, over what was declared and measured. As the simulator's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainingcxl.systems import CONFIGURATIONS

# Watts, idle and busy: of the simulator's devices, with their sources there.
_HOST = (30.0, 95.0)  # Core i5-9600K, TDP
_GPU = (50.0, 250.0)  # RTX 3090
_MODULE = (4.0, 15.0)  # Optane PMem 200, TDP; of one
_LOGIC = (5.0, 15.0)  # near memory: assumed
_SSD = (5.0, 12.0)  # P4800X
_VERBS_OF_ROWS = ("capture", "lookup", "lookup_ahead", "update")


def joules(cell: Mapping[str, Any], system: str) -> float:
    """The host, or the logic near memory beside a host that waits, is busy with rows; what works takes power."""
    configuration = CONFIGURATIONS[system]
    batch_s = 1e-3 * cell["batch_ms"]
    rows_s = 1e-3 * sum(cell["stage_ms"].get(verb, 0.0) for verb in _VERBS_OF_ROWS)
    medium_s = cell["dial"]["declared_s"] / cell["stretch"]
    parts = [
        (_HOST, 0.0 if configuration.near else rows_s, 1),
        (_GPU, 1e-3 * cell["accelerator_ms"], 1),
        (_SSD if configuration.block else _MODULE, medium_s, cell["modules"]),
    ]
    if configuration.near:
        parts.append((_LOGIC, rows_s, 1))
    return float(
        sum(count * (idle * batch_s + (busy - idle) * min(busy_s, batch_s)) for (idle, busy), busy_s, count in parts)
    )
