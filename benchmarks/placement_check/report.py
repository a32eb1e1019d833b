"""Predicted beside measured, as a table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report_page
from holdfast_lab.placement.step_time import StepInputs, StepTime, predict_step
from larger.figures import hit_rate
from machine import in_words
from markdown_table import markdown_table
from placement_check.configurations import Configuration
from placement_check.outcome import Outcome

BAR = 0.25
_HEAD = (
    "`cd benchmarks && python -m placement_check`: costs by `holdfast tiers probe`, access statistics by `holdfast "
    "profile`, both as `holdfast plan` takes them; then training, each in a process of its own. In ms. Measured is the "
    "mean of a window. `others`: CPUs that other processes used meanwhile, of the quietest of three tries at most."
)
_PARTS = ("network_ms", "rows_ms", "displaced_ms", "loader_ms", "disk_ms", "log_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome(Outcome):
    """predicted: by `holdfast plan`."""

    predicted: StepTime


def outcome_of(
    configuration: Configuration, inputs: StepInputs, measured: dict[str, Any], others_cpus: float
) -> PlanOutcome:
    predicted = predict_step(inputs)
    return PlanOutcome(
        name=configuration.name,
        predicted=predicted,
        predicted_ms=predicted.ms,
        measured=measured,
        others_cpus=others_cpus,
        bar=BAR,
    )


def write_report(outcomes: list[PlanOutcome], machine: dict[str, Any], directory: Path) -> None:
    """report.md in `directory`."""
    lines = [
        "# Predicted and measured step times",
        "",
        _HEAD,
        "",
        f"{in_words(machine)}; holdfast {machine['holdfast_commit']}.",
        "",
        *markdown_table(
            ["", "predicted", "measured", "off by", "limited by", *(part[:-3] for part in _PARTS), "others", "steady"],
            [_cells(outcome) for outcome in outcomes],
        ),
        "What the log store does in a step, predicted / seen:",
        "",
        *markdown_table(
            ["", "hit rate", "rows missed", "fetch requests", "merge requests"],
            [_store_cells(outcome) for outcome in outcomes if outcome.predicted.store_work and outcome.measured_ms],
        ),
        *(f"- {complaint}" for outcome in outcomes if (complaint := outcome.complaint)),
    ]
    report_page.write(directory, "\n".join(lines))


def _cells(outcome: PlanOutcome) -> list[str]:
    predicted, measured = outcome.predicted, outcome.measured_ms
    return [
        outcome.name,
        f"{predicted.ms:.1f}",
        "failed" if measured is None else f"{measured:.1f}",
        "–" if outcome.error is None else f"{outcome.error:+.0%}",
        predicted.limited_by,
        *(f"{getattr(predicted, part):.1f}" for part in _PARTS),
        f"{outcome.others_cpus:.1f}",
        "yes" if outcome.measured.get("steady") else "no",
    ]


def _store_cells(outcome: PlanOutcome) -> list[str]:
    work, traffic, steps = outcome.predicted.store_work, outcome.measured["traffic"], outcome.measured["steps"]
    assert work is not None
    seen = {name: count / steps for name, count in traffic.items()}
    return [
        outcome.name,
        f"{work.hit_rate:.1%} / {hit_rate(outcome.measured):.1%}",
        f"{work.missed_rows:,.0f} / {seen['rows_missed']:,.0f}",
        f"{work.fetch_requests:,.0f} / {seen['fetch_reads']:,.0f}",
        f"{work.merge_requests:,.0f} / {seen['merge_reads'] + seen['merge_writes']:,.0f}",
    ]
