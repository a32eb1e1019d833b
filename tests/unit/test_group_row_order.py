"""The rows of several writers, put in order by long reads of each one's home, are those that each row's read gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.admin import row_order
from holdfast.admin.digest import digest_pool
from holdfast.admin.exporting import export_pool
from holdfast.admin.row_order import rows_in_order
from holdfast.admin.snapshot import layer_file, output, runs, take_snapshot
from holdfast.files.config import read_config
from holdfast.pools.read_only import at_rest
from holdfast.run.sections import RunConfig
from test_group_reading import CONFIG, GROUP, deal_out, killed_after, train_group

SMALL_LOG = ["train.steps=40", "train.epochs=10", "pool.medium=block", "pool.log_bytes=32768"]


@pytest.fixture
def config(pool_root: Path) -> RunConfig:
    path = pool_root / "run.toml"
    path.write_text(CONFIG + GROUP)
    return read_config(RunConfig, path, SMALL_LOG)


def same_in_order(pool: Path) -> tuple[int, int]:
    """Checks digest and export of a pool; how many rows were read, and how many of these count."""
    read: list[int] = []
    with at_rest(pool) as (reader, _):
        as_they_lie = digest_pool(reader)
        export_pool(reader, pool.with_suffix(".as_they_lie"), overwrite=True)
        with rows_in_order(pool, pool.parent, read.append) as ordered:
            assert ordered is not None
            assert digest_pool(reader, ordered=ordered) == as_they_lie
        with rows_in_order(pool, pool.parent) as ordered:
            export_pool(reader, pool.with_suffix(".ordered"), ordered=ordered, overwrite=True)
    assert pool.with_suffix(".ordered").read_bytes() == pool.with_suffix(".as_they_lie").read_bytes()
    assert not list(pool.parent.glob(".holdfast-rows*"))
    return sum(read), as_they_lie.rows_counted


@pytest.mark.parametrize("spare", [0, 1 << 30])
@pytest.mark.parametrize("writers", [1, 3])
def test_rows_at_home_and_in_logs_are_read_in_order(
    config: RunConfig, pool_root: Path, monkeypatch: pytest.MonkeyPatch, writers: int, spare: int
) -> None:
    monkeypatch.setattr(row_order, "spare_bytes", lambda: spare)
    for module in (runs, row_order):
        monkeypatch.setattr(module, "RUN_BYTES", 600)
    for module in (output, layer_file):
        monkeypatch.setattr(module, "RUN_CHUNK_BYTES", 200)
    at_home, counted = same_in_order(train_group(config, pool_root / "group", writers))
    assert 0 < at_home <= counted


def test_what_a_killed_group_has_in_its_logs_counts(config: RunConfig, pool_root: Path) -> None:
    killed_after(config, pool_root / "group", 25, lambda step: pool_root / f"killed-{step}")
    at_home, counted = same_in_order(pool_root / "killed-25")
    assert at_home < counted
    deal_out(pool_root / "killed-25", 3)
    same_in_order(pool_root / "killed-25")


def test_a_snapshot_of_a_group_says_how_much_it_is_going_to_write(config: RunConfig, pool_root: Path) -> None:
    told: list[tuple[int, int | None]] = []
    group = train_group(config, pool_root / "group", 3)
    taken = take_snapshot(group, pool_root / "snapshot", on_bytes=lambda done, total: told.append((done, total)))
    assert taken.rows > 0
    assert {total for _, total in told} and None not in {total for _, total in told}
