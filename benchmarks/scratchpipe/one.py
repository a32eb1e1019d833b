"""``python -m scratchpipe.one``, from benchmarks/: one cell in a process of its own; prints one JSON object."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from dialled_steps import time_steps, write_tables
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
        write_tables(trainer)
        for table, rows in enumerate(np.load(keep) if keep else ()):
            trainer.pool.core.keep_rows(table, rows.tolist())
        timed = time_steps(trainer, warmup, steps, _counts)
    return {
        "batch_ms": timed.batch_ms,
        "each_ms": timed.each_ms,
        "stage_ms": timed.stage_ms,
        "counts": timed.counts,
        "cpu_ms": 1e3 * timed.cpu_s,
    }


def _counts(trainer: Any) -> dict[str, float]:
    """Of the dial and of the scratchpad, where there are any."""
    pool = trainer.pool
    traffic = pool.traffic() or {}
    return dict(pool.core.dial_counts or {}) | {name: traffic[name] for name in _TRAFFIC if name in traffic}


if __name__ == "__main__":
    main()
