"""A simulated step beside the measured one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.placement.step_plan import StepInputs
from holdfast.placement.step_time import StepCosts
from holdfast.sim.here import Loop, simulate_here
from placement_check.configurations import Configuration

WORST_BAR, MEAN_BAR = 0.30, 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator said, and from what. analytic_ms: of `holdfast plan`, the slowest device alone."""

    ms: float
    stage_ms: Mapping[str, float]
    busy_ms: Mapping[str, float]
    analytic_ms: float
    costs: StepCosts
    loop: Loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """measured: what larger.one said, or {"error": ...}. others_cpus: in use before it ran."""

    name: str
    prediction: Prediction
    measured: dict[str, Any]
    others_cpus: float

    @property
    def measured_ms(self) -> float | None:
        """Of a step, merges and dense states included."""
        return self.measured.get("ms_per_step")

    @property
    def measured_stage_ms(self) -> Mapping[str, float]:
        """Means, which add up to a step."""
        found: dict[str, float] = self.measured.get("mean_stage_ms", {})
        return found

    @property
    def error(self) -> float | None:
        """Of the predicted step, relative to the measured one; below 0 where too little was predicted."""
        return None if self.measured_ms is None else self.prediction.ms / self.measured_ms - 1.0

    @property
    def line(self) -> str:
        """All of it in one line."""
        if self.error is None:
            return f"{self.name}: predicted {self.prediction.ms:.1f} ms, not measured"
        return f"{self.name}: predicted {self.prediction.ms:.1f} ms, measured {self.measured_ms:.1f}: {self.error:+.0%}"

    @property
    def complaint(self) -> str | None:
        """Why this is not as it should be, in one line."""
        if self.error is None:
            return f"{self.name}: not measured: {str(self.measured.get('error')).strip().splitlines()[-1]}"
        return f"{self.line}, more than {WORST_BAR:.0%}" if abs(self.error) > WORST_BAR else None


def outcome_of(
    configuration: Configuration, inputs: StepInputs, measured: dict[str, Any], others_cpus: float, *, threads: int
) -> Outcome:
    """Simulates the step. threads: of the training thread's team."""
    train, pool = configuration.run_config().train, configuration.run_config().pool
    loop = Loop(
        window=train.window,
        prefetch=train.prefetch,
        workers=train.workers,
        capture_ahead=train.capture_ahead,
        dense_interval=pool.dense_interval,
        threads=threads,
    )
    step = simulate_here(inputs, loop)
    prediction = Prediction(
        ms=step.ms,
        stage_ms=step.stage_ms,
        busy_ms=step.busy_ms,
        analytic_ms=inputs.predict().ms,
        costs=inputs.costs(),
        loop=loop,
    )
    return Outcome(name=configuration.name, prediction=prediction, measured=measured, others_cpus=others_cpus)


def errors(outcomes: Sequence[Outcome]) -> list[float]:
    """Of those that were measured, without signs."""
    return [abs(each.error) for each in outcomes if each.error is not None]


def complaint_of_all(outcomes: Sequence[Outcome]) -> list[str]:
    """Whether they are off by too much on average."""
    found = errors(outcomes)
    if not found or statistics.mean(found) <= MEAN_BAR:
        return []
    return [f"the mean of {len(found)} errors is {statistics.mean(found):.0%}, more than {MEAN_BAR:.0%}"]
