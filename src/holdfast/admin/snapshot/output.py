"""Files and directories that are whole and durable, or not there."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from holdfast.admin.snapshot.form import CHUNK, CHUNK_MAGIC, RUN_CHUNK_BYTES, FileInfo, crc_of
from holdfast.admin.snapshot.rows import Rows
from holdfast.admin.snapshot.runs import ascending, gathered
from holdfast.errors import PoolExists, PoolFailed, PoolFull
from holdfast.files.attempts import attempt_at
from holdfast.files.direct import DirectWriter
from holdfast.files.durable import sync_path
from holdfast.files.names import advice_on


class Output:
    """A file that is durable when the block ends; `info` says what is in it. Raises PoolFull, PoolFailed."""

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        """durable: else what ends a block well makes it a file, no more."""
        self._path = path
        self._durable = durable
        self._bytes = self._crc = 0
        self.num_runs = 0  # of chunks that ascend
        self._last_row = 1 << 64

    def __enter__(self) -> Self:
        with _writing(self._path):
            os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            self._writer = DirectWriter(self._path, direct=self._durable)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _writing(self._path):
            self._writer.__exit__(kind, error, trace)
            if error is None and self._durable:
                sync_path(self._path)

    @property
    def info(self) -> FileInfo:
        return FileInfo(self._bytes, self._crc)

    def write(self, data: bytes | memoryview) -> None:
        found = np.frombuffer(data, np.uint8)
        self._crc = crc_of(found, self._crc)
        self._bytes += len(found)
        with _writing(self._path):
            self._writer.write(found)

    def write_runs(self, found: Iterator[Rows], row_bytes: int, memory: NDArray[np.uint8]) -> int:
        """Rows in any order, as ascending runs of as many as `memory` holds. Returns how many rows."""
        return sum(self.write_run(run) for run, _ in gathered(found, row_bytes, memory))

    def write_run(self, run: Rows) -> int:
        """These rows, in any order, as one. Returns how many they are."""
        for chunk in ascending(run, RUN_CHUNK_BYTES):
            self.write_chunk(chunk)
        return len(run)

    def write_chunk(self, rows: Rows) -> None:
        """These rows, one at least, as a chunk of a layer."""
        numbers = np.ascontiguousarray(rows.rows, "<u8").view(np.uint8)
        data = np.ascontiguousarray(rows.data).reshape(-1)
        first, last = int(rows.rows[0]), int(rows.rows[-1])
        self.num_runs += first <= self._last_row
        self._last_row = last
        payload_crc = crc_of(data, crc_of(numbers))
        head = CHUNK.pack(CHUNK_MAGIC, len(rows), first, last, len(numbers) + len(data), payload_crc, b"", 0)
        self.write(head[:-4] + crc_of(head[:-4]).to_bytes(4, "little"))
        self.write(numbers.data)
        self.write(data.data)


@contextmanager
def new_directory(path: Path, suffix: str) -> Iterator[Path]:
    """An empty directory beside `path`; it becomes `path`, durably, if the block ends well, and is removed if not.

    What processes that were killed left of their own attempts is removed, too: their locks went with them.
    """
    with _attempt(path, suffix) as partial:
        made = partial  # whatever has the name now
        try:
            yield partial
            with _writing(path):
                sync_path(partial)
                made = partial.rename(path)
                sync_path(path.parent)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise


@contextmanager
def scratch_directory(beside: Path, name: str) -> Iterator[Path]:
    """An empty, hidden directory in `beside`, which is removed: what a killed process left of its own, by the next one
    of this name."""
    with _attempt(beside / name, "scratch") as directory:
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _attempt(path: Path, suffix: str) -> Iterator[Path]:
    with ExitStack() as stack:
        with _writing(path):
            partial = stack.enter_context(attempt_at(path, suffix, is_directory=True))
        yield partial


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise PoolExists(
                f"{path} is there by now: somebody else made it; nothing is left of another one"
            ) from error
        kind = PoolFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else PoolFailed
        refused = f"{error.strerror}{advice_on(error)}"
        raise kind(f"{path}: {refused}; nothing is left of what was being made") from error
