"""Lanes: how the stream's positions are divided once and for all, so that trainers can divide the work of decoding.

- Of every ``batch_size`` consecutive positions (from 0) each lane has one run, in the lanes' order, of even length:
  lane ``l`` of ``L`` those from ``l * batch_size // L`` to ``(l + 1) * batch_size // L``. So of a batch that begins at
  a multiple of ``batch_size`` the i-th of n parts is whole lanes, where n divides L.
- A lane's positions are counted from 0, too: ``position``. One lane is the stream itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ConfigError

MAX_BATCH_SIZE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive positions of the stream that are of one lane, as positions of the lane: ``[begin, end)``."""

    lane: int
    begin: int
    end: int


class Lanes:
    """``num_lanes`` lanes of a stream that was begun with batches of ``batch_size``; see the module's text."""

    def __init__(self, num_lanes: int = 1, batch_size: int = 1) -> None:
        if num_lanes < 1:
            raise ConfigError(f"loader lanes: must be at least 1, not {num_lanes}")
        if batch_size > MAX_BATCH_SIZE:
            raise ConfigError(f"loader batch_size: must be at most {MAX_BATCH_SIZE:,}, not {batch_size}")
        self.num_lanes = num_lanes
        self.batch_size = batch_size
        self._bounds = [lane * batch_size // num_lanes for lane in range(num_lanes + 1)]

    def position(self, lane: int, position: int) -> int:
        """How many of the stream's first ``position`` positions are the lane's."""
        cycles, offset = divmod(position, self.batch_size)
        first, end = self._bounds[lane], self._bounds[lane + 1]
        return cycles * (end - first) + min(max(offset - first, 0), end - first)

    def stream_positions(self, lane: int, begin: int, end: int) -> NDArray[np.int64]:
        """Where the lane's positions ``[begin, end)`` are in the stream."""
        first, width = self._bounds[lane], self._bounds[lane + 1] - self._bounds[lane]
        cycles, offsets = np.divmod(np.arange(begin, end, dtype=np.int64), width)
        return cycles * self.batch_size + first + offsets

    def runs(self, begin: int, end: int) -> Iterator[Run]:
        """The stream's positions ``[begin, end)``, in order."""
        if self.num_lanes == 1 and begin < end:
            yield Run(0, begin, end)
            return
        while begin < end:
            cycle, offset = divmod(begin, self.batch_size)
            lane = bisect_right(self._bounds, offset) - 1
            stop = min(end, cycle * self.batch_size + self._bounds[lane + 1])
            first = self.position(lane, begin)
            yield Run(lane, first, first + stop - begin)
            begin = stop

    def ends(self, begin: int, end: int) -> dict[int, int]:
        """The lanes that ``[begin, end)`` reaches, and the position in each after it."""
        # after batch_size positions every lane was reached that has any
        lanes = dict.fromkeys(run.lane for run in self.runs(begin, min(end, begin + self.batch_size)))
        return {lane: self.position(lane, end) for lane in lanes}
