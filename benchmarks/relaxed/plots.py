"""The report's picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from plain_axes import plain
from relaxed.figures import estimate, price, set_back, spread
from relaxed.workloads import LAGS, Crash, Workload

_UNIT = 1e-4
_LAG_COLORS = {1: "#bcd4e4", 10: "#7fb3d3", 100: "#2f6f9f", 300: "#d98c3f", 1000: "#b05c5c"}
_LINEAR = 1.0  # of axes that are logarithmic beyond it, in _UNIT


def prices(path: Path, of_title: dict[str, tuple[Workload, list[dict[str, Any]]]]) -> None:
    """A column a crash: AUC by lag, at once after a recovery and at the end; below it, how a gap in log-loss closes."""
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
            plain(axes)
    grid[0][0].set_ylabel("AUC − that of the run never cut (1e-4)", fontsize=8)
    grid[1][0].set_ylabel("log-loss − that of the run never cut (1e-4)", fontsize=8)
    aside = {"fontsize": 8, "frameon": False, "loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    grid[0][-1].legend(**aside)
    grid[1][-1].legend(title="batches behind", title_fontsize=8, **aside)
    figure.savefig(path)
    plt.close(figure)


def _by_lag(axes: Any, workload: Workload, crashes: list[Crash], trials: list[dict[str, Any]]) -> None:
    noise = spread(trials, workload.last_step, "auc")
    if noise is not None:
        axes.axhspan(
            -noise / _UNIT, noise / _UNIT, color="#9a9a9a", alpha=0.2, linewidth=0, label="spread between seeds"
        )
    series: dict[str, tuple[str, Callable[[Crash], list[float]]]] = {
        "exact, at once": ("#9a9a9a", lambda crash: set_back(trials, crash, "auc")),
        "relaxed, at once": ("#d98c3f", lambda crash: price(trials, crash, crash.step, "auc")),
        "relaxed, at the end": ("#2f6f9f", lambda crash: price(trials, crash, workload.last_step, "auc")),
    }
    for number, (label, (color, differences)) in enumerate(series.items()):
        found = [estimate(differences(crash)) for crash in crashes]
        means = [each.mean / _UNIT for each in found]
        halves = [0.0 if each.high is None else (each.high - each.mean) / _UNIT for each in found]
        at = [LAGS.index(crash.lag) + 0.2 * (number - 1) for crash in crashes]
        axes.errorbar(at, means, halves, fmt="o", markersize=4, capsize=3, linewidth=1, color=color, label=label)
    axes.set_yscale("symlog", linthresh=_LINEAR)
    axes.set_xticks(range(len(LAGS)), [f"{lag:,}" for lag in LAGS])
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
    axes.set_xticks([0, 1, 10, 100, 1000], ["0", "1", "10", "100", "1,000"])
    axes.set_xlabel("batches since the recovery", fontsize=8)
