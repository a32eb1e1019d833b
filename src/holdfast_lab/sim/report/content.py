"""What figures and pages show, as plain data: whoever has the numbers makes these, and needs to know no picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast_lab.sim.lanes import lanes_of, stages_by_role
from holdfast_lab.sim.machine import Run
from holdfast_lab.sim.report.exposure import exposed_by_part_s, part_of
from holdfast_lab.sim.system import System

Cell = str | float | None  # None: not known, an empty cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Floats are shown with four digits; whoever wants them otherwise gives strings."""

    header: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]
    title: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"table {self.title!r}: {len(row)} cells under {len(self.header)} columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """text: paragraphs, with empty lines between. figures: PNG files."""

    title: str
    text: str = ""
    tables: tuple[Table, ...] = ()
    figures: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """A batch of a model in a system. parts_ms: by part (see exposure), which sum to its time. measured_ms: what
    somebody else found."""

    model: str
    system: str
    parts_ms: Mapping[str, float]
    measured_ms: float | None = None

    @property
    def batch_ms(self) -> float:
        return sum(self.parts_ms.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Joules of a batch of a model in a system, by role of the device. measured_ratio: to the energy of the system that
    the figure's bars are relative to, as somebody else found it."""

    model: str
    system: str
    joules: Mapping[str, float]
    measured_ratio: float | None = None

    @property
    def total_joules(self) -> float:
        return sum(self.joules.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A stage on a timeline, and the batch that it belongs to: 0 for the first that is shown."""

    lane: str
    stage: str
    part: str
    batch: int
    begin_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """lanes: from the top. ends_ms: where batches end."""

    title: str
    lanes: tuple[str, ...]
    bars: tuple[Bar, ...]
    ends_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """low, high: a band about y, where there is one."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A value as simulated and as measured, in the same unit. group: it is coloured by, as "fitted" or "predicted"."""

    label: str
    group: str
    simulated: float
    measured: float


def breakdown_of(run: Run, system: System, *, model: str, measured_ms: float | None = None) -> Breakdown:
    parts_ms = {part: seconds * 1e3 for part, seconds in exposed_by_part_s(run, system).items()}
    return Breakdown(model=model, system=run.system, parts_ms=parts_ms, measured_ms=measured_ms)


def energy_of(run: Run, *, model: str, measured_ratio: float | None = None) -> Energy:
    return Energy(model=model, system=run.system, joules=run.joules_by_role, measured_ratio=measured_ratio)


def timeline_of(run: Run, system: System, *, batches: int = 2, title: str | None = None) -> Timeline:
    """Batches in steady state, from where the first of them begins to compute; what others do meanwhile is cut there.

    Devices that do the same stages share a lane; where stages overlap on a device, it has several.
    """
    first = max(0, run.steady.stop - batches)
    origin_s = _compute_begins_s(run, system, first)
    until_s = origin_s + batches * run.batch_s
    lanes: list[str] = []
    bars: list[Bar] = []
    for device, stages in device_lanes(system).items():
        spans = [
            replace(span, begin_s=max(span.begin_s, origin_s), end_s=min(span.end_s, until_s))
            for span in run.spans
            if span.stage in stages and span.end_s > origin_s and span.begin_s < until_s
        ]
        numbers = lanes_of(spans)
        names = [device if lane == 0 else f"{device} ({lane + 1})" for lane in range(max(numbers, default=0) + 1)]
        lanes += names
        bars += [
            Bar(
                lane=names[number],
                stage=span.stage,
                part=part_of(system.stages[span.stage].does),
                batch=span.batch - first,
                begin_ms=(span.begin_s - origin_s) * 1e3,
                end_ms=(span.end_s - origin_s) * 1e3,
            )
            for span, number in zip(spans, numbers, strict=True)
        ]
    return Timeline(
        title=f"{run.system}: {run.batch_s * 1e3:.2f} ms a batch" if title is None else title,
        lanes=tuple(lanes),
        bars=tuple(bars),
        ends_ms=tuple((at - origin_s) * 1e3 for at in _ends_s(run) if origin_s < at <= until_s * (1 + 1e-9)),
    )


def device_lanes(system: System) -> dict[str, tuple[str, ...]]:
    """As `stages_by_role`; devices with the same stages are one: "a, b"."""
    roles: dict[tuple[str, ...], list[str]] = {}
    for role, stages in stages_by_role(system).items():
        roles.setdefault(stages, []).append(role)
    return {", ".join(alike): stages for stages, alike in roles.items()}


def _compute_begins_s(run: Run, system: System, batch: int) -> float:
    begins_s = {system.stages[span.stage].does: span.begin_s for span in run.spans if span.batch == batch}
    return begins_s.get("bottom_forward", min(begins_s.values()))


def _ends_s(run: Run) -> list[float]:
    """Of all batches, in order."""
    ends_s: dict[int, float] = {}
    for span in run.spans:
        ends_s[span.batch] = max(ends_s.get(span.batch, 0.0), span.end_s)
    return sorted(ends_s.values())
