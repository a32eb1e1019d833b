"""The report's picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from plain_axes import plain
from sim_check.outcome import SimOutcome

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

_COLORS = ("#9a9a9a", "#d98c3f", "#e3c38f", "#c9a7c7", "#7fb3d3", "#2f6f9f", "#b05c5c")
_HEIGHT = 0.36


def plot_stages(outcomes: Sequence[SimOutcome], stages: Sequence[str], path: Path) -> None:
    """Two bars a configuration: predicted above measured, stages one behind another."""
    figure, axes = plt.subplots(figsize=(9.0, 1.2 + 0.62 * len(outcomes)), dpi=144, layout="constrained")
    for place, outcome in enumerate(outcomes):
        for offset, stage_ms in ((-0.5, outcome.prediction.stage_ms), (0.5, outcome.measured_stage_ms)):
            left = 0.0
            for stage, color in zip(stages, _COLORS, strict=True):
                width = stage_ms.get(stage, 0.0)
                axes.barh(place + offset * _HEIGHT, width, 0.9 * _HEIGHT, left, color=color)
                left += width
            axes.text(left, place + offset * _HEIGHT, f" {left:.1f}", va="center", fontsize=7)
    axes.set_yticks(range(len(outcomes)), [outcome.name for outcome in outcomes], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms a step; above predicted, below measured", fontsize=8)
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in _COLORS]
    labels = [stage.replace("_", " ") for stage in stages]
    figure.legend(handles, labels, fontsize=7, frameon=False, loc="outside upper center", ncols=len(labels))
    plain(axes)
    figure.savefig(path)
    plt.close(figure)
