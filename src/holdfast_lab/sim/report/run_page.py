"""The page of `holdfast sim run -o`: where a batch's time and energy go, in pictures and tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast_lab.sim.machine import Run
from holdfast_lab.sim.report import figures
from holdfast_lab.sim.report.content import Section, Table, breakdown_of, timeline_of
from holdfast_lab.sim.report.page import write_html
from holdfast_lab.sim.system import System


def write_run(
    directory: Path, found: Run, system: System, told: Mapping[str, Any], summary: str, *, overwrite: bool
) -> Path:
    """`index.html`, and its figures as SVG and CSV. told: what `sim run --json` says. Raises ConfigError where one of
    the files is there already."""
    directory.mkdir(parents=True, exist_ok=True)
    time = figures.batch_breakdowns(
        directory / "batch-time.svg",
        [breakdown_of(found, system, model=told["model"])],
        title="Where the batch's time goes",
        overwrite=overwrite,
    )
    timeline = figures.timelines(
        directory / "timeline.svg",
        [timeline_of(found, system, batches=2)],
        title="Two batches in steady state",
        overwrite=overwrite,
    )
    stages = [
        (name, stage["does"], ", ".join(stage["on"]), stage["ms"], stage["exposed_ms"])
        for name, stage in told["stages"].items()
    ]
    devices = [
        (role, each["device"], each["busy_ms"], f"{each['busy_share']:.1%}", each["joules_per_batch"])
        for role, each in told["devices"].items()
    ]
    asked = [(name.replace("_", " "), value if isinstance(value, (int, float)) else str(value))
             for name, value in told["workload"].items()]  # fmt: skip
    sections = [
        Section(
            title="Time",
            text=f"{summary}\n\nA stage's exposed time is that in which nothing runs that comes before it: MLPs, then "
            "memory, then transfers, then logs.",
            figures=(time, timeline),
            tables=(Table(header=("stage", "does", "on", "ms", "exposed ms"), rows=stages),),
        ),
        Section(
            title="Devices",
            tables=(Table(header=("role", "device", "busy ms", "of the time", "J a batch"), rows=devices),),
        ),
        Section(title="What a batch asks for", tables=(Table(header=("", "a batch"), rows=asked),)),
    ]
    page = directory / "index.html"
    write_html(page, f"{found.system} with {told['model']}", sections, overwrite=overwrite)
    return page
