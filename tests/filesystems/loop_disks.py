"""Disks in loop devices, of one sector size or another, whose power is cut and which fail.

A disk is a file on a file system of its own that clones files (XFS): a clone is the disk as it is at that instant, with
whatever had been written to it, flushed or not, and without what the kernel still has in memory. Where that file system
is full, the disk fails writes to blocks that it was never given. The loop driver
believes in a write of which only a part was done, as no disk does: so a disk is written a block at a time, which is
done or is not.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FICLONE = 0x40049409  # of linux/fs.h
HOST_BYTES = 4 << 30  # sparse
BUSY_SECONDS = 60
MIB = 1 << 20


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout.strip()


def unmount(path: Path) -> None:
    """Once nothing uses it: the kernel lets go of a killed process's io_uring, and so of its files, only some time
    after the process was waited for."""
    last = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            run("umount", path)
            return
        except OSError as error:
            if "busy" not in str(error) or time.monotonic() > last:
                raise
        time.sleep(0.05)


def wait_until_unused(device: str) -> None:
    """Until the file system of a device that was unmounted has let go of it: a process in a mount namespace of its own
    has mounts of its own, and no file system takes kindly to the twin of one that is still mounted."""
    last = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            os.close(os.open(device, os.O_RDONLY | os.O_EXCL))
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > last:
                raise
        time.sleep(0.05)


def reserve(path: Path, spare_bytes: int) -> None:
    """Makes a file of all the space that its file system has, but for `spare_bytes`; none where it has none at all."""
    try:
        file = path.open("wb")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return
    with file:
        end, piece = 0, 64 * MIB
        while piece >= 64 << 10:
            try:
                os.posix_fallocate(file.fileno(), end, piece)
                end += piece
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                piece //= 2
        os.ftruncate(file.fileno(), max(0, end - spare_bytes))
        os.fsync(file.fileno())


def clone(image: Path, copy: Path) -> None:
    with image.open("rb") as this, copy.open("wb") as other:
        fcntl.ioctl(other, FICLONE, this.fileno())


@dataclass(frozen=True)
class Cell:
    """A file system on disks of one sector size. torn_bytes: what it needs to be written whole or not at all."""

    name: str
    sector_bytes: int
    disk_bytes: int
    mkfs: tuple[str, ...]
    options: str = "defaults"
    overlay: bool = False  # over it
    torn_bytes: int = 512

    def __str__(self) -> str:
        return f"{self.name}-{self.sector_bytes}"


def cells_of(name: str, disk_bytes: int, *mkfs: str, torn_bytes: int = 512) -> list[Cell]:
    return [
        Cell(name, sector_bytes, disk_bytes, mkfs, torn_bytes=max(torn_bytes, sector_bytes))
        for sector_bytes in (512, 4096)
    ]


# A superblock of ext4, of two sectors, cannot be mounted after it was torn if it has a checksum; nor can one of btrfs.
EXT4 = ("mkfs.ext4", "-q", "-b", "4096", "-O", "^metadata_csum")
CELLS = [
    *cells_of("ext4", 128 * MIB, *EXT4),
    *cells_of("xfs", 320 * MIB, "mkfs.xfs", "-q"),
    *cells_of("btrfs", 320 * MIB, "mkfs.btrfs", "-q", torn_bytes=4096),
    Cell("ext4_without_direct_io", 512, 128 * MIB, EXT4, "data=journal"),
    Cell("overlay", 512, 128 * MIB, EXT4, overlay=True),
]


class Host:
    """The file system on which disks lie."""

    def __init__(self, root: Path) -> None:
        self._image = root / "host"
        self.path = root / "disks"
        self.path.mkdir()
        with self._image.open("wb") as file:
            file.truncate(HOST_BYTES)
        run("mkfs.xfs", "-q", "-m", "reflink=1", self._image)
        run("mount", "-o", "loop", self._image, self.path)

    def fill(self) -> None:
        """Takes the space that is free now; what a deleted image had comes back only when its loop device is gone."""
        reserve(self.path / f"ballast-{len(list(self.path.glob('ballast-*')))}", 0)

    def free(self) -> None:
        for ballast in self.path.glob("ballast-*"):
            ballast.unlink()

    def close(self) -> None:
        run("umount", "-l", self.path)
        self._image.unlink()


class LoopDisk:
    """A disk with a file system, mounted at `path`."""

    def __init__(self, cell: Cell, image: Path, mount_point: Path) -> None:
        self.cell = cell
        self.image = image
        self._mount_point = mount_point
        self._device = ""
        self.path = mount_point / "merged" if cell.overlay else mount_point

    @classmethod
    def make(cls, cell: Cell, host: Host, name: str) -> LoopDisk:
        disk = cls(cell, host.path / name, host.path / f"{name}-mounted")
        with disk.image.open("wb") as file:
            file.truncate(cell.disk_bytes)
        disk._attach()
        run(*cell.mkfs, disk._device)
        disk.mount()
        return disk

    def _attach(self) -> None:
        self._device = run("losetup", "-b", str(self.cell.sector_bytes), "--show", "-f", self.image)
        Path(f"/sys/block/{Path(self._device).name}/queue/max_sectors_kb").write_text("4")

    def mount(self) -> None:
        if not self._device:
            self._attach()
        self._mount_point.mkdir(exist_ok=True)
        run("mount", "-o", self.cell.options, self._device, self._mount_point)
        if not self.cell.overlay:
            return
        below, upper, work = (self._mount_point / part for part in ("below", "upper", "work"))
        for directory in (below, upper, work, self.path):
            directory.mkdir(exist_ok=True)
        run("mount", "-t", "overlay", "-o", f"lowerdir={below},upperdir={upper},workdir={work}", "overlay", self.path)

    def unmount(self) -> None:
        if self.cell.overlay:
            unmount(self.path)
        unmount(self._mount_point)
        wait_until_unused(self._device)
        run("losetup", "-d", self._device)
        self._device = ""

    def remount(self) -> None:
        """So that nothing is in the page cache."""
        self.unmount()
        self.mount()

    def cut(self, number: int) -> LoopDisk:
        """The disk as it is now, not mounted."""
        copy = self.image.with_name(f"{self.image.name}-cut-{number}")
        clone(self.image, copy)
        return LoopDisk(self.cell, copy, copy.with_name(copy.name + "-mounted"))

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        self.mount()
        try:
            yield self.path
            self.unmount()
        finally:
            self.close()

    def close(self) -> None:
        """Whatever it is used for."""
        for directory in (self.path, self._mount_point) if self.cell.overlay else (self._mount_point,):
            subprocess.run(["umount", "-l", directory], capture_output=True, check=False)
        if self._device:
            subprocess.run(["losetup", "-d", self._device], capture_output=True, check=False)
        self.image.unlink(missing_ok=True)
        shutil.rmtree(self._mount_point, ignore_errors=True)
