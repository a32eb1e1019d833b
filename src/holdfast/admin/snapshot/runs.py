"""Rows that come in any order, some of them at a time: ascending runs."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from holdfast.admin.snapshot.rows import Rows, order_of


def gathered(found: Iterator[Rows], row_bytes: int, num_bytes: int) -> Iterator[tuple[Rows, bool]]:
    """As many of the rows as fit into `num_bytes`, in the order in which they came, and whether they are the last; one
    time at least. The next ones take their memory."""
    most = max(1, num_bytes // (8 + row_bytes))
    kept = Rows(_memory(8 * most).view(np.uint64), _memory(row_bytes * most).reshape(most, row_bytes))
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


def _memory(num_bytes: int) -> NDArray[np.uint8]:
    """In huge pages where the system has them: a page fault for each small one takes longer than to fill it, and rows
    are taken from all over it."""
    mapped = mmap.mmap(-1, num_bytes)
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8)


def ascending(rows: Rows, chunk_bytes: int) -> Iterator[Rows]:
    """All of them, so many bytes at a time."""
    order = order_of(rows.rows)
    step = max(1, chunk_bytes // (8 + rows.data.shape[1]))
    for begin in range(0, len(order), step):
        part = order[begin : begin + step]
        yield Rows(rows.rows[part], rows.data.take(part, axis=0))
