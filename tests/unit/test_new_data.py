"""Training day after day: new files follow those that a pool was trained on."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli_runs import Commands, Result, start
from holdfast.data.parquet import ParquetSource

pytestmark = pytest.mark.dear

SAMPLES = 20 * 32 + 5  # of a day: batches straddle its epochs

CONFIG = """
[data.parquet]
paths = ["day1.parquet"]
label = "click"
dense = ["age"]

[data.parquet.sparse.item]
column = "item"
keys = true
num_embeddings = 3000

[data.parquet.sparse.shop]
column = "shop"
num_embeddings = 20

[embedding]
dim = 4
lr = 0.05

[model]
bottom = [8, 4]
top = [8, 1]

[train]
batch_size = 32
"""


@pytest.fixture
def days(pool_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Commands:
    holdfast = Commands(pool_root, monkeypatch, capfd)
    monkeypatch.chdir(pool_root)  # paths of an override are relative to it
    for day in (1, 2, 3):
        draw = np.random.default_rng(day)
        table = {
            "click": draw.integers(0, 2, SAMPLES),
            "age": draw.integers(18, 90, SAMPLES),
            "item": draw.integers(day * 100, day * 100 + 300, SAMPLES) * -0x61C8864680B583EB,
            "shop": draw.integers(0, 20, SAMPLES),
        }
        pq.write_table(pa.table(table), holdfast.root / f"day{day}.parquet", row_group_size=100)
    holdfast.config.write_text(CONFIG)
    return holdfast


def options(day: int, *others: str) -> list[str]:
    settings = [f'data.parquet.paths=["day{day}.parquet"]', f"train.new_data={str(day > 1).lower()}", *others]
    return [part for setting in settings for part in ("--set", setting)]


def train(days: Commands, pool: str, day: int, *others: str) -> Result:
    return days.train(pool, *options(day, *others))


def test_each_day_is_trained_once_after_those_before_it(days: Commands) -> None:
    for day, last in ((1, 21), (2, 42), (3, 63)):
        result = train(days, "pool", day)
        assert result.code == 0, result.err
        assert f"step {last}" in result.out
    trained = days.digest()
    again = train(days, "pool", 3)
    assert again.code == 0
    assert "nothing is left to train up to step 63" in again.out + again.err
    assert days.digest() == trained
    # The state says where the data of now begin: whoever goes on with them need not say again that they are new.
    later = days.train("pool", "--set", 'data.parquet.paths=["day3.parquet"]', "--set", "train.epochs=2")
    assert later.code == 0, later.err
    assert "step 83" in later.out


def test_other_data_are_refused_unless_they_are_said_to_be_new(days: Commands) -> None:
    assert train(days, "pool", 1).code == 0
    trained = days.digest()
    result = days.train("pool", "--set", 'data.parquet.paths=["day2.parquet"]', "--set", "train.epochs=2")
    assert result.code == 1
    assert "source.files" in result.err
    assert "train.new_data = true" in result.err
    result = train(days, "pool", 2, "data.parquet.dense=[]")
    assert result.code == 1
    assert days.digest() == trained


@pytest.mark.parametrize("others", [(), ("pool.dense_interval=4", 'pool.medium="memory"')])
def test_killed_on_the_second_day_it_ends_as_if_nothing_had_been(
    days: Commands, others: tuple[str, ...], is_sample: bool
) -> None:
    for day in (1, 2):
        assert train(days, "whole", day, *others, f"train.epochs={12 * day - 11}").code == 0
    assert train(days, "pool", 1, *others).code == 0
    assert train(days, "pool", 2, *others, "train.steps=22").code == 0  # stopped after the first step of the new data
    for wait in (0.0, 0.15) if is_sample else (0.0, 0.1, 0.15, 0.2):
        command = ["train", days.config, "--pool", days.root / "pool", *options(2, *others, "train.epochs=13")]
        killed = start(*command)
        assert killed.stdout is not None
        next(line for line in killed.stdout if "training goes on at step" in line)
        time.sleep(wait)
        killed.kill()
        killed.communicate()
    assert train(days, "pool", 2, *others, "train.epochs=13").code == 0
    assert days.digest("pool") == days.digest("whole")


def test_a_schedule_that_ends_before_the_new_data_is_named(days: Commands) -> None:
    days.config.write_text(CONFIG + '[scheduler]\nname = "OneCycleLR"\nmax_lr = 0.1\ntotal_steps = 30\n')
    assert train(days, "pool", 1).code == 0
    trained = days.digest()
    result = train(days, "pool", 2)
    assert result.code == 1
    assert "OneCycleLR ends after 30 steps, and training at step 42" in result.err
    assert days.digest() == trained


def test_a_file_that_is_there_before_its_day_changes_nothing(days: Commands, tmp_path: Path) -> None:
    """Two days as one: other samples are shuffled together, but all of them are trained."""
    result = days.train("pool", "--set", 'data.parquet.paths=["day1.parquet", "day2.parquet"]')
    assert result.code == 0, result.err
    assert "step 41" in result.out


def test_new_data_may_be_read_in_another_order_and_those_of_before_not(days: Commands) -> None:
    """Lanes, for a run that several ranks go on with."""
    assert train(days, "pool", 1).code == 0
    assert train(days, "pool", 2, "train.lanes=4").code == 0
    trained = days.digest()
    for lanes in ("train.lanes=2", "train.shuffle=false"):
        refused = train(days, "pool", 2, lanes, "train.epochs=2")
        assert refused.code == 1
        assert "lanes" in refused.err or "shuffle" in refused.err
    assert days.digest() == trained
    assert train(days, "whole", 1).code == 0
    assert train(days, "whole", 2, "train.lanes=4", "train.steps=30").code == 0
    assert train(days, "whole", 2, "train.lanes=4").code == 0
    assert days.digest("whole") == trained


def with_more_shops(days: Commands, num_shops: int) -> None:
    """Day 2, with shops that nobody had seen on day 1."""
    table = pq.read_table(days.root / "day2.parquet").to_pydict()
    table["shop"] = np.random.default_rng(5).integers(0, num_shops, SAMPLES)
    pq.write_table(pa.table(table), days.root / "day2.parquet", row_group_size=100)


def restore(days: Commands, pool: str, grown: str, *options: str) -> Result:
    snapshot = days.root / f"{pool}.snapshot"
    if not snapshot.exists():
        assert days("snapshot", days.root / pool, snapshot).code == 0
    return days("restore", snapshot, days.root / grown, *options)


IDS = 'data.parquet.sparse.shop.hashing="identity"'
LARGER = "data.parquet.sparse.shop.num_embeddings=30"


def test_a_catalogue_that_grew_is_trained_with_more_rows(days: Commands) -> None:
    """As if its table had had room for all from the first day on."""
    with_more_shops(days, 30)
    assert train(days, "small", 1, IDS).code == 0
    for others, words in ((IDS,), "id 20 is not in [0, 20)"), ((IDS, LARGER), "num_embeddings"):
        refused = train(days, "small", 2, *others)
        assert refused.code == 1
        assert words in refused.err
    assert restore(days, "small", "grown", "--rows", "shop=30").code == 0
    result = train(days, "grown", 2, IDS, LARGER)
    assert result.code == 0, result.err
    assert "step 42" in result.out


def test_hashed_ids_keep_their_number_of_rows(days: Commands) -> None:
    assert train(days, "pool", 1).code == 0
    refused = restore(days, "pool", "grown", "--rows", "shop=30")
    assert refused.code == 1
    assert "holdfast import --new shop" in refused.err
    assert not (days.root / "grown").exists()
    assert restore(days, "pool", "grown", "--rows", "item=4000", "--rows", "shop=20").code == 0  # as many as it has


def test_a_state_from_when_it_told_the_rows_of_ids_goes_on(days: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ParquetSource, "fingerprint", lambda source: source.former_fingerprint)
        assert train(days, "pool", 1, IDS).code == 0
    later = days.train("pool", "--set", IDS, "--set", "train.epochs=2")
    assert later.code == 0, later.err
    assert train(days, "pool", 2, IDS).code == 0
