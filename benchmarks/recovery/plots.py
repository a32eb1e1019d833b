"""The report's picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

from plain_axes import plain
from recovery.figures import Line, Point

mpl.use("Agg")
import matplotlib.pyplot as plt

_COLORS = ("#2f6f9f", "#d98c3f")


def recovery(
    path: Path,
    over_logs: Mapping[str, Sequence[Point]],
    over_tables: Mapping[str, Sequence[Point]],
    lines: Mapping[str, Line],
) -> None:
    """Seconds to open: over the log's size, with the line through the points; over the table's."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2), dpi=144, layout="constrained", sharey=True)
    for (name, points), color in zip(over_logs.items(), _COLORS, strict=True):
        line = lines[name]
        sizes = [point.log_bytes / 2**20 for point in points]
        left.plot(
            [0, sizes[-1]],
            [line.fixed_s, line.fixed_s + points[-1].log_bytes / line.bytes_per_s],
            color=color,
            linewidth=0.8,
            linestyle="--",
        )
        left.plot(sizes, [point.median for point in points], "o", color=color, markersize=4, label=name)
    for (name, points), color in zip(over_tables.items(), _COLORS, strict=True):
        sizes = [point.table_bytes / 2**30 for point in points]
        right.plot(sizes, [point.median for point in points], "o-", color=color, markersize=4, label=name)
    left.set_xlabel("log that recovery reads (MiB)", fontsize=8)
    right.set_xlabel("table (GiB)", fontsize=8)
    right.set_xscale("log", base=2)
    ticks = [point.table_bytes / 2**30 for points in over_tables.values() for point in points]
    right.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
    left.set_ylim(bottom=0)
    for axes, title in ((left, "Seconds to recover, over the log's size"), (right, "over the table's, with one log")):
        axes.tick_params(labelsize=8)
        plain(axes, title)
    left.legend(fontsize=8, frameon=False)
    figure.savefig(path)
    plt.close(figure)
