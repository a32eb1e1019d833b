"""A large log store's rows in order of their numbers.

At home they lie by first touch, those of a group in each writer's part. To read each where it lies would be a request a
row; so a table's home is read from one end to the other, into memory where there is enough, else into a scratch file of
ascending runs, which is read as one. The next table takes the same memory: a page that nobody had before takes longer
to get than to fill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from tempfile import gettempdir
from typing import Self

import numpy as np
from numpy.typing import NDArray

from holdfast.admin.ahead import ahead
from holdfast.admin.snapshot.copying import LivePool, copy_of
from holdfast.admin.snapshot.form import RUN_BYTES
from holdfast.admin.snapshot.layer_file import put_in_order
from holdfast.admin.snapshot.merged import Merged
from holdfast.admin.snapshot.output import scratch_directory
from holdfast.admin.snapshot.rows import Rows
from holdfast.admin.snapshot.runs import run_memory
from holdfast.files.recycled import huge_pages
from holdfast.group.manifest import TableEntry
from holdfast.pools.machine import spare_bytes
from holdfast.pools.read_only import RowChunk


class OrderedRows:
    """The touched rows of a pool at rest, a table at a time. Each is asked for once, in order of their numbers; where
    there is memory for two, the next one is read while a table's rows are used.

    directory: for scratch files. memories: in which tables are put in order by turns, `RUN_BYTES` each at least.
    on_rows: see rows_in_order. Context manager: no thread reads when the block has ended.
    """

    def __init__(
        self,
        copy: LivePool,
        directory: Path,
        memories: Sequence[NDArray[np.uint8]],
        on_rows: Callable[[int], None] | None,
    ) -> None:
        self._copy = copy
        self._directory = directory
        self._memories = memories
        self._turns = cycle(memories)
        self._is_closed = False
        self._on_rows = on_rows
        self._reader = ThreadPoolExecutor(1, "hf-rows-in-order")
        self._coming: dict[int, Future[tuple[ExitStack, Iterator[Rows]]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        self._reader.shutdown()
        for coming in self._coming.values():
            if coming.exception() is None:
                coming.result()[0].close()

    @contextmanager
    def of(self, number: int) -> Iterator[Merged]:
        """A table's, ascending."""
        self._come(number)
        held, rows = self._coming.pop(number).result()
        with held as stack:
            self._copy.settle()  # what was torn at home is among the corrections, or damage
            if len(self._memories) > 1 and (following := self._following(number)) is not None:
                self._come(following)
            corrections = self._by_row(number, self._copy.corrections(number))
            if self._split(number):  # which ascended by place
                row_bytes, beside = self._copy.tables[number].row_bytes, self._directory / f"{number}-corrections"
                corrections = stack.enter_context(put_in_order(corrections, row_bytes, beside, run_memory()))
            yield Merged([corrections, rows])

    def _following(self, number: int) -> int | None:
        tables = enumerate(self._copy.tables)
        return next((other for other, table in tables if other > number and not table.keys), None)

    def _come(self, number: int) -> None:
        """Has a table's rows read, where they were not before."""
        if number not in self._coming:
            self._coming[number] = self._reader.submit(self._read, number, next(self._turns))

    def _read(self, number: int, memory: NDArray[np.uint8]) -> tuple[ExitStack, Iterator[Rows]]:
        """A table's rows as they lie at home, in order; and what they hold."""
        wanted = _memory_for(self._copy, number)
        memory = memory[: wanted if wanted <= len(memory) else RUN_BYTES]
        row_bytes, scratch = self._copy.tables[number].row_bytes, self._directory / str(number)
        with ExitStack() as stack:
            found = stack.enter_context(ahead(self._by_row(number, self._copy.rows(number))))
            rows = stack.enter_context(put_in_order(self._counted(found), row_bytes, scratch, memory))
            return stack.pop_all(), rows

    def _split(self, number: int) -> TableEntry | None:
        """A table over several shards, whose writers know rows by place."""
        return None if self._copy.group is None else self._copy.group.split_table(number)

    def _by_row(self, number: int, found: Iterator[Rows]) -> Iterator[Rows]:
        entry = self._split(number)
        for rows in found:
            if entry is None:
                yield rows
            else:
                yield Rows(entry.rows_of_places(rows.rows.view(np.int64)).view(np.uint64), rows.data)

    def initial_weights(self, number: int, rows: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """What these rows have before any update: uint8 ``[n, bytes]``. State is zeros then."""
        if (entry := self._split(number)) is not None:
            rows = entry.places_of(rows.view(np.int64)).view(np.uint64)
        return self._copy.initial_weights(number, rows)

    def chunks(self, number: int) -> Iterator[RowChunk]:
        """As pools.read_only.touched_rows has them."""
        weight_bytes = self._copy.tables[number].layout.weight_bytes
        with self.of(number) as touched, ahead(iter(touched)) as found:
            for rows in found:
                state = rows.data[:, weight_bytes:]
                # It is zeros at first, and with most optimizers no more after an update.
                differs: NDArray[np.bool_] = np.logical_or.reduce(state, axis=1)
                if len(unsure := np.flatnonzero(~differs)):
                    initial = self.initial_weights(number, rows.rows[unsure])
                    differs[unsure] = (rows.data[unsure, :weight_bytes] != initial).any(axis=1)
                yield RowChunk(rows.rows, rows.data[:, :weight_bytes], state, differs)

    def _counted(self, found: Iterator[Rows]) -> Iterator[Rows]:
        for rows in found:
            if self._is_closed:
                return
            yield rows
            if self._on_rows is not None:
                self._on_rows(len(rows))


@contextmanager
def rows_in_order(
    pool: Path, scratch: Path | None = None, on_rows: Callable[[int], None] | None = None
) -> Iterator[OrderedRows | None]:
    """For a pool at rest whose rows lie by first touch; None for any other, whose rows are read in order as they are.

    scratch: a directory for files as large as the touched rows of the largest table, which are removed; the system's
    one for temporary files where none is named. on_rows: told how many rows were just read from the pool.
    """
    copy = copy_of(pool)
    if copy.rows_ascend:
        yield None
        return
    copy.fix()
    copy.settle()
    spare = spare_bytes()
    fitting = [wanted for number in range(len(copy.tables)) if (wanted := _memory_for(copy, number)) <= spare]
    largest = max(fitting, default=RUN_BYTES)
    num_memories = 2 if len(copy.tables) > 1 and 2 * largest <= spare else 1
    memories = [np.frombuffer(huge_pages(largest), np.uint8) for _ in range(num_memories)]
    beside = Path(gettempdir()) if scratch is None else scratch
    with (
        scratch_directory(beside, "holdfast-rows") as directory,
        OrderedRows(copy, directory, memories, on_rows) as ordered,
    ):
        yield ordered


def _memory_for(copy: LivePool, number: int) -> int:
    """That holds all rows of the table, if they are about as many as is known."""
    home_rows = copy.home_rows
    return RUN_BYTES + (0 if home_rows is None else home_rows[number]) * (8 + copy.tables[number].row_bytes)
