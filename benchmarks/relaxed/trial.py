"""One seed of a workload: the run that is never cut, and its crashes, each recovered relaxed and trained to the end."""

from __future__ import annotations

import shutil
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from holdfast.run.sections import RunConfig
from relaxed.lives import copy_at, recover_and_train, train_and_die, train_whole
from relaxed.processes import Processes
from relaxed.workloads import Crash, Workload


def run_trial(workload: Workload, seed: int, memory: Path, processes: Processes) -> dict[str, Any]:
    """memory: a directory on tmpfs. Raises RuntimeError where a life did not go as it was meant to."""
    config = workload.config(seed)
    crashes = workload.crashes
    with tempfile.TemporaryDirectory(prefix="holdfast-relaxed-", dir=memory) as name:
        directory = Path(name)
        dense_steps = sorted({crash.dense_step for crash in crashes})
        whole = processes.run(train_whole, config, directory, workload.evaluated, dense_steps)
        with ThreadPoolExecutor(len(crashes)) as threads:
            lives = list(
                threads.map(lambda crash: _crash_and_recover(workload, config, directory, crash, processes), crashes)
            )
    return {
        "workload": workload.name,
        "seed": seed,
        "world": workload.world(seed),
        "whole": whole,
        "recoveries": [
            {"crash_step": crash.step, "lag": crash.lag, **life} for crash, life in zip(crashes, lives, strict=True)
        ],
    }


def _crash_and_recover(
    workload: Workload, config: RunConfig, directory: Path, crash: Crash, processes: Processes
) -> dict[str, Any]:
    pool = directory / f"killed-at-{crash.step}-{crash.lag}"
    shutil.copytree(copy_at(directory, crash.dense_step), pool)
    processes.run(train_and_die, config, pool, crash, status=-signal.SIGKILL)
    life = processes.run(recover_and_train, config, pool, workload.evaluated_from(crash.step))
    check_recovered(life["recovered"], crash, config.train.batch_size)
    shutil.rmtree(pool)
    return life


def check_recovered(found: dict[str, Any], crash: Crash, batch_size: int) -> None:
    """RuntimeError unless recovery found the crash that was meant, and kept its rows and cursor."""
    meant = {
        "step": crash.step,
        "cursor": crash.step * batch_size,
        "rows_step": crash.step,
        "dense_step": crash.dense_step,
        "clean": False,
    }
    if found != meant:
        raise RuntimeError(f"recovery found {found}, and {meant} was meant")
