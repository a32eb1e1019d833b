"""Kill -9 anywhere, resume, and end with the digest of a run that was never killed."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crash_runs import SIGKILL, Zygote, digest, pool_root

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "log_of_three_records": {"log_bytes": 16384},
    "dense_every_3_steps": {"dense_interval": 3, "optimizer": "adam"},
    "captured_ahead": {"capture_ahead": True},
    "two_micro_batches_bf16": {"micro_batches": 2, "dtype": "bf16", "optimizer": "rowwise_adam"},
    "skipped_steps": {"skip_every": 3, "optimizer": "adagrad", "dense_interval": 2},
    "captured_ahead_dense_every_4_steps": {"capture_ahead": True, "dense_interval": 4, "dtype": "fp16"},
}


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as process:
        yield process


@pytest.fixture
def directory() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="holdfast-crash-", dir=pool_root()))
    yield root
    shutil.rmtree(root)


class Reference:
    """An uninterrupted run: its digest, and how many persist points it has."""

    def __init__(self, zygote: Zygote, directory: Path, options: dict[str, Any]) -> None:
        pool = directory / "reference"
        self.persist_points: int = zygote.run(pool, options)["result"]["persist_points"]
        self.digest = digest(pool)


def kill_and_resume(zygote: Zygote, pool: Path, options: dict[str, Any], kills: list[int]) -> int:
    """Runs `pool`, killed at each of `kills` persist points in turn, then to the end. Returns how many kills there were
    (a run may end before its point)."""
    struck = 0
    for point in kills:
        answer = zygote.run(pool, options, kill_at=point)
        if answer["signal"] == 0:
            break
        assert answer["signal"] == SIGKILL
        struck += 1
    zygote.run(pool, options)
    return struck


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_kill_at_any_persist_point_leaves_no_trace(name: str, zygote: Zygote, directory: Path) -> None:
    options = CONFIGURATIONS[name]
    reference = Reference(zygote, directory, options)
    stride = 1 if name == "default" else 7
    points = range(1, reference.persist_points + 1, stride)
    struck = 0
    for point in points:
        pool = directory / f"killed-{point}"
        struck += kill_and_resume(zygote, pool, options, [point])
        assert digest(pool) == reference.digest, f"killed at persist point {point} of {options}"
        shutil.rmtree(pool)
    assert struck == len(points)


@pytest.mark.parametrize("seed", range(6))
def test_kills_upon_kills_of_resumed_runs_leave_no_trace(seed: int, zygote: Zygote, directory: Path) -> None:
    rng = random.Random(seed)
    options = rng.choice(list(CONFIGURATIONS.values()))
    reference = Reference(zygote, directory, options)
    pool = directory / "killed"
    # Small numbers strike in recovery itself.
    kills = [rng.choice([rng.randint(1, 12), rng.randint(1, reference.persist_points)]) for _ in range(8)]
    kill_and_resume(zygote, pool, options, kills)
    assert digest(pool) == reference.digest, f"seed {seed}: {options} killed at persist points {kills}"


def test_a_kill_at_any_time_leaves_no_trace(zygote: Zygote, directory: Path) -> None:
    rng = random.Random(7)
    options = {"steps": 40}
    reference = Reference(zygote, directory, options)
    pool = directory / "killed"
    struck = 0
    for _ in range(12):
        struck += zygote.run(pool, options, kill_after_s=rng.uniform(0.01, 0.12))["signal"] == SIGKILL
    zygote.run(pool, options)
    assert struck >= 3
    assert digest(pool) == reference.digest


def test_a_run_that_is_resumed_with_another_learning_rate_equals_one_that_changed_it_in_flight(
    zygote: Zygote, directory: Path
) -> None:
    changed = {"steps": 8, "lr_change": [6, 0.25]}
    reference = Reference(zygote, directory, changed)
    pool = directory / "killed"
    # The first life does not know of the change; it is killed while it is in step 6.
    first = zygote.run(directory / "counting", {"steps": 5})["result"]["persist_points"]
    assert zygote.run(pool, {"steps": 8}, kill_at=first - 6)["signal"] == SIGKILL
    resumed = zygote.run(pool, changed)["result"]["resumed_at"]
    assert resumed <= 5
    assert digest(pool) == reference.digest


def test_a_stop_between_steps_and_a_new_start_leave_no_trace(zygote: Zygote, directory: Path) -> None:
    options = {"steps": 9, "dense_interval": 4}
    reference = Reference(zygote, directory, options)
    pool = directory / "stopped"
    for steps in (2, 3, 7, 9):
        answer = zygote.run(pool, {**options, "steps": steps})
    assert answer["result"]["resumed_at"] == 7
    assert digest(pool) == reference.digest


def test_relaxed_recovery_keeps_the_newest_rows_beside_an_older_dense_state(zygote: Zygote, directory: Path) -> None:
    options = {"steps": 12, "dense_interval": 5}
    points = Reference(zygote, directory, options).persist_points
    for name, recovery in (("exact", "exact"), ("relaxed", "relaxed")):
        pool = directory / name
        zygote.run(pool, options, kill_at=points - 30)
        answer = zygote.run(pool, {**options, "recovery": recovery})
        resumed = answer["result"]["resumed_at"]
        if recovery == "exact":
            exact_step = resumed
    assert exact_step % 5 == 0
    assert resumed > exact_step
