"""Whether a file that is read for hours, a piece at a time, is still the one that was opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.errors import DataError


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
