"""``python -m trainingcxl.one``, from benchmarks/: one cell in a process of its own; prints one JSON object."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from dialled_steps import time_steps, write_tables
from holdfast import prepare_environment


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainingcxl.one", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run's file")
    parser.add_argument("--directory", type=Path, required=True, help="where the pool lies for the time")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    prepare_environment()
    with tempfile.TemporaryDirectory(prefix="trainingcxl-", dir=arguments.directory) as folder:
        print(json.dumps(_measure(arguments.run, Path(folder) / "pool", arguments.warmup, arguments.steps)))


def _measure(run: Path, pool: Path, warmup: int, steps: int) -> dict[str, Any]:
    from holdfast.files.config import read_config
    from holdfast.run.assembly import open_trainer
    from holdfast.run.sections import RunConfig

    config = read_config(RunConfig, run)
    with open_trainer(config, pool) as trainer:
        write_tables(trainer)
        timed = time_steps(trainer, warmup, steps, lambda trainer: dict(trainer.pool.core.dial_counts or {}))
    began = timed.began
    spans = [
        (stage, 1e3 * (span.began - began[0]), 1e3 * (span.ended - began[0]))
        for report in timed.reports
        for stage, span in report.background
    ]
    verbs = []
    for report in timed.reports[:-1]:
        at = 1e3 * (report.began - began[0])
        for stage, length in report.laps:
            verbs.append((stage, at, at + length))
            at += length
    return {
        "batch_ms": timed.batch_ms,
        "each_ms": timed.each_ms,
        "stage_ms": timed.stage_ms,
        "dial": timed.counts,
        "cpu_s": timed.cpu_s,
        "verbs": verbs,
        "background": spans,
    }


if __name__ == "__main__":
    main()
