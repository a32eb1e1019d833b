"""A medium that is full or read-only: a typed error, nothing lost, and training goes on once there is space again."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast import _core
from holdfast.admin.digest import digest_pool
from holdfast.admin.exporting import export_pool
from holdfast.admin.exporting_table import export_table
from holdfast.admin.snapshot import restore_snapshot, take_snapshot
from holdfast.errors import PoolFull, PoolReadOnly
from holdfast.pools.pool import Pool
from holdfast.pools.read_only import at_rest
from holdfast.pools.tables import EmbeddingBagConfig
from holdfast.rows.embedding import EmbeddingBagCollection
from holdfast.train.metrics import Evaluation
from holdfast.train.observe import TensorBoard

SIZE_BYTES = 4 << 20
ROWS = 200_000  # × 64 bytes: more than the medium holds


def mounted(*options: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["mount", *options], capture_output=True, check=False)


@pytest.fixture
def small_medium() -> Iterator[Path]:
    """A tmpfs of 4 MiB. Needs the right to mount, as root in a container may have."""
    with tempfile.TemporaryDirectory() as directory:
        if os.geteuid() != 0 or mounted("-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "none", directory).returncode != 0:
            pytest.skip("no right to mount a tmpfs")
        try:
            yield Path(directory)
        finally:
            subprocess.run(["umount", "-l", directory], check=True)


def open_rows(directory: Path) -> tuple[Pool, EmbeddingBagCollection]:
    pool = Pool(directory, seed=1, log_bytes=1 << 20)
    table = EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=16, name="t", feature_names=["f"])
    return pool, EmbeddingBagCollection(pool, [table])


def step(pool: Pool, rows: EmbeddingBagCollection, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, ROWS, (256,), generator=generator)
    (rows({"f": (ids, torch.arange(256))}).values() ** 2).sum().backward()
    rows.optimizer.step()
    pool.commit(number * 256)


def train_until_full(pool: Pool, rows: EmbeddingBagCollection) -> None:
    for number in range(1, 1000):
        step(pool, rows, number)


def test_a_full_medium_is_an_error_before_capture_and_training_goes_on_after_space_was_freed(
    small_medium: Path,
) -> None:
    ballast = small_medium / "ballast"
    ballast.write_bytes(bytes(1 << 20))
    pool, rows = open_rows(small_medium / "pool")
    with pytest.raises(PoolFull, match="free space"):
        train_until_full(pool, rows)
    reached = pool.step
    assert reached >= 1
    ballast.unlink()
    step(pool, rows, reached + 1)
    pool.close()
    pool, rows = open_rows(small_medium / "pool")
    assert pool.step == reached + 1
    pool.close()


def test_a_step_that_met_a_full_medium_leaves_no_trace(small_medium: Path) -> None:
    pool, rows = open_rows(small_medium / "pool")
    with pytest.raises(PoolFull):
        train_until_full(pool, rows)
    reached = pool.step
    pool.close()
    digests = [digest_pool(_core.Reader(str(small_medium / "pool"))).whole]
    with tempfile.TemporaryDirectory() as directory:
        pool, rows = open_rows(Path(directory) / "pool")
        for number in range(1, reached + 1):
            step(pool, rows, number)
        pool.close()
        digests.append(digest_pool(_core.Reader(str(Path(directory) / "pool"))).whole)
    assert digests[0] == digests[1]


def test_a_pool_that_does_not_fit_its_medium_is_refused_when_it_is_made(small_medium: Path) -> None:
    pool = Pool(small_medium / "pool", log_bytes=64 << 20)
    table = EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="t", feature_names=["f"])
    with pytest.raises(PoolFull):
        EmbeddingBagCollection(pool, [table])


def test_snapshots_to_and_from_a_full_medium_leave_nothing_there(small_medium: Path, pool_root: Path) -> None:
    pool, rows = open_rows(pool_root / "pool")
    for number in range(1, 400):
        step(pool, rows, number)
    pool.close()
    with pytest.raises(PoolFull, match="No space left"):
        take_snapshot(pool_root / "pool", small_medium / "snapshot")
    assert list(small_medium.iterdir()) == []
    take_snapshot(pool_root / "pool", pool_root / "snapshot")
    for medium in ("memory", "block"):
        with pytest.raises(PoolFull):
            restore_snapshot(pool_root / "snapshot", small_medium / "restored", medium=medium)  # type: ignore[arg-type]
        assert list(small_medium.iterdir()) == []


@pytest.mark.parametrize("suffix", ["safetensors", "parquet", "arrow"])
def test_an_export_to_a_full_medium_names_its_file_and_leaves_nothing_there(
    suffix: str, small_medium: Path, pool_root: Path
) -> None:
    pool, rows = open_rows(pool_root / "pool")
    with pool:
        for number in range(1, 4):
            step(pool, rows, number)
    (small_medium / "another's").write_bytes(bytes(SIZE_BYTES - (8 << 10)))
    out = small_medium / f"out.{suffix}"
    with at_rest(pool_root / "pool") as (reader, _), pytest.raises(OSError, match="free space there") as raised:
        export_pool(reader, out) if suffix == "safetensors" else export_table(reader, 0, out)
    assert raised.value.filename == str(out)
    assert [path.name for path in small_medium.iterdir()] == ["another's"]


def show_until_full(directory: Path) -> None:
    board = TensorBoard(directory, resumed_step=0)
    for step in range(10_000):
        board.evaluation(step, Evaluation(auc=0.5, log_loss=0.7, samples=2, positives=1), began=0.0, is_end=False)


def test_a_full_medium_under_tensorboard_is_an_error_that_names_its_directory(
    small_medium: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (small_medium / "another's").write_bytes(bytes(SIZE_BYTES))
    before = set(threading.enumerate())
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # TensorBoard's own thread ends with the error, too
    with pytest.raises(OSError, match="No space left") as raised:
        show_until_full(small_medium / "scalars")
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert raised.value.filename == str(small_medium / "scalars")


def test_a_read_only_medium_is_read_and_not_written(small_medium: Path) -> None:
    pool, rows = open_rows(small_medium / "pool")
    step(pool, rows, 1)
    pool.close()
    if mounted("-o", "remount,ro", str(small_medium)).returncode != 0:
        pytest.skip("no right to remount")
    with pytest.raises(PoolReadOnly):
        open_rows(small_medium / "pool")
    reader = _core.Reader(str(small_medium / "pool"))
    assert reader.commit["step"] == 1
    assert reader.verify() == []
