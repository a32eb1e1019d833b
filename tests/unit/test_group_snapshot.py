"""Snapshots of a group's pool: its parts are copied as one, and a restore makes as many parts that go on to the bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from left_behind import left_behind

from cli_runs import CONFIG, Commands, pool_digest
from holdfast import _core
from holdfast.admin.inspection import inspect_pool
from holdfast.admin.repair import problems_of
from holdfast.admin.snapshot import Snapshot, open_chain, restore_snapshot, take_snapshot
from holdfast.errors import BrokenChain, ConfigError, Corrupted, FormatMismatch, PoolNotFound
from holdfast.files.config import read_config
from holdfast.group import manifest as manifests
from holdfast.run.sections import RunConfig
from test_group_reading import GROUP, STEPS, deal_out, on, open_alone, train_group, train_plain

pytestmark = pytest.mark.dear

MEDIA = ["memory", "block"]


@pytest.fixture
def config(pool_root: Path) -> RunConfig:
    path = pool_root / "run.toml"
    path.write_text(CONFIG + GROUP)
    return read_config(RunConfig, path, [f"train.steps={STEPS}", "pool.log_bytes=1048576"])


def train_to(config: RunConfig, directory: Path, steps: int) -> str:
    """The digest there."""
    with open_alone(replace(config, train=replace(config.train, steps=steps)), directory) as trainer:
        for _ in trainer.steps():
            pass
        trainer.flush()
    return pool_digest(directory).whole


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("writers", [1, 3])
def test_a_restored_group_goes_on_as_the_one_that_was_copied(
    config: RunConfig, pool_root: Path, medium: str, writers: int
) -> None:
    config = on(config, medium)
    at_3 = train_to(config, pool_root / "pool", 3)
    deal_out(pool_root / "pool", writers)
    assert take_snapshot(pool_root / "pool", pool_root / "full").step == 3
    at_8 = train_to(config, pool_root / "pool", STEPS)  # its shards are dealt out anew, to one writer
    changed = take_snapshot(pool_root / "pool", pool_root / "changed", since=pool_root / "full")
    assert changed.step == STEPS
    assert restore_snapshot(pool_root / "full", pool_root / "a", medium=medium).step == 3
    assert restore_snapshot(pool_root / "changed", pool_root / "b", medium=medium).snapshots == 2
    assert (pool_digest(pool_root / "a").whole, pool_digest(pool_root / "b").whole) == (at_3, at_8)
    assert manifests.read(pool_root / "a").num_writers == writers
    assert manifests.read(pool_root / "a").uuid != manifests.read(pool_root / "pool").uuid
    for pool in ("a", "b"):
        assert problems_of(pool_root / pool) == []
    assert train_to(config, pool_root / "a", STEPS) == at_8


@pytest.mark.parametrize("medium", MEDIA)
def test_since_a_snapshot_of_the_same_step_nothing_has_changed(config: RunConfig, pool_root: Path, medium: str) -> None:
    group = train_group(on(config, medium), pool_root / "pool", writers=3)
    full = take_snapshot(group, pool_root / "full")
    assert full.rows + full.corrections > 100
    deal_out(group, 2)  # owners make no difference
    nothing = take_snapshot(group, pool_root / "nothing", since=pool_root / "full")
    assert (nothing.rows, nothing.corrections) == (0, 0)


@pytest.mark.parametrize("medium", MEDIA)
def test_a_snapshot_of_one_kind_of_store_makes_a_pool_of_the_other(
    config: RunConfig, pool_root: Path, medium: str
) -> None:
    group = train_group(on(config, medium), pool_root / "pool", writers=3)
    take_snapshot(group, pool_root / "snapshot")
    other = "block" if medium == "memory" else "memory"
    restore_snapshot(pool_root / "snapshot", pool_root / "other", medium=other)
    assert manifests.read(pool_root / "other").store == ("log" if other == "block" else "in_place")
    assert pool_digest(pool_root / "other") == pool_digest(group)


@pytest.mark.parametrize("medium", MEDIA)
def test_a_group_that_died_is_copied_as_of_the_step_that_it_goes_back_to(
    config: RunConfig, pool_root: Path, medium: str
) -> None:
    """The dense states lag behind the rows, and one of them is of a step that a writer does not have."""
    config = on(config, medium)
    config = replace(config, pool=replace(config.pool, dense_interval=3))
    with open_alone(config, pool_root / "pool") as trainer:
        for report in trainer.steps():
            if report.step == 5:
                trainer.pool.flush()
                left_behind(pool_root / "pool", pool_root / "rows-of-5")
    recovery = inspect_pool(pool_root / "rows-of-5")["recovery"]
    assert (recovery["exact_step"], recovery["relaxed_step"]) == (3, 5)
    step = take_snapshot(pool_root / "rows-of-5", pool_root / "snapshot").step
    restore_snapshot(pool_root / "snapshot", pool_root / "restored")
    assert pool_digest(pool_root / "restored") == pool_digest(pool_root / "rows-of-5")  # recovers it
    assert step == pool_digest(pool_root / "restored").step == 3


def test_snapshots_of_other_shards_or_of_one_writer_are_no_base(config: RunConfig, pool_root: Path) -> None:
    group = train_group(config, pool_root / "group", writers=2)
    fewer = train_group(replace(config, group=replace(config.group, shards=4)), pool_root / "fewer")
    plain = train_plain(config, pool_root / "plain")
    for pool in (group, fewer, plain):
        take_snapshot(pool, pool.with_suffix(".snapshot"))
    for pool, since in ((group, fewer), (group, plain), (plain, group)):
        with pytest.raises(ConfigError, match="other tables, shards"):
            take_snapshot(pool, pool_root / "changed", since=since.with_suffix(".snapshot"))
    take_snapshot(group, pool_root / "changed", since=group.with_suffix(".snapshot"))
    shutil.rmtree(group.with_suffix(".snapshot"))
    with pytest.raises(BrokenChain):
        open_chain(pool_root / "changed")


def test_a_group_whose_parts_are_not_all_there_is_not_copied(config: RunConfig, pool_root: Path) -> None:
    group = train_group(config, pool_root / "group", writers=2)
    writer = manifests.read(group).writer_directory(group, 1)
    writer.rename(pool_root / "elsewhere")
    with pytest.raises(PoolNotFound, match="cannot be reached"):
        take_snapshot(group, pool_root / "snapshot")
    assert not (pool_root / "snapshot").exists()
    (pool_root / "elsewhere").rename(writer)
    with pytest.raises(FormatMismatch, match="not copied alone"):
        _core.LiveCopy(str(writer))
    with pytest.raises(FormatMismatch, match="no part"):
        _core.LiveCopy(str(group / "dense"), part=True)


def test_how_a_group_shared_its_rows_is_not_believed_unchecked(config: RunConfig, pool_root: Path) -> None:
    from test_snapshot import reseal

    take_snapshot(train_group(config, pool_root / "group", writers=2), pool_root / "snapshot")
    before = (pool_root / "snapshot" / "manifest.json").read_text()

    def refused(change: object) -> None:
        reseal(pool_root / "snapshot", change)  # type: ignore[arg-type]
        with pytest.raises(Corrupted):
            Snapshot.open(pool_root / "snapshot")
        (pool_root / "snapshot" / "manifest.json").write_text(before)

    refused(lambda said: said["group"].update(owner_of=[0] * 8))
    refused(lambda said: said["group"].pop("crc32c"))
    refused(lambda said: said.update(group=7))
    refused(lambda said: said["tables"].pop())
    assert json.loads(before)["group"]["owner_of"] == list(manifests.read(pool_root / "group").owner_of)


def test_the_commands_take_a_group(
    config: RunConfig, pool_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    commands = Commands(pool_root, monkeypatch, capfd)
    train_group(config, pool_root / "pool", writers=2)
    taken = commands("snapshot", pool_root / "pool", pool_root / "snapshot")
    assert taken.code == 0 and f"step {STEPS}" in taken.out
    made = commands("restore", pool_root / "snapshot", pool_root / "made")
    assert made.code == 0 and f"step {STEPS}" in made.out
    assert commands.digest("made") == commands.digest("pool")
    assert commands("verify", pool_root / "made").code == 0
    assert "2 writers" in commands("inspect", pool_root / "made").out
