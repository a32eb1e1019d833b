"""The figures, from plain data: each a PNG or SVG, and a CSV of the same name with every number that is drawn.

Where a file is there already, they raise ConfigError, unless overwrite is set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ConfigError
from holdfast_lab.sim.report.canvas import (
    BAND_COLOR,
    LINE_COLORS,
    MARKERS,
    MEDIUM,
    PART_COLORS,
    SMALL,
    TEXT_COLOR,
    TITLE,
    figure_with_axes,
    legend_aside,
    legend_below,
    logarithmic,
    plain,
    plain_figure,
    role_colors,
    save,
    scale,
)
from holdfast_lab.sim.report.content import Bar, Breakdown, Cell, Energy, Line, Prediction, Table, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_VISIBLE = 2e-3  # of a stack: less than that is in the CSV only
_LEVEL_LABELS = 6  # so many stand side by side
_THIN = 0.005  # of a timeline's width: a bar without a white edge, which would be all of it
_LETTER = 0.0105  # of a timeline's width
_BROKEN = 2.5  # times as high as all others: such stacks are cut
_BAND = 1.1  # of a parity plot: so far from the line a point may be
_NAME_ROOM = 0.07  # of the logarithm: what a name takes of the height of a parity plot


@dataclass(frozen=True, slots=True)
class _Stack:
    """mark: what somebody else found for its height."""

    model: str
    system: str
    parts: Mapping[str, float]
    mark: float | None

    @property
    def height(self) -> float:
        return sum(self.parts.values())


def batch_breakdowns(
    path: Path, shown: Sequence[Breakdown], *, title: str, measured: str = "paper", overwrite: bool = False
) -> Path:
    """Stacked bars of where a batch's time goes, models in groups and systems within them, with a mark at what somebody
    else measured. measured: who."""
    figure, axes = figure_with_axes(_width_of(shown), 4.3, title)
    stacks = [_Stack(each.model, each.system, each.parts_ms, each.measured_ms) for each in shown]
    _draw_stacks(axes, stacks, PART_COLORS, measured=measured, label="{:.1f}")
    axes.set_ylabel("ms per batch", fontsize=MEDIUM)
    header = ("model", "system", "batch_ms", f"{measured}_ms", *(f"{part}_ms" for part in PART_COLORS))
    rows = [
        (each.model, each.system, each.batch_ms, each.measured_ms, *(each.parts_ms.get(p, 0.0) for p in PART_COLORS))
        for each in shown
    ]
    return save(figure, path, header, rows, overwrite=overwrite)


def energies(
    path: Path,
    shown: Sequence[Energy],
    *,
    relative_to: str,
    title: str,
    measured: str = "paper",
    overwrite: bool = False,
) -> Path:
    """Stacked bars of a batch's energy by device, over the whole of the system `relative_to` with the same model."""
    whole = {each.model: each.total_joules for each in shown if each.system == relative_to}
    for each in shown:
        if each.model not in whole:
            raise ConfigError(f"energies relative to {relative_to!r}: there are none of it with model {each.model!r}")
    roles = _in_order(role for each in shown for role in each.joules)
    figure, axes = figure_with_axes(_width_of(shown), 4.0, title)
    stacks = [
        _Stack(
            each.model,
            each.system,
            {role: each.joules.get(role, 0.0) / whole[each.model] for role in roles},
            each.measured_ratio,
        )
        for each in shown
    ]
    colors = role_colors(roles)
    _draw_stacks(axes, stacks, {role: colors[role] for role in roles}, measured=measured, label="{:.2f}")
    axes.axhline(1.0, color=TEXT_COLOR, linewidth=0.7, linestyle="--", zorder=0)
    axes.set_ylabel(f"energy of a batch, {relative_to} = 1", fontsize=MEDIUM)
    header = ("model", "system", "joules", "ratio", f"{measured}_ratio", *(f"{role}_joules" for role in roles))
    rows = [
        (
            each.model,
            each.system,
            each.total_joules,
            each.total_joules / whole[each.model],
            each.measured_ratio,
            *(each.joules.get(role, 0.0) for role in roles),
        )
        for each in shown
    ]
    return save(figure, path, header, rows, overwrite=overwrite)


def timelines(path: Path, shown: Sequence[Timeline], *, title: str, overwrite: bool = False) -> Path:
    """What every device does, one timeline below the other on the same axis; every other batch hatched."""
    lanes = [max(1, len(timeline.lanes)) for timeline in shown]
    figure = plain_figure(8.4, 1.3 + sum(0.34 * count + 0.45 for count in lanes))
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": lanes})[:, 0]
    figure.suptitle(title, fontsize=TITLE, x=0.008, ha="left")
    until_ms = max((bar.end_ms for timeline in shown for bar in timeline.bars), default=1.0)
    for axes, timeline in zip(panels, shown, strict=True):
        plain(axes, timeline.title, MEDIUM)
        _draw_timeline(axes, timeline, until_ms)
        axes.set_xlim(0, until_ms * 1.005)
    panels[-1].set_xlabel("ms", fontsize=MEDIUM)
    drawn = {bar.part for timeline in shown for bar in timeline.bars}
    _part_legend(panels[-1], [part for part in PART_COLORS if part in drawn])
    rows = [
        (timeline.title, bar.lane, bar.stage, bar.batch, bar.begin_ms, bar.end_ms)
        for timeline in shown
        for bar in timeline.bars
    ]
    header = ("timeline", "lane", "stage", "batch", "begin_ms", "end_ms")
    return save(figure, path, header, rows, overwrite=overwrite)


def lines(
    path: Path,
    shown: Sequence[Line],
    *,
    title: str,
    x_name: str,
    y_name: str,
    x_labels: Sequence[str] | None = None,
    marked_x: float | None = None,
    table: Table | None = None,
    overwrite: bool = False,
) -> Path:
    """Lines over one axis, with bands where they have them. An axis whose values span decades is logarithmic.

    x_labels: of x = 0, 1, ... where that is no number. marked_x: has a line of its own, as what is usual. table: what
    the CSV holds instead of the lines.
    """
    figure, axes = figure_with_axes(6.6, 3.8, title)
    for number, line in enumerate(shown):
        color, marker = LINE_COLORS[number % len(LINE_COLORS)], MARKERS[number % len(MARKERS)]
        style = "-" if x_labels is None else "none"
        axes.plot(line.x, line.y, color=color, ls=style, marker=marker, markersize=5, lw=1.5, label=line.label)
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.15, linewidth=0)
    if x_labels is None:
        scale(axes, "x", [x for line in shown for x in line.x])
    else:
        axes.set_xticks(range(len(x_labels)), x_labels, rotation=30 if len(x_labels) > _LEVEL_LABELS else 0)
        axes.set_xlim(-0.5, len(x_labels) - 0.5)
    heights = [y for line in shown for y in (*line.y, *(line.low or ()), *(line.high or ()))]
    if not scale(axes, "y", heights) and min(heights, default=0.0) >= 0:
        axes.set_ylim(0, 1.08 * max([*heights, 1e-12]))
    axes.set_xlabel(x_name, fontsize=MEDIUM)
    axes.set_ylabel(y_name, fontsize=MEDIUM)
    axes.grid(alpha=0.25, linewidth=0.6)
    if marked_x is not None:
        axes.axvline(marked_x, color=TEXT_COLOR, linewidth=0.9, linestyle=":")
    if len(shown) > 1:
        legend_aside(axes)
    table = _lines_table(shown, x_name, y_name) if table is None else table
    return save(figure, path, table.header, table.rows, overwrite=overwrite)


def parity(path: Path, shown: Sequence[Prediction], *, title: str, unit: str = "ms", overwrite: bool = False) -> Path:
    """Simulated over measured on logarithmic axes, with a band of 10 % about where they are equal; points outside it
    are named as far as there is room."""
    figure, axes = figure_with_axes(5.4, 5.0, title)
    values = [value for each in shown for value in (each.simulated, each.measured)]
    low, high = 0.75 * min(values), 1.35 * max(values)
    axes.fill_between(
        [low, high], [low / _BAND, high / _BAND], [low * _BAND, high * _BAND], color=BAND_COLOR, alpha=0.2, lw=0
    )
    axes.plot([low, high], [low, high], color=TEXT_COLOR, linewidth=0.8)
    for number, group in enumerate(_in_order(each.group for each in shown)):
        of_group = [each for each in shown if each.group == group]
        axes.scatter(
            [each.measured for each in of_group],
            [each.simulated for each in of_group],
            s=24,
            color=LINE_COLORS[number % len(LINE_COLORS)],
            marker=MARKERS[number % len(MARKERS)],
            label=group,
            zorder=3,
        )
    _name_points(axes, shown)
    logarithmic(axes, "x")
    logarithmic(axes, "y")
    axes.set_xlabel(f"measured, {unit}", fontsize=MEDIUM)
    axes.set_ylabel(f"simulated, {unit}", fontsize=MEDIUM)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_aspect("equal")
    axes.legend(fontsize=SMALL, frameon=False, loc="upper left")
    header = ("label", "group", f"simulated_{unit}", f"measured_{unit}", "error")
    rows = [(e.label, e.group, e.simulated, e.measured, e.simulated / e.measured - 1.0) for e in shown]
    return save(figure, path, header, rows, overwrite=overwrite)


def _lines_table(shown: Sequence[Line], x_name: str, y_name: str) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for line in shown:
        bands = [[None] * len(line.x) if band is None else band for band in (line.low, line.high)]
        rows += [(line.label, *values) for values in zip(line.x, line.y, *bands, strict=True)]
    return Table(header=("line", x_name, y_name, "low", "high"), rows=rows)


def _width_of(shown: Sequence[object]) -> float:
    """Inches for so many stacks: as few as their names and numbers take, for a page may be 500 pixels wide."""
    return max(6.0, 1.0 + 0.3 * len(shown))


def _draw_stacks(axes: Axes, stacks: Sequence[_Stack], colors: Mapping[str, str], *, measured: str, label: str) -> None:
    """In groups by model, parts in the order of `colors` from below, each stack's height over it. Stacks that would
    flatten all others are cut, and say so."""
    models = _in_order(stack.model for stack in stacks)
    systems = _in_order(stack.system for stack in stacks)
    places = [models.index(stack.model) * (len(systems) + 1.0) + systems.index(stack.system) for stack in stacks]
    below = [0.0] * len(stacks)
    for part, color in colors.items():
        heights = [stack.parts.get(part, 0.0) for stack in stacks]
        if any(height > _VISIBLE * stack.height for height, stack in zip(heights, stacks, strict=True)):
            axes.bar(places, heights, 0.82, bottom=below, color=color, label=part)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    marks = [(at, stack.mark) for at, stack in zip(places, stacks, strict=True) if stack.mark is not None]
    if marks:
        at_marks, values = [at for at, _ in marks], [value for _, value in marks]
        axes.scatter(
            at_marks, values, marker="D", s=16, color="white", edgecolor="black", linewidth=0.9, label=measured
        )
    top = _top([max(stack.height, stack.mark or 0.0) for stack in stacks])
    for at, stack in zip(places, stacks, strict=True):
        over = max(stack.height, (stack.mark or 0.0) + 0.012 * top) + 0.012 * top
        is_cut = over > 1.05 * top
        if is_cut:
            for share in (0.91, 0.94):
                axes.plot([at - 0.5, at + 0.5], [share * top, (share + 0.02) * top], color="white", lw=2)
        axes.text(
            at, 1.02 * top if is_cut else over, label.format(stack.height), ha="center", va="bottom",
            fontsize=SMALL - 1, color="#111111" if is_cut else "black",
        )  # fmt: skip
    axes.set_ylim(0, 1.08 * top)
    axes.set_xlim(min(places) - 0.8, max(places) + 0.8)
    axes.set_xticks(places, [stack.system for stack in stacks], rotation=90, fontsize=SMALL)
    axes.tick_params(axis="x", length=0)
    for model in models:
        of_model = [at for at, stack in zip(places, stacks, strict=True) if stack.model == model]
        axes.text(
            sum(of_model) / len(of_model), 1.0, model, ha="center", va="bottom", fontsize=MEDIUM, color=TEXT_COLOR,
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip
    axes.set_title(axes.get_title(loc="left"), fontsize=TITLE, loc="left", pad=18)
    handles, _ = axes.get_legend_handles_labels()
    legend_below(axes, handles)


def _top(heights: Sequence[float]) -> float:
    """Of what is drawn: somewhat over the highest below a gap that would flatten it."""
    ascending = sorted(heights)
    for lower, higher in pairwise(ascending[len(ascending) // 2 :]):
        if higher > _BROKEN * lower > 0:
            return 1.2 * lower
    return ascending[-1]


def _draw_timeline(axes: Axes, timeline: Timeline, until_ms: float) -> None:
    for bar in timeline.bars:
        color, width_ms = PART_COLORS[bar.part], bar.end_ms - bar.begin_ms
        is_thin = width_ms < _THIN * until_ms
        axes.barh(
            timeline.lanes.index(bar.lane), width_ms, left=bar.begin_ms, height=0.78, color=color,
            edgecolor=color if is_thin else "white", linewidth=0.6, hatch="////" if bar.batch % 2 else None,
        )  # fmt: skip
    for bar in timeline.bars:
        _name_bar(axes, bar, timeline.lanes.index(bar.lane), until_ms)
    for at in timeline.ends_ms:
        axes.axvline(at, color=TEXT_COLOR, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(timeline.lanes)), timeline.lanes, fontsize=SMALL)
    axes.set_ylim(len(timeline.lanes) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _name_bar(axes: Axes, bar: Bar, lane: int, until_ms: float) -> None:
    name = bar.stage.replace("_", " ")
    if (bar.end_ms - bar.begin_ms) / until_ms > _LETTER * len(name):
        axes.text(
            (bar.begin_ms + bar.end_ms) / 2, lane, name, ha="center", va="center", fontsize=SMALL - 1, color="#111111",
            bbox={"facecolor": PART_COLORS[bar.part], "edgecolor": "none", "pad": 0.8},
        )  # fmt: skip


def _part_legend(axes: Axes, parts: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=PART_COLORS[part], label=part) for part in parts]
    handles.append(Patch(facecolor="#bbbbbb", edgecolor="white", hatch="////", label="every other batch"))
    legend_below(axes, handles)


def _name_points(axes: Axes, points: Sequence[Prediction]) -> None:
    """Those outside the band, the farthest first, where no name is in the way yet."""
    named: list[Prediction] = []
    for point in sorted(points, key=_distance, reverse=True):
        is_over = point.simulated > point.measured
        is_free = all(abs(math.log(point.simulated / other.simulated)) > _NAME_ROOM for other in named)
        if _distance(point) > _BAND and is_free:
            named.append(point)
            axes.annotate(
                point.label, (point.measured, point.simulated), xytext=(-6 if is_over else 6, 0), va="center",
                textcoords="offset points", ha="right" if is_over else "left", fontsize=SMALL - 1, color=TEXT_COLOR,
            )  # fmt: skip


def _distance(point: Prediction) -> float:
    return max(point.simulated / point.measured, point.measured / point.simulated)


def _in_order(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
