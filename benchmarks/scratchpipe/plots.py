"""The report's picture: how many times as long as looking forward each system takes, over skew, cache, row and bag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from plain_axes import plain
from scratchpipe.batches import SKEWS, Workload
from scratchpipe.cells import SWEEPS
from scratchpipe.systems import MODES

mpl.use("Agg")
import matplotlib.pyplot as plt

_COLORS = {
    "dram": "#9a9a9a",
    "none": "#b05c5c",
    "static": "#d98c3f",
    "static-beside": "#e3c38f",
    "lru": "#7fb3d3",
    "straw": "#c9a7c7",
    "forward": "#2f6f9f",
}
_X = {"cache": lambda w: f"{w.cache:.0%}", "dim": lambda w: str(w.dim), "lookups": lambda w: str(w.lookups)}
_X_NAMES = {"cache": "rows in the cache", "dim": "elements of a row", "lookups": "ids of a table and sample"}

Cells = Mapping[str, Mapping[str, Any]]


def times_as_long(cells: Cells, workload: Workload, mode: str) -> float | None:
    """As looking forward; None where either was not measured."""
    both = [cells.get(f"{workload.name}/{each}") for each in (mode, "forward")]
    return None if None in both else float(both[0]["batch_ms"] / both[1]["batch_ms"])  # type: ignore[index]


def plot_times(cells: Cells, path: Path) -> None:
    panels: list[tuple[str, Sequence[Workload], list[str]]] = [
        ("skew", [Workload(skew=skew) for skew in SKEWS], list(SKEWS)),
        *((_X_NAMES[varied], swept, [_X[varied](each) for each in swept]) for varied, swept in SWEEPS.items()),
    ]
    figure, rows = plt.subplots(1, len(panels), figsize=(14.0, 3.4), dpi=144, layout="constrained", sharey=True)
    modes = [mode for mode in MODES if mode != "forward"]
    width = 0.85 / len(modes)
    for axes, (title, workloads, names) in zip(rows, panels, strict=True):
        for number, mode in enumerate(modes):
            heights = [times_as_long(cells, workload, mode) or 0.0 for workload in workloads]
            places = [place + (number - len(modes) / 2 + 0.5) * width for place in range(len(workloads))]
            axes.bar(places, heights, 0.9 * width, color=_COLORS[mode], label=MODES[mode].title)
        axes.axhline(1.0, color=_COLORS["forward"], linewidth=1)
        axes.set_xticks(range(len(workloads)), names, fontsize=8)
        axes.tick_params(axis="y", labelsize=7)
        plain(axes, title)
    rows[0].set_yscale("log")
    rows[0].set_yticks([0.25, 0.5, 1, 2, 4, 8], ["1/4", "1/2", "1", "2", "4", "8"])
    rows[0].set_ylabel("time of a batch, over looking forward", fontsize=8)
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, frameon=False, loc="outside upper center", ncols=len(modes))
    figure.savefig(path)
    plt.close(figure)
