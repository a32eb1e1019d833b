"""An import makes a pool that is cut into shards, with the rows and the dense part of one that is not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from pool_digests import digest_of_tables
from safetensors.torch import load_file

import holdfast
from cli_runs import Commands, pool_digest
from holdfast.admin.exporting import export_pool
from holdfast.admin.importing import import_pool
from holdfast.admin.importing_shards import import_in_shards
from holdfast.admin.tensor_files import open_tensors
from holdfast.errors import ConfigError, PoolExists, PoolOfGroup
from holdfast.group import manifest as manifests
from holdfast.group.options import GroupConfig
from holdfast.pools.directory import Medium
from holdfast.pools.read_only import at_rest
from holdfast.run.assembly import open_trainer
from holdfast.run.sections import RunConfig
from test_cli_keys import clicks as clicks
from test_cli_keys import train as train_clicks
from test_group_reading import config as config
from test_group_reading import deal_out, on, open_alone, train_plain

IN_EIGHT = GroupConfig(shards=8, split_rows=100)  # the third of three tables is split


@pytest.fixture
def exported(config: RunConfig, pool_root: Path) -> Path:
    out = pool_root / "out.safetensors"
    with at_rest(train_plain(config, pool_root / "trained")) as (reader, _):
        export_pool(reader, out)
    return out


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_what_is_imported_in_shards_is_what_is_imported_and_trains_as_that_does(
    medium: str, config: RunConfig, exported: Path, pool_root: Path
) -> None:
    config = on(config, medium)
    one, eight = pool_root / "one", pool_root / "eight"
    tables, dense = 3, 0
    for summary in (
        import_pool(open_tensors(exported), config, one),
        import_in_shards(open_tensors(exported), config, eight, IN_EIGHT),
    ):
        assert (summary.tables, summary.unused) == (tables, ())
        dense = dense or len(summary.dense)
        assert len(summary.dense) == dense > 0
    manifest = manifests.read(eight)
    assert [table.table_shards for table in manifest.tables] == [1, 1, 8]
    assert manifest.store == {"memory": "in_place", "block": "log"}[medium]
    assert pool_digest(eight) == pool_digest(one)
    deal_out(eight, 3)
    for trainer in (open_trainer(config, one), open_alone(config, eight)):
        with trainer:
            for _ in trainer.steps():
                pass
            trainer.flush()
    assert pool_digest(eight) == pool_digest(one)
    assert not [path for path in pool_root.iterdir() if path.name.startswith(".")]


def test_a_new_table_begins_in_its_shards_as_it_does_in_one(config: RunConfig, exported: Path, pool_root: Path) -> None:
    with at_rest(pool_root / "trained") as (reader, _):
        name = reader.tables[-1].name  # the one that is split
    import_pool(open_tensors(exported), config, pool_root / "one", new=[name])
    import_in_shards(open_tensors(exported), config, pool_root / "eight", IN_EIGHT, new=[name])
    assert pool_digest(pool_root / "eight") == pool_digest(pool_root / "one")


def test_a_checksum_that_rows_in_place_want_is_kept_in_shards(
    config: RunConfig, exported: Path, pool_root: Path
) -> None:
    config = replace(config, pool=replace(config.pool, medium="memory", row_checksums=True))
    import_in_shards(open_tensors(exported), config, pool_root / "eight", IN_EIGHT)
    assert manifests.read(pool_root / "eight").row_checksums


def test_keys_find_their_shards(clicks: Commands) -> None:
    train_clicks(clicks, "pool")
    out, again = clicks.root / "out.safetensors", clicks.root / "again.safetensors"
    assert clicks("export", clicks.root / "pool", out).code == 0
    result = clicks("import", out, clicks.config, "--pool", clicks.root / "imported", "--shards", 4)
    assert result.code == 0, result.err
    assert clicks("verify", clicks.root / "imported").code == 0
    assert clicks("export", clicks.root / "imported", again).code == 0
    before, after = load_file(out), load_file(again)
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_a_script_imports_tables_for_ranks(medium: Medium, pool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keyed = holdfast.EmbeddingBagConfig(
        name="shops", num_embeddings=None, capacity=512, embedding_dim=4, feature_names=["shop"]
    )
    tables = [
        holdfast.EmbeddingBagConfig(name="items", num_embeddings=300, embedding_dim=4, feature_names=["item"]),
        keyed,
    ]
    draw = torch.Generator().manual_seed(3)
    keys = torch.randint(-(1 << 62), 1 << 62, (90,), generator=draw)
    source = {
        "items": {"weight": torch.randn(300, 4, generator=draw), "momentum1": torch.rand(300, generator=draw)},
        "shops": {"weight": torch.randn(90, 4, generator=draw), "keys": keys},
    }
    made = []
    for name, group in (("one", None), ("ranks", IN_EIGHT)):
        summary = holdfast.import_tables(pool_root / name, tables, source, seed=5, medium=medium, group=group)
        made.append(summary)
    assert made[0] == made[1] is not None
    assert digest_of_tables(pool_root / "ranks") == digest_of_tables(pool_root / "one")
    assert {entry.table_shards for entry in manifests.read(pool_root / "ranks").tables} == {8}
    again = partial(holdfast.import_tables, pool_root / "ranks", tables, source, group=IN_EIGHT)
    assert again(exist_ok=True) is None
    with pytest.raises(PoolExists):
        again()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert again(exist_ok=True) is None
    with pytest.raises(PoolOfGroup, match="run it without torchrun"):
        holdfast.import_tables(pool_root / "new", tables, source, group=IN_EIGHT)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # of one rank, whose pool would be a group's as well
    with pytest.raises(PoolOfGroup, match="run it without torchrun"):
        holdfast.import_tables(pool_root / "new", tables, source)
    assert {path.name for path in pool_root.iterdir()} == {"one", "ranks"}


def test_what_is_refused_leaves_nothing(
    config: RunConfig, exported: Path, pool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {path.name for path in pool_root.iterdir()}
    file = open_tensors(exported)
    other = replace(config, embedding=replace(config.embedding, dim=8), model=replace(config.model, bottom=(8, 8)))
    with pytest.raises(ConfigError, match="embedding_bags"):
        import_in_shards(file, other, pool_root / "eight", IN_EIGHT)
    with pytest.raises(PoolExists):
        import_in_shards(file, config, pool_root / "trained", IN_EIGHT)
    monkeypatch.setenv("RANK", "0")  # as a cluster may, for purposes of its own
    import_pool(file, config, pool_root / "alone")
    there.add("alone")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for refused in (
        lambda: import_pool(file, config, pool_root / "one"),
        lambda: import_in_shards(file, config, pool_root / "eight", IN_EIGHT),
    ):
        with pytest.raises(PoolOfGroup, match="run it without torchrun; --shards 64 for ranks"):
            refused()
    assert {path.name for path in pool_root.iterdir()} == there
