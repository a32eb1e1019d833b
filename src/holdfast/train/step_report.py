"""What a step did, and when: what metrics and traces are made of."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from holdfast.pools.pool import Pool


@dataclass(frozen=True, slots=True)
class Span:
    """Where and when something ran, in seconds of ``time.perf_counter``."""

    thread: str
    began: float
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did.

    began: when, in seconds of ``time.perf_counter``. stage_ms: wall time of each verb, one after the other from there;
    plan is the wait for the loader, which plans ahead, and planning is when it did. laps: the same times in the order
    in which they were spent, each piece of a verb that comes in several. logged_bytes: what the step wrote
    to the log; log_bytes_free: what the log has left after commit. traffic: rows and bytes since the report before (of
    this step and of what ran beside it), where rows come through a scratchpad (names as in core/step/row_backend.h; of
    a device's, device_...). keys: since the report before, how many keys were admitted, how many updates were held
    back, of keys that are not, and how many keys were left behind; where a table has such rules, of this rank's shards.
    device: when the device did what of this step, by its own clock; where rows are updated there. background: what ran
    beside training, on the pool's own threads, and ended since the report before, whichever step it was for: (stage,
    when); stages as in core/base/stage_spans.h.
    """

    step: int
    durable_step: int
    loss: float
    samples: int
    began: float
    stage_ms: dict[str, float]
    planning: Span
    logged_bytes: int
    log_bytes_free: int
    traffic: dict[str, float] | None = None
    keys: dict[str, int] | None = None
    laps: list[tuple[str, float]] = field(default_factory=list)
    device: dict[str, Span] = field(default_factory=dict)
    background: list[tuple[str, Span]] = field(default_factory=list)


# How much there is, not how much was done.
_STANDING = ("index_entries", "index_bytes", "scratchpad_rows", "is_warming", "device_slots")


def traffic_since(before: dict[str, float] | None, after: dict[str, float] | None) -> dict[str, float] | None:
    """What was done between two readings of a pool's traffic; None where it tells of none."""
    if before is None or after is None:
        return None
    return {name: value if name in _STANDING else value - before[name] for name, value in after.items()}


def keys_since(before: dict[str, int] | None, after: dict[str, int] | None) -> dict[str, int] | None:
    """The same of what became of keys."""
    if before is None or after is None:
        return None
    return {name: max(0, value - before[name]) for name, value in after.items()}


def background_of(pool: Pool) -> list[tuple[str, Span]]:
    """See StepReport; each is given once."""
    return [(stage, Span(thread, began, ended)) for stage, thread, began, ended in pool.take_spans()]


class Stopwatch:
    """Splits a step's wall time into stages."""

    def __init__(self) -> None:
        self.stage_ms: dict[str, float] = {}
        self.laps: list[tuple[str, float]] = []
        self.began = self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        ms = (now - self._last) * 1e3
        self.stage_ms[stage] = self.stage_ms.get(stage, 0.0) + ms
        self.laps.append((stage, ms))
        self._last = now
