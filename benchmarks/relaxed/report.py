"""report.md: every number comes from the trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import report_page
from machine import in_words
from markdown_table import markdown_table
from relaxed import plots
from relaxed.figures import METRICS, Estimate, estimate, lead, price, same_bits, set_back, spread, value
from relaxed.record import Record
from relaxed.workloads import Crash, Workload

_UNIT = 1e-4
_HOW = """\
- One run of each seed is never cut. For each lag, the same run is killed (SIGKILL) at the end of a step, with all its
  rows durable and its newest dense state (network and its optimizer) `lag` steps older; then a new process opens the
  pool with `recovery="relaxed"` and trains to the end, on the same remaining batches in the same order.
- At once: evaluated before a batch is trained. Exact recovery of the same crash begins `lag` steps back, and ends as if
  nothing had happened. Ahead: relaxed recovery after `lag` batches more, minus exact recovery after as many, which is
  then where the run was killed. At the end: when the last step is trained.
- All but "ahead" are differences from the run never cut, at the step of the kill or at the end. Compared are runs of
  one seed; above zero is better in AUC, worse in log-loss. Brackets: 95% confidence over the seeds (Student's t).
- Spread: standard deviation of what runs end with that were never cut, have the same data and differ in initial values
  and order of samples. Last column: the bound of the confidence interval further from zero, over that.
- Two seeds have the same planted data; criteo_8k is the same for all. Held out: 50,000 samples; of criteo_8k 800.
- Rows: row-wise Adagrad. Learning rates are constant. Network of 32-8 and 32-1, vectors of 8.
"""


def write_report(record: Record, workloads: list[Workload], directory: Path) -> None:
    """report.md and its plots in `directory`."""
    there = [workload for workload in workloads if record.of(workload.name)]
    if not there:
        return
    plots.prices(directory / "relaxed.png", {w.title: (w, record.of(w.name)) for w in there})
    machine = record.machine
    lines = [
        f"# The price of relaxed recovery, {record.date[:10]}",
        "",
        f"{in_words(machine)}; pools on {machine['medium']}; holdfast "
        + ", ".join(sorted({trial["holdfast_commit"] for w in there for trial in record.of(w.name)}))
        + ". All settings are in results.json.",
        "",
        _HOW,
        "![price](relaxed.png)",
        "",
        *(
            line
            for workload in there
            for step in workload.lags
            for line in _section(workload, step, record.of(workload.name))
        ),
    ]
    report_page.write(directory, "\n".join(lines))


def _section(workload: Workload, crash_step: int, trials: list[dict[str, Any]]) -> list[str]:
    crashes = [crash for crash in workload.crashes if crash.step == crash_step]
    ends = {metric: [value(trial["whole"], workload.last_step, metric) for trial in trials] for metric in METRICS}
    never_cut = ", ".join(
        f"{name} {estimate(ends[metric]).mean:.4f} (spread {_plain(spread(trials, workload.last_step, metric))})"
        for metric, name in METRICS.items()
    )
    lines = [
        f"## {workload.title}, killed at step {crash_step:,} of {workload.last_step:,}",
        "",
        (
            f"{len(trials)} seeds, batches of {workload.config(0).train.batch_size}. Never cut: {never_cut}. "
            "Differences in 1e-4, which is the paper's 0.01%."
        ),
        "",
    ]
    for metric, name in METRICS.items():
        lines += markdown_table(
            [f"{name}: lag", "relaxed, at once", "exact, at once", "ahead", "relaxed, at the end", "over the spread"],
            [_cells(workload, trials, crash, metric) for crash in crashes],
        )
    lines += [f"How the gap in {METRICS['log_loss']} closes, by batches since the recovery:", ""]
    steps = workload.evaluated_from(crash_step)
    lines += markdown_table(
        ["lag", *(f"{step - crash_step:,}" for step in steps)],
        [
            [
                f"{crash.lag:,}",
                *(f"{estimate(price(trials, crash, step, 'log_loss')).mean / _UNIT:+.1f}" for step in steps),
            ]
            for crash in crashes
            if crash.lag
        ],
    )
    lines += [
        f"A lag of 0 ended with the digest of the run never cut in {same_bits(trials, crash)} of {len(trials)} seeds."
        for crash in crashes
        if crash.lag == 0
    ]
    return [*lines, ""]


def _cells(workload: Workload, trials: list[dict[str, Any]], crash: Crash, metric: str) -> list[str]:
    at_the_end = estimate(price(trials, crash, workload.last_step, metric))
    noise = spread(trials, workload.last_step, metric)
    catches_up = crash.step + crash.lag in workload.evaluated_from(crash.step)
    return [
        f"{crash.lag:,}",
        _interval(estimate(price(trials, crash, crash.step, metric))),
        _interval(estimate(set_back(trials, crash, metric))),
        _interval(estimate(lead(trials, crash, metric))) if catches_up else "–",
        _interval(at_the_end),
        "–" if noise is None or at_the_end.furthest is None else f"{at_the_end.furthest / noise:.2f}",
    ]


def _interval(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return f"{found.mean / _UNIT:+.1f}"
    return f"{found.mean / _UNIT:+.1f} [{found.low / _UNIT:+.1f}, {found.high / _UNIT:+.1f}]"


def _plain(number: float | None) -> str:
    return "unknown" if number is None else f"{number:.4f}"
