"""Rows of a table on their way into a snapshot, or out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast import _core
from holdfast.files.recycled import recycled


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a table, each once; ascending where nothing else is said. rows: uint64 ``[n]``; data: uint8
    ``[n, bytes]``, a row's weights and behind them its state."""

    rows: NDArray[np.uint64]
    data: NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + self.data.nbytes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice | NDArray[Any]) -> Rows:
        return Rows(self.rows[part], self.data[part])

    def taken(self, places: NDArray[np.int64]) -> Rows:
        """Those at these places."""
        data = _room(len(places), self.data.shape[1])
        _core.take_values(np.ascontiguousarray(self.data), places, data)
        return Rows(self.rows[places], data)

    def same_as(self, other: Rows) -> NDArray[np.bool_]:
        """bool ``[n]``: which of these rows the other has too, with the same data."""
        if len(other) == 0:
            return np.zeros(len(self), np.bool_)
        place = _places_in(other.rows, self.rows)
        same: NDArray[np.bool_] = (other.rows[place] == self.rows) & (other.data[place] == self.data).all(axis=1)
        return same

    def are_among(self, numbers: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """bool ``[n]``: which of these rows have one of the numbers, which ascend."""
        if len(numbers) == 0:
            return np.zeros(len(self), np.bool_)
        among: NDArray[np.bool_] = numbers[_places_in(numbers, self.rows)] == self.rows
        return among

    def without(self, other: Rows) -> Rows:
        """Those that the other does not have."""
        return self[~np.isin(self.rows, other.rows, assume_unique=True)]

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """All of them; of a row that several parts have, the first part's. One of the parts at least."""
        numbers = np.concatenate([part.rows for part in parts])
        data = _room(len(numbers), parts[0].data.shape[1])
        np.concatenate([part.data for part in parts], out=data)
        order = order_of(numbers)
        rows = numbers[order]
        order = order[np.concatenate(([True], rows[1:] != rows[:-1]))[: len(order)]]
        return cls(numbers, data).taken(order)


def _room(num_rows: int, row_bytes: int) -> NDArray[np.uint8]:
    return recycled(num_rows * row_bytes).reshape(num_rows, row_bytes)


def order_of(rows: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Which of these rows is the first, which the second, and so on."""
    order = np.empty(len(rows), np.int64)
    _core.ascending_order(np.ascontiguousarray(rows), order)
    return order


def _places_in(numbers: NDArray[np.uint64], rows: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Where each row would be among numbers that ascend, one at least."""
    return np.minimum(np.searchsorted(numbers, rows), len(numbers) - 1)
