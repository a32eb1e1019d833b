"""Tables whose ids are keys, trained by several ranks: each key has its row at one of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pool_digests import digest_of_tables

import holdfast
from group_runs import Act, Life, Ranks, digest
from holdfast import _core
from holdfast.admin.by_key import keyed_rows
from holdfast.admin.exporting import export_pool
from holdfast.admin.inspection import inspect_pool
from holdfast.admin.snapshot import restore_snapshot, take_snapshot
from holdfast.errors import ConfigError
from holdfast.pools.read_only import ReadOnlyPool, at_rest, open_reader
from keyed_loops import score, tables

STORES: dict[str, dict[str, Any]] = {
    "in place": {},
    "log": {"medium": "block", "log_bytes": 60 << 10, "dense_interval": 3},
}
GROUPS = {"one process": (1, 0), "2 ranks": (2, 0), "4 ranks": (4, 0), "2 trainers, 2 memory ranks": (4, 2)}
LEAVES: dict[str, Any] = {"ttl_steps": 4, "admit_after": 2}
ROOM: dict[str, Any] = {"max_keys": 96, "stay": "lfu", "admit_probability": 0.5}

pytestmark = pytest.mark.dear


def run(ranks: Ranks, directory: Path, options: dict[str, Any], group: str = "2 ranks", **how: Any) -> Life:
    num_ranks, memory_ranks = GROUPS[group]
    how = {"loop": "keyed_loops:train", **how}
    return ranks.run(directory, options, num_ranks, memory_ranks=memory_ranks, **how)


def whole(ranks: Ranks, directory: Path, options: dict[str, Any], group: str = "2 ranks", **how: Any) -> str:
    life = run(ranks, directory, options, group, **how)
    assert life.ended_well, life.errors()
    return digest(directory)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", [{}, LEAVES, ROOM], ids=["kept", "left behind", "left behind for room"])
def test_keys_have_the_rows_of_one_process_whoever_owns_them(
    policy: dict[str, Any], store: str, ranks: Ranks, pool_root: Path
) -> None:
    """To the bit: bags of the table that is cut have one id each, and the other lies whole. Where shards have parts
    of max_keys, one process goes on with a pool that has shards."""
    options = {**STORES[store], **policy}
    found = {}
    for group in GROUPS:
        if "max_keys" in policy:
            whole(ranks, pool_root / group, {**options, "steps": 1}, "2 ranks")
        whole(ranks, pool_root / group, options, group)
        found[group] = digest_of_tables(pool_root / group)
    assert len({json.dumps(each) for each in found.values()}) == 1, found


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("group", ["2 ranks", "2 trainers, 2 memory ranks"])
def test_a_rank_that_is_killed_costs_no_bit_of_any_key(group: str, store: str, ranks: Ranks, pool_root: Path) -> None:
    options = {**STORES[store], **LEAVES, "dense": True, "seen": 3, "timeout": 5.0}
    expected = whole(ranks, pool_root / "whole", options, group)
    draw = random.Random(f"{group} {store}")
    for _ in range(3):
        victim = draw.randrange(GROUPS[group][0])
        act = Act(
            at=draw.choice(["commit", "dense", "collective"]), nth=draw.randrange(2, 8), after=draw.random() < 0.5
        )
        run(ranks, pool_root / "killed", options, group, acts={victim: act}, grace=0.2)
    assert whole(ranks, pool_root / "killed", options, group) == expected


@pytest.mark.parametrize(("store", "policy"), [("in place", LEAVES), ("log", LEAVES), ("log", ROOM)])
def test_killed_at_a_persist_point_no_bit_is_lost(
    store: str, policy: dict[str, Any], ranks: Ranks, pool_root: Path
) -> None:
    options = {**STORES[store], **policy, "dense": True, "timeout": 5.0}
    expected = whole(ranks, pool_root / "whole", options)
    for persist_point in (5, 17, 31):
        act = Act(persist_point=persist_point)
        run(ranks, pool_root / "killed", options, acts={persist_point % 2: act}, grace=0.2)
    assert whole(ranks, pool_root / "killed", options) == expected


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", [LEAVES, ROOM], ids=["age", "room"])
def test_a_pool_that_other_ranks_go_on_with_keeps_every_key(
    policy: dict[str, Any], store: str, ranks: Ranks, pool_root: Path
) -> None:
    """Dealt out anew between lives, one of which is killed."""
    options = {**STORES[store], **policy, "timeout": 5.0}
    whole(ranks, pool_root / "straight", options, "2 ranks")
    lives = [("4 ranks", 4), ("one process", 6), ("2 trainers, 2 memory ranks", 9), ("2 ranks", 12)]
    for group, steps in lives:
        if group == "2 ranks":
            run(ranks, pool_root / "dealt", options, group, acts={1: Act(at="commit", nth=2)}, grace=0.2)
        whole(ranks, pool_root / "dealt", {**options, "steps": steps}, group)
    assert digest_of_tables(pool_root / "dealt") == digest_of_tables(pool_root / "straight")


def test_batches_that_are_announced_ahead_change_no_bit(ranks: Ranks, pool_root: Path) -> None:
    options = {**STORES["log"], **LEAVES, "dense": True}
    expected = whole(ranks, pool_root / "0", options)
    assert whole(ranks, pool_root / "3", {**options, "ahead": 3}) == expected


def test_keys_that_nobody_has_seen_read_as_their_initial_values_and_leave_no_trace(
    ranks: Ranks, pool_root: Path
) -> None:
    """On every rank, and for whoever reads the group's pool or that of one process."""
    expected = whole(ranks, pool_root / "without", LEAVES)
    life = run(ranks, pool_root / "with", {**LEAVES, "evaluate_every": 3})
    assert life.ended_well, life.errors()
    assert digest(pool_root / "with") == expected
    whole(ranks, pool_root / "one", LEAVES, "one process")
    of_readers = []
    for directory in (pool_root / "with", pool_root / "one"):
        rows = holdfast.EmbeddingBagCollection(
            ReadOnlyPool(directory), tables(LEAVES), optimizer=holdfast.Adagrad(lr=0.3)
        )
        of_readers.append(score(rows, (0, 2)))
    assert of_readers[0] == of_readers[1] == life.ranks[0].all_said("score")[-1]


def test_inspection_export_and_a_snapshot_know_a_groups_keys(ranks: Ranks, pool_root: Path, tmp_path: Path) -> None:
    whole(ranks, pool_root / "group", LEAVES)
    whole(ranks, pool_root / "one", LEAVES, "one process")
    of_group, of_one = (inspect_pool(pool_root / name)["tables"] for name in ("group", "one"))
    assert [table["keys"] for table in of_group] == [table["keys"] for table in of_one]
    assert of_group[0]["keys"]["live"] > 50
    exported = []
    for name in ("group", "one"):
        with at_rest(pool_root / name) as (reader, _):
            export_pool(reader, tmp_path / f"{name}.safetensors")
        exported.append((tmp_path / f"{name}.safetensors").read_bytes())
    assert exported[0] == exported[1]
    take_snapshot(pool_root / "group", tmp_path / "snapshot")
    restore_snapshot(tmp_path / "snapshot", pool_root / "restored")
    assert digest(pool_root / "restored") == digest(pool_root / "group")
    assert whole(ranks, pool_root / "restored", {**LEAVES, "steps": 15}) == whole(
        ranks, pool_root / "group", {**LEAVES, "steps": 15}
    )


def test_a_shard_that_is_full_ends_all_ranks_by_name(ranks: Ranks, pool_root: Path) -> None:
    life = run(ranks, pool_root / "pool", {}, loop="keyed_loops:until_full")
    errors = life.errors()
    assert not life.ended_well
    assert any("PoolFull" in error and "larger capacity" in error for error in errors.values()), errors
    assert open_reader(pool_root / "pool").commit["step"] > 0


def test_each_shard_has_its_part_of_the_keys(ranks: Ranks, pool_root: Path) -> None:
    """Counted over the records of the whole pool, the newest step's beside them."""
    whole(ranks, pool_root / "pool", {"max_keys": 96, "steps": 20})
    with at_rest(pool_root / "pool") as (reader, _):
        (number,) = (number for number, table in enumerate(reader.tables) if table.name == "item")
        _, records = keyed_rows(reader, number)
        shards = _core.shards_of_keys(reader.header["seed"], number, 8, np.ascontiguousarray(records["key"]))
    of_shard = [records["step"][shards == shard] for shard in range(8)]
    assert all(len(steps) <= 12 or (steps == steps.max()).all() for steps in of_shard)
    assert 0.5 * 96 < len(records) <= 96


def test_fewer_keys_than_shards_are_refused_and_leave_nothing_in_the_way(ranks: Ranks, pool_root: Path) -> None:
    life = run(ranks, pool_root / "pool", {"max_keys": 7})
    errors = life.errors().values()
    assert any("ConfigError: table 'item': max_keys = 7, of which each of its 8 shards" in error for error in errors)
    assert len(errors) == 2
    whole(ranks, pool_root / "pool", {"steps": 2, "max_keys": 8})


def test_a_capacity_beyond_what_shards_can_have_is_refused_and_leaves_nothing_in_the_way(
    ranks: Ranks, pool_root: Path
) -> None:
    life = run(ranks, pool_root / "pool", {"capacity": (1 << 32) - 2})
    assert all("make its capacity smaller" in error for error in life.errors().values()), life.errors()
    assert len(life.errors()) == 2
    whole(ranks, pool_root / "pool", {"steps": 2})


def test_a_part_with_fewer_keys_than_shards_is_not_made(pool_root: Path) -> None:
    (pool_root / "part").mkdir(parents=True)
    spec = _core.TableSpec(
        name="t", num_embeddings=500, embedding_dim=4, dtype=0, optimizer=0, pooling=0, init_low=0.0, init_high=0.0,
        table_shards=4, keys=1, max_keys=3,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="max_keys = 3"):
        _core.Pool.create(
            str(pool_root / "part"), 1, 1 << 20, [spec], log_store=False, num_shards=4, owned=[0, 1, 2, 3],
            group_uuid=bytes(range(16)),
        )  # fmt: skip


def test_shards_of_keys_are_even_and_stay_what_they_are() -> None:
    """They are part of the format: a pool of today is read by what comes."""
    keys = np.arange(-(1 << 16), 1 << 16)
    shards = _core.shards_of_keys(7, 3, 16, keys)
    counts = np.bincount(shards, minlength=16)
    assert counts.min() > 0.95 * counts.mean()
    assert counts.max() < 1.05 * counts.mean()
    edges = np.array([0, 1, -1, np.iinfo(np.int64).min, np.iinfo(np.int64).max], np.int64)
    assert _core.shards_of_keys(0, 0, 4096, edges).tolist() == GOLDEN
    assert (_core.shards_of_keys(0, 1, 4096, edges) != GOLDEN).any()


# By a program of a few lines that knows nothing of the core: docs/FORMAT.md says how.
GOLDEN = [1672, 3024, 878, 3156, 881]
