"""A pool that one process made is cut into shards by a restore, and any number of ranks goes on with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pool_digests import digest_of_tables

from cli_runs import pool_digest
from holdfast.admin.by_key import keyed_rows
from holdfast.admin.snapshot import restore_snapshot, take_snapshot
from holdfast.errors import ConfigError, PoolExists
from holdfast.group import manifest as manifests
from holdfast.group.options import GroupConfig
from holdfast.pools.read_only import at_rest
from holdfast.run.sections import RunConfig
from test_group_reading import config as config
from test_group_reading import deal_out, on, open_alone, train_group, train_plain
from test_resizing import STORES, keyed, numbered, train


def cut(pool: Path, name: str, **options: Any) -> Path:
    """A copy of the pool, in shards of at most a hundred rows of a table that is whole."""
    snapshot = pool.with_name(f"{name}.snapshot")
    take_snapshot(pool, snapshot)
    given = {"shards": GroupConfig(shards=8, split_rows=100), **options}
    restore_snapshot(snapshot, pool.with_name(name), **given)
    return pool.with_name(name)


def with_steps(config: RunConfig, steps: int) -> RunConfig:
    return replace(config, train=replace(config.train, steps=steps))


@pytest.mark.dear
@pytest.mark.parametrize("medium", ["memory", "block"])
def test_a_run_that_one_process_began_goes_on_in_shards(config: RunConfig, pool_root: Path, medium: str) -> None:
    config = on(config, medium)
    whole = pool_digest(train_plain(config, pool_root / "whole"))
    train_plain(with_steps(config, 5), pool_root / "begun")
    for name, writers in (("one", 1), ("three", 3)):
        pool = cut(pool_root / "begun", name, medium=medium)
        assert pool_digest(pool) == pool_digest(pool_root / "begun")
        deal_out(pool, writers)
        with open_alone(config, pool) as trainer:
            for _ in trainer.steps():
                pass
            trainer.flush()
        assert pool_digest(pool) == whole


@pytest.mark.dear
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("has_keys", [False, True])
def test_rows_and_keys_find_their_shards_whatever_the_pool_was_cut_into(
    store: str, has_keys: bool, pool_root: Path
) -> None:
    """From one process to 8 shards, to 2 with more rows, to a table that is whole."""
    table = keyed if has_keys else numbered
    train(pool_root / "begun", store, table(3000), 1, 6, 900)
    expected = digest_of_tables(pool_root / "begun")
    medium = {"medium": STORES[store]["medium"]}
    eight = cut(pool_root / "begun", "eight", **medium)
    assert manifests.read(eight).tables[0].table_shards == 8
    assert digest_of_tables(eight) == expected
    deal_out(eight, 3)
    two = cut(eight, "two", **medium, shards=GroupConfig(shards=2, split_rows=10), rows={"items": 4000})
    whole = cut(two, "whole", **medium, shards=GroupConfig(shards=4), rows={"items": 3000})
    assert manifests.read(whole).tables[0].table_shards == 1
    assert digest_of_tables(whole) == expected
    train(pool_root / "begun", store, table(3000), 7, 9, 900)
    for pool in (eight, whole):
        train(pool, store, table(3000), 7, 9, 900, shards=8)
        assert digest_of_tables(pool) == digest_of_tables(pool_root / "begun")


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", [{"max_keys": 200}, {"max_keys": 128, "stay": "lfu"}, {"ttl_steps": 3}])
def test_keys_that_were_left_behind_do_not_come_back_in_a_shard_with_room(
    policy: dict[str, Any], store: str, pool_root: Path
) -> None:
    """Nor do rows that a key had before: one that came back would have two."""
    table = replace(keyed(3000), **policy)
    train(pool_root / "pool", store, table, 1, 40, 900)
    take_snapshot(pool_root / "pool", pool_root / "first")
    train(pool_root / "pool", store, table, 41, 60, 900)
    take_snapshot(pool_root / "pool", pool_root / "second", since=pool_root / "first")
    restore_snapshot(pool_root / "second", pool_root / "cut", shards=GroupConfig(shards=8, split_rows=10))
    before, after = keys_of(pool_root / "pool"), keys_of(pool_root / "cut")
    assert 0 < len(after) == len(after & before)


def keys_of(pool: Path) -> set[int]:
    with at_rest(pool) as (reader, _):
        return set(keyed_rows(reader, 0).records["key"].tolist())


def test_the_rows_of_a_later_snapshot_count(pool_root: Path) -> None:
    train(pool_root / "pool", "block", keyed(3000), 1, 3, 900)
    take_snapshot(pool_root / "pool", pool_root / "first")
    train(pool_root / "pool", "block", keyed(3000), 4, 6, 900)
    take_snapshot(pool_root / "pool", pool_root / "second", since=pool_root / "first")
    restore_snapshot(pool_root / "second", pool_root / "cut", shards=GroupConfig(shards=4, split_rows=10))
    assert digest_of_tables(pool_root / "cut") == digest_of_tables(pool_root / "pool")


def test_keys_that_a_shard_has_no_room_for_are_said_with_what_has(pool_root: Path) -> None:
    train(pool_root / "pool", "memory", keyed(350), 1, 6, 340)
    with pytest.raises(ConfigError, match=r"table 'items': a shard has room for 5 keys.* --rows items=\d+"):
        cut(pool_root / "pool", "cut", shards=GroupConfig(shards=64, split_rows=10))
    assert not (pool_root / "cut").exists()


def test_more_shards_than_max_keys_are_refused_with_what_helps(pool_root: Path) -> None:
    train(pool_root / "pool", "memory", replace(keyed(350), max_keys=20), 1, 2, 340)
    with pytest.raises(ConfigError, match=r"'items': its max_keys are 20, .* 64 shards .*: take fewer shards"):
        cut(pool_root / "pool", "cut", shards=GroupConfig(shards=64, split_rows=10))
    assert not (pool_root / "cut").exists()


def test_shards_are_compared_with_the_pools(config: RunConfig, pool_root: Path) -> None:
    train_plain(with_steps(config, 2), pool_root / "pool")
    with pytest.raises(PoolExists, match="restore --shards"):
        train_group(config, pool_root / "pool")
    pool = cut(pool_root / "pool", "cut", shards=GroupConfig(shards=16))
    with pytest.raises(ConfigError, match=r"group.shards: 8, but the pool is cut into 16"):
        open_alone(config, pool)
    train_group(replace(config, group=replace(config.group, shards=16)), pool)
