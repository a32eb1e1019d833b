"""The report's pictures. Values that were not measured are None, and left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

from plain_axes import plain

mpl.use("Agg")
import matplotlib.pyplot as plt

_COLORS = ("#2f6f9f", "#7fb3d3", "#d98c3f", "#9a9a9a", "#5b8c5a", "#b05c5c")
_HOLDFAST, _PEER = "#2f6f9f", "#9a9a9a"


def _axes(width: float, height: float, title: str) -> tuple[Any, Any]:
    figure, axes = plt.subplots(figsize=(width, height), dpi=144, layout="constrained")
    plain(axes, title)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path)
    plt.close(figure)
    return path


def _grouped(axes: Any, groups: list[str], series: dict[str, list[float | None]], label: str) -> None:
    width = 0.8 / max(1, len(series))
    for number, (name, values) in enumerate(series.items()):
        at = [g + (number - (len(series) - 1) / 2) * width for g, value in enumerate(values) if value is not None]
        bars = axes.bar(at, [v for v in values if v is not None], width * 0.92, label=name, color=_COLORS[number])
        axes.bar_label(bars, fmt=label, fontsize=8, padding=1)
    axes.set_xticks(range(len(groups)), groups)


def speed_ups(path: Path, shapes: list[str], series: dict[str, list[float | None]]) -> Path | None:
    """Steps per second over the best peer's, by shape."""
    there = {name: values for name, values in series.items() if any(value is not None for value in values)}
    if not there:
        return None
    figure, axes = _axes(7, 3.4, "Steps per second, every batch durable, over the best peer without any checkpoint")
    _grouped(axes, shapes, there, "%.2f×")
    axes.axhline(1.0, color="#555555", linewidth=0.8, linestyle="--")
    axes.text(axes.get_xlim()[1], 1.0, " best peer", va="center", fontsize=8, color="#555555")
    axes.set_ylabel("× steps/s")
    axes.legend(fontsize=8, frameon=False, ncols=len(there), loc="upper center", bbox_to_anchor=(0.5, -0.1))
    return _save(figure, path)


def ablation(path: Path, names: list[str], of_shape: dict[str, list[float | None]]) -> Path | None:
    """Milliseconds per step by way of logging, one panel a shape."""
    shapes = {shape: values for shape, values in of_shape.items() if any(value is not None for value in values)}
    if not shapes:
        return None
    figure, panels = plt.subplots(
        1,
        len(shapes),
        figsize=(3.2 + 2.6 * len(shapes), 2.8),
        dpi=144,
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    for axes, (shape, values) in zip(panels[0], shapes.items(), strict=True):
        rows = [(row, value) for row, value in enumerate(values) if value is not None]
        colors = [_PEER if names[row].endswith(("waited for", "no commit")) else _HOLDFAST for row, _ in rows]
        bars = axes.barh([row for row, _ in rows], [value for _, value in rows], color=colors)
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
        plain(axes, shape)
        axes.set_xlabel("ms per step", fontsize=8)
        axes.margins(x=0.15)
    panels[0][0].set_yticks(range(len(names)), names, fontsize=8)
    panels[0][0].invert_yaxis()
    return _save(figure, path)


def checkpoints(path: Path, of_peer: dict[str, float | None], holdfast: float | None) -> Path | None:
    """What checkpoints add to a step of kaggle, the peers' and ours."""
    bars = [(name, value, _PEER) for name, value in of_peer.items() if value is not None]
    if not bars:
        return None
    if holdfast is not None:
        bars.append(("holdfast\nevery batch", holdfast, _HOLDFAST))
    figure, axes = _axes(6.4, 3.2, "Time that checkpoints add to training (kaggle)")
    drawn = axes.bar([b[0] for b in bars], [100 * b[1] for b in bars], color=[b[2] for b in bars])
    axes.bar_label(drawn, fmt="%.1f%%", fontsize=8, padding=1)
    axes.set_ylabel("% of a step without")
    axes.tick_params(axis="x", labelsize=8)
    return _save(figure, path)
