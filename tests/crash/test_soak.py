"""Hundreds of kills in fresh processes, and hundreds of fresh processes that must agree to the bit. `make soak`."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash_runs import SIGKILL, SRC, Zygote, digest, disk_root, pool_root
from test_kill import CONFIGURATIONS, Reference, kill_and_resume, kill_at_any_time

KILLS_IN_FRESH_PROCESSES = 250
KILLS_OVER_A_ROW_LOG = 100  # of fresh processes: a run that merges all the time takes half a minute
KILLS_AT_ANY_TIME = 500
KILLS_IN_FORKS = 2000
PROCESSES_THAT_AGREE = 400
CONFIG = Path(__file__).parents[2] / "examples/criteo_synthetic.toml"

pytestmark = pytest.mark.soak


LOG_BYTES = 2 << 20
ROW_LOG = ("pool.medium=block", f"pool.log_bytes={LOG_BYTES}", "pool.scratchpad_bytes=400000", "pool.dense_interval=2")


@pytest.fixture
def directory() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="holdfast-soak-", dir=pool_root()))
    yield root
    shutil.rmtree(root)


@pytest.fixture
def disk() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="holdfast-soak-", dir=disk_root()))
    yield root
    shutil.rmtree(root)


def command(pool: Path, *overrides: str, threads: int = 2) -> tuple[list[str], dict[str, str]]:
    small = ["data.criteo_shape.num_samples=40000", "data.criteo_shape.scale=0.001", "validation.num_samples=2000"]
    line = [sys.executable, "-m", "holdfast", "train", str(CONFIG), "--pool", str(pool)]
    for item in (*small, "train.batch_size=512", *overrides):
        line += ["--set", item]
    return line, {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": str(threads)}


def run(
    pool: Path, *overrides: str, kill_after_s: float | None = None, threads: int = 2, metrics: Path | None = None
) -> int:
    line, environment = command(pool, *overrides, threads=threads)
    if metrics is not None:
        line += ["--metrics", str(metrics)]
    process = subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return process.wait(timeout=kill_after_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        return process.wait()


def kill_fresh_processes(directory: Path, num_kills: int, overrides: tuple[str, ...] = ()) -> None:
    """Kills runs at random moments of their lives, the start of Python aside, and starts them again until they come to
    their end; and so on until there were `num_kills`. `directory` has the reference, a run that was never killed."""
    rng = random.Random(1)
    reference = directory / "reference"
    started = time.monotonic()
    assert run(reference, *overrides, metrics=directory / "metrics.jsonl") == 0
    whole_s = time.monotonic() - started
    expected = digest(reference)
    kills = 0
    while kills < num_kills:
        pool = directory / "killed"
        while True:
            status = run(pool, *overrides, kill_after_s=rng.uniform(0.3, 1.1) * whole_s)
            if status == 0:
                break
            assert status == -SIGKILL
            kills += 1
        assert digest(pool) == expected, f"seed 1, after {kills} kills"
        shutil.rmtree(pool)


def test_hundreds_of_kills_of_fresh_processes_leave_no_trace(directory: Path) -> None:
    kill_fresh_processes(directory, KILLS_IN_FRESH_PROCESSES)


def test_hundreds_of_kills_of_fresh_processes_over_a_row_log_that_is_merged_leave_no_trace(disk: Path) -> None:
    kill_fresh_processes(disk, KILLS_OVER_A_ROW_LOG, ROW_LOG)
    steps = [json.loads(line) for line in (disk / "metrics.jsonl").read_text().splitlines()]
    merged_bytes = sum(step["traffic"]["merged_bytes"] for step in steps if "traffic" in step)
    assert merged_bytes > 3 * LOG_BYTES, "kills strike merges only where runs merge"


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_kills_at_any_time_leave_no_trace(name: str, directory: Path) -> None:
    options = {**CONFIGURATIONS[name], "steps": 60}
    with Zygote() as zygote:
        kill_at_any_time(zygote, directory, options, KILLS_AT_ANY_TIME // len(CONFIGURATIONS) + 1, seed=name)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_kills_at_every_persist_point_and_again_in_recovery_leave_no_trace(name: str, directory: Path) -> None:
    rng = random.Random(name)
    options = CONFIGURATIONS[name]
    with Zygote() as zygote:
        reference = Reference(zygote, directory, options)
        struck = 0
        while struck < KILLS_IN_FORKS // len(CONFIGURATIONS):
            kills = [rng.choice([rng.randint(1, 15), rng.randint(1, reference.persist_points)]) for _ in range(6)]
            pool = directory / "killed"
            struck += kill_and_resume(zygote, pool, options, kills)
            assert digest(pool) == reference.digest, f"{options} killed at persist points {kills}"
            shutil.rmtree(pool)


@pytest.mark.parametrize("bf16", ["false", "true"])
@pytest.mark.parametrize("threads", [1, 2])
def test_fresh_processes_train_to_the_same_bits(bf16: str, threads: int, directory: Path) -> None:
    digests = set()
    for number in range(PROCESSES_THAT_AGREE // 4):
        pool = directory / str(number)
        assert run(pool, f"train.bf16={bf16}", "train.steps=12", threads=threads) == 0
        digests.add(digest(pool))
        shutil.rmtree(pool)
    assert len(digests) == 1
