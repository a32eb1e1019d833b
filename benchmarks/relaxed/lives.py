"""The lives that a run may have, each in a process of its own: never cut, killed, recovered.

Invariants
- A killed life ends with SIGKILL, sent when all that it committed is durable: rows at the crash's step, the newest
  dense state at the crash's dense_step. What recovery found says whether that was so.
- Evaluation leaves no trace, so where a life is evaluated does not matter to its bits.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from holdfast import _core
from holdfast.admin.digest import digest_pool
from holdfast.data import Source
from holdfast.run.assembly import open_trainer
from holdfast.run.sections import RunConfig
from holdfast.run.sources import open_validation
from holdfast.train.trainer import Trainer
from relaxed.workloads import Crash


def train_whole(
    config: RunConfig, directory: Path, evaluated: Collection[int], copied: Collection[int]
) -> dict[str, Any]:
    """Never cut. At the end of each step of `copied` its pool is made durable and copied as it is, in use."""
    validation = _validation(config)
    evaluations = []
    with open_trainer(config, directory / "whole") as trainer:
        for step in _steps(trainer):
            if step in copied:
                trainer.checkpoint.flush()
                shutil.copytree(directory / "whole", copy_at(directory, step))
            if step in evaluated:
                evaluations.append(_evaluation(trainer, validation))
        trainer.checkpoint.flush()
    return {"evaluations": evaluations, "digest": _digest(directory / "whole")}


def copy_at(directory: Path, step: int) -> Path:
    """Where `train_whole` puts the copy of that step."""
    return directory / f"at-{step}"


def train_and_die(config: RunConfig, pool: Path, crash: Crash) -> NoReturn:
    """From a pool at the crash's dense_step: its dense state is next due one step too late."""
    config = replace(config, pool=replace(config.pool, dense_interval=crash.lag + 1))
    config = replace(config, train=replace(config.train, steps=crash.step))
    with open_trainer(config, pool) as trainer:
        for _ in _steps(trainer):
            pass
        trainer.pool.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("alive after SIGKILL")


def recover_and_train(config: RunConfig, pool: Path, evaluated: Collection[int]) -> dict[str, Any]:
    """Keeps the newest rows beside the older dense state, and trains to the end."""
    validation = _validation(config)
    with open_trainer(config, pool, recovery="relaxed") as trainer:
        report = trainer.pool.recovered
        found = {
            "step": report.step,
            "cursor": report.cursor,
            "rows_step": report.rows_step,
            "dense_step": report.dense_step,
            "clean": report.clean,
        }
        evaluations = [_evaluation(trainer, validation) for step in _steps(trainer) if step in evaluated]
        trainer.checkpoint.flush()
    return {"recovered": found, "evaluations": evaluations, "digest": _digest(pool)}


def _steps(trainer: Trainer) -> Iterator[int]:
    """The step where training begins or goes on, and then each one that was committed."""
    yield trainer.pool.step
    for report in trainer.steps():
        yield report.step


def _validation(config: RunConfig) -> Source:
    source = open_validation(config)
    assert source is not None
    return source


def _evaluation(trainer: Trainer, validation: Source) -> dict[str, float]:
    found = trainer.evaluate(validation)
    assert found is not None
    return {"step": trainer.pool.step, "auc": found.auc, "log_loss": found.log_loss}


def _digest(pool: Path) -> str:
    return digest_pool(_core.Reader(str(pool))).whole
