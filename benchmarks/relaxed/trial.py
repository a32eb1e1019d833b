"""One seed of a workload: the run that is never cut, and its crashes, each recovered relaxed and trained to the end."""

from __future__ import annotations

import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from relaxed.lives import copy_at, in_a_process, recover_and_train, train_and_die, train_whole
from relaxed.workloads import Crash, Workload


def run_trial(workload: Workload, seed: int, memory: Path) -> dict[str, Any]:
    """memory: a directory on tmpfs. Raises RuntimeError where a life did not go as it was meant to."""
    config = workload.config(seed)
    with tempfile.TemporaryDirectory(prefix="holdfast-relaxed-", dir=memory) as name:
        directory = Path(name)
        dense_steps = sorted({crash.dense_step for crash in workload.crashes})
        whole = in_a_process(train_whole, config, directory, workload.evaluated, dense_steps)
        recoveries = []
        for crash in workload.crashes:
            pool = directory / "crashed"
            shutil.copytree(copy_at(directory, crash.dense_step), pool)
            in_a_process(train_and_die, config, pool, crash, expected_status=-signal.SIGKILL)
            life = in_a_process(recover_and_train, config, pool, workload.evaluated_from(crash.step))
            check_recovered(life["recovered"], crash, config.train.batch_size)
            recoveries.append({"crash_step": crash.step, "lag": crash.lag, **life})
            shutil.rmtree(pool)
    return {
        "workload": workload.name,
        "seed": seed,
        "world": workload.world(seed),
        "whole": whole,
        "recoveries": recoveries,
    }


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
