"""Tables that get more rows, or fewer: a restore of a snapshot gives them, and training goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool_digests import digest_of_tables
from torch._C._distributed_c10d import HashStore

from holdfast import Adagrad, Checkpoint, EmbeddingBagCollection, EmbeddingBagConfig, Pool
from holdfast.admin.digest import digest_pool
from holdfast.admin.repair import problems_of
from holdfast.admin.snapshot import restore_snapshot, take_snapshot
from holdfast.errors import ConfigError, PoolFull
from holdfast.group.group import Group
from holdfast.group.options import GroupOptions
from holdfast.group.roles import Roles
from holdfast.group.shared_pool import SharedPool
from holdfast.pools.read_only import at_rest, layout_of
from test_group_reading import deal_out

STORES: dict[str, dict[str, Any]] = {
    "memory": {"medium": "memory"},
    "block": {"medium": "block", "log_bytes": 60 << 10, "scratchpad_bytes": 200_000},
}


def train(
    directory: Path, store: str, table: EmbeddingBagConfig, first: int, last: int, end: int, *, shards: int = 0
) -> None:
    """Steps first to last, whose ids are below `end`. shards: of a group of one, over which the table is cut."""
    with open_pool(directory, STORES[store], shards) as pool:
        rows = EmbeddingBagCollection(pool, [table], optimizer=Adagrad(lr=0.2))
        model = torch.nn.Linear(table.embedding_dim, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        checkpoint = Checkpoint(pool, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
        assert checkpoint.resume() == first - 1
        for step in range(first, last + 1):
            ids = torch.from_numpy(np.random.default_rng(step).integers(0, end, 40))
            (model(rows({"item": (ids, torch.arange(41))}).values()).square().mean()).backward()
            rows.optimizer.step()
            checkpoint.commit()
        checkpoint.flush()


def open_pool(directory: Path, options: dict[str, Any], shards: int) -> Pool:
    if not shards:
        return Pool(directory, seed=9, **options)
    ranks = Group(store=HashStore(), rank=0, roles=Roles(world_size=1), timeout=10.0)
    return SharedPool(directory, seed=9, group=GroupOptions(shards=shards, split_rows=1), ranks=ranks, **options)


def numbered(num_rows: int, **fields: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(num_embeddings=num_rows, embedding_dim=5, name="items", feature_names=["item"], **fields)


def keyed(capacity: int) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        num_embeddings=None, capacity=capacity, embedding_dim=5, name="items", feature_names=["item"]
    )


def read(directory: Path, count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    with at_rest(directory) as (reader, _):
        layout = layout_of(reader.tables[0])
        weights = np.zeros(count * layout.weight_bytes, np.uint8)
        state = np.zeros(count * layout.state_bytes, np.uint8)
        reader.read_rows(0, 0, count, weights, state)
    return weights, state


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("other", STORES)
def test_a_table_that_grows_keeps_its_rows_and_trains_new_ones(store: str, other: str, pool_root: Path) -> None:
    """Beside a pool that had so many rows from its beginning, and the same initial values."""
    bound = 1 / np.sqrt(300)
    train(pool_root / "large", store, numbered(90_000, weight_init_min=-bound, weight_init_max=bound), 1, 6, 300)
    train(pool_root / "small", store, numbered(300), 1, 6, 300)
    take_snapshot(pool_root / "small", pool_root / "snapshot")
    restore_snapshot(
        pool_root / "snapshot", pool_root / "grown", medium=STORES[other]["medium"], rows={"items": 90_000}
    )
    for name in ("large", "grown"):
        store_of = store if name == "large" else other
        table = numbered(90_000, weight_init_min=-bound, weight_init_max=bound) if name == "large" else numbered(90_000)
        train(pool_root / name, store_of, table, 7, 12, 90_000)
    for mine, theirs in zip(read(pool_root / "grown", 90_000), read(pool_root / "large", 90_000), strict=True):
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("store", STORES)
def test_a_full_table_of_keys_goes_on_with_a_larger_capacity(store: str, pool_root: Path) -> None:
    with pytest.raises(PoolFull, match=r"'items' .* restore --rows items=N"):
        train(pool_root / "pool", store, keyed(50), 1, 9, 400)
    with at_rest(pool_root / "pool") as (reader, _):
        step = reader.commit["step"]
    take_snapshot(pool_root / "pool", pool_root / "snapshot")
    restore_snapshot(pool_root / "snapshot", pool_root / "grown", medium=STORES[store]["medium"], rows={"items": 5000})
    train(pool_root / "grown", store, keyed(5000), step + 1, 9, 400)
    with at_rest(pool_root / "grown") as (reader, _):
        assert digest_pool(reader).rows_counted > 150


def test_a_table_shrinks_by_rows_that_nobody_used_and_by_no_other(pool_root: Path) -> None:
    train(pool_root / "pool", "memory", numbered(1000), 1, 4, 300)
    take_snapshot(pool_root / "pool", pool_root / "snapshot")
    restore_snapshot(pool_root / "snapshot", pool_root / "300", rows={"items": 300})
    train(pool_root / "300", "memory", numbered(300), 5, 6, 300)
    for mine, theirs in zip(read(pool_root / "300", 5), read(pool_root / "pool", 5), strict=True):
        assert mine.size == theirs.size > 0
    with pytest.raises(ConfigError, match=r"row \d+ is in use, and 200 rows would end before it"):
        restore_snapshot(pool_root / "snapshot", pool_root / "200", rows={"items": 200})
    assert not (pool_root / "200").exists()


@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("before", "after"), [(2000, 700_000), (700_000, 2000)])
def test_a_table_that_is_cut_over_shards_changes_as_one_that_lies_whole(
    before: int, after: int, store: str, has_keys: bool, pool_root: Path
) -> None:
    """By so much that a place of a row is another number: shards have more than 2^15 rows each, or not."""
    table = keyed if has_keys else numbered
    found = []
    for name, shards in (("alone", 0), ("group", 8)):
        train(pool_root / name, store, table(before), 1, 6, 1500, shards=shards)
        if shards:
            deal_out(pool_root / name, 3)
        take_snapshot(pool_root / name, pool_root / f"{name}.snapshot")
        changed = pool_root / f"{name} changed"
        restore_snapshot(pool_root / f"{name}.snapshot", changed, medium=STORES[store]["medium"], rows={"items": after})
        restored = digest_of_tables(changed)
        train(changed, store, table(after), 7, 12, 1500, shards=shards)
        found.append((restored, digest_of_tables(changed)))
    assert found[0] == found[1]


def test_a_table_over_shards_does_not_shrink_by_a_row_that_is_in_use(pool_root: Path) -> None:
    train(pool_root / "pool", "memory", numbered(700_000), 1, 4, 300, shards=8)
    take_snapshot(pool_root / "pool", pool_root / "snapshot")
    with pytest.raises(ConfigError, match=r"row 2\d\d is in use, and 200 rows would end before it"):
        restore_snapshot(pool_root / "snapshot", pool_root / "200", rows={"items": 200})
    assert not (pool_root / "200").exists()


def test_a_full_shard_of_keys_goes_on_with_a_larger_capacity(pool_root: Path) -> None:
    with pytest.raises(PoolFull, match="shard"):
        train(pool_root / "pool", "memory", keyed(80), 1, 9, 400, shards=8)
    with at_rest(pool_root / "pool") as (reader, _):
        step = reader.commit["step"]
    take_snapshot(pool_root / "pool", pool_root / "snapshot")
    restore_snapshot(pool_root / "snapshot", pool_root / "grown", rows={"items": 5000})
    train(pool_root / "grown", "memory", keyed(5000), step + 1, 9, 400, shards=8)
    with at_rest(pool_root / "grown") as (reader, _):
        assert digest_pool(reader).rows_counted > 150


def test_a_capacity_below_max_keys_is_refused(pool_root: Path) -> None:
    """No configuration has both, so nobody could open the pool."""
    train(pool_root / "pool", "memory", replace(keyed(300), max_keys=200), 1, 1, 300)
    take_snapshot(pool_root / "pool", pool_root / "snapshot")
    with pytest.raises(ConfigError, match=r"table 'items': 199 rows; it can have between 200 and .*max_keys are 200"):
        restore_snapshot(pool_root / "snapshot", pool_root / "small", rows={"items": 199})
    restore_snapshot(pool_root / "snapshot", pool_root / "small", rows={"items": 200})
    train(pool_root / "small", "memory", replace(keyed(200), max_keys=200), 2, 2, 300)


@pytest.mark.parametrize(
    ("rows", "words"), [({"itms": 5}, "no table 'itms' \\(it has items\\)"), ({"items": 0}, "between 1 and")]
)
def test_rows_that_no_table_can_have_are_refused(rows: dict[str, int], words: str, pool_root: Path) -> None:
    train(pool_root / "pool", "memory", numbered(1000), 1, 1, 300)
    take_snapshot(pool_root / "pool", pool_root / "snapshot")
    with pytest.raises(ConfigError, match=words):
        restore_snapshot(pool_root / "snapshot", pool_root / "other", rows=rows)
    assert not (pool_root / "other").exists()


def test_bounds_that_somebody_asked_for_are_still_compared(pool_root: Path) -> None:
    train(pool_root / "pool", "memory", numbered(1000, weight_init_min=-0.3, weight_init_max=0.2), 1, 1, 300)
    with pytest.raises(ConfigError, match="init_low"):
        train(pool_root / "pool", "memory", numbered(1000), 2, 2, 300)


@pytest.mark.parametrize(("made_with", "asked", "has"), [(False, True, 1), (True, False, 0), (True, None, 1)])
@pytest.mark.parametrize("shards", [0, 4])
def test_a_restore_gives_rows_in_place_checksums_and_takes_them_away(
    pool_root: Path, shards: int, made_with: bool, asked: bool | None, has: int
) -> None:
    with open_pool(pool_root / "pool", {"medium": "memory", "row_checksums": made_with}, shards) as pool:
        rows = EmbeddingBagCollection(pool, [numbered(50)], optimizer=Adagrad(lr=0.2))
        checkpoint = Checkpoint(pool, model=torch.nn.Identity(), optimizer=[])
        checkpoint.resume()
        rows({"item": torch.arange(9)}).values().sum().backward()
        rows.optimizer.step()
        checkpoint.commit()
        checkpoint.flush()
    take_snapshot(pool_root / "pool", pool_root / "taken")
    restore_snapshot(pool_root / "taken", pool_root / "restored", medium="memory", row_checksums=asked)
    for directory, checks in (("pool", int(made_with)), ("restored", has)):
        with at_rest(pool_root / directory) as (reader, _):
            assert reader.header["row_checksums"] == checks
        assert digest_of_tables(pool_root / directory) == digest_of_tables(pool_root / "pool")
        assert problems_of(pool_root / directory) == []
