"""Advisory locks that go with the process that took them: a child of fork (a DataLoader's worker) keeps none."""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

Taken = TypeVar("Taken")
_MOMENT_S = 1.0  # verify takes longer where there is much to read
_BETWEEN_LOOKS_S = 0.01


class FileLock:
    """A lock on a file or directory, from now until `release`, the end of the ``with`` block or of the process.

    flags: how it is opened (os.O_...). Raises BlockingIOError where another process has it, OSError where it cannot be
    opened.
    """

    def __init__(self, path: Path, flags: int, *, shared: bool = False) -> None:
        self.fd = -1
        self.fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BaseException:
            self.release()
            raise
        _held.add(self)

    def sign(self) -> None:
        """Writes into the file which process has it, for those that find it locked; only what they are told suffers
        where that cannot be written."""
        with suppress(OSError):
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """May be called again."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def signed_by(path: Path) -> str:
    """The process that has the file's lock, as it signed."""
    return path.read_bytes()[:32].decode(errors="replace").strip() or "(unknown)"


def outlasting_readers(path: Path, take: Callable[[], Taken], busy: type[Exception]) -> Taken:
    """What `take` gives, which wants the lock of `path` and raises `busy` where it has not got it. Waits for those that
    share it for a moment, as inspect does, and keep it from who wants it alone."""
    until = time.monotonic() + _MOMENT_S
    while True:
        try:
            return take()
        except busy:
            if time.monotonic() > until or not is_lock_shared(path):
                raise
        time.sleep(_BETWEEN_LOOKS_S)


def is_lock_shared(path: Path) -> bool:
    """Whether nobody has the file's lock alone: those that share it change nothing, and did not sign."""
    try:
        with FileLock(path, os.O_RDONLY, shared=True):
            return True
    except BlockingIOError:
        return False


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_close_in_child)
