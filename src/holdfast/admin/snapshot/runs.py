"""Rows that come in any order, some of them at a time: ascending runs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from holdfast.admin.snapshot.form import RUN_BYTES
from holdfast.admin.snapshot.rows import Rows, order_of
from holdfast.files.recycled import huge_pages


def run_memory() -> NDArray[np.uint8]:
    """What a run of `RUN_BYTES` is gathered in, and the next run, and those of the next table: a page that nobody had
    before takes longer to get than to fill."""
    return np.frombuffer(huge_pages(RUN_BYTES), np.uint8)


def gathered(found: Iterator[Rows], row_bytes: int, memory: NDArray[np.uint8]) -> Iterator[tuple[Rows, bool]]:
    """As many of the rows as fit into `memory`, in the order in which they came, and whether they are the last; one
    time at least. The next ones take their place. memory: of one row at least."""
    most = len(memory) // (8 + row_bytes)
    numbers, data = memory[: 8 * most], memory[8 * most : (8 + row_bytes) * most]
    kept = Rows(numbers.view(np.uint64), data.reshape(most, row_bytes))
    count = 0
    for rows in found:
        for begin in range(0, len(rows), most):
            part = rows[begin : begin + most]
            if count + len(part) > most:
                yield kept[:count], False
                count = 0
            kept.rows[count : count + len(part)] = part.rows
            kept.data[count : count + len(part)] = part.data
            count += len(part)
    yield kept[:count], True


def ascending(rows: Rows, chunk_bytes: int) -> Iterator[Rows]:
    """All of them, so many bytes at a time."""
    order = order_of(rows.rows)
    step = max(1, chunk_bytes // (8 + rows.data.shape[1]))
    for begin in range(0, len(order), step):
        yield rows.taken(order[begin : begin + step])
