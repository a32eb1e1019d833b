"""A pool of several writers, seen without training it, says what one writer's says of the same run."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from left_behind import left_behind
from torch._C._distributed_c10d import HashStore

import holdfast
from cli_runs import CONFIG, Commands, pool_digest
from holdfast import _core
from holdfast.admin.exporting import export_pool
from holdfast.admin.importing import import_pool
from holdfast.admin.inspection import describe, inspect_pool
from holdfast.admin.repair import may_be_repaired, problems_of, repair_pool
from holdfast.admin.tensor_files import open_tensors
from holdfast.errors import ConfigError, Corrupted, PoolBusy, PoolExists, PoolNotFound
from holdfast.files.config import read_config
from holdfast.group import manifest as manifests
from holdfast.group import meeting
from holdfast.group.founding import deal_out_anew
from holdfast.group.group import Group
from holdfast.group.roles import Roles
from holdfast.pools.opening_options import OpenOptions
from holdfast.pools.read_only import ReadOnlyPool, at_rest, open_reader, touched_rows
from holdfast.run.assembly import evaluate_pool, open_trainer
from holdfast.run.ranks import open_group_trainer
from holdfast.run.sections import RunConfig
from holdfast.run.sources import open_source, open_validation
from holdfast.train.trainer import Trainer

pytestmark = pytest.mark.dear

STEPS = 8
SHARDS = 8
GROUP = f"\n[group]\nshards = {SHARDS}\nsplit_rows = 100\n"  # the third of three tables is split


@pytest.fixture
def config(pool_root: Path) -> RunConfig:
    path = pool_root / "run.toml"
    path.write_text(CONFIG + GROUP)
    return read_config(RunConfig, path, [f"train.steps={STEPS}", "pool.log_bytes=1048576"])


def on(config: RunConfig, medium: str) -> RunConfig:
    return replace(config, pool=replace(config.pool, medium=medium))  # type: ignore[arg-type]


def open_alone(config: RunConfig, directory: Path) -> Trainer:
    group = Group(store=HashStore(), rank=0, roles=Roles(world_size=1), timeout=10.0)
    return open_group_trainer(config, directory, group)


def train_group(config: RunConfig, directory: Path, writers: int = 1) -> Path:
    """A run of a group of one; then its shards are dealt out to so many writers, which changes no row."""
    with open_alone(config, directory) as trainer:
        for _ in trainer.steps():
            pass
        trainer.flush()
    if writers > 1:
        deal_out(directory, writers)
    return directory


def deal_out(directory: Path, writers: int) -> None:
    options = OpenOptions(grow_log=False, scratchpad_bytes=1 << 20)
    deal_out_anew(
        directory, manifests.read(directory), writers, options, lambda layout, num_shards, cursor: [1] * num_shards
    )


def train_plain(config: RunConfig, directory: Path) -> Path:
    with open_trainer(config, directory) as trainer:
        for _ in trainer.steps():
            pass
        trainer.flush()
    return directory


def killed_after(config: RunConfig, directory: Path, steps: int, copies: Callable[[int], Path]) -> None:
    """Copies of a pool whose run goes on, at the ends of steps: what is there if the process is killed then."""
    with open_alone(config, directory) as trainer:
        for report in trainer.steps():
            if report.step in (steps, STEPS):
                trainer.flush()
                left_behind(directory, copies(report.step))


def step_in(slot: Path) -> int:
    return int.from_bytes(slot.read_bytes()[16:24], "little")


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_a_groups_digest_is_one_writers_whoever_owns_what(config: RunConfig, pool_root: Path, medium: str) -> None:
    config = on(config, medium)
    plain = pool_digest(train_plain(config, pool_root / "plain"))
    group = train_group(config, pool_root / "group")
    assert pool_digest(group) == plain
    for writers in (3, 8, 2):
        deal_out(group, writers)
        generation = group / f"writers-{manifests.read(group).generation}"
        assert sum(path.is_dir() for path in generation.iterdir()) == writers
        assert pool_digest(group) == plain
    assert plain.step == STEPS and plain.rows_counted > 100


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_rows_are_asked_for_by_their_own_numbers(config: RunConfig, pool_root: Path, medium: str) -> None:
    config = on(config, medium)
    plain = open_reader(train_plain(config, pool_root / "plain"))
    group = open_reader(train_group(config, pool_root / "group", writers=3))
    for number, table in enumerate(plain.tables):
        size = table.num_embeddings
        expected = plain.touched_rows(number, 0, size)
        assert group.touched_rows(number, 0, size) == expected
        middle = expected[len(expected) // 2]
        assert group.touched_rows(number, middle, 3) == plain.touched_rows(number, middle, 3)
        assert group.touched_rows(number, size, 3) == []
        for ours, theirs in zip(touched_rows(group, number, 7), touched_rows(plain, number, 7), strict=True):
            np.testing.assert_array_equal(ours.rows, theirs.rows)
            np.testing.assert_array_equal(ours.weights, theirs.weights)
            np.testing.assert_array_equal(ours.state, theirs.state)
            np.testing.assert_array_equal(ours.differs, theirs.differs)
    with pytest.raises(ValueError, match="do not fit"):
        group.read_rows(2, 399, 2, np.empty(32, np.uint8), np.empty(8, np.uint8))


def test_weighted_bags_are_pooled_as_one_writer_pools_them(config: RunConfig, pool_root: Path) -> None:
    pools = train_plain(config, pool_root / "plain"), train_group(config, pool_root / "group", writers=3)
    source = open_source(config.data)
    tables = config.embedding.tables(source.features)
    draw = np.random.default_rng(5)
    lengths = [draw.integers(0, 5, 20) for _ in tables]
    ids = [draw.integers(0, table.num_embeddings, sum(n)) for table, n in zip(tables, lengths, strict=True)]
    values, offsets = torch.from_numpy(np.concatenate(ids)), np.cumsum([0, *np.concatenate(lengths)])
    weights = torch.from_numpy(draw.normal(size=len(values)).astype(np.float32))
    keys = [table.feature_names[0] for table in tables]
    batch = holdfast.JaggedFeatures(keys, values, torch.from_numpy(offsets), weights)
    out = []
    for pool in pools:
        rows = holdfast.EmbeddingBagCollection(
            ReadOnlyPool(pool),
            tables,
            optimizer=config.embedding.spec(),  # type: ignore[arg-type]
        ).eval()
        out.append(rows(batch).values())
    torch.testing.assert_close(out[0], out[1])
    assert out[0].abs().sum() > 0


def test_an_export_is_the_same_file(config: RunConfig, pool_root: Path) -> None:
    pools = train_plain(config, pool_root / "plain"), train_group(config, pool_root / "group", writers=3)
    files = [pool.with_suffix(".safetensors") for pool in pools]
    for pool, file in zip(pools, files, strict=True):
        with at_rest(pool) as (reader, recovery):
            assert recovery is not None and recovery.clean and recovery.step == STEPS
            export_pool(reader, file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_evaluation_is_what_training_ends_with(config: RunConfig, pool_root: Path) -> None:
    validation = open_validation(config)
    assert validation is not None
    group = pool_root / "group"
    with open_alone(config, group) as trainer:
        for _ in trainer.steps():
            pass
        trainer.flush()
        told = trainer.evaluate(validation)
        beside_the_run = evaluate_pool(config, group, validation)
    assert beside_the_run == (STEPS, told)
    deal_out(group, 3)
    step, found = evaluate_pool(config, group, validation)
    assert told is not None and step == STEPS
    assert found.auc == pytest.approx(told.auc, abs=1e-4)
    assert found.log_loss == pytest.approx(told.log_loss, rel=1e-5)


def test_a_pool_in_use_is_inspected_and_not_digested_or_verified(
    config: RunConfig, pool_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command, group = Commands(pool_root, monkeypatch, capfd), pool_root / "group"
    with open_alone(config, group) as trainer:
        next(iter(trainer.steps()))
        found = json.loads(command("inspect", group, "--json").out)
        assert found["in_use"] and not found["clean"]
        assert "a run is at work" in found["recovery"]["would"]
        for name in ("digest", "verify"):
            result = command(name, group)
            assert result.code == 1 and "is open for writing" in result.err
        with pytest.raises(PoolBusy), at_rest(group):
            pass
    assert not inspect_pool(group)["in_use"]


def test_inspect_says_who_has_what(config: RunConfig, pool_root: Path) -> None:
    group = train_group(config, pool_root / "group", writers=3)
    found = inspect_pool(group)
    assert (found["step"], found["dense_step"], found["shards"], found["writers"]) == (STEPS, STEPS, SHARDS, 3)
    assert found["clean"] and found["recovery"]["would"] == "nothing to do"
    assert found["recovery"]["exact_step"] == STEPS
    parts = found["group"]
    assert parts["generation"] == 2 and parts["dense"]["steps"] == [STEPS - 1, STEPS]
    assert sorted(shard for writer in parts["writers"] for shard in writer["shards"]) == list(range(SHARDS))
    for writer in parts["writers"]:
        assert writer["load_share"] == len(writer["shards"]) / SHARDS
        assert writer["step"] == STEPS
    assert [table["lies_in"] for table in found["tables"]] == ["shard 0", "shard 1", "all shards"]
    plain = inspect_pool(train_plain(config, pool_root / "plain"))
    assert [table["touched_rows"] for table in found["tables"]] == [t["touched_rows"] for t in plain["tables"]]
    text = "\n".join(describe(found))
    assert "8 shards of 3 writers, generation 2" in text and "writers-2/0002" in text and "all shards" in text


def test_what_a_killed_run_left_is_recovered_to_one_step(config: RunConfig, pool_root: Path) -> None:
    killed_after(config, pool_root / "group", 5, lambda step: pool_root / f"killed-{step}")
    for step in (5, STEPS):
        killed = pool_root / f"killed-{step}"
        assert problems_of(killed) == []
        with at_rest(killed) as (reader, recovery):
            assert recovery is not None and not recovery.clean
            assert recovery.step == step == reader.commit["step"] == reader.commit["row_updates"]
        with at_rest(killed) as (_, recovery):
            assert recovery is not None and recovery.clean
    assert pool_digest(pool_root / f"killed-{STEPS}") == pool_digest(pool_root / "group")


def test_verify_names_the_part_in_which_something_is_wrong(config: RunConfig, pool_root: Path) -> None:
    whole = train_group(config, pool_root / "group", writers=3)
    other = train_group(config, pool_root / "other", writers=3)
    assert problems_of(whole) == []
    number = iter(range(100))

    def damaged(damage: Callable[[Path], object]) -> str:
        copy = pool_root / f"damaged-{next(number)}"
        shutil.copytree(whole, copy)
        damage(copy)
        return "\n".join(problems_of(copy))

    def swap(pool: Path) -> None:
        first, second, aside = (pool / "writers-2" / name for name in ("0000", "0001", "aside"))
        first.rename(aside)
        second.rename(first)
        aside.rename(second)

    def replace_by_others(pool: Path) -> None:
        shutil.rmtree(pool / "writers-2" / "0001")
        shutil.copytree(other / "writers-2" / "0001", pool / "writers-2" / "0001")

    def edit_manifest(pool: Path) -> None:
        file = pool / "group.json"
        file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))

    assert "group.json: the manifest's checksum does not hold" in damaged(edit_manifest)
    replaced = damaged(replace_by_others)
    assert replaced.startswith("writers-2/0001: ")
    assert "this file belongs to another pool" in replaced
    assert "writers-2/0000: owns shards" in damaged(swap)
    lost = damaged(lambda pool: shutil.rmtree(pool / "writers-2" / "0002"))
    assert lost.startswith("writers-2/0002: this part is not here: look at the pool where all of its parts can be")
    for directory, may in ((pool_root / f"damaged-{next(number) - 1}", False), (whole, True)):
        assert may_be_repaired(directory) == may
    assert damaged(lambda pool: (pool / "dense" / "dense-0").unlink()).startswith("dense: ")
    assert "table-0002" in damaged(lambda pool: (pool / "shard-0003" / "table-0002.weights").unlink())


def test_a_writer_from_an_older_copy_is_found(config: RunConfig, pool_root: Path) -> None:
    killed_after(config, pool_root / "group", 4, lambda step: pool_root / f"killed-{step}")
    mixed = pool_root / f"killed-{STEPS}"
    shutil.rmtree(mixed / "writers-1")
    shutil.copytree(pool_root / "killed-4" / "writers-1", mixed / "writers-1")
    assert any("it is an older copy than the others" in problem for problem in problems_of(mixed))
    assert "fail: " in inspect_pool(mixed)["recovery"]["would"]
    with pytest.raises(Corrupted, match="older copy"), at_rest(mixed):
        pass


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_a_writer_from_a_copy_that_has_the_older_dense_state_s_step_has_all_go_back_to_it(
    config: RunConfig, pool_root: Path, medium: str
) -> None:
    config = on(config, medium)
    older, mixed = pool_root / "older", pool_root / "mixed"
    with open_alone(config, mixed) as trainer:
        for report in trainer.steps():
            if report.step == STEPS - 1:
                trainer.flush()
                left_behind(mixed, older)
    expected, ended = pool_digest(older), pool_digest(train_group(config, pool_root / "other"))
    for part in ["writers-1", *(path.name for path in older.glob("shard-*"))]:
        shutil.rmtree(mixed / part)
        shutil.copytree(older / part, mixed / part)
    assert problems_of(mixed) == []
    assert pool_digest(mixed) == expected != ended
    assert pool_digest(train_group(config, mixed)) == ended


def test_a_repair_puts_right_what_is_wrong_in_a_part(config: RunConfig, pool_root: Path) -> None:
    group = train_group(config, pool_root / "group")
    before = pool_digest(group)
    slots = {step_in(group / "dense" / name): group / "dense" / name for name in ("dense-0", "dense-1")}
    older = slots[STEPS - 1]
    data = bytearray(older.read_bytes())
    data[4200] ^= 1
    older.write_bytes(data)
    assert problems_of(group) == [f"dense: {older} at offset 0: the payload's checksum does not hold"]
    report = repair_pool(group)
    assert report.left == [] and len(report.done) == 1
    assert report.backup is not None and report.backup.parent == group.parent
    assert pool_digest(group) == before


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("part", ["dense", "writers-2/0000", "writers-2/0001"])
def test_a_repair_puts_a_part_s_superblock_back(config: RunConfig, pool_root: Path, part: str, is_lost: bool) -> None:
    group = train_group(on(config, "block"), pool_root / "group", writers=2)
    before = pool_digest(group)
    superblock = group / part / "pool.holdfast"
    if is_lost:
        superblock.unlink()
    else:
        superblock.write_bytes(bytes(4096) + superblock.read_bytes()[4096:])
    assert problems_of(group)
    report = repair_pool(group)
    assert report.left == report.refusals == [] and len(report.done) == 1
    assert pool_digest(group) == before


def test_a_superblock_of_rows_in_place_that_is_lost_with_a_part_s_step_is_left_and_says_why(
    config: RunConfig, pool_root: Path
) -> None:
    group = train_group(on(config, "memory"), pool_root / "group", writers=2)
    (group / "writers-2" / "0001" / "pool.holdfast").unlink()
    report = repair_pool(group)
    assert report.done == [] and report.left
    assert "nothing but the lost pool.holdfast says at which step the pool was" in report.refusals[0]


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_a_repair_writes_damaged_labels_of_shards_anew(config: RunConfig, pool_root: Path, medium: str) -> None:
    group = train_group(on(config, medium), pool_root / "group", writers=2)
    files = [path for path in sorted(group.rglob("*")) if path.is_file() and "writers-1" not in path.parts]  # retired
    whole = {path: path.read_bytes() for path in files}
    damaged = {path: data.find(b"HFLABEL\n") for path, data in whole.items() if b"HFLABEL\n" in data}
    assert {path.parent.name for path in damaged} > {"shard-0000", "shard-0001"}
    for path, at in damaged.items():
        data = bytearray(whole[path])
        data[at + 20] ^= 0xA5
        path.write_bytes(data)
    assert problems_of(group)
    report = repair_pool(group)
    assert report.left == []
    assert [path for path in whole if path.read_bytes() != whole[path]] == []


def test_a_repair_leaves_a_dense_state_alone_that_all_may_go_back_to(config: RunConfig, pool_root: Path) -> None:
    killed_after(config, pool_root / "group", 4, lambda step: pool_root / f"killed-{step}")
    mixed = pool_root / f"killed-{STEPS}"
    shutil.rmtree(mixed / "writers-1")
    shutil.copytree(pool_root / "killed-4" / "writers-1", mixed / "writers-1")
    report = repair_pool(mixed)
    assert report.done == [] and report.left
    assert "it may be the older one that all go back to" in "".join(report.refusals)


def test_a_missing_part_is_named(config: RunConfig, pool_root: Path) -> None:
    group = train_group(config, pool_root / "group", writers=2)
    shutil.move(group / "writers-2" / "0001", pool_root / "elsewhere")
    for look in (open_reader, inspect_pool, lambda pool: at_rest(pool).__enter__()):
        with pytest.raises(PoolNotFound, match=r"writers-2/0001, a writer's part of the pool, cannot be reached"):
            look(group)  # type: ignore[operator]


def test_what_cannot_be_done_with_a_groups_pool_says_so(config: RunConfig, pool_root: Path) -> None:
    group = train_group(config, pool_root / "group")
    before = pool_digest(group)
    with open_trainer(config, group) as trainer:  # a process alone is a group of one
        assert trainer.pool.step == STEPS
    file = pool_root / "group.safetensors"
    with at_rest(group) as (reader, _):
        export_pool(reader, file)
    with pytest.raises(PoolExists):
        import_pool(open_tensors(file), config, group)
    import_pool(open_tensors(file), config, pool_root / "moved")
    assert pool_digest(pool_root / "moved").rows_counted == before.rows_counted
    assert pool_digest(group) == before
    assert isinstance(open_reader(pool_root / "moved"), _core.Reader)


def test_dense_states_of_another_group_are_refused_and_named(config: RunConfig, pool_root: Path) -> None:
    ours, theirs = (train_group(config, pool_root / name) for name in ("ours", "theirs"))
    own = shutil.move(ours / "dense", pool_root / "own")
    shutil.copytree(theirs / "dense", ours / "dense")
    assert any(problem.startswith("dense: ") and "another pool" in problem for problem in problems_of(ours))
    for opening in (open_reader, lambda pool: open_alone(config, pool)):
        with pytest.raises(Corrupted, match="another pool"):
            opening(ours)
    shutil.rmtree(ours / "dense")
    shutil.move(own, ours / "dense")
    assert problems_of(ours) == []


def test_shards_of_another_group_are_refused_and_named(config: RunConfig, pool_root: Path) -> None:
    ours, theirs = (train_group(config, pool_root / name) for name in ("ours", "theirs"))
    shutil.rmtree(ours / "shard-0000")
    shutil.copytree(theirs / "shard-0000", ours / "shard-0000")
    assert any("belongs to another pool" in problem for problem in problems_of(ours))
    with pytest.raises(Corrupted, match="belongs to another pool"):
        open_alone(config, ours)


def test_a_child_that_collects_a_group_that_was_closed_ends(config: RunConfig, pool_root: Path) -> None:
    """What a group leaves behind has no threads that a child would wait for."""
    gc.collect()
    gc.disable()
    try:
        train_group(config, pool_root / "group")
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        gc.enable()


def test_a_groups_pool_is_not_opened_as_what_it_is_not(config: RunConfig, pool_root: Path) -> None:
    group = train_group(on(config, "memory"), pool_root / "group")
    before = pool_digest(group)
    with pytest.raises(ConfigError, match=r"medium = 'block', .* was made as 'memory'"):
        open_alone(on(config, "block"), group)
    with pytest.raises(ConfigError, match=r"row_checksums = true, .* was made without"):
        open_alone(replace(config, pool=replace(config.pool, medium="memory", row_checksums=True)), group)
    open_alone(on(config, "memory"), group).close()
    assert pool_digest(group) == before


def test_a_part_with_rows_is_not_taken_for_the_one_with_dense_states(config: RunConfig, pool_root: Path) -> None:
    group = train_group(on(config, "memory"), pool_root / "group", writers=2)
    manifest = manifests.read(group)
    shutil.rmtree(group / "dense")
    shutil.copytree(manifest.writer_directory(group, 0), group / "dense")
    with pytest.raises(Corrupted, match="dense: this is no part with dense states"):
        open_alone(on(config, "memory"), group)
    with pytest.raises(Corrupted, match="dense: this is no part with dense states"):
        deal_out(group, 3)


def test_parts_of_another_version_than_the_manifests_are_another_pools(config: RunConfig, pool_root: Path) -> None:
    group = train_group(on(config, "memory"), pool_root / "group")
    older = replace(manifests.read(group), version=manifests.VERSION - 1)
    with pytest.raises(Corrupted, match=r"a part of format 5, .* is of version 2: this part is another pool's"):
        older.check_part(group, 0)
    with pytest.raises(Corrupted, match="a part of format 5"):
        older.check_dense(group / "dense")


def test_a_table_that_lies_whole_in_a_shard_has_its_rows_where_they_are_whatever_its_size(
    config: RunConfig, pool_root: Path
) -> None:
    manifest = manifests.read(train_group(on(config, "memory"), pool_root / "group", writers=3))
    number, table = next((n, table) for n, table in enumerate(manifest.tables) if table.table_shards == 1)
    rows = np.arange(table.num_embeddings)
    places, writers = manifest.locate(number, rows)
    assert places.tolist() == rows.tolist()
    assert set(writers.tolist()) == {manifest.owner_of[table.first_shard]}
    larger = replace(table, num_embeddings=2 * table.num_embeddings)
    assert table.moved(rows.astype(np.uint64), larger).tolist() == rows.tolist()
    assert (table.end, larger.end) == (table.num_embeddings, 2 * table.num_embeddings)


@pytest.mark.parametrize("address", ["a-name-that-may-mean-anything", "203.0.113.7"])
def test_rank_0_listens_on_no_address_that_is_not_its_machines(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", "0")
    assert meeting._listen_on_master_address() is None
