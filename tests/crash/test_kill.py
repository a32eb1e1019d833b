"""Kill -9 anywhere, resume, and end with the digest of a run that was never killed."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from crash_runs import SIGKILL, Zygote, digest, pool_root
from holdfast import EmbeddingBagCollection, EmbeddingBagConfig, Pool
from holdfast.admin.inspection import inspect_pool
from holdfast.errors import ConfigError

IN_A_SMALL_ROW_LOG = {"medium": "block", "log_bytes": 60 << 10, "scratchpad_bytes": 60_000, "window": 2}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "log_of_three_records": {"log_bytes": 16384},
    "dense_every_3_steps": {"dense_interval": 3, "optimizer": "adam"},
    "captured_ahead": {"capture_ahead": True},
    "two_micro_batches_bf16": {"micro_batches": 2, "dtype": "bf16", "optimizer": "rowwise_adam"},
    "skipped_steps": {"skip_every": 3, "optimizer": "adagrad", "dense_interval": 2},
    "captured_ahead_dense_every_4_steps": {"capture_ahead": True, "dense_interval": 4, "dtype": "fp16"},
    "row_checksums": {"row_checksums": True, "capture_ahead": True, "dense_interval": 2, "optimizer": "adam"},
    "in_slots": {"way": "scratchpad", "window": 3, "slot_bytes": 12_000},
    "in_slots_of_a_direct_device": {"way": "direct", "window": 2, "dense_interval": 3, "optimizer": "adam"},
    "in_slots_bf16_skipped_steps": {
        "way": "scratchpad",
        "window": 2,
        "dtype": "bf16",
        "optimizer": "rowwise_adam",
        "skip_every": 3,
        "row_checksums": True,
    },
    "relaxed_lookup": {"relaxed_lookup": True, "capture_ahead": True, "dense_interval": 2},
    "dialled": {"dial": "pmem", "dense_interval": 2, "capture_ahead": True},
    "dialled_synchronous": {"dial": "cxl-pmem", "synchronous": True, "optimizer": "adam"},
    "row_log": {"medium": "block", "log_bytes": 1 << 20},
    "row_log_synchronous": {**IN_A_SMALL_ROW_LOG, "dial": "ssd", "synchronous": True},
    "row_log_in_slots": {**IN_A_SMALL_ROW_LOG, "way": "scratchpad", "steps": 12, "slot_bytes": 12_000},
    "row_log_of_seven_records": {**IN_A_SMALL_ROW_LOG, "steps": 16},
    "row_log_apart": {**IN_A_SMALL_ROW_LOG, "steps": 14, "dense_interval": 2, "log_apart": True},
    "row_log_dense_every_3_steps": {**IN_A_SMALL_ROW_LOG, "steps": 14, "dense_interval": 3, "log_bytes": 80 << 10},
    "row_log_micro_batches_skipped_steps": {
        **IN_A_SMALL_ROW_LOG,
        "steps": 14,
        "log_bytes": 80 << 10,
        "window": 3,
        "micro_batches": 2,
        "skip_every": 3,
        "dtype": "bf16",
        "dense_interval": 2,
    },
    "keys_captured_ahead_bf16": {
        "keys": True,
        "capture_ahead": True,
        "dtype": "bf16",
        "row_checksums": True,
        "relaxed_lookup": True,
    },
    "keys_left_behind": {"keys": True, "ttl_steps": 2, "dense_interval": 3, "steps": 11},
    "keys_left_behind_relaxed_lookup": {
        "keys": True,
        "ttl_steps": 2,
        "relaxed_lookup": True,
        "skip_every": 4,
        "dense_interval": 2,
        "steps": 11,
    },
    "keys_in_slots": {
        "keys": True,
        "ttl_steps": 2,
        "way": "scratchpad",
        "window": 3,
        "slot_bytes": 16_000,
        "skip_every": 4,
        "dense_interval": 2,
        "steps": 11,
    },
    "keys_row_log_in_slots": {
        **IN_A_SMALL_ROW_LOG,
        "keys": True,
        "max_keys": 12,
        "way": "scratchpad",
        "slot_bytes": 16_000,
        "steps": 14,
        "log_bytes": 90 << 10,
        "dense_interval": 2,
    },
    "keys_admitted_by_chance": {
        "keys": True,
        "admit_probability": 0.4,
        "max_keys": 12,
        "dense_interval": 3,
        "steps": 11,
    },
    "keys_row_log_often_updated_ones_stay": {
        **IN_A_SMALL_ROW_LOG,
        "keys": True,
        "max_keys": 12,
        "stay": "lfu",
        "admit_probability": 0.6,
        "steps": 14,
        "log_bytes": 90 << 10,
        "dense_interval": 2,
    },
    "keys_micro_batches_skipped_steps": {"keys": True, "micro_batches": 2, "skip_every": 3, "optimizer": "adam"},
    "keys_row_log": {
        **IN_A_SMALL_ROW_LOG,
        "keys": True,
        "ttl_steps": 3,
        "steps": 14,
        "log_bytes": 90 << 10,
        "dense_interval": 2,
    },
}
STRIDES = {
    "default": 1,
    "row_log_of_seven_records": 2,
    **{name: 13 for name in CONFIGURATIONS if name.startswith("keys")},
}


@pytest.fixture
def directory() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="holdfast-crash-", dir=pool_root()))
    yield root
    shutil.rmtree(root)


def in_place(options: dict[str, Any]) -> dict[str, Any]:
    """The same run with its rows in place, which ends with the same digest."""
    return {**options, "medium": "memory", "log_bytes": None, "log_apart": False, "window": 0, "slot_bytes": None}


class Reference:
    """An uninterrupted run: its digest, how many persist points it has, and how long it takes."""

    def __init__(self, zygote: Zygote, directory: Path, options: dict[str, Any]) -> None:
        pool = directory / "reference"
        started = time.monotonic()
        result = zygote.run(pool, options)["result"]
        self.seconds = time.monotonic() - started
        self.persist_points: int = result["persist_points"]
        # When a merge begins, and whether the end gives it up, is up to its thread, so a run in a row log has more
        # points or fewer than another; the record of each of its steps is one in every run.
        self.certain_points = options.get("steps", 8) if options.get("medium") == "block" else self.persist_points
        self.digest = digest(pool)
        if options.get("medium") == "block":
            zygote.run(directory / "in-place", in_place(options))
            assert self.digest == digest(directory / "in-place"), "a log store gives the bits of rows in place"


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


@pytest.mark.dear
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_kill_at_any_persist_point_leaves_no_trace(
    name: str, zygote: Zygote, directory: Path, is_sample: bool
) -> None:
    options = CONFIGURATIONS[name]
    reference = Reference(zygote, directory, options)
    stride = STRIDES.get(name, 7) if not is_sample else 13
    points = range(1, reference.persist_points + 1, stride)
    for point in points:
        pool = directory / f"killed-{point}"
        struck = kill_and_resume(zygote, pool, options, [point])
        assert struck == 1 or point > reference.certain_points
        assert digest(pool) == reference.digest, f"killed at persist point {point} of {options}"
        shutil.rmtree(pool)


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


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("options", [{}, IN_A_SMALL_ROW_LOG], ids=["in_place", "row_log"])
def test_a_kill_at_any_time_leaves_no_trace(
    options: dict[str, Any], seed: int, zygote: Zygote, directory: Path
) -> None:
    kill_at_any_time(zygote, directory, {**options, "steps": 60}, 4, seed=seed)


def kill_at_any_time(
    zygote: Zygote, directory: Path, options: dict[str, Any], num_kills: int, *, seed: int | str
) -> None:
    """Kills runs at random times, and starts them again until they come to their end: so often in all."""
    rng = random.Random(seed)
    zygote.run(directory / "warm-up", options)
    reference = Reference(zygote, directory, options)
    pool = directory / "killed"
    longest_s = 0.7 * reference.seconds
    delays: list[float] = []
    struck = 0
    is_new = True
    while struck < num_kills:
        delays.append(rng.uniform(0.02, 1.0) * longest_s)
        if zygote.run(pool, options, kill_after_s=delays[-1])["signal"] == SIGKILL:
            struck += 1
            is_new = False
            continue
        if is_new:  # the machine has become faster than it was
            longest_s *= 0.7
        assert digest(pool) == reference.digest, f"seed {seed}: {options} killed after {delays} s"
        shutil.rmtree(pool)
        is_new = True
    zygote.run(pool, options)
    assert digest(pool) == reference.digest, f"seed {seed}: {options} killed after {delays} s"


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


@pytest.mark.parametrize("store", [{}, {"medium": "block", "log_bytes": 1 << 20}], ids=["in_place", "row_log"])
def test_relaxed_recovery_equals_a_run_whose_dense_part_was_put_back_in_flight(
    store: dict[str, Any], zygote: Zygote, directory: Path
) -> None:
    options = {**store, "steps": 16, "dense_interval": 5}
    points = Reference(zygote, directory, options).persist_points
    killed, exact = directory / "killed", directory / "exact"
    assert zygote.run(killed, options, kill_at=round(0.8 * points))["signal"] == SIGKILL
    shutil.copytree(killed, exact)
    dense_step = zygote.run(exact, options)["result"]["resumed_at"]
    rows_step = zygote.run(killed, {**options, "recovery": "relaxed"})["result"]["resumed_at"]
    assert 0 < dense_step < rows_step < 16
    assert dense_step % 5 == 0
    put_back = {**in_place(options), "put_back": (rows_step, dense_step)}
    zygote.run(directory / "put-back", put_back)
    assert digest(killed) == digest(directory / "put-back"), f"{put_back}, killed at {round(0.8 * points)} of {points}"


@pytest.mark.dear
@pytest.mark.parametrize("store", [{}, {"medium": "block", "log_bytes": 1 << 20}], ids=["in_place", "row_log"])
def test_relaxed_recovery_after_an_exact_one_that_was_killed_finds_all_rows_of_one_step(
    store: dict[str, Any], zygote: Zygote, directory: Path
) -> None:
    """Rows in place that were half taken back are of no step but that of the dense state."""
    options = {**store, "steps": 16, "dense_interval": 5}
    reference = Reference(zygote, directory, options)
    killed = directory / "killed"
    assert zygote.run(killed, options, kill_at=round(0.8 * reference.persist_points))["signal"] == SIGKILL
    shutil.copytree(killed, directory / "relaxed")
    rows_step = zygote.run(directory / "relaxed", {**options, "recovery": "relaxed"})["result"]["resumed_at"]
    shutil.copytree(killed, directory / "exact")
    dense_step = zygote.run(directory / "exact", options)["result"]["resumed_at"]
    found = []
    for point in range(1, 100):
        again = directory / "again"
        shutil.copytree(killed, again)
        # It goes back, and trains no step.
        if zygote.run(again, {**options, "steps": dense_step}, kill_at=point)["signal"] != SIGKILL:
            break
        told = inspect_pool(again)["recovery"]
        found.append(zygote.run(again, {**options, "recovery": "relaxed"})["result"]["resumed_at"])
        assert (told["exact_step"], told["relaxed_step"]) == (dense_step, found[-1]), told["would"]
        whole = {rows_step: digest(directory / "relaxed"), dense_step: reference.digest}
        assert digest(again) == whole[found[-1]], f"an exact recovery killed at persist point {point}"
        shutil.rmtree(again)
    assert 0 < dense_step < rows_step
    assert found[0] == rows_step, "before anything was taken back, the newest rows are kept"
    assert found[-1] == dense_step


def test_a_kill_between_two_collections_of_a_new_pool_leaves_one_that_takes_both(directory: Path) -> None:
    """The pool is made with the tables of the first, and again with those of both."""

    def tables(name: str) -> list[EmbeddingBagConfig]:
        return [EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, name=name, feature_names=[name])]

    with Pool(directory / "pool") as pool:
        EmbeddingBagCollection(pool, tables("users"))
        shutil.copytree(directory / "pool", directory / "killed")
    for left in ("killed", "pool"):  # while it was open, and when it had been closed to be made again
        with Pool(directory / left) as pool:
            rows = [EmbeddingBagCollection(pool, tables(name)) for name in ("users", "items")]
            assert [table.name for table in pool.core.tables] == ["users", "items"]
            rows[1]({"items": (torch.tensor([1]), torch.tensor([0, 1]))}).values().sum().backward()
            rows[1].optimizer.step()
            pool.commit(1)
        with Pool(directory / left) as pool, pytest.raises(ConfigError, match="has no table 'shops'"):
            EmbeddingBagCollection(pool, tables("shops"))
