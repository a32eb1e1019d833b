"""A group divides the decoding of its files, and trains what one process trains."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from group_runs import WHOLE, Act, Life, Ranks, digest, small
from holdfast.data.lanes import Lanes
from holdfast.data.shuffle import SampleOrder

pytestmark = pytest.mark.thorough

STEPS = 30
SAMPLES, ROW_GROUP = 620, 50
BLOCKS = [ROW_GROUP] * (SAMPLES // ROW_GROUP) + [SAMPLES % ROW_GROUP]


def config_on_files(folder: Path, *, bad_row: int | None = None, **train: Any) -> dict[str, Any]:
    """Bags of several lengths in row groups; STEPS steps are more than an epoch. bad_row: whose label is no label."""
    rng = np.random.default_rng(7)
    features = (("few", 40, 1), ("many", 2000, 9), ("mostly_empty", 300, 2))
    bags = {
        name: [rng.integers(0, count, rng.integers(0, most + 1)).tolist() for _ in range(SAMPLES)]
        for name, count, most in features
    }
    labels = rng.integers(0, 2, SAMPLES)
    if bad_row is not None:
        labels[bad_row] = 5
    columns = {"label": labels, "dense": rng.standard_normal(SAMPLES), **bags}
    path = folder / "data.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=ROW_GROUP)
    sparse = {name: {"column": name, "num_embeddings": count, "hashing": "identity"} for name, count, _ in features}
    config = small(train={"steps": STEPS, "lanes": 8, **train})
    config["data"] = {"parquet": {"paths": [str(path)], "label": "label", "dense": ["dense"], "sparse": sparse}}
    config["validation"] = {"paths": [str(path)]}
    return config


def trained(ranks: Ranks, pool: Path, config: dict[str, Any], num_ranks: int = 1, **options: Any) -> Life:
    life = ranks.run(pool, config, num_ranks, **options)
    assert life.ended_well, life.errors()
    return life


@pytest.mark.parametrize("lanes", [2, 8])
def test_trainers_that_divide_the_files_train_what_one_process_trains(
    lanes: int, ranks: Ranks, pool_root: Path
) -> None:
    config = config_on_files(pool_root, lanes=lanes)
    plain = trained(ranks, pool_root / "plain", config, plain=True)
    for num_ranks, memory_ranks in ((2, 0), (3, 0), (3, 1)):
        life = trained(ranks, pool_root / f"{num_ranks}-{memory_ranks}", config, num_ranks, memory_ranks=memory_ranks)
        np.testing.assert_allclose(life.ranks[0].losses, plain.ranks[0].losses, rtol=1e-3)
        np.testing.assert_allclose(life.evaluations, plain.evaluations, atol=1e-3)


def test_one_trainer_of_a_laned_stream_gives_the_bits_of_one_process(ranks: Ranks, pool_root: Path) -> None:
    config = {**config_on_files(pool_root), "group": {**small()["group"], **WHOLE["group"]}}
    plain = trained(ranks, pool_root / "plain", config, plain=True)
    life = trained(ranks, pool_root / "pool", config, 2, memory_ranks=1)
    assert life.ranks[0].losses == plain.ranks[0].losses
    assert digest(pool_root / "pool") == digest(pool_root / "plain")


def test_a_killed_group_that_divides_the_files_ends_with_the_bits_of_one_that_was_not(
    ranks: Ranks, pool_root: Path
) -> None:
    config = config_on_files(pool_root)
    trained(ranks, pool_root / "whole", config, 2)
    killed = ranks.run(pool_root / "pool", config, 2, acts={1: Act(at="train", nth=17)}, grace=0.5)
    assert not killed.ended_well
    trained(ranks, pool_root / "pool", config, 2)
    assert digest(pool_root / "pool") == digest(pool_root / "whole")


def test_other_numbers_of_trainers_go_on_in_the_same_stream(ranks: Ranks, pool_root: Path) -> None:
    plain = trained(ranks, pool_root / "plain", config_on_files(pool_root), plain=True)
    losses: list[float] = []
    for num_ranks, steps in ((2, 11), (3, 19), (1, 24), (4, STEPS)):
        life = trained(ranks, pool_root / "pool", config_on_files(pool_root, steps=steps), num_ranks)
        losses += life.ranks[0].losses
    np.testing.assert_allclose(losses, plain.ranks[0].losses, rtol=1e-3)


def test_a_bad_row_that_one_trainer_alone_reads_ends_all_of_them_and_what_was_before_it_stays(
    ranks: Ranks, pool_root: Path
) -> None:
    window, batch_size = 100, 24
    order = SampleOrder(np.array(BLOCKS), seed=3, window_samples=window, lanes=Lanes(2, batch_size))
    groups = list(islice(order.groups_from(0, 1), 5))
    bad = groups[3].pieces[0].block
    labels = np.zeros(SAMPLES, int)
    labels[bad * ROW_GROUP + 7] = 5
    columns = {"label": labels, "item": np.arange(SAMPLES), "dense": np.zeros(SAMPLES)}
    pq.write_table(pa.table(columns), pool_root / "data.parquet", row_group_size=ROW_GROUP)
    options = {"path": str(pool_root / "data.parquet"), "window": window, "batch_size": batch_size, "lanes": 2}
    before = groups[3].start // (batch_size // 2)  # steps that need no sample of the bad row's group
    assert before > 5
    for opened in (0, before):
        life = ranks.run(pool_root / "pool", {**options, "steps": 25}, 2, grace=0.5, loop="with_lanes")
        other, failed = life.ranks
        assert failed.error == "DataError"
        assert f"row {bad * ROW_GROUP + 8}: column label" in failed.message
        assert other.error == "GroupError"
        assert "rank 1 failed: DataError" in other.message
        assert (other.opened, failed.all_said("step")) == (opened, list(range(opened + 1, before + 1)))
    # fewer trainers or more, the bad row is met in the same step
    life = ranks.run(pool_root / "pool", {**options, "steps": 25}, 1, grace=0.5, loop="with_lanes")
    assert (life.ranks[0].error, life.ranks[0].opened, life.ranks[0].all_said("step")) == ("DataError", before, [])


def test_a_loop_of_ones_own_divides_the_files(ranks: Ranks, pool_root: Path) -> None:
    columns = {"label": np.arange(SAMPLES) % 2, "item": np.arange(SAMPLES), "dense": np.zeros(SAMPLES)}
    pq.write_table(pa.table(columns), pool_root / "data.parquet", row_group_size=ROW_GROUP)
    options = {"path": str(pool_root / "data.parquet"), "window": 100, "batch_size": 24, "lanes": 6, "steps": 30}
    losses = {}
    blocks = {}
    for num_ranks in (1, 2, 3):
        life = ranks.run(pool_root / str(num_ranks), options, num_ranks, loop="with_lanes")
        assert life.ended_well, life.errors()
        losses[num_ranks] = np.mean([rank.losses for rank in life.ranks], axis=0)
        blocks[num_ranks] = [rank.all_said("blocks")[0] for rank in life.ranks]
    np.testing.assert_allclose(losses[2], losses[1], rtol=1e-4)
    np.testing.assert_allclose(losses[3], losses[1], rtol=1e-4)
    assert max(blocks[2]) <= 0.8 * blocks[1][0]
    assert max(blocks[3]) <= 0.7 * blocks[1][0]


def test_loaders_of_other_batches_are_refused(ranks: Ranks, pool_root: Path) -> None:
    """Rank 1 would take samples of its own, and after a resume others than without."""
    columns = {"label": np.arange(SAMPLES) % 2, "item": np.arange(SAMPLES), "dense": np.zeros(SAMPLES)}
    pq.write_table(pa.table(columns), pool_root / "data.parquet", row_group_size=ROW_GROUP)
    options = {"path": str(pool_root / "data.parquet"), "window": 100, "batch_size": 24, "odd_batch_size": 12}
    life = ranks.run(pool_root / "pool", {**options, "lanes": 1, "steps": 4}, 2, loop="with_lanes")
    for rank, message in life.errors().items():
        assert f"of rank {rank}" in message
        assert "make them the same" in message
    assert [rank.error for rank in life.ranks] == ["ConfigError"] * 2


def test_batches_smaller_than_the_number_of_trainers_are_refused(ranks: Ranks, pool_root: Path) -> None:
    """A rank without a sample has a loss that is NaN, which told of learning rates."""
    columns = {"label": np.arange(SAMPLES) % 2, "item": np.arange(SAMPLES), "dense": np.zeros(SAMPLES)}
    pq.write_table(pa.table(columns), pool_root / "data.parquet", row_group_size=ROW_GROUP)
    options = {"path": str(pool_root / "data.parquet"), "window": 100, "lanes": 1, "steps": 2}
    small = ranks.run(pool_root / "small", {**options, "batch_size": 1}, 2, loop="with_lanes")
    assert [rank.error for rank in small.ranks] == ["ConfigError"] * 2
    assert all("batch_size = 1 for 2 ranks that train" in message for message in small.errors().values())
    assert ranks.run(pool_root / "least", {**options, "batch_size": 2}, 2, loop="with_lanes").ended_well


def test_trainers_that_decode_more_than_their_share_say_so_and_what_to_do(ranks: Ranks, pool_root: Path) -> None:
    def advice(num_ranks: int, lanes: int, **train: Any) -> str | None:
        pool = pool_root / f"{num_ranks}-{lanes}-{len(train)}"
        life = trained(ranks, pool, config_on_files(pool_root, lanes=lanes, **{"steps": 1, **train}), num_ranks)
        found = life.ranks[0].all_said("advice")[0]
        assert found is None or isinstance(found, str)
        return found

    assert advice(1, 1) is None
    assert advice(2, 2) is None
    assert advice(2, 1, shuffle=False) is None
    assert "[train] lanes = 8 with new data, or in a new pool, divides it" in (advice(2, 1) or "")
    assert "[train] lanes = 9 with new data, or in a new pool, divides it" in (advice(3, 1) or "")
    assert "lanes = 8 is no multiple of the 3 trainers" in (advice(3, 8) or "")
    assert "the data are only 13 blocks (row groups), for 8 lanes" in (advice(2, 8) or "")
    generated = trained(ranks, pool_root / "generated", small(train={"steps": 1}), 2)
    assert generated.ranks[0].all_said("advice") == [None]
