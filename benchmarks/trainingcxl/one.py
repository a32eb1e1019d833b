"""``python -m trainingcxl.one``, from benchmarks/: one cell in a process of its own; prints one JSON object."""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

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
    from holdfast.train.trainer import Trainer

    def counts(trainer: Trainer) -> dict[str, float]:
        return dict(trainer.pool.core.dial_counts or {})

    config = read_config(RunConfig, run)
    with open_trainer(config, pool) as trainer:
        _write_tables(trainer)
        going = trainer.steps()
        for _ in range(warmup):
            next(going)
        before, cpu_before = counts(trainer), _cpu_seconds()
        reports = [next(going) for _ in range(steps)]
        cpu_s = _cpu_seconds() - cpu_before
        after = counts(trainer)
        last = next(going)  # where the last that is timed ends
    began = [report.began for report in reports] + [last.began]
    spans = [
        (stage, 1e3 * (span.began - began[0]), 1e3 * (span.ended - began[0]))
        for report in [*reports, last]
        for stage, span in report.background
    ]
    verbs = []
    for report in reports:
        at = 1e3 * (report.began - began[0])
        for stage, length in report.laps:
            verbs.append((stage, at, at + length))
            at += length
    return {
        "batch_ms": 1e3 * (began[-1] - began[0]) / steps,
        "each_ms": [1e3 * (b - a) for a, b in itertools.pairwise(began)],
        "stage_ms": {
            stage: statistics.fmean(report.stage_ms.get(stage, 0.0) for report in reports)
            for stage in dict.fromkeys(stage for report in reports for stage in report.stage_ms)
        },
        "dial": {name: (after[name] - before[name]) / steps for name in after},
        "cpu_s": cpu_s / steps,
        "verbs": verbs,
        "background": spans,
    }


def _write_tables(trainer: Any) -> None:
    """All rows in full, so that no step finds a page of a file new."""
    rng = np.random.default_rng(1)
    for number, table in enumerate(trainer.pool.core.tables):
        weights = rng.standard_normal(table.num_embeddings * table.embedding_dim, np.float32)
        trainer.pool.core.import_rows(number, 0, weights.view(np.uint8), None)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
