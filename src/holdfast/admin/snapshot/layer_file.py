"""A file of a table's rows, in chunks. docs/FORMAT.md has the bytes.

A chunk's rows ascend. Chunks that ascend one behind another are a run; a file has one, or several, which its reader
puts in order: one chunk of each in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from holdfast.admin.snapshot.form import CHUNK, CHUNK_MAGIC, RUN_CHUNK_BYTES, crc_of
from holdfast.admin.snapshot.merged import Merged
from holdfast.admin.snapshot.output import Output
from holdfast.admin.snapshot.rows import Rows
from holdfast.admin.snapshot.runs import ascending, gathered
from holdfast.errors import Corrupted
from holdfast.files.direct import DirectReader


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What a chunk's head says, and where in its file it lies."""

    offset: int
    num_rows: int
    first_row: int
    last_row: int
    payload_bytes: int
    payload_crc: int


class LayerFile:
    """Reads one. row_bytes: of a row's weights and state; end: rows are below it; num_bytes: of the file; ascends: it
    is to have one run. Raises Corrupted wherever something does not hold."""

    def __init__(self, path: Path, *, row_bytes: int, end: int, num_bytes: int, ascends: bool) -> None:
        self.path = path
        self.crc = self.length = 0  # of what `chunks` has read
        self._row_bytes = row_bytes
        self._end = end
        self._num_bytes = num_bytes
        self._ascends = ascends

    def chunks(self) -> Iterator[Rows]:
        """All rows, chunk by chunk as they lie there."""
        self.crc = self.length = 0
        last_row = -1
        with not_missing(self.path), DirectReader(self.path) as file:
            while head := file.read(CHUNK.size).tobytes():
                chunk = self._chunk_at(self.length, head)
                if self._ascends and chunk.first_row <= last_row:
                    raise Corrupted(f"{self.path} at offset {self.length}: rows that are out of order")
                payload = file.read(chunk.payload_bytes)
                yield self._rows_of(chunk, payload)
                self.crc = crc_of(payload, crc_of(head, self.crc))
                self.length += CHUNK.size + chunk.payload_bytes
                last_row = chunk.last_row

    def ascending(self) -> Iterator[Rows]:
        """All rows, ascending."""
        if self._ascends:
            return self.chunks()
        return iter(Merged([self._run(run) for run in self._runs()], each_row_once=True))

    def _runs(self) -> list[list[_Chunk]]:
        runs: list[list[_Chunk]] = []
        with opened(self.path) as file:
            offset = 0
            while head := os.pread(file.fileno(), CHUNK.size, offset):
                chunk = self._chunk_at(offset, head)
                if not runs or chunk.first_row <= runs[-1][-1].last_row:
                    runs.append([])
                runs[-1].append(chunk)
                offset += CHUNK.size + chunk.payload_bytes
        return runs

    def _run(self, run: Sequence[_Chunk]) -> Iterator[Rows]:
        with opened(self.path) as file:
            for chunk in run:
                payload = os.pread(file.fileno(), chunk.payload_bytes, chunk.offset + CHUNK.size)
                yield self._rows_of(chunk, payload)

    def _chunk_at(self, offset: int, head: bytes) -> _Chunk:
        bad = f"{self.path} at offset {offset}: "
        if len(head) < CHUNK.size or crc_of(head[:-4]) != int.from_bytes(head[-4:], "little"):
            raise Corrupted(bad + "the checksum of a chunk's head does not hold")
        magic, num_rows, first_row, last_row, payload_bytes, payload_crc, _, _ = CHUNK.unpack(head)
        if magic != CHUNK_MAGIC or num_rows == 0 or payload_bytes != num_rows * (8 + self._row_bytes):
            raise Corrupted(bad + "a chunk's head says what cannot be")
        if offset + CHUNK.size + payload_bytes > self._num_bytes:
            raise Corrupted(bad + "a chunk ends beyond the file")
        return _Chunk(offset, num_rows, first_row, last_row, payload_bytes, payload_crc)

    def _rows_of(self, chunk: _Chunk, payload: bytes | NDArray[np.uint8]) -> Rows:
        bad = f"{self.path} at offset {chunk.offset}: "
        if len(payload) < chunk.payload_bytes or crc_of(payload) != chunk.payload_crc:
            raise Corrupted(bad + "a chunk's checksum does not hold")
        rows = np.frombuffer(payload, "<u8", chunk.num_rows).copy()  # aligned
        data = np.frombuffer(payload, np.uint8, offset=8 * chunk.num_rows).reshape(chunk.num_rows, -1)
        if (
            not (chunk.first_row == rows[0] and rows[-1] == chunk.last_row < self._end)
            or not (rows[1:] > rows[:-1]).all()
        ):
            raise Corrupted(bad + "rows that are out of order")
        return Rows(rows, data)


@contextmanager
def put_in_order(
    found: Iterator[Rows], row_bytes: int, scratch: Path, memory: NDArray[np.uint8]
) -> Iterator[Iterator[Rows]]:
    """The same rows, ascending: in `memory`, or where it does not hold all of them, from runs of as many as it does,
    which are in the file `scratch` meanwhile."""
    runs = gathered(found, row_bytes, memory)
    first, are_all = next(runs)
    if are_all:
        yield ascending(first, RUN_CHUNK_BYTES)
        return
    try:
        with Output(scratch, durable=False) as out:
            out.write_run(first)
            for run, _ in runs:
                out.write_run(run)
        file = LayerFile(scratch, row_bytes=row_bytes, end=1 << 64, num_bytes=out.info.bytes, ascends=out.num_runs <= 1)
        yield file.ascending()
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    with not_missing(path), path.open("rb") as file:
        yield file


@contextmanager
def not_missing(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise Corrupted(f"{path} is missing; the snapshot has lost a file") from None
