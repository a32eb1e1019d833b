"""From trials to the numbers that the report shows: paired differences with their confidence intervals.

A difference is that of two runs of one seed, so of the same data, initial values and order: a relaxed one and the one
that was never cut. What is left of the noise between seeds is what the interval says.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from relaxed.workloads import Crash

METRICS = {"auc": "AUC", "log_loss": "log-loss"}
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean, and between what bounds it lies with 95% confidence (Student's t); no bounds from fewer than two."""

    mean: float
    low: float | None
    high: float | None

    @property
    def furthest(self) -> float | None:
        """The bound that is further from zero, without its sign."""
        return None if self.low is None or self.high is None else max(abs(self.low), abs(self.high))


def estimate(values: Sequence[float]) -> Estimate:
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(mean=mean, low=None, high=None)
    half = stats.t.ppf((1.0 + CONFIDENCE) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean=mean, low=mean - float(half), high=mean + float(half))


def value(life: dict[str, Any], step: int, metric: str) -> float:
    """What a life's model reached at the end of `step`."""
    (found,) = [evaluation for evaluation in life["evaluations"] if evaluation["step"] == step]
    return float(found[metric])


def recovery_of(trial: dict[str, Any], crash: Crash) -> dict[str, Any]:
    (found,) = [r for r in trial["recoveries"] if (r["crash_step"], r["lag"]) == (crash.step, crash.lag)]
    assert isinstance(found, dict)
    return found


def price(trials: Iterable[dict[str, Any]], crash: Crash, step: int, metric: str) -> list[float]:
    """Relaxed minus never cut, both at the end of `step`, of each seed."""
    return [value(recovery_of(trial, crash), step, metric) - value(trial["whole"], step, metric) for trial in trials]


def set_back(trials: Iterable[dict[str, Any]], crash: Crash, metric: str) -> list[float]:
    """Where exact recovery begins again minus where the run was killed, of each seed."""
    return [
        value(trial["whole"], crash.dense_step, metric) - value(trial["whole"], crash.step, metric) for trial in trials
    ]


def lead(trials: Iterable[dict[str, Any]], crash: Crash, metric: str) -> list[float]:
    """Relaxed minus exact recovery when both have trained `crash.lag` batches more, so that exact recovery is where the
    run was killed, of each seed."""
    step = crash.step + crash.lag
    return [
        value(recovery_of(trial, crash), step, metric) - value(trial["whole"], crash.step, metric) for trial in trials
    ]


def spread(trials: Iterable[dict[str, Any]], step: int, metric: str) -> float | None:
    """Standard deviation between runs that were never cut and differ in initial values and order alone: of one world;
    pooled over worlds. None where no world has two."""
    worlds: dict[int, list[float]] = {}
    for trial in trials:
        worlds.setdefault(trial["world"], []).append(value(trial["whole"], step, metric))
    freedom = sum(len(values) - 1 for values in worlds.values())
    if freedom == 0:
        return None
    return math.sqrt(sum((len(v) - 1) * statistics.variance(v) for v in worlds.values() if len(v) > 1) / freedom)


def same_bits(trials: Iterable[dict[str, Any]], crash: Crash) -> int:
    """In how many trials the recovered run ended with the digest of the one that was never cut."""
    return sum(recovery_of(trial, crash)["digest"] == trial["whole"]["digest"] for trial in trials)
