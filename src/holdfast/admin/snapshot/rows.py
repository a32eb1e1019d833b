"""Rows of a table on their way into a snapshot, or out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


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

    def ascending(self) -> Rows:
        """The same rows in order of their numbers."""
        order = np.argsort(self.rows, kind="stable")
        return Rows(self.rows[order], self.data[order])

    def same_as(self, other: Rows) -> NDArray[np.bool_]:
        """bool ``[n]``: which of these rows the other has too, with the same data."""
        if len(other) == 0:
            return np.zeros(len(self), np.bool_)
        place = np.minimum(np.searchsorted(other.rows, self.rows), len(other) - 1)
        same: NDArray[np.bool_] = (other.rows[place] == self.rows) & (other.data[place] == self.data).all(axis=1)
        return same

    def without(self, other: Rows) -> Rows:
        """Those that the other does not have."""
        return self[~np.isin(self.rows, other.rows, assume_unique=True)]

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """All of them; of a row that several parts have, the first part's."""
        rows, first = np.unique(np.concatenate([part.rows for part in parts]), return_index=True)
        return cls(rows, np.concatenate([part.data for part in parts])[first])
