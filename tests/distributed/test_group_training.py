"""Several ranks train what one process trains; and whoever owns the shards, their rows stay as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from pool_digests import digest_of_tables

from group_runs import LOG_STORE, WHOLE, Life, Ranks, digest, small
from holdfast.group import manifest as manifests
from holdfast.pools.read_only import at_rest, touched_rows

pytestmark = pytest.mark.dear

STEPS = 30
VALIDATION = {"validation": {"num_samples": 300}}
# fp32 sums in another order, over STEPS steps of an adaptive optimizer
TOLERANCE = {"rtol": 2e-3, "atol": 2e-4}


def trained(ranks: Ranks, pool: Path, config: Mapping[str, Any], num_ranks: int = 1, **options: Any) -> Life:
    patient = {**config, "group": {**config["group"], "timeout": 60.0}}  # on a busy machine, too: nobody dies here
    life = ranks.run(pool, patient, num_ranks, **options)
    assert life.ended_well, life.errors()
    return life


def rows_of(pool: Path) -> dict[str, tuple[NDArray[np.uint64], NDArray[np.float32]]]:
    """Touched rows and their weights, by table; of fp32 tables."""
    found = {}
    with at_rest(pool) as (reader, _):
        for number, table in enumerate(reader.tables):
            chunks = list(touched_rows(reader, number))
            rows = np.concatenate([chunk.rows for chunk in chunks])
            weights = np.concatenate([chunk.weights for chunk in chunks]).view(np.float32)
            found[table.name] = rows, weights
    return found


def check_close(one: Path, several: Path, **tolerance: float) -> None:
    ours, theirs = rows_of(one), rows_of(several)
    assert ours.keys() == theirs.keys()
    for name, (rows, weights) in ours.items():
        np.testing.assert_array_equal(rows, theirs[name][0])
        np.testing.assert_allclose(theirs[name][1], weights, **tolerance)


RUNS: dict[str, dict[str, Any]] = {
    "in_place": {},
    "log_store": LOG_STORE,
    "mean_pooling": {"embedding": {"pooling": "mean"}},
    "adam_rows": {"embedding": {"optimizer": "adam", "lr": 0.01}},
    "sgd_clipped": {"embedding": {"optimizer": "sgd", "lr": 0.1}, "train": {"max_grad_norm": 0.05}},
    "whole_tables_dense_every_5_steps": {**WHOLE, "pool": {"dense_interval": 5}},
}


def run_of(**sections: Any) -> dict[str, Any]:
    return small(**{**VALIDATION, **sections, "train": {"steps": STEPS, **sections.get("train", {})}})


@pytest.mark.parametrize("name", RUNS)
def test_several_ranks_train_to_the_rows_of_one_process(name: str, ranks: Ranks, pool_root: Path) -> None:
    config = run_of(**RUNS[name])
    plain = trained(ranks, pool_root / "plain", config, plain=True)
    for num_ranks, memory_ranks in ((1, 0), (3, 0), (3, 1)):
        pool = pool_root / f"{num_ranks}-{memory_ranks}"
        life = trained(ranks, pool, config, num_ranks, memory_ranks=memory_ranks)
        np.testing.assert_allclose(life.ranks[0].losses, plain.ranks[0].losses, rtol=1e-3)
        np.testing.assert_allclose(life.evaluations, plain.evaluations, atol=1e-3)
        check_close(pool_root / "plain", pool, **TOLERANCE)


def test_every_rank_reports_the_loss_of_the_whole_batch_or_none(ranks: Ranks, pool_root: Path) -> None:
    life = trained(ranks, pool_root / "pool", run_of(), 3, memory_ranks=1)
    assert life.ranks[0].losses == life.ranks[1].losses
    assert all(math.isnan(loss) for loss in life.ranks[2].losses)


def test_bf16_trains_to_about_the_rows_of_one_process(ranks: Ranks, pool_root: Path) -> None:
    config = run_of(train={"bf16": True})
    plain = trained(ranks, pool_root / "plain", config, plain=True)
    life = trained(ranks, pool_root / "pool", config, 2)
    np.testing.assert_allclose(life.ranks[0].losses, plain.ranks[0].losses, rtol=0.02)
    np.testing.assert_allclose(life.evaluations, plain.evaluations, atol=0.02)


@pytest.mark.parametrize("store", [{}, LOG_STORE], ids=["in_place", "log_store"])
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"embedding": {"optimizer": "adam", "dtype": "bf16"}},
        {"embedding": {"pooling": "mean"}, "pool": {"dense_interval": 4}},
        {"train": {"bf16": True}},
    ],
    ids=["rowwise_adagrad", "adam_bf16", "mean_dense_every_4_steps", "autocast"],
)
def test_one_trainer_with_memory_ranks_and_whole_tables_gives_the_bits_of_one_process(
    sections: dict[str, Any], store: dict[str, Any], ranks: Ranks, pool_root: Path
) -> None:
    sections = {**sections, **WHOLE, "pool": {**store.get("pool", {}), **sections.get("pool", {})}}
    config = run_of(**sections)
    plain = trained(ranks, pool_root / "plain", config, plain=True)
    expected = digest(pool_root / "plain")
    for num_ranks in (1, 2, 3):
        pool = pool_root / str(num_ranks)
        life = trained(ranks, pool, config, num_ranks, memory_ranks=num_ranks - 1)
        assert life.ranks[0].losses == plain.ranks[0].losses
        assert life.evaluations == plain.evaluations
        assert digest(pool) == expected


def test_evaluation_between_steps_leaves_no_trace(ranks: Ranks, pool_root: Path) -> None:
    config = run_of(train={"eval_every": 7, "eval_batch_size": 64})
    life = trained(ranks, pool_root / "often", config, 2)
    once = trained(ranks, pool_root / "once", run_of(), 2)
    assert len(life.evaluations) == 1 + STEPS // 7
    np.testing.assert_allclose(life.evaluations[-1], once.evaluations[-1], rtol=1e-6)
    assert digest(pool_root / "often") == digest(pool_root / "once")


@pytest.mark.parametrize("memory_ranks", [0, 1])
def test_rows_that_are_captured_ahead_change_no_bit(memory_ranks: int, ranks: Ranks, pool_root: Path) -> None:
    for name, ahead in (("without", False), ("with", True)):
        config = small(train={"capture_ahead": ahead, "max_grad_norm": 0.5}, pool={"dense_interval": 3})
        trained(ranks, pool_root / name, config, 3, memory_ranks=memory_ranks)
    check_close(pool_root / "without", pool_root / "with", rtol=0, atol=0)


@pytest.mark.parametrize("store", [{}, LOG_STORE], ids=["in_place", "log_store"])
def test_memory_ranks_pool_in_two_parts_with_the_bits_of_one_process(
    store: dict[str, Any], ranks: Ranks, pool_root: Path
) -> None:
    bags = {"synthetic": {"num_samples": 4000, "rows": [50, 7, 3000, 90], "lookups": [5, 3, 9, 4], "num_dense": 3}}
    sections = {**store, "data": bags, "device": {"relaxed_lookup": True}, "train": {"steps": STEPS, "window": 3}}
    sections = {**sections, **WHOLE}
    config = small(**sections)
    plain = trained(ranks, pool_root / "plain", config, plain=True)
    for num_ranks in (2, 3):
        pool = pool_root / str(num_ranks)
        life = trained(ranks, pool, config, num_ranks, memory_ranks=num_ranks - 1)
        assert life.ranks[0].losses == plain.ranks[0].losses
        assert digest(pool) == digest(pool_root / "plain")
    exact = trained(ranks, pool_root / "exact", small(**{**sections, "device": {}}), 2, memory_ranks=1)
    assert exact.ranks[0].losses != plain.ranks[0].losses


def test_a_group_evaluates_as_any_other_over_the_same_pool(ranks: Ranks, pool_root: Path) -> None:
    """Batches smaller than the group, too: the last one has a single sample."""
    config = run_of(train={"eval_batch_size": 23}, validation={"num_samples": 277})
    pool = pool_root / "pool"
    first = trained(ranks, pool, config, 3).evaluations
    for num_ranks, memory_ranks in ((1, 0), (4, 0), (4, 3)):
        again = trained(ranks, pool, config, num_ranks, memory_ranks=memory_ranks)
        np.testing.assert_allclose(again.evaluations, first, rtol=1e-5)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_jagged_and_empty_bags(pooling: str, ranks: Ranks, pool_root: Path) -> None:
    rng = np.random.default_rng(7)
    num_samples = 400
    bags = {
        name: [rng.integers(0, count, rng.integers(0, most + 1)).tolist() for _ in range(num_samples)]
        for name, count, most in (("few", 40, 1), ("many", 2000, 9), ("mostly_empty", 300, 2))
    }
    columns = {"label": rng.integers(0, 2, num_samples), "dense": rng.standard_normal(num_samples), **bags}
    pq.write_table(pa.table(columns), pool_root / "data.parquet", row_group_size=50)
    sparse = {
        name: {"column": name, "num_embeddings": count, "hashing": "identity"}
        for name, count in (("few", 40), ("many", 2000), ("mostly_empty", 300))
    }
    path = str(pool_root / "data.parquet")
    config = small(train={"steps": STEPS}, embedding={"pooling": pooling})
    config["data"] = {"parquet": {"paths": [path], "label": "label", "dense": ["dense"], "sparse": sparse}}
    config["validation"] = {"paths": [path]}
    plain = trained(ranks, pool_root / "plain", config, plain=True)
    for num_ranks, memory_ranks in ((3, 0), (3, 2)):
        pool = pool_root / f"{num_ranks}-{memory_ranks}"
        life = trained(ranks, pool, config, num_ranks, memory_ranks=memory_ranks)
        np.testing.assert_allclose(life.ranks[0].losses, plain.ranks[0].losses, rtol=1e-3)
        np.testing.assert_allclose(life.evaluations, plain.evaluations, atol=1e-3)
        check_close(pool_root / "plain", pool, **TOLERANCE)


# Elastic.


def row_files(pool: Path) -> dict[str, tuple[int, int, bytes]]:
    """Which file it is, when it was written last, and its bytes."""
    files = (path for path in sorted(pool.glob("shard-*/*")) if path.is_file())
    return {
        str(path.relative_to(pool)): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in files
    }


@pytest.mark.parametrize("store", [{}, LOG_STORE], ids=["in_place", "log_store"])
def test_other_ranks_go_on_with_the_same_rows_and_no_row_is_rewritten(
    store: dict[str, Any], ranks: Ranks, pool_root: Path
) -> None:
    pool = pool_root / "pool"
    losses: list[float] = []
    steps = 0
    for generation, (num_ranks, memory_ranks) in enumerate([(3, 0), (1, 0), (4, 0), (4, 2), (4, 3)], start=1):
        if steps:
            files = row_files(pool)
            rows = digest_of_tables(pool)
            changed = trained(ranks, pool, small(train={"steps": steps}, **store), num_ranks, memory_ranks=memory_ranks)
            assert changed.opened == steps
            assert digest_of_tables(pool) == rows
            if not store:  # what a log store's log still has goes home
                assert row_files(pool) == files
            assert changed.ranks[0].losses == []
        steps += 8
        life = trained(ranks, pool, small(train={"steps": steps}, **store), num_ranks, memory_ranks=memory_ranks)
        losses += life.ranks[0].losses
        manifest = manifests.read(pool)
        assert manifest.num_writers == (memory_ranks or num_ranks)
        assert manifest.generation <= generation
        assert not [path for path in pool.glob("writers-*") if path.name != f"writers-{manifest.generation}"]
    whole = trained(ranks, pool_root / "whole", small(train={"steps": steps}, **store), 2)
    np.testing.assert_allclose(losses, whole.ranks[0].losses, rtol=1e-3)
    check_close(pool_root / "whole", pool, **TOLERANCE)


def test_one_trainer_goes_on_exactly_whoever_owns_whole_tables(ranks: Ranks, pool_root: Path) -> None:
    pool = pool_root / "pool"
    for lives, memory_ranks in enumerate((0, 3, 1, 2), start=1):
        config = small(**WHOLE, train={"steps": 6 * lives})
        trained(ranks, pool, config, 1 + memory_ranks, memory_ranks=memory_ranks)
    trained(ranks, pool_root / "plain", small(**WHOLE, train={"steps": 24}), plain=True)
    assert digest(pool) == digest(pool_root / "plain")
