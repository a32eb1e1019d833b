"""Where rows lie, how many of them are in memory and how far ahead they are fetched shows in no bit of a run.

Micro-batches, forwards that are thrown away, evaluations in between and steps without an update are part of it; the log
is merged several times over.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import SGD, Adam, RowWiseAdagrad, RowWiseAdam
from holdfast.errors import BatchTooLarge, ConfigError
from small_runs import ALL_ROWS, LOG_BYTES, Found, Run, Step, Way, train

WINDOWS = (0, 1, 2, 8, 32)

MANY_STEPS = tuple(
    Step(
        micro_batches=1 + (number % 5 == 3),
        thrown_away=number % 4 == 1,
        evaluates=number % 6 == 2,
        updates=number % 7 != 5,
    )
    for number in range(56)
)


@pytest.fixture(scope="module")
def smallest_scratchpad(new_root: Callable[[], Path]) -> int:
    """Bytes with which every step of MANY_STEPS fits; with a twentieth less some does not."""
    low, high = 1 << 10, ALL_ROWS
    while high - low > high // 20:
        middle = (low + high) // 2
        try:
            train(new_root() / "pool", Run(steps=MANY_STEPS), Way(scratchpad_bytes=middle))
            high = middle
        except (BatchTooLarge, ConfigError):
            low = middle
    return high


@pytest.fixture(scope="module")
def in_place(new_root: Callable[[], Path]) -> Found:
    return train(new_root() / "pool", Run(steps=MANY_STEPS), Way(medium="memory"))


@pytest.mark.dear
@pytest.mark.parametrize("scratchpad", ["smallest", "half as much again", "all rows"])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_log_store_gives_the_bits_of_rows_in_place(
    pool_root: Path, in_place: Found, smallest_scratchpad: int, scratchpad: str, window: int
) -> None:
    factor = {"smallest": 1.0, "half as much again": 1.5, "all rows": ALL_ROWS / smallest_scratchpad}[scratchpad]
    scratchpad_bytes = int(factor * smallest_scratchpad)
    for num_threads, dense_interval in ((1, 1), (2, 4)) if window % 3 else ((1, 4), (2, 1)):
        way = Way(
            scratchpad_bytes=scratchpad_bytes, window=window, num_threads=num_threads, dense_interval=dense_interval
        )
        found = train(pool_root / f"{num_threads}-{dense_interval}", Run(steps=MANY_STEPS), way)
        assert found == in_place, way
        assert found.traffic is not None
        assert found.traffic["merged_bytes"] > 2 * LOG_BYTES, "several turns of the log"
        if window == 0:
            assert found.traffic["demand_fetches"] == found.traffic["rows_missed"]
        if scratchpad == "smallest":
            assert found.traffic["rows_missed"] > 430, "rows come and go"


def test_a_log_store_on_a_disk_gives_the_bits_of_rows_in_place(tmp_path: Path, in_place: Found) -> None:
    assert train(tmp_path / "pool", Run(steps=MANY_STEPS), Way(window=3)) == in_place


STEPS = st.builds(
    Step,
    micro_batches=st.integers(1, 3),
    thrown_away=st.booleans(),
    evaluates=st.booleans(),
    updates=st.sampled_from([True, True, True, False]),
)
RUNS = st.builds(
    Run,
    steps=st.lists(STEPS, min_size=1, max_size=12).map(tuple),
    optimizer=st.sampled_from([RowWiseAdagrad(lr=0.1), Adam(lr=0.02), SGD(lr=0.3), RowWiseAdam(lr=0.02)]),
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    seed=st.integers(1, 100),
)
WAYS = st.builds(
    Way,
    scratchpad_bytes=st.integers(30_000, 120_000),
    log_bytes=st.integers(30, 60).map(lambda blocks: 4096 * blocks),
    window=st.sampled_from(WINDOWS),
    num_threads=st.integers(1, 2),
    dense_interval=st.integers(1, 5),
)


@given(run=RUNS, way=WAYS)
@settings(derandomize=True, database=None, max_examples=50)
def test_no_run_shows_how_its_rows_were_kept(new_root: Callable[[], Path], run: Run, way: Way) -> None:
    root = new_root()
    try:
        found = train(root / "log", run, way)
    except BatchTooLarge:
        return  # a step of several forwards, in a small scratchpad
    assert found == train(root / "in-place", run, Way(medium="memory"))
