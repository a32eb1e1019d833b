"""Predicted beside measured, as a table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.placement.step_time import StepTime
from larger.figures import hit_rate
from markdown_table import markdown_table

BAR = 0.25
_HEAD = (
    "`cd benchmarks && python -m placement_check`: costs by `holdfast tiers probe`, access statistics by `holdfast "
    "profile`, both as `holdfast plan` takes them; then training, each in a process of its own. In ms. Measured is the "
    "mean of a window. `others`: CPUs that other processes used before the run."
)
_PARTS = ("network_ms", "rows_ms", "displaced_ms", "loader_ms", "disk_ms", "log_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """measured: what larger.one said, or {"error": ...}. others_cpus: in use before it ran."""

    name: str
    predicted: StepTime
    measured: dict[str, Any]
    others_cpus: float

    @property
    def measured_ms(self) -> float | None:
        """Of a step, merges and dense states included."""
        return self.measured.get("ms_per_step")

    @property
    def ratio(self) -> float | None:
        """Predicted over measured."""
        return None if self.measured_ms is None else self.predicted.ms / self.measured_ms

    @property
    def line(self) -> str:
        """All of it in one line."""
        if self.ratio is None:
            return f"{self.name}: predicted {self.predicted.ms:.1f} ms, not measured"
        return f"{self.name}: predicted {self.predicted.ms:.1f} ms, measured {self.measured_ms:.1f}: {self.ratio:.2f}"

    @property
    def complaint(self) -> str | None:
        """Why this is not as it should be, in one line."""
        if self.ratio is None:
            return f"{self.name}: not measured: {str(self.measured.get('error')).strip().splitlines()[-1]}"
        if abs(self.ratio - 1.0) <= BAR:
            return None
        return (
            f"{self.name}: predicted {self.predicted.ms:.1f} ms, measured {self.measured_ms:.1f}: off by "
            f"{abs(self.ratio - 1.0):.0%}, more than {BAR:.0%}"
        )


def write_report(outcomes: list[Outcome], machine: dict[str, Any], directory: Path) -> None:
    """report.md in `directory`."""
    lines = [
        "# Predicted and measured step times",
        "",
        _HEAD,
        "",
        f"{machine['processor']}, {machine['cpus']} CPUs, {machine['kernel']}; holdfast {machine['holdfast_commit']}.",
        "",
        *markdown_table(
            ["", "predicted", "measured", "ratio", "limited by", *(part[:-3] for part in _PARTS), "others", "steady"],
            [_cells(outcome) for outcome in outcomes],
        ),
        "What the log store does in a step, predicted / seen:",
        "",
        *markdown_table(
            ["", "hit rate", "rows missed", "fetch requests", "merge requests"],
            [_store_cells(outcome) for outcome in outcomes if outcome.predicted.store_work and outcome.ratio],
        ),
        *(f"- {complaint}" for outcome in outcomes if (complaint := outcome.complaint)),
    ]
    (directory / "report.md").write_text("\n".join(lines) + "\n")


def _cells(outcome: Outcome) -> list[str]:
    predicted, measured = outcome.predicted, outcome.measured_ms
    return [
        outcome.name,
        f"{predicted.ms:.1f}",
        "failed" if measured is None else f"{measured:.1f}",
        "–" if outcome.ratio is None else f"{outcome.ratio:.2f}",
        predicted.limited_by,
        *(f"{getattr(predicted, part):.1f}" for part in _PARTS),
        f"{outcome.others_cpus:.1f}",
        "yes" if outcome.measured.get("steady") else "no",
    ]


def _store_cells(outcome: Outcome) -> list[str]:
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
