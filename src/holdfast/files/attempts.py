"""Names for what is being made: each has a lock of its own, and what a process that died left is removed."""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.files.locks import FileLock

_MOST_BYTES = 220


@contextmanager
def attempt_at(path: Path, suffix: str, *, is_directory: bool) -> Iterator[Path]:
    """A hidden file or directory beside `path`, empty, for this process alone as long as the block lasts. Who asks for
    it removes it, or gives it another name.

    What processes that were killed left of their own attempts at `path` is removed: their locks went with them. Where
    the file system knows no locks nothing is. Raises OSError.
    """
    for left in path.parent.glob(f".{glob.escape(_hidden(path.name))}.*.{suffix}"):
        with suppress(OSError), FileLock(left, os.O_RDONLY if left.is_dir() else os.O_RDWR):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()
    partial, lock = _made(path, suffix, is_directory=is_directory)
    try:
        yield partial
    finally:
        if lock is not None:
            lock.release()


def _hidden(name: str) -> str:
    """As much of the name as leaves room for what stands around it: names have 255 bytes."""
    while len(os.fsencode(name)) > _MOST_BYTES:
        name = name[:-1]
    return name


def _made(path: Path, suffix: str, *, is_directory: bool) -> tuple[Path, FileLock | None]:
    while True:
        # Process ids come again, and are the same in two containers: they make no name of one's own.
        partial = path.with_name(f".{_hidden(path.name)}.{secrets.token_hex(8)}.{suffix}")
        if is_directory:
            partial.mkdir()
        else:
            os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        try:
            lock = FileLock(partial, os.O_RDONLY if is_directory else os.O_RDWR)
        except (BlockingIOError, FileNotFoundError):
            continue  # somebody who removes what was left saw it before it was locked
        except OSError:
            return partial, None
        if partial.exists():
            return partial, lock
        lock.release()
