"""A disk whose requests are recorded on their way, and what a cut of the power leaves of it at every flush.

The kernel's own file system lies on a loop device, over a file that nbdfuse makes of a server of the NBD protocol: what
comes to the server is what would come to a disk, its flushes with it. So every cut is one that a disk with a volatile
cache might have left (volatile_disk.py), and all of them are of the same run.

The server is a process of its own (`recorded_disk.py PLATTER SOCKET LOG NOTE`): whoever waits for the disk may hold
Python's lock while he does.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import BinaryIO

sys.path.insert(0, str(Path(__file__).parents[1] / "cxl"))

from loop_disks import LoopDisk, clone, run
from volatile_disk import VolatileCache, VolatileDisk

SHARES_LOST = (1.0, 0.5, 0.02, 0.0)  # of what was not flushed: by turns
_HEAD = Struct("<?QII")


@dataclass(frozen=True, slots=True)
class Request:
    """A write, or a flush. note: what the note file held when the request came."""

    offset: int
    data: bytes
    through: bool
    note: bytes

    @property
    def is_flush(self) -> bool:
        return not self.data


class RecordingCache(VolatileCache):
    """Writes every request to `log` before it does anything."""

    def __init__(self, platter: Path, log: Path, note: Path) -> None:
        super().__init__(platter)
        self._log = log.open("wb", buffering=0)
        self._note = note

    def write(self, offset: int, data: bytes, *, through: bool = False) -> None:
        self._record(offset, data, through)
        super().write(offset, data, through=through)

    def flush(self) -> None:
        self._record(0, b"", False)
        super().flush()

    def _record(self, offset: int, data: bytes, through: bool) -> None:
        note = self._note.read_bytes() if self._note.exists() else b""
        self._log.write(_HEAD.pack(through, offset, len(data), len(note)) + data + note)


def read_requests(log: BinaryIO, end: int) -> Iterator[Request]:
    """Those in the first `end` bytes."""
    while log.tell() < end:
        through, offset, size, note_size = _HEAD.unpack(log.read(_HEAD.size))
        yield Request(offset, log.read(size), through, log.read(note_size))


@dataclass(frozen=True, slots=True)
class Cut:
    """What a cut left: a disk that is not mounted. note: of the request at which the power went; is_end: whether the
    mark had come."""

    number: int
    disk: LoopDisk
    share_lost: float
    note: bytes
    is_end: bool

    def __str__(self) -> str:
        when = "the end" if self.is_end else f"flush {self.number}"
        return f"{self.disk.cell}, at {when}, {self.share_lost:.0%} of what was not flushed is lost"


class RecordedDisk(LoopDisk):
    """Begins as another disk, which is not mounted, and is there to be mounted once. note: a file whose bytes are
    recorded with every request."""

    def __init__(self, before: LoopDisk, note: Path | None = None) -> None:
        self._directory = before.image.with_name(f"{before.image.name}-recorded")
        self._directory.mkdir()
        super().__init__(before.cell, self._directory / "image", self._directory / "mounted")
        clone(before.image, self.image)
        self._before = before
        self._log = self._directory / "log"
        self._note = note or self._directory / "note"
        self._processes: list[subprocess.Popen[bytes]] = []

    def _attach(self) -> None:
        socket, fuse = self._directory / "socket", self._directory / "fuse"
        fuse.mkdir()
        self._start([sys.executable, __file__, self.image, socket, self._log, self._note], socket.exists)
        self._start(["nbdfuse", fuse, "--unix", socket], (fuse / "nbd").exists)
        self._device = run("losetup", "-b", str(self.cell.sector_bytes), "--show", "-f", fuse / "nbd")
        # Whoever asks what the disk lies on is to find a disk: FUSE might be anything, and promises nothing.
        cover = self._directory / "cover"
        cover.mkdir()
        (cover / "nbd").touch()
        run("mount", "--bind", cover, fuse)

    def _start(self, command: list[str | Path], is_there: Callable[[], bool]) -> None:
        process = subprocess.Popen(command)
        self._processes.append(process)
        until = time.monotonic() + 30
        while not is_there():
            if process.poll() is not None or time.monotonic() > until:
                raise OSError(f"{command[0]} did not start")
            time.sleep(0.01)

    def mark(self) -> int:
        """How long the recording is now."""
        return self._log.stat().st_size

    def close(self) -> None:
        super().close()
        for _ in ("cover", "fuse"):
            subprocess.run(["umount", "-l", self._directory / "fuse"], capture_output=True, check=False)
        for process in self._processes:
            process.kill()
            process.wait()
        shutil.rmtree(self._directory)

    def cuts(self, end: int, seed: int, count: int | None = None, *, forgetful: bool = False) -> Iterator[Cut]:
        """At every flush before the mark `end`, or at `count` of them, when it is asked for; and at `end`. The disk is
        not to be mounted any more: no file system takes kindly to its twin. forgetful: as if it did nothing at a flush
        (volatile_disk.py)."""
        chosen = self._choose(end, seed, count)
        platter = self._directory / "platter"
        clone(self._before.image, platter)
        cache = VolatileCache(platter, sector_bytes=self.cell.torn_bytes, forgetful=forgetful)

        def cut(number: int, note: bytes, *, is_end: bool = False) -> Cut:
            left = LoopDisk(self.cell, self._directory / f"cut-{number}", self._directory / f"cut-{number}-mounted")
            share = SHARES_LOST[number % len(SHARES_LOST)]
            clone(platter, left.image)
            cache.cut_copy(left.image, random.Random(f"{seed} {number}"), share)
            return Cut(number, left, share, note, is_end)

        number, note = 0, b""
        with self._log.open("rb") as log:
            for request in read_requests(log, end):
                note = request.note
                if request.is_flush or request.through:
                    if number in chosen:
                        yield cut(number, note)
                    number += 1
                if request.is_flush:
                    cache.flush()
                else:
                    cache.write(request.offset, request.data, through=request.through)
        yield cut(number, note, is_end=True)
        cache.close()
        platter.unlink()

    def _choose(self, end: int, seed: int, count: int | None) -> set[int]:
        with self._log.open("rb") as log:
            flushes = range(sum(request.is_flush or request.through for request in read_requests(log, end)))
        return set(flushes if count is None else random.Random(seed).sample(flushes, min(count, len(flushes))))


def serve(platter: str, address: str, log: str, note: str) -> None:
    with VolatileDisk(RecordingCache(Path(platter), Path(log), Path(note)), Path(address)) as disk:
        disk.wait()


if __name__ == "__main__":
    serve(*sys.argv[1:])
