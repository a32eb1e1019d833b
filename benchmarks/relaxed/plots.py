"""The report's picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from relaxed.figures import estimate, price, spread
from relaxed.workloads import Crash, Workload

_UNIT = 1e-4
_LAG_COLORS = {1: "#bcd4e4", 10: "#7fb3d3", 100: "#2f6f9f", 300: "#d98c3f", 1000: "#b05c5c"}
_BEGIN, _END = "#d98c3f", "#2f6f9f"
_LINEAR = 1.0  # of axes that are logarithmic beyond it, in _UNIT


def prices(path: Path, of_title: dict[str, tuple[Workload, list[dict[str, Any]]]]) -> None:
    """A column a crash: AUC by lag, right after the recovery and at the end; below it, how a gap in log-loss closes."""
    columns = [
        (f"{title}\nkilled at step {step:,} of {workload.last_step:,}", workload, step, trials)
        for title, (workload, trials) in of_title.items()
        for step in workload.lags
    ]
    figure, grid = plt.subplots(
        2,
        len(columns),
        figsize=(0.6 + 3.1 * len(columns), 5.6),
        dpi=144,
        layout="constrained",
        squeeze=False,
        sharey="row",
    )
    for (title, workload, step, trials), above, below in zip(columns, *grid, strict=True):
        crashes = [crash for crash in workload.crashes if crash.step == step]
        _by_lag(above, workload, crashes, trials)
        _closing(below, workload, crashes, trials)
        above.set_title(title, fontsize=9, loc="left")
        for axes in (above, below):
            axes.axhline(0.0, color="#555555", linewidth=0.8)
            axes.tick_params(labelsize=8)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
    grid[0][0].set_ylabel("AUC, relaxed − never cut (1e-4)", fontsize=8)
    grid[1][0].set_ylabel("log-loss, relaxed − never cut (1e-4)", fontsize=8)
    grid[0][-1].legend(fontsize=8, frameon=False, loc="lower left")
    grid[1][-1].legend(fontsize=8, frameon=False, loc="upper right", title="lag", title_fontsize=8)
    figure.savefig(path)
    plt.close(figure)


def _by_lag(axes: Any, workload: Workload, crashes: list[Crash], trials: list[dict[str, Any]]) -> None:
    noise = spread(trials, workload.last_step, "auc")
    if noise is not None:
        axes.axhspan(
            -noise / _UNIT, noise / _UNIT, color="#9a9a9a", alpha=0.2, linewidth=0, label="spread between seeds"
        )
    places = range(len(crashes))
    for shift, color, label in ((-0.12, _BEGIN, "right after"), (0.12, _END, "at the end")):
        found = [
            estimate(price(trials, crash, crash.step if color == _BEGIN else workload.last_step, "auc"))
            for crash in crashes
        ]
        means = [each.mean / _UNIT for each in found]
        halves = [0.0 if each.high is None else (each.high - each.mean) / _UNIT for each in found]
        at = [place + shift for place in places]
        axes.errorbar(at, means, halves, fmt="o", markersize=4, capsize=3, linewidth=1, color=color, label=label)
    axes.set_yscale("symlog", linthresh=_LINEAR)
    axes.set_xticks(list(places), [f"{crash.lag:,}" for crash in crashes])
    axes.set_xlabel("batches that the dense state is behind", fontsize=8)


def _closing(axes: Any, workload: Workload, crashes: list[Crash], trials: list[dict[str, Any]]) -> None:
    for crash in crashes:
        if crash.lag == 0:
            continue
        steps = workload.evaluated_from(crash.step)
        since = [step - crash.step for step in steps]
        means = [estimate(price(trials, crash, step, "log_loss")).mean / _UNIT for step in steps]
        axes.plot(
            since,
            means,
            marker="o",
            markersize=3,
            linewidth=1.2,
            color=_LAG_COLORS.get(crash.lag),
            label=f"{crash.lag:,}",
        )
    axes.set_xscale("symlog", linthresh=_LINEAR)
    axes.set_yscale("symlog", linthresh=_LINEAR)
    axes.set_xlabel("batches since the recovery", fontsize=8)
