"""Files that are read or written from one end to the other, past the page cache where their file system can: copies
there take as much of a processor as all else that is done with the bytes, and drive out what others have in it."""

from __future__ import annotations

import errno
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from holdfast.files.names import named
from holdfast.files.recycled import recycled

_BLOCK_BYTES = 4096  # what direct requests begin and end with, on every device and file system known
_WINDOW_BYTES = 8 << 20
_ON_THEIR_WAY = 2  # buffers that are being written while one is filled


class DirectReader:
    """Reads a file from `begin` on. Context manager. Raises OSError."""

    def __init__(self, path: Path, begin: int = 0, *, window_bytes: int = _WINDOW_BYTES) -> None:
        """window_bytes: that are read at a time."""
        self._path = path
        self._window_bytes = window_bytes
        self._fd, self._is_direct = _opened(path, os.O_RDONLY, direct=True)
        self._next = begin // _BLOCK_BYTES * _BLOCK_BYTES  # in the file
        self._skip = begin - self._next
        self._window = np.empty(0, np.uint8)
        self._at_end = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, num_bytes: int) -> NDArray[np.uint8]:
        """The next so many bytes; fewer at the end of the file. They stay as they are while anybody has them."""
        if len(self._window) < num_bytes and not self._at_end:
            self._read_on(num_bytes)
        found, self._window = self._window[:num_bytes], self._window[num_bytes:]
        return found

    def _read_on(self, num_bytes: int) -> None:
        """What is left of the window moves before what follows it."""
        left = len(self._window)
        wanted = _in_blocks(max(self._window_bytes, num_bytes - left) + self._skip)
        begin = _in_blocks(left)
        memory = recycled(begin + wanted)
        memory[begin - left : begin] = self._window
        got = self._fill(memory[begin:])
        self._at_end = got < wanted
        self._window = memory[begin - left + self._skip : begin + got]
        self._skip = 0

    def _fill(self, memory: NDArray[np.uint8]) -> int:
        got = 0
        while got < len(memory):
            try:
                with named(self._path):
                    count = os.preadv(self._fd, [memory[got:].data], self._next)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                os.close(self._fd)
                self._fd, self._is_direct = _opened(self._path, os.O_RDONLY, direct=False)
                continue
            if count == 0:
                break
            got += count
            self._next += count
        if not self._is_direct:
            os.posix_fadvise(self._fd, self._next - got, got, os.POSIX_FADV_DONTNEED)
        return got


class DirectWriter:
    """Writes to a file that is there, from `begin` on; a thread writes what was gathered while more is. Context
    manager: when the block ends well, the system has all of it. Raises OSError, of an earlier write, too.

    Blocks that are not all its own, the first and the last one, go through the page cache: nothing is written over that
    others write into them.
    """

    def __init__(self, path: Path, begin: int = 0, *, direct: bool = True) -> None:
        """direct: else through the page cache, where it is wanted soon."""
        self._path = path
        self._cached_fd, _ = _opened(path, os.O_WRONLY, direct=False)
        self._fd, self._is_direct = _opened(path, os.O_WRONLY, direct=direct)
        self._first = self._filled = begin % _BLOCK_BYTES  # in the buffer: what is to be written lies between
        self._offset = begin - self._first  # of the buffer, in the file
        self._buffer = recycled(_WINDOW_BYTES)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hf-writer")
        self._written: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._send()
                while self._written:
                    self._written.popleft().result()
        finally:
            self._thread.shutdown()
            os.close(self._fd)
            os.close(self._cached_fd)

    def write(self, data: NDArray[np.uint8]) -> None:
        """What follows; uint8, of one dimension."""
        while len(data):
            some = data[: len(self._buffer) - self._filled]
            self._buffer[self._filled : self._filled + len(some)] = some
            self._filled += len(some)
            data = data[len(some) :]
            if self._filled == len(self._buffer):
                self._send()

    def _send(self) -> None:
        while len(self._written) >= _ON_THEIR_WAY:
            self._written.popleft().result()
        self._written.append(self._thread.submit(self._put, self._buffer, self._first, self._filled, self._offset))
        self._offset += self._filled
        self._first = self._filled = 0
        self._buffer = recycled(_WINDOW_BYTES)

    def _put(self, buffer: NDArray[np.uint8], first: int, end: int, offset: int) -> None:
        """Of a buffer that lies at `offset` of the file."""
        whole = min(_in_blocks(first), end)
        whole_end = max(whole, end // _BLOCK_BYTES * _BLOCK_BYTES)
        for fd, begin, stop in (
            (self._cached_fd, first, whole),
            (self._fd, whole, whole_end),
            (self._cached_fd, whole_end, end),
        ):
            try:
                write_at(fd, buffer[begin:stop], offset + begin, self._path)
            except OSError as error:
                if error.errno != errno.EINVAL or fd != self._fd or not self._is_direct:
                    raise
                write_at(self._cached_fd, buffer[begin:stop], offset + begin, self._path)


def _in_blocks(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _opened(path: Path, flags: int, *, direct: bool) -> tuple[int, bool]:
    """A descriptor, and whether it is direct."""
    flags |= os.O_CLOEXEC
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags), False


def write_at(fd: int, data: NDArray[np.uint8], offset: int, path: Path) -> None:
    """All of it, however little the system takes at once. path: what an error names."""
    view = data.reshape(-1).data
    with named(path):
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written
