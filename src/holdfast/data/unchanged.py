"""Whether a path leads to a file, and whether one that is read for hours, a piece at a time, is still the one that was
opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.errors import ConfigError, DataError


def check_is_file(path: Path) -> None:
    """Raises ConfigError that names `path`, and says what to do, where it is no file."""
    if path.is_file():
        return
    if path.is_dir():
        raise ConfigError(f"paths: {path} is a directory, not a file: name each of its files, in the order of training")
    if any(letter in str(path) for letter in "*?["):
        raise ConfigError(
            f"paths: {path} is not a file, and no pattern either: name each file, in the order of training"
        )
    raise ConfigError(f"paths: {path} is not a file")


class Unchanged:
    """Notices that a path leads to other bytes than when this was made. Others at the same places may be samples, too,
    so nothing else would say so."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path = path
        self._mark = _mark_of(path)

    def check(self, is_same: Callable[[], bool]) -> None:
        """To be called when a piece was read. is_same: whether the contents are the same, asked where the file was
        written or another one put in its place; a touch, or a copy of it, is no change. Raises DataError."""
        try:
            mark = _mark_of(self._path)
            if mark == self._mark:
                return
            if is_same():
                self._mark = mark
                return
        except OSError as error:
            raise DataError(f"{self._path}: it cannot be read: {error.strerror}") from error
        raise DataError(
            f"{self._path}: the file has changed since it was opened: put it back and start again, and give other data "
            "a file of its own"
        )


def _mark_of(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
