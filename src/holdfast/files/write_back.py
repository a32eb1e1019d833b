"""Files that are written from one end to the other, at about the disk's rate."""

from __future__ import annotations

import os

_BYTES = 32 << 20


class WriteBack:
    """Of a file, or of a part of one that begins at `begin`: the disk has something to do before the end, when all of
    it is waited for; and memory is not filled with what nobody is going to read."""

    def __init__(self, fd: int, begin: int = 0) -> None:
        self._fd = fd
        self._done = self._begun = begin  # up to there it is written back, and up to there that has begun

    def reached(self, end: int) -> None:
        """Everything before `end` was written."""
        if end - self._begun < _BYTES:
            return
        os.posix_fadvise(self._fd, self._done, end - self._done, os.POSIX_FADV_DONTNEED)
        self._done, self._begun = self._begun, end
