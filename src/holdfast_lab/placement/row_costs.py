"""What one verb of the training thread costs, and what a batch asks of it. Pure, from numbers to seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

VERBS = ("capture", "lookup", "train", "update", "commit")
"""Those that work on rows; of `train` it is what rows add to the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAmounts:
    """Of a batch, over all tables. rows: unique ones; row_bytes: of their weights and state; id_bytes: of weights, once
    for each id; dense_bytes: of dense state that becomes durable."""

    rows: float
    row_bytes: float
    ids: float
    id_bytes: float
    dense_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCosts:
    """Wall time of the training thread and its team, alone on the machine: step_us a step, row_ns and row_byte_ns (of
    weights and state) a unique row, id_ns and id_byte_ns (of weights) an id, dense_byte_ns a byte of dense state.
    Raises ValueError that names the field."""

    step_us: float = 0.0
    row_ns: float = 0.0
    row_byte_ns: float = 0.0
    id_ns: float = 0.0
    id_byte_ns: float = 0.0
    dense_byte_ns: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{field.name} = {value}; it must be 0 or more")

    def seconds(self, batch: RowAmounts) -> float:
        return 1e-6 * self.step_us + 1e-9 * (
            batch.rows * self.row_ns
            + batch.row_bytes * self.row_byte_ns
            + batch.ids * self.id_ns
            + batch.id_bytes * self.id_byte_ns
            + batch.dense_bytes * self.dense_byte_ns
        )
