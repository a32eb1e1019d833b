"""The report's pictures. Values that were not measured are None, and left out."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

from plain_axes import plain

mpl.use("Agg")
import matplotlib.pyplot as plt

_COLORS = {
    "DRAM": "#7fb3d3",
    "look-forward": "#2f6f9f",
    "LRU": "#d98c3f",
    "static": "#b05c5c",
    "mapped files": "#9a9a9a",
    "RocksDB": "#5b8c5a",
}


def steps(
    path: Path, of_workload: dict[str, dict[str, float | None]], rooflines: dict[str, float | None]
) -> Path | None:
    """Milliseconds per step by system, one panel a workload, and its roofline."""
    panels = {name: {s: ms for s, ms in found.items() if ms is not None} for name, found in of_workload.items()}
    panels = {name: found for name, found in panels.items() if found}
    if not panels:
        return None
    figure, grid = plt.subplots(
        1, len(panels), figsize=(1.5 + 2.7 * len(panels), 2.8), dpi=144, layout="constrained", squeeze=False
    )
    for axes, (name, found) in zip(grid[0], panels.items(), strict=True):
        bars = axes.barh(list(found), list(found.values()), color=[_COLORS[system] for system in found])
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
        if (roofline := rooflines.get(name)) is not None:
            axes.axvline(roofline, color="#555555", linewidth=0.8, linestyle="--")
        plain(axes, name)
        axes.set_xlabel("ms per step (dashed: roofline)", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.margins(x=0.2)
        axes.invert_yaxis()
    figure.savefig(path)
    plt.close(figure)
    return path


def amplification(path: Path, points: list[tuple[int, float | None, float]]) -> Path | None:
    """Write amplification over the log's size: measured, and as the merge's arithmetic has it (±15%)."""
    if not points:
        return None
    figure, axes = plt.subplots(figsize=(6.4, 3.2), dpi=144, layout="constrained")
    sizes = [size for size, _, _ in points]
    predicted = [value for _, _, value in points]
    axes.plot(sizes, predicted, color="#9a9a9a", marker="o", markersize=3, label="predicted")
    axes.fill_between(
        sizes, [0.85 * v for v in predicted], [1.15 * v for v in predicted], color="#9a9a9a", alpha=0.2, linewidth=0
    )
    measured = [(size, value) for size, value, _ in points if value is not None]
    if measured:
        axes.plot(*zip(*measured, strict=True), color=_COLORS["look-forward"], marker="o", label="measured")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size} MiB" if size < 1024 else f"{size // 1024} GiB" for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("log", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=8, frameon=False)
    plain(axes, "Bytes written to the device per byte of updated rows")
    figure.savefig(path)
    plt.close(figure)
    return path
