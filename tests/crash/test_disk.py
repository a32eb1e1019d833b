"""A disk that fails below the file system, or goes away: a loop device over a file that finds no space for blocks."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import _core
from holdfast.errors import PoolFailed, PoolFull, PoolNotFound, UntrustedPool
from holdfast.pools.pool import Pool
from test_row_log_faults import Rows, digest, trained

BACKING_BYTES = 24 << 20
DISK_BYTES = 96 << 20


def succeeds(*command: str | Path) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class ThinDisk:
    """An ext4 that has more space than what it lies on, a tmpfs. Writes to blocks that were never written fail when the
    tmpfs is full, although the file system has given them away. Its blocks are pages of the tmpfs: a loop device that
    could write a part of a block would say that it wrote all of it."""

    def __init__(self, root: Path) -> None:
        self._image = root / "backing" / "image"
        self._ballast = root / "backing" / "ballast"
        self.path = root / "disk"
        self._image.parent.mkdir()
        self.path.mkdir()
        if not succeeds("mount", "-t", "tmpfs", "-o", f"size={BACKING_BYTES}", "none", self._image.parent):
            pytest.skip("no right to mount a tmpfs")
        with self._image.open("wb") as file:
            file.truncate(DISK_BYTES)
        if not succeeds("mkfs.ext4", "-q", "-b", "4096", "-O", "^has_journal", self._image) or not self.mount():
            pytest.skip("no right to mount a loop device, or no mkfs.ext4")

    def mount(self) -> bool:
        return succeeds("mount", "-o", "loop", self._image, self.path)

    def unmount(self, *options: str) -> bool:
        return succeeds("umount", *options, self.path)

    def fill(self) -> None:
        with self._ballast.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)):
                    pass
            except OSError:
                return

    def free(self) -> None:
        self._ballast.unlink()

    def close(self) -> None:
        self.unmount("-l")
        succeeds("umount", "-l", self._image.parent)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[ThinDisk]:
    disk = ThinDisk(tmp_path)
    yield disk
    disk.close()


def train_until_it_fails(rows: Rows) -> int:
    """Returns the last step that was durable before."""
    with pytest.raises((PoolFull, PoolFailed), match="opened again"):
        rows.steps(5000)
    durable = rows.pool.durable_step
    with pytest.raises((PoolFull, PoolFailed)):
        rows.pool.close()
    return durable


def test_a_row_log_on_a_disk_that_fails_goes_on_when_the_disk_does(disk: ThinDisk, pool_root: Path) -> None:
    rows = Rows(disk.path / "pool")
    rows.steps(3)
    disk.fill()
    durable = train_until_it_fails(rows)
    disk.free()
    with Rows(disk.path / "pool") as rows:
        assert rows.pool.step >= durable
        rows.steps(40 - rows.pool.step)
    assert digest(disk.path / "pool") == digest(trained(pool_root / "whole", 40, medium="memory"))


def test_rows_in_place_are_not_trusted_after_a_close_that_the_disk_did_not_take(disk: ThinDisk) -> None:
    pool = disk.path / "pool"
    with Rows(pool, medium="memory") as rows:
        rows.steps(1)
    rows = Rows(pool, medium="memory")
    disk.fill()
    rows.steps(30)
    with pytest.raises((PoolFull, PoolFailed), match="syncing"):
        rows.pool.close()
    disk.free()
    # The pages look written: another sync finds nothing to complain of, and nothing of them is on the disk.
    with pytest.raises(UntrustedPool, match="could not be synced"):
        Pool(pool)
    del rows
    gc.collect()
    assert disk.unmount()
    assert disk.mount()
    with pytest.raises(UntrustedPool, match="could not be synced"):
        Pool(pool)


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_a_disk_that_is_unmounted_lazily_has_the_whole_run(medium: str, disk: ThinDisk, pool_root: Path) -> None:
    pool = disk.path / "pool"
    rows = Rows(pool, medium=medium)
    rows.steps(5)
    assert disk.unmount("-l")
    with pytest.raises(PoolNotFound):
        _core.Reader(str(pool))
    rows.steps(5)
    rows.pool.close()
    del rows
    gc.collect()
    assert disk.mount()
    assert digest(pool) == digest(trained(pool_root / "whole", 10, medium="memory"))


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_a_limit_on_the_size_of_files_is_named(medium: str, pool_root: Path) -> None:
    """A shell's, or a container's: the system says of it that a file is too large, and not that it was asked to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(PoolFailed, match=r"File too large; the limit on the size of files \(ulimit -f\)"):
            Rows(pool_root / "pool", medium=medium)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


MAKING = """
import sys
import holdfast
with holdfast.Pool(sys.argv[1], medium="memory") as pool:
    table = holdfast.EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=8, feature_names=["f"])
    holdfast.EmbeddingBagCollection(pool, [table], optimizer=holdfast.SGD(lr=0.1))
"""


def test_a_pool_in_place_that_a_disk_has_no_room_for_is_refused(tmp_path: Path) -> None:
    image, mounted = tmp_path / "image", tmp_path / "disk"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(48 << 20)
    if not succeeds("mkfs.ext4", "-q", "-m", "0", image) or not succeeds("mount", "-o", "loop", image, mounted):
        pytest.skip("no right to mount a loop device, or no mkfs.ext4")
    try:
        with (mounted / "ballast").open("wb") as file:
            space = os.statvfs(mounted)
            os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - (3 << 19))
        made = subprocess.run(
            [sys.executable, "-c", MAKING, mounted / "pool"], capture_output=True, text=True, check=False
        )
        assert made.returncode == 1, made.stderr
        assert "PoolFull: allocating" in made.stderr
    finally:
        succeeds("umount", mounted)
