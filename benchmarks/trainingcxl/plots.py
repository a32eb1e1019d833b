"""The report's pictures: stages as Figure 11, two batches as Figure 12, energy as Figure 13."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from plain_axes import plain
from trainingcxl.energy import joules
from trainingcxl.systems import CONFIGURATIONS

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

_COLORS = {
    "plan": "#9a9a9a",
    "capture": "#d98c3f",
    "lookup": "#c9a7c7",
    "lookup_ahead": "#e0cfe0",
    "capture_ahead": "#e3c38f",
    "train": "#7fb3d3",
    "update": "#2f6f9f",
    "commit": "#b05c5c",
    "persist": "#8c5a5a",
    "dense": "#d49a9a",
}
Cells = Mapping[str, Mapping[str, Any]]


def plot_stages(cells: Cells, models: Sequence[str], systems: Sequence[str], path: Path) -> None:
    """A bar a system, of verbs; the simulator's figure as a mark."""
    figure, rows = plt.subplots(
        1, len(models), figsize=(3.2 * len(models), 3.6), dpi=144, layout="constrained", squeeze=False
    )
    for axes, model in zip(rows[0], models, strict=True):
        there = [system for system in systems if f"{model}/{system}" in cells]
        for place, system in enumerate(there):
            cell, bottom = cells[f"{model}/{system}"], 0.0
            for stage, length in cell["stage_ms"].items():
                axes.bar(place, length, 0.7, bottom, color=_COLORS.get(stage, "#cccccc"))
                bottom += length
            axes.plot([place - 0.4, place + 0.4], [cell["simulated_ms"]] * 2, color="black", linewidth=1)
        axes.set_xticks(range(len(there)), [CONFIGURATIONS[s].title for s in there], fontsize=6, rotation=60)
        axes.tick_params(axis="y", labelsize=7)
        plain(axes, model.upper())
    rows[0][0].set_ylabel("ms a batch; line: simulated", fontsize=8)
    _name_colors(figure, [verb for verb in _COLORS if verb not in ("persist", "dense")], font_size=7)
    figure.savefig(path)
    plt.close(figure)


def _name_colors(figure: Figure, stages: Sequence[str], *, font_size: int) -> None:
    figure.legend(
        [Rectangle((0, 0), 1, 1, color=_COLORS[stage]) for stage in stages],
        [stage.replace("_", " ") for stage in stages],
        fontsize=font_size,
        frameon=False,
        loc="outside upper center",
        ncols=len(stages),
    )


def plot_batches(cells: Cells, model: str, systems: Sequence[str], path: Path) -> None:
    """Two batches of the training thread and of the thread that makes durable."""
    figure, rows = plt.subplots(
        max(1, len(systems)),
        1,
        figsize=(9.0, 1.1 + 1.1 * len(systems)),
        dpi=144,
        layout="constrained",
        squeeze=False,
        sharex=True,
    )
    for (axes,), system in zip(rows, systems, strict=False):
        cell = cells[f"{model}/{system}"]
        first, length = sum(cell["each_ms"][:2]), sum(cell["each_ms"][2:4])
        for lane, spans in ((1, cell["verbs"]), (0, cell["background"])):
            for stage, begin, end in spans:
                begin, end = max(begin, first), min(end, first + length)
                if end > begin:
                    axes.barh(lane, end - begin, 0.8, begin - first, color=_COLORS.get(stage, "#cccccc"))
        axes.axvline(cell["each_ms"][2], color="black", linewidth=0.6)
        axes.set_yticks([0, 1], ["background", "training"], fontsize=7)
        axes.tick_params(axis="x", labelsize=7)
        plain(axes, CONFIGURATIONS[system].title)
    rows[-1][0].set_xlabel(f"ms, two batches of {model.upper()}", fontsize=8)
    _name_colors(figure, list(_COLORS), font_size=6)
    figure.savefig(path)
    plt.close(figure)


def plot_energy(cells: Cells, models: Sequence[str], systems: Sequence[str], path: Path) -> None:
    """Joules a batch over PMEM's."""
    figure, axes = plt.subplots(figsize=(6.0, 3.0), dpi=144, layout="constrained")
    width = 0.8 / max(1, len(systems))
    for number, system in enumerate(systems):
        heights = [
            joules(cells[f"{m}/{system}"], system) / joules(cells[f"{m}/pmem"], "pmem")
            if f"{m}/{system}" in cells and f"{m}/pmem" in cells
            else 0.0
            for m in models
        ]
        axes.bar(
            [place + number * width for place in range(len(models))],
            heights,
            0.9 * width,
            label=CONFIGURATIONS[system].title,
        )
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(models))], [m.upper() for m in models], fontsize=8)
    axes.set_ylabel("joules a batch, of PMEM's", fontsize=8)
    axes.legend(fontsize=7, frameon=False)
    plain(axes)
    figure.savefig(path)
    plt.close(figure)
