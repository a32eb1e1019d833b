"""Runs whose data bring keys, by their configuration alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from cli_runs import Commands, Result
from holdfast import _core
from holdfast.admin.by_key import keyed_rows
from holdfast.cli.options import read_run
from holdfast.data.text_keys import text_keys
from holdfast.errors import ConfigError, DataError
from holdfast.run.sources import open_validation
from holdfast_lab.placement.access_profile import KeyNumbers

pytestmark = pytest.mark.dear

CONFIG = """
[data.parquet]
paths = ["clicks.parquet"]
label = "click"
dense = ["age"]
dense_transform = "log1p"

[data.parquet.sparse.item]
column = "item"
keys = true

[data.parquet.sparse.seen]
column = "seen"
keys = true
missing_id = -7
num_embeddings = 3000

[data.parquet.sparse.country]
column = "country"
num_embeddings = 20

[validation]
paths = ["later.parquet"]

[embedding]
dim = 4
lr = 0.05

[model]
bottom = [8, 4]
top = [8, 1]

[train]
batch_size = 32
steps = 30
"""


def write_clicks(path: Path, first_item: int, seed: int) -> None:
    """Items all over the 64 bits; a list of the items that were seen before, now and then null."""
    draw = np.random.default_rng(seed)
    ids = np.concatenate((np.arange(200), draw.integers(0, 200, 440)))  # each of 200 once at least
    items = draw.permutation((ids + first_item) * -0x61C8864680B583EB)
    seen = [None if draw.random() < 0.1 else list(draw.choice(items, draw.integers(0, 4))) for _ in items]
    table = {
        "click": draw.integers(0, 2, 640),
        "age": draw.integers(0, 90, 640),
        "item": items,
        "seen": pa.array(seen, pa.list_(pa.int64())),
        "country": draw.integers(0, 300, 640),
    }
    pq.write_table(pa.table(table), path, row_group_size=100)


@pytest.fixture
def clicks(pool_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Commands:
    holdfast = Commands(pool_root, monkeypatch, capfd)
    write_clicks(holdfast.root / "clicks.parquet", 0, 1)
    write_clicks(holdfast.root / "later.parquet", 100, 2)
    holdfast.config.write_text(CONFIG)
    return holdfast


def train(run: Commands, pool: str, *overrides: str) -> Result:
    return run.train(pool, *(part for override in overrides for part in ("--set", override)))


def keys_of(run: Commands, pool: str) -> dict[str, dict[str, int]]:
    found = json.loads(run("inspect", run.root / pool, "--json").out)
    return {table["name"]: table["keys"] for table in found["tables"]}


def test_a_run_trains_and_evaluates_on_ids_that_nobody_counted(clicks: Commands) -> None:
    assert train(clicks, "pool", "train.eval_every=10").code == 0
    found = keys_of(clicks, "pool")
    assert found["item"] == {"live": 200, "not_admitted": 0, "left_behind": 0}
    assert found["seen"]["live"] > 100
    assert found["country"] is None
    assert clicks("verify", clicks.root / "pool").code == 0
    assert "item: 200 keys" in clicks("inspect", clicks.root / "pool").out


def test_evaluation_and_loader_threads_leave_no_trace_in_keys(clicks: Commands) -> None:
    train(clicks, "plain")
    train(clicks, "curious", "train.eval_every=4", "train.workers=3", "train.prefetch=5")
    train(clicks, "logged", "pool.medium='block'", "train.workers=2")
    assert clicks.digest("plain").tables == clicks.digest("curious").tables == clicks.digest("logged").tables
    rows = [keyed_rows(_core.Reader(str(clicks.root / pool)), 0).rows for pool in ("plain", "curious", "logged")]
    assert rows[0].tolist() == rows[1].tolist() == rows[2].tolist()


def write_as(clicks: Commands, kind: pa.DataType, of_row: Callable[[list[Any]], list[Any]]) -> None:
    """The same clicks with other items."""
    for path in (clicks.root / "clicks.parquet", clicks.root / "later.parquet"):
        table = pq.read_table(path)
        seen = [None if row is None else of_row(row) for row in table["seen"].to_pylist()]
        columns = {"item": pa.array(of_row(table["item"].to_pylist()), kind), "seen": pa.array(seen, pa.list_(kind))}
        for name, values in columns.items():
            table = table.set_column(table.column_names.index(name), name, values)
        pq.write_table(table, path, row_group_size=100)


def test_a_run_on_texts_is_the_run_on_their_keys(clicks: Commands) -> None:
    write_as(clicks, pa.string(), lambda row: [f"item {number}" for number in row])
    assert train(clicks, "texts", "train.workers=2").code == 0
    write_as(clicks, pa.int64(), lambda row: text_keys(row).tolist())
    assert train(clicks, "keys").code == 0
    assert clicks.digest("texts").tables == clicks.digest("keys").tables
    assert keys_of(clicks, "texts")["item"]["live"] == 200


def test_a_snapshot_and_what_is_restored_of_it_have_the_keys(clicks: Commands) -> None:
    train(clicks, "pool", "train.steps=12")
    pool, first, second = (str(clicks.root / name) for name in ("pool", "first", "second"))
    assert clicks("snapshot", pool, first).code == 0
    train(clicks, "pool")
    assert clicks("snapshot", pool, second, "--since", first).code == 0
    assert clicks("restore", second, clicks.root / "restored").code == 0
    assert clicks.digest("restored") == clicks.digest("pool")
    train(clicks, "pool", "train.steps=40")
    train(clicks, "restored", "train.steps=40")
    assert clicks.digest("restored") == clicks.digest("pool")


def test_keys_move_out_beside_their_rows_and_in_again(clicks: Commands) -> None:
    train(clicks, "pool")
    out = clicks.root / "out.safetensors"
    assert clicks("export", clicks.root / "pool", out).code == 0
    exported = load_file(out)
    keys, rows = (exported[f"embedding_bags.item.{what}"] for what in ("keys", "weight"))
    items = pq.read_table(clicks.root / "clicks.parquet")["item"].to_pylist()
    assert keys.tolist() == sorted(set(items))
    assert rows.shape == (200, 4)
    assert exported["optimizer.item.momentum1"].shape == (200,)
    assert clicks("import", out, clicks.config, "--pool", clicks.root / "imported").code == 0
    again = clicks.root / "again.safetensors"
    assert clicks("export", clicks.root / "imported", again).code == 0
    for name, tensor in load_file(again).items():
        assert torch.equal(tensor, exported[name]), name
    assert train(clicks, "imported", "train.steps=3").code == 0
    assert keys_of(clicks, "imported")["item"]["live"] == 200


MANAGED = "_managed_collision_collection._managed_collision_modules.item"


def managed(exported: dict[str, torch.Tensor], num_slots: int) -> dict[str, torch.Tensor]:
    """The same as TorchRec's managed collisions keep it: rows in any order, free slots, and one for all other ids."""
    keys, rows = (exported[f"embedding_bags.item.{what}"] for what in ("keys", "weight"))
    draw = torch.Generator().manual_seed(3)
    row_of = torch.randperm(num_slots, generator=draw)
    weight = torch.randn(num_slots, rows.shape[1], generator=draw)
    weight[row_of[: len(keys)]] = rows
    momentum = torch.zeros(num_slots)
    momentum[row_of[: len(keys)]] = exported["optimizer.item.momentum1"]
    free = torch.full((num_slots - len(keys),), torch.iinfo(torch.int64).max)
    changed = {"embedding_bags.item.weight": weight, "optimizer.item.momentum1": momentum}
    changed |= {f"{MANAGED}._mch_sorted_raw_ids": torch.cat([keys, free])}
    changed |= {f"{MANAGED}._mch_remapped_ids_mapping": row_of}
    return {name: tensor for name, tensor in exported.items() if name != "embedding_bags.item.keys"} | changed


def test_torchrecs_managed_collisions_come_in_by_their_ids(clicks: Commands) -> None:
    train(clicks, "pool")
    exported_to, managed_in, again = (clicks.root / f"{name}.safetensors" for name in ("out", "managed", "again"))
    assert clicks("export", clicks.root / "pool", exported_to).code == 0
    exported = load_file(exported_to)
    save_file(managed(exported, 260), managed_in)
    result = clicks("import", managed_in, clicks.config, "--pool", clicks.root / "imported")
    assert result.code == 0, result.err
    assert clicks("export", clicks.root / "imported", again).code == 0
    for name, tensor in load_file(again).items():
        assert torch.equal(tensor, exported[name]), name
    assert keys_of(clicks, "imported")["item"]["live"] == 200


def test_validation_data_that_are_touched_between_two_evaluations_are_the_same(clicks: Commands) -> None:
    """The run ended there."""
    source = open_validation(read_run([clicks.config], None))
    assert source is not None
    path = clicks.root / "later.parquet"
    os.utime(path, ns=(0, 0))
    assert source.read_block(0).num_samples == source.block_sizes[0]
    edited = bytearray(path.read_bytes())
    edited[-9] ^= 1
    path.write_bytes(edited)
    with pytest.raises(DataError, match="the file has changed since it was opened"):
        source.read_block(0)


@pytest.mark.parametrize("field", ["data.parquet.paths", "validation.paths"])
def test_files_without_a_sample_are_named_before_a_pool_is_made(clicks: Commands, field: str) -> None:
    """Of validation data it was said when training had ended."""
    nothing = clicks.root / "nothing.parquet"
    pq.write_table(pq.read_table(clicks.root / "later.parquet").slice(0, 0), nothing)
    result = train(clicks, "empty", f"{field}=['{nothing}']")
    assert (result.code, f"{field}: there is no sample in {nothing}" in result.err) == (1, True), result.err
    assert not (clicks.root / "empty").exists()


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda rows: rows.fill_(3), "an id or a row more than once"),
        (lambda rows: rows.add_(1000), "names rows that are not there"),
        (lambda rows: rows.neg_(), "names rows that are not there"),
    ],
    ids=["twice", "beyond", "negative"],
)
def test_managed_collisions_that_cannot_be_are_refused(
    break_it: Callable[[torch.Tensor], object], words: str, clicks: Commands
) -> None:
    train(clicks, "pool")
    assert clicks("export", clicks.root / "pool", clicks.root / "out.safetensors").code == 0
    tensors = managed(load_file(clicks.root / "out.safetensors"), 260)
    break_it(tensors[f"{MANAGED}._mch_remapped_ids_mapping"])
    save_file(tensors, clicks.root / "managed.safetensors")
    result = clicks("import", clicks.root / "managed.safetensors", clicks.config, "--pool", clicks.root / "imported")
    assert (result.code, words in result.err) == (1, True), result.err
    assert not (clicks.root / "imported").exists()
    del tensors[f"{MANAGED}._mch_remapped_ids_mapping"]
    save_file(tensors, clicks.root / "managed.safetensors")
    result = clicks("import", clicks.root / "managed.safetensors", clicks.config, "--pool", clicks.root / "imported")
    assert (result.code, "but not" in result.err) == (1, True), result.err


def test_keys_are_left_behind_by_the_configuration(clicks: Commands) -> None:
    train(clicks, "pool", "embedding.ttl_steps=3", "embedding.admit_after=2")
    found = keys_of(clicks, "pool")["item"]
    assert found["left_behind"] > 0
    assert found["not_admitted"] > 0
    assert found["live"] + found["left_behind"] == 200


def test_keys_are_admitted_and_stay_by_the_configuration(clicks: Commands) -> None:
    rules = ("embedding.max_keys=80", "embedding.stay=lfu", "embedding.admit_probability=0.5")
    given = [part for rule in rules for part in ("--set", rule)]
    clicks.train("pool", *given, "--metrics", str(clicks.root / "metrics.jsonl"))
    found = keys_of(clicks, "pool")["item"]
    assert found["left_behind"] > 0
    assert 0 < found["not_admitted"] < found["live"]
    lines = [json.loads(line) for line in (clicks.root / "metrics.jsonl").read_text().splitlines()]
    told = [line["keys"] for line in lines if "keys" in line]
    assert len(told) == sum("step" in line and "event" not in line for line in lines)
    for what in ("admitted", "held_back", "left_behind"):
        assert sum(of_step[what] for of_step in told) > 0, what


def test_a_profile_counts_keys_as_rows_and_a_plan_rests_on_it(clicks: Commands) -> None:
    profile, tiers = clicks.root / "profile.json", Path(__file__).parents[2] / "examples/tiers.toml"
    result = clicks("profile", clicks.config, "--out", profile)
    assert result.code == 0, result.err
    (counted,) = (table for table in json.loads(profile.read_text())["tables"] if table["name"] == "item")
    keys = pq.read_table(clicks.root / "clicks.parquet")["item"].to_numpy()
    assert counted["num_embeddings"] == len(np.unique(keys))
    assert counted["accesses"] >= len(keys)  # the last batch is filled up
    hottest = np.sort(np.unique(keys, return_counts=True)[1])[::-1]
    assert counted["ladder"][0]["access_share"] == pytest.approx(hottest[0] / len(keys), rel=0.1)
    planned = clicks("plan", clicks.config, "--tiers", tiers, "--profile", profile)
    assert planned.code == 0, planned.err
    refused = clicks("plan", clicks.config, "--tiers", tiers)
    assert (refused.code, "give the plan a profile" in refused.err) == (1, True)


def test_more_keys_than_memory_was_given_for_end_a_profile_by_name() -> None:
    numbers = KeyNumbers("item", 1000)
    numbers.add(np.arange(600))
    numbers.add(np.arange(300, 900))
    assert np.array_equal(numbers.sorted(), np.arange(900))
    numbers.add(np.arange(2000))
    with pytest.raises(ConfigError, match="table 'item' has more than 1,000 different keys"):
        numbers.sorted()


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.parquet.sparse.country.num_embeddings=0", "num_embeddings is 0"),
        ("data.parquet.sparse.item.hashing='identity'", "hashing is 'identity', where keys need none"),
        ("embedding.ttl_steps=0", "ttl_steps = 0; it must be between"),
    ],
)
def test_what_keys_cannot_be_is_refused_by_name(clicks: Commands, override: str, named: str) -> None:
    result = train(clicks, "pool", override)
    assert result.code == 1
    assert named in result.err
