"""A large log store's rows in order of their numbers.

At home they lie by first touch. To read each where it lies would be a request a row; so homes are read from one end to
the other, into memory where there is enough, else into a scratch file of ascending runs, which is read as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import gettempdir

import numpy as np
from numpy.typing import NDArray

from holdfast.admin.ahead import ahead
from holdfast.admin.snapshot.copying import PoolCopy
from holdfast.admin.snapshot.form import RUN_BYTES
from holdfast.admin.snapshot.layer_file import put_in_order
from holdfast.admin.snapshot.merged import Merged
from holdfast.admin.snapshot.output import scratch_directory
from holdfast.admin.snapshot.rows import Rows
from holdfast.pools.directory import is_of_group
from holdfast.pools.machine import spare_bytes
from holdfast.pools.read_only import RowChunk


class OrderedRows:
    """The touched rows of a pool at rest. Each table is asked for once."""

    def __init__(self, copy: PoolCopy, tables: list[Merged]) -> None:
        self._copy = copy
        self._tables = tables

    def of(self, number: int) -> Merged:
        """A table's, ascending."""
        return self._tables[number]

    def initial_weights(self, number: int, rows: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """What these rows have before any update: uint8 ``[n, bytes]``. State is zeros then."""
        return self._copy.initial_weights(number, rows)

    def chunks(self, number: int) -> Iterator[RowChunk]:
        """As pools.read_only.touched_rows has them."""
        weight_bytes = self._copy.tables[number].layout.weight_bytes
        with ahead(iter(self.of(number))) as found:
            for rows in found:
                state = rows.data[:, weight_bytes:]
                # It is zeros at first, and with most optimizers no more after an update.
                differs: NDArray[np.bool_] = np.logical_or.reduce(state, axis=1)
                if len(unsure := np.flatnonzero(~differs)):
                    initial = self.initial_weights(number, rows.rows[unsure])
                    differs[unsure] = (rows.data[unsure, :weight_bytes] != initial).any(axis=1)
                yield RowChunk(rows.rows, rows.data[:, :weight_bytes], state, differs)


@contextmanager
def rows_in_order(
    pool: Path, scratch: Path | None = None, on_rows: Callable[[int], None] | None = None
) -> Iterator[OrderedRows | None]:
    """For a pool at rest whose rows lie by first touch; None for any other, whose rows are read in order as they are.

    scratch: a directory for files as large as the touched rows, which are removed; the system's one for temporary files
    where none is named. on_rows: told how many rows were just read from the pool.
    """
    copy = None if is_of_group(pool) else PoolCopy(pool)
    if copy is None or copy.rows_ascend:
        yield None
        return
    with ExitStack() as stack:
        beside = Path(gettempdir()) if scratch is None else scratch
        directory = stack.enter_context(scratch_directory(beside, "holdfast-rows"))
        tables = []
        left = spare_bytes()
        for number, table in enumerate(copy.tables):
            wanted = _memory_for(copy, number)
            memory = wanted if wanted <= left else None
            left -= memory or 0
            with ahead(copy.rows(number)) as found:
                rows = put_in_order(_counted(found, on_rows), table.row_bytes, directory / str(number), memory)
                tables.append(stack.enter_context(rows))
        copy.fix()
        copy.settle()
        yield OrderedRows(copy, [Merged([copy.corrections(number), rows]) for number, rows in enumerate(tables)])


def _memory_for(copy: PoolCopy, number: int) -> int:
    """That holds all rows of the table, if they are about as many as is known."""
    assert copy.home_rows is not None
    return RUN_BYTES + copy.home_rows[number] * (8 + copy.tables[number].row_bytes)


def _counted(found: Iterator[Rows], on_rows: Callable[[int], None] | None) -> Iterator[Rows]:
    for rows in found:
        yield rows
        if on_rows is not None:
            on_rows(len(rows))
