"""Copies of the rows of a pool at the end of one step while a run changes them, table by table
(core/readers/live_copy.h).

- `PoolCopy` is of a pool of one writer; `group_copying.GroupCopy` of the parts of several as one.
- A table's rows are numbered by row; those of a table that is split over a group's shards by place, which is what its
  writers go by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast import _core
from holdfast.admin.snapshot.form import TableInfo
from holdfast.admin.snapshot.rows import Rows
from holdfast.errors import Overtaken
from holdfast.files.recycled import recycled
from holdfast.group.manifest import Manifest
from holdfast.pools.directory import SUPERBLOCK, is_of_group

CHUNK_BYTES = 8 << 20

Fixed = tuple[int, int, int, tuple[bytes, bytes] | None]
"""Step, cursor, row_updates; structure and tensors of the dense state."""


Record = tuple[int, int]
"""Position and checksum of one in a row log."""


class LivePool(Protocol):
    """What `taking` copies. Rows come before `fix`, or after it where `fixes_first`; then `settle`, then corrections.

    group: of several writers, how the pool is shared. Raises Overtaken, Corrupted, where the run was faster.
    """

    @property
    def tables(self) -> tuple[TableInfo, ...]: ...
    @property
    def group(self) -> Manifest | None: ...
    @property
    def header(self) -> dict[str, Any]: ...
    @property
    def fixes_first(self) -> bool: ...
    @property
    def rows_ascend(self) -> bool: ...
    @property
    def newest_dense_step(self) -> int | None: ...
    @property
    def home_rows(self) -> list[int] | None:
        """By table, about how many rows `rows` is going to give, where that is known."""

    @property
    def fixed_record(self) -> Record | None:
        """After `fix`: names the row log's newest record of a step up to the fixed one, where there is one log."""

    def log_goes_on_from(self, record: Record) -> bool:
        """Whether the corrections have everything that was written since that record."""

    def fix(self) -> Fixed: ...
    def settle(self) -> None: ...
    def rows(self, number: int) -> Iterator[Rows]:
        """Those of a table that an update ever wrote; where not `rows_ascend`, as they lie in the pool."""

    def corrections(self, number: int) -> Iterator[Rows]:
        """Those that count instead of what `rows` gave."""

    def initial_weights(self, number: int, rows: NDArray[np.uint64]) -> NDArray[np.uint8]: ...


class Place:
    """A pool's path, at which another one may be put while files are opened there by and by: a copy of the same pool,
    of another step, has the same identity. To be made before the first of them is opened."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = self._look()

    def check(self) -> None:
        """Raises Overtaken where the pool is not there any more."""
        if self._look() != self._file:
            raise Overtaken(f"{self._directory}: the pool was moved or removed while it was read")

    def _look(self) -> tuple[int, int] | None:
        try:
            found = (self._directory / SUPERBLOCK).stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino


class PoolCopy:
    """See LivePool."""

    group = None

    def __init__(self, directory: Path) -> None:
        self._place = Place(directory)
        self._copy = _core.LiveCopy(str(directory))
        self.tables = tuple(TableInfo.of(table) for table in self._copy.tables)

    @property
    def header(self) -> dict[str, Any]:
        return self._copy.header

    @property
    def fixes_first(self) -> bool:
        return self._copy.fixes_first

    @property
    def rows_ascend(self) -> bool:
        return self._copy.rows_ascend

    @property
    def newest_dense_step(self) -> int | None:
        return self._copy.newest_dense_step

    @property
    def home_rows(self) -> list[int] | None:
        return self._copy.home_rows

    @property
    def fixed_record(self) -> Record | None:
        return self._copy.fixed_record

    def log_goes_on_from(self, record: Record) -> bool:
        return self._copy.log_goes_on_from(record)

    def fix(self) -> Fixed:
        return self._copy.fix()

    def settle(self) -> None:
        self._copy.settle()
        self._place.check()

    def rows(self, number: int) -> Iterator[Rows]:
        table = self.tables[number]
        return stream(self._copy.copy_rows, number, table, table.num_embeddings)

    def corrections(self, number: int) -> Iterator[Rows]:
        table = self.tables[number]
        return stream(self._copy.corrections, number, table, table.num_embeddings)

    def initial_weights(self, number: int, rows: NDArray[np.uint64]) -> NDArray[np.uint8]:
        return initial_weights(self._copy, number, self.tables[number], rows)


def copy_of(pool: Path) -> LivePool:
    if not is_of_group(pool):
        return PoolCopy(pool)
    from holdfast.admin.snapshot.group_copying import GroupCopy  # imports this module

    return GroupCopy(pool)


def stream(read: Callable[..., tuple[int, int]], number: int, table: TableInfo, end: int) -> Iterator[Rows]:
    """What a live copy's `read` gives of a table up to `end`, a chunk at a time."""
    chunk_rows = max(1, CHUNK_BYTES // (8 + table.row_bytes))
    first = 0
    while first < end:
        rows = recycled(chunk_rows * 8).view(np.uint64)
        data = recycled(chunk_rows * table.row_bytes)
        count, first = read(number, first, rows, data)
        if count > 0:
            yield Rows(rows[:count], data.reshape(chunk_rows, -1)[:count])


def initial_weights(copy: _core.LiveCopy, number: int, table: TableInfo, rows: NDArray[np.uint64]) -> NDArray[np.uint8]:
    weights = np.empty((len(rows), table.layout.weight_bytes), np.uint8)
    copy.initial_rows(number, np.ascontiguousarray(rows), weights.reshape(-1))
    return weights
