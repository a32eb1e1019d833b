"""Which samples of the stream a reader makes batches of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCut:
    """Which part of the stream becomes batches: from ``start`` to ``end`` (None: endless), ``batch_size`` at a time;
    and which of `of` even parts of each batch is made."""

    start: int
    end: int | None
    batch_size: int
    part: int = 0
    of: int = 1

    def bounds(self, index: int) -> tuple[int, int]:
        """Positions of the ``index``-th batch from ``start`` (from 0); empty when past the end."""
        begin = self.start + index * self.batch_size
        end = begin + self.batch_size
        return (begin, end) if self.end is None else (min(begin, self.end), min(end, self.end))

    def part_of(self, begin: int, end: int) -> tuple[int, int]:
        """Positions of the part that is made of the batch at ``[begin, end)``."""
        size = end - begin
        return begin + self.part * size // self.of, begin + (self.part + 1) * size // self.of

    def takes(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these positions are in the part that is made of their batch."""
        taken = positions >= self.start
        sizes: int | NDArray[np.int64] = self.batch_size
        if self.end is not None:
            taken &= positions < self.end
            last = self.end - (self.end - self.start) % self.batch_size
            sizes = np.where(positions < last, self.batch_size, self.end - last)
        if self.of > 1:
            offsets = (positions - self.start) % self.batch_size
            taken &= (offsets >= self.part * sizes // self.of) & (offsets < (self.part + 1) * sizes // self.of)
        return taken
