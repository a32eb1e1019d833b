"""Predicted beside measured, as tables and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report_page
from machine import in_words
from markdown_table import markdown_table
from sim_check.outcome import (
    MEAN_BAR,
    WORST_BAR,
    SimOutcome,
    complaint_of_all,
    errors,
    formula_errors,
    stage_error,
)
from sim_check.plot import plot_stages

STAGES = ("plan", "capture", "lookup", "capture_ahead", "train", "update", "commit")
_HEAD = (
    "`cd benchmarks && python -m sim_check`: costs by `holdfast tiers probe`, access statistics by `holdfast profile`, "
    "the loop simulated from both (`holdfast_lab.sim.here`); then training, each in a process of its own. Nothing is "
    "fitted to what was measured. In ms, means of a window. `slowest device`: what `holdfast plan` predicts, which "
    "knows no waiting. `others`: CPUs that other processes used meanwhile, in the quietest of three tries."
)
_STAGES_HEAD = (
    "By stage of the training thread, predicted / measured. A stage ends where the next one begins, so waiting is part "
    "of it: `plan` waits for the loader, `capture` for rows that are fetched, `commit` for the step before to be "
    "durable."
)


def write_report(outcomes: Sequence[SimOutcome], record: dict[str, Any], directory: Path) -> None:
    """report.md and stages.png in `directory`."""
    machine, found = record["machine"], errors(outcomes)
    measured = [each for each in outcomes if each.error is not None]
    plot_stages(measured, STAGES, directory / "stages.png")
    lines = [
        "# Simulated and measured step times",
        "",
        _HEAD,
        "",
        f"{in_words(machine)}; holdfast {machine['holdfast_commit']}.",
        "",
        *_summary(found, measured),
        *markdown_table(
            ["", "predicted", "measured", "off by", "slowest device", "others", "steady"],
            [_cells(outcome) for outcome in outcomes],
        ),
        "![](stages.png)",
        "",
        _STAGES_HEAD,
        "",
        *markdown_table(["", *STAGES], [_stage_cells(outcome) for outcome in measured]),
        *(f"- {complaint}" for each in outcomes if (complaint := each.complaint)),
        *(f"- {complaint}" for complaint in complaint_of_all(outcomes)),
    ]
    report_page.write(directory, "\n".join(lines))


def _summary(found: list[float], measured: Sequence[SimOutcome]) -> list[str]:
    if not found:
        return []
    formula, stages = formula_errors(measured), [stage_error(each) for each in measured if each.measured_stage_ms]
    rows = [
        ("mean error", f"{statistics.mean(found):.1%}", f"≤ {MEAN_BAR:.0%}"),
        ("worst error", f"{max(found):.1%}", f"≤ {WORST_BAR:.0%}"),
        ("of the slowest device alone: mean, worst", f"{statistics.mean(formula):.1%}, {max(formula):.1%}", "more"),
    ]
    if stages:
        rows.append(("in the wrong stage, mean of a step", f"{statistics.mean(stages):.1%}", ""))
    return markdown_table([f"of {len(found)} configurations", "", "bar"], rows)


def _cells(outcome: SimOutcome) -> list[str]:
    return [
        outcome.name,
        f"{outcome.prediction.ms:.1f}",
        "failed" if outcome.measured_ms is None else f"{outcome.measured_ms:.1f}",
        "–" if outcome.error is None else f"{outcome.error:+.0%}",
        f"{outcome.prediction.analytic_ms:.1f}",
        f"{outcome.others_cpus:.1f}",
        "yes" if outcome.measured.get("steady") else "no",
    ]


def _stage_cells(outcome: SimOutcome) -> list[str]:
    predicted, measured = outcome.prediction.stage_ms, outcome.measured_stage_ms
    cells = [
        f"{predicted[stage]:.1f} / {measured[stage]:.1f}" if stage in predicted and stage in measured else "–"
        for stage in STAGES
    ]
    return [outcome.name, *cells]
