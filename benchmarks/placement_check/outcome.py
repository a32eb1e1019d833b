"""A predicted step beside the measured one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """measured: what larger.one said, or {"error": ...}. others_cpus: in use by others meanwhile. bar: of the error."""

    name: str
    predicted_ms: float
    measured: dict[str, Any]
    others_cpus: float
    bar: float

    @property
    def measured_ms(self) -> float | None:
        """Of a step, merges and dense states included."""
        return self.measured.get("ms_per_step")

    @property
    def error(self) -> float | None:
        """Of the predicted step, relative to the measured one; below 0 where too little was predicted."""
        return None if self.measured_ms is None else self.predicted_ms / self.measured_ms - 1.0

    @property
    def line(self) -> str:
        """All of it in one line."""
        if self.error is None:
            return f"{self.name}: predicted {self.predicted_ms:.1f} ms, not measured"
        return f"{self.name}: predicted {self.predicted_ms:.1f} ms, measured {self.measured_ms:.1f}: {self.error:+.0%}"

    @property
    def complaint(self) -> str | None:
        """Why this is not as it should be, in one line."""
        if self.error is None:
            return f"{self.name}: not measured: {str(self.measured.get('error')).strip().splitlines()[-1]}"
        return f"{self.line}, more than {self.bar:.0%}" if abs(self.error) > self.bar else None
