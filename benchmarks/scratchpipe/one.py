"""``python -m scratchpipe.one``, from benchmarks/: one cell in a process of its own; prints one JSON object."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from holdfast import prepare_environment

_TRAFFIC = ("rows_hit", "rows_missed", "rows_demanded", "rows_fetched", "fetch_reads", "merges", "stall_seconds")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scratchpipe.one", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run's file")
    parser.add_argument("--directory", type=Path, required=True, help="where the pool lies for the time")
    parser.add_argument("--keep", type=Path, help="an array of the rows of each table that stay in for good")
    parser.add_argument("--warmup", type=int, required=True, help="batches, those that fill the cache among them")
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    prepare_environment()
    with tempfile.TemporaryDirectory(prefix="scratchpipe-", dir=arguments.directory) as folder:
        pool = Path(folder) / "pool"
        print(json.dumps(_measure(arguments.run, pool, arguments.keep, arguments.warmup, arguments.steps)))


def _measure(run: Path, pool: Path, keep: Path | None, warmup: int, steps: int) -> dict[str, Any]:
    from holdfast.files.config import read_config
    from holdfast.run.assembly import open_trainer
    from holdfast.run.sections import RunConfig

    config = read_config(RunConfig, run)
    with open_trainer(config, pool) as trainer:
        _write_tables(trainer)
        for table, rows in enumerate(np.load(keep) if keep else ()):
            trainer.pool.core.keep_rows(table, rows.tolist())
        going = trainer.steps()
        for _ in range(warmup):
            next(going)
        before, cpu_before = _counts(trainer), time.process_time()
        reports = [next(going) for _ in range(steps)]
        cpu_s = time.process_time() - cpu_before
        after = _counts(trainer)
        last = next(going)  # where the last that is timed ends
    began = [report.began for report in reports] + [last.began]
    return {
        "batch_ms": 1e3 * (began[-1] - began[0]) / steps,
        "each_ms": [1e3 * (b - a) for a, b in itertools.pairwise(began)],
        "stage_ms": {
            stage: statistics.fmean(report.stage_ms.get(stage, 0.0) for report in reports)
            for stage in dict.fromkeys(stage for report in reports for stage in report.stage_ms)
        },
        "counts": {name: (after[name] - before[name]) / steps for name in after},
        "cpu_ms": 1e3 * cpu_s / steps,
    }


def _counts(trainer: Any) -> dict[str, float]:
    """Of the dial and of the scratchpad, where there are any."""
    pool = trainer.pool
    traffic = pool.traffic() or {}
    return dict(pool.core.dial_counts or {}) | {name: traffic[name] for name in _TRAFFIC if name in traffic}


def _write_tables(trainer: Any) -> None:
    """All rows in full, so that no step finds a page of a file new, and no row is one that was never written."""
    rng = np.random.default_rng(1)
    for number, table in enumerate(trainer.pool.core.tables):
        weights = rng.standard_normal(table.num_embeddings * table.embedding_dim, np.float32)
        trainer.pool.core.import_rows(number, 0, weights.view(np.uint8), None)


if __name__ == "__main__":
    main()
