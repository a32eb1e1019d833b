"""Sweeps: one value of a scenario varied, and what becomes of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast_lab.sim.machine import DEFAULT_BATCHES, Run
from holdfast_lab.sim.report.content import Cell, Line, Table
from holdfast_lab.sim.report.figures import lines
from holdfast_lab.sim.scenario import Scenario, parse_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """key: as a setting's."""

    key: str
    values: tuple[Any, ...]

    @property
    def is_numeric(self) -> bool:
        return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A scenario's run with one of the values."""

    value: Any
    scenario: str
    run: Run


def parse_variation(text: str) -> Variation:
    """ "KEY=a,b,c", or "KEY=lo:hi:n": n values from lo to hi, each the same times as large as the one before; whole
    numbers between whole ends. Raises ConfigError."""
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise ConfigError(f"vary {text!r}: not of the form KEY=a,b,c or KEY=lo:hi:n")
    parts = values.split(":")
    found = _range(text, parts) if len(parts) == 3 else [parse_value(value.strip()) for value in values.split(",")]
    return Variation(key=key.strip(), values=tuple(value for n, value in enumerate(found) if value not in found[:n]))


def sweep(
    scenarios: Mapping[str, Scenario],
    variation: Variation,
    *,
    batches: int = DEFAULT_BATCHES,
    on_run: Callable[[], None] = lambda: None,
) -> list[Point]:
    """Every value, and with each every scenario, by what it is called. on_run: called after every one. Raises
    ConfigError."""
    points = []
    for value in variation.values:
        for name, scenario in scenarios.items():
            run = scenario.changed(variation.key, value).run(batches)
            points.append(Point(value=value, scenario=name, run=run))
            on_run()
    return points


def _range(text: str, parts: Sequence[str]) -> list[float]:
    low, high, count = (parse_value(part.strip()) for part in parts)
    numbers = [value for value in (low, high) if isinstance(value, (int, float)) and math.isfinite(value) and value > 0]
    if len(numbers) < 2 or not isinstance(count, int) or count < 2:
        raise ConfigError(f"vary {text!r}: lo:hi:n needs two numbers above 0, and how many values, 2 or more")
    are_whole = isinstance(low, int) and isinstance(high, int)
    values = [low * (high / low) ** (n / (count - 1)) for n in range(count - 1)] + [high]
    return [round(value) for value in values] if are_whole else [float(value) for value in values]


def table_of(points: Sequence[Point], variation: Variation) -> Table:
    """A row for every run."""
    rows = [(_cell(each.value), each.scenario, each.run.batch_s * 1e3, each.run.joules_per_batch) for each in points]
    return Table(header=(variation.key, "system", "batch_ms", "joules_per_batch"), rows=rows)


def write_sweep(path: Path, points: Sequence[Point], variation: Variation, *, title: str, overwrite: bool) -> None:
    """A figure of the time of a batch, and a CSV of every run beside it."""
    lines(
        path,
        [_line(name, points, variation) for name in dict.fromkeys(each.scenario for each in points)],
        title=title,
        x_name=variation.key,
        y_name="ms per batch",
        x_labels=None if variation.is_numeric else [str(value) for value in variation.values],
        table=table_of(points, variation),
        overwrite=overwrite,
    )


def _line(name: str, points: Sequence[Point], variation: Variation) -> Line:
    runs = [each.run for each in points if each.scenario == name]
    x = variation.values if variation.is_numeric else range(len(variation.values))
    return Line(label=name, x=x, y=[run.batch_s * 1e3 for run in runs])


def _cell(value: Any) -> Cell:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
