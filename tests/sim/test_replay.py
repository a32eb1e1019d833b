"""Ids of a run, replayed: what a batch touches, and what a cache misses, counted and not by a law."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import ConfigError
from holdfast.files.config import read_config
from holdfast.run.sections import RunConfig
from holdfast.run.sources import open_source
from holdfast_lab.sim.caches import missed_rows_per_batch
from holdfast_lab.sim.from_run import model_of_run
from holdfast_lab.sim.library import read_library
from holdfast_lab.sim.model import workload_of
from holdfast_lab.sim.replay import FEWEST_BATCHES, Replay, ReplayedModel, replay_of, replayed_model
from holdfast_lab.sim.scenario import read_scenario
from holdfast_lab.sim.system import Cache

CONFIG = """
[data.synthetic]
num_samples = 40_000
num_dense = 4
rows = [50, 2000, 2000]
lookups = 2
zipf_exponent = 1.1

[embedding]
dim = 8

[model]
bottom = [16, 8]
top = [16, 1]

[train]
batch_size = 128
epochs = 1
"""
BATCHES = 120


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "run.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def replayed(config_path: Path) -> ReplayedModel:
    config = read_config(RunConfig, config_path)
    replay = replay_of(open_source(config.data), config.train, num_batches=BATCHES)
    return replayed_model(model_of_run(config), replay)


def by_hand(batches: list[list[int]], rows: int) -> ReplayedModel:
    filler = [list(range(rows))[:2]] * (FEWEST_BATCHES - len(batches))
    replay = Replay([[np.array(ids)] for ids in (*filler, *batches)], [rows])
    model = read_library().model("deeprecsys-rm1")
    return ReplayedModel(
        **{name: getattr(model, name) for name in ("bottom", "top", "num_dense")},
        batch_size=1,
        tables=(model.tables[0].__class__(rows=rows, dim=32, lookups=replay.lookups(0)),),
        replay=replay,
    )


def test_rows_that_come_again_are_counted_from_one_batch_to_the_next() -> None:
    # Of fourteen batches [0, 1] come eight and seven more pairs of the same; then [1, 1, 2], then [2, 5].
    workload = workload_of(by_hand([[1, 1, 2], [2, 5]], rows=6))
    same = FEWEST_BATCHES - 2
    assert workload.unique_rows == 2
    assert workload.repeated_rows == pytest.approx((2 * (same - 1) + 1 + 1) / (FEWEST_BATCHES - 1))
    assert workload.repeated_accesses == pytest.approx((2 * (same - 1) + 2 + 1) / (FEWEST_BATCHES - 1))


def test_a_cache_is_warmed_up_by_the_first_half_and_its_misses_of_the_second_count() -> None:
    model = by_hand([[0, 1], [2, 3], [0, 1], [2, 3]], rows=4)
    half = FEWEST_BATCHES / 2
    assert missed_rows_per_batch(Cache(policy="lru", share=0.5), model) == pytest.approx(2 * 3 / half)
    assert missed_rows_per_batch(Cache(policy="lru", share=1.0), model) == pytest.approx(2 / half)
    assert missed_rows_per_batch(Cache(policy="static", share=0.5), model) == pytest.approx(2 * 2 / half)
    with pytest.raises(ConfigError, match="a scratchpad that looks forward"):
        missed_rows_per_batch(Cache(policy="look_forward", share=0.5), model)


def test_replayed_ids_of_a_law_touch_what_the_law_says(replayed: ReplayedModel, config_path: Path) -> None:
    by_law = workload_of(model_of_run(read_config(RunConfig, config_path)))
    counted = workload_of(replayed)
    assert counted.accesses == by_law.accesses
    assert counted.table_bytes == by_law.table_bytes
    for name in ("unique_rows", "repeated_rows", "repeated_accesses"):
        assert getattr(counted, name) == pytest.approx(getattr(by_law, name), rel=0.02), name


@pytest.mark.parametrize(("policy", "share"), [("lru", 0.45), ("static", 0.05), ("look_forward", 0.45)])
def test_a_cache_misses_of_replayed_ids_what_it_misses_of_their_law(
    replayed: ReplayedModel, config_path: Path, policy: str, share: float
) -> None:
    cache = Cache(policy=policy, share=share)  # type: ignore[arg-type]
    by_law = missed_rows_per_batch(cache, model_of_run(read_config(RunConfig, config_path)))
    assert missed_rows_per_batch(cache, replayed) == pytest.approx(by_law, rel=0.1)


def test_a_command_replays_a_run_of_any_data(config_path: Path) -> None:
    scenario = read_scenario("scratchpipe", str(config_path), replay=40)
    model = scenario.library.model(scenario.model)
    assert isinstance(model, ReplayedModel)
    assert model.source.endswith("the ids of its first 40 batches")


@pytest.mark.dear
@pytest.mark.parametrize(
    ("setting", "words"),
    [("model.batch_size=64", "batch_size and lookups cannot be changed"), ("model.rows=9", "tables cannot be changed")],
)
def test_what_was_replayed_cannot_be_set(config_path: Path, setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_scenario("dram", str(config_path), [setting], replay=FEWEST_BATCHES)
    assert read_scenario("dram", str(config_path), ["model.precision=tf32"], replay=FEWEST_BATCHES)


def test_a_replay_is_of_a_run_and_of_some_batches(config_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--replay: it is of a run's ids; give --model that run's configuration"):
        read_scenario("cxl", "rm1", replay=20)
    with pytest.raises(ConfigError, match=f"--replay: 3 batches; it takes {FEWEST_BATCHES} at least"):
        read_scenario("cxl", str(config_path), replay=3)
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({}))
    with pytest.raises(ConfigError, match="counted by --profile, or replayed, not both"):
        read_scenario("cxl", str(config_path), profile=profile, replay=20)
