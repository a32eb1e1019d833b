"""A simulated step beside the measured one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast_lab.placement.step_time import StepCosts, StepInputs, predict_step, step_costs
from holdfast_lab.sim.here import Loop, simulate_here
from placement_check.configurations import Configuration
from placement_check.outcome import Outcome

WORST_BAR, MEAN_BAR = 0.25, 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator said, and from what. analytic_ms: of `holdfast plan`, the slowest device alone. costs: None
    where it is read from a record, which has them."""

    ms: float
    stage_ms: Mapping[str, float]
    busy_ms: Mapping[str, float]
    analytic_ms: float
    costs: StepCosts | None
    loop: Loop


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOutcome(Outcome):
    prediction: Prediction

    @property
    def measured_stage_ms(self) -> Mapping[str, float]:
        """Means, which add up to a step."""
        found: dict[str, float] = self.measured.get("mean_stage_ms", {})
        return found


def outcome_of(
    configuration: Configuration, inputs: StepInputs, measured: dict[str, Any], others_cpus: float, *, threads: int
) -> SimOutcome:
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
        analytic_ms=predict_step(inputs).ms,
        costs=step_costs(inputs),
        loop=loop,
    )
    return SimOutcome(
        name=configuration.name,
        prediction=prediction,
        predicted_ms=step.ms,
        measured=measured,
        others_cpus=others_cpus,
        bar=WORST_BAR,
    )


def errors(outcomes: Sequence[SimOutcome]) -> list[float]:
    """Of those that were measured, without signs."""
    return [abs(each.error) for each in outcomes if each.error is not None]


def formula_errors(outcomes: Sequence[SimOutcome]) -> list[float]:
    """Of the slowest device alone, without signs."""
    return [
        abs(each.prediction.analytic_ms / each.measured_ms - 1) for each in outcomes if each.measured_ms is not None
    ]


def stage_error(outcome: SimOutcome) -> float:
    """The part of a step that is simulated in the wrong stage, or not at all."""
    predicted, measured = outcome.prediction.stage_ms, outcome.measured_stage_ms
    apart = [abs(predicted.get(stage, 0.0) - measured.get(stage, 0.0)) for stage in {*predicted, *measured}]
    return sum(apart) / sum(measured.values())


def complaint_of_all(outcomes: Sequence[SimOutcome]) -> list[str]:
    """Whether they are off by too much on average."""
    found = errors(outcomes)
    if not found or statistics.mean(found) <= MEAN_BAR:
        return []
    return [f"the mean of {len(found)} errors is {statistics.mean(found):.0%}, more than {MEAN_BAR:.0%}"]
