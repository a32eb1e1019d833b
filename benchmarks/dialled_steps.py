"""What runs on dialled media beside a declared accelerator have in common: the accelerator, tables that are written in
full, and steps that are timed."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """Seconds of the dense part of a batch."""

    bottom_forward_s: float
    top_s: float
    bottom_backward_s: float

    @property
    def total_s(self) -> float:
        return self.bottom_forward_s + self.top_s + self.bottom_backward_s

    def device_dial(
        self, name: str, *, link_bytes_per_s: float, link_latency_s: float, copy_s: float, stretch: float
    ) -> str:
        """The section of a run's file."""
        return f"""\
[device.dial]
name = "{name}"
bottom_forward_s = {self.bottom_forward_s}
top_s = {self.top_s}
bottom_backward_s = {self.bottom_backward_s}
link_bandwidth_bytes_per_s = {link_bytes_per_s}
link_latency_s = {link_latency_s}
copy_s = {copy_s}
stretch = {stretch}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSteps:
    """reports: of the steps and the one after, with whose beginning the last of them ends. began: of all of these, in
    seconds. stage_ms, counts, cpu_s: a step's mean."""

    reports: list[Any]
    began: list[float]
    counts: dict[str, float]
    cpu_s: float

    @property
    def each_ms(self) -> list[float]:
        return [1e3 * (end - begin) for begin, end in itertools.pairwise(self.began)]

    @property
    def batch_ms(self) -> float:
        return 1e3 * (self.began[-1] - self.began[0]) / (len(self.began) - 1)

    @property
    def stage_ms(self) -> dict[str, float]:
        timed = self.reports[:-1]
        stages = dict.fromkeys(stage for report in timed for stage in report.stage_ms)
        return {stage: statistics.fmean(report.stage_ms.get(stage, 0.0) for report in timed) for stage in stages}


def time_steps(trainer: Any, warmup: int, steps: int, counts: Callable[[Any], dict[str, float]]) -> TimedSteps:
    """counts: of the trainer, what grows from step to step."""
    going = trainer.steps()
    for _ in range(warmup):
        next(going)
    before, cpu_before = counts(trainer), time.process_time()
    reports = [next(going) for _ in range(steps)]
    cpu_s = time.process_time() - cpu_before
    after = counts(trainer)
    reports.append(next(going))
    return TimedSteps(
        reports=reports,
        began=[report.began for report in reports],
        counts={name: (after[name] - before[name]) / steps for name in after},
        cpu_s=cpu_s / steps,
    )


def write_tables(trainer: Any) -> None:
    """All rows in full, so that no step finds a page of a file new, and no row is one that was never written."""
    rng = np.random.default_rng(1)
    for number, table in enumerate(trainer.pool.core.tables):
        weights = rng.standard_normal(table.num_embeddings * table.embedding_dim, np.float32)
        trainer.pool.core.import_rows(number, 0, weights.view(np.uint8), None)
