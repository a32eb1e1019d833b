"""How soon rows come again: what a cache misses, and how many different rows a stretch of batches has.

A *touch* is a row that a batch looks up, however often it does. `m(t)` are the touches of a batch whose row none of the
`t` batches before had touched. Of it follow, whatever law the ids have,
- the different rows of `n` batches in a row: `w(n) = m(0) + m(1) + ... + m(n - 1)`, for each is new at its first touch
  (Denning and Schwartz, *Properties of the Working-Set Model*, CACM 15(3), 1972);
- the misses of a cache of `C` rows that forgets the row that was unused for longest: `m(T)`, where `w(T) = C`. `T` is
  the characteristic time of Che, Tung and Wang, *Hierarchical Web Caching Systems*, IEEE JSAC 20(7), 2002; why one
  number serves for all rows is in Fricker, Robert and Roberts, *A Versatile and Accurate Approximation for LRU Cache
  Performance*, ITC 2012. Theirs computes both from rates of access; here they are counted, because the rates of rows
  that were seen once or twice are not known.

Tables whose rows are more than there is memory for are sampled by row, not by access: the touches of one row in k,
which a permutation chooses, times k (Waldspurger et al., *Efficient MRC Construction with SHARDS*, FAST 2015).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from holdfast.data.counter import stream_key
from holdfast.data.scatter import Scatter

_STREAM = 1  # of the permutation that samples rows
_MOST_BATCHES = 1 << 40  # beyond which nobody asks


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseRung:
    """touches: m(batches), see the module's text. Raises ValueError that names the field."""

    batches: int
    touches: float

    def __post_init__(self) -> None:
        if self.batches < 0:
            raise ValueError(f"batches = {self.batches}; it must not be negative")
        if not (math.isfinite(self.touches) and self.touches >= 0.0):
            raise ValueError(f"touches = {self.touches}; it must be 0 or more")


def check_reuse(rungs: Sequence[ReuseRung]) -> None:
    """ValueError unless the rungs begin at 0 batches and ascend."""
    if not rungs or rungs[0].batches != 0:
        raise ValueError("reuse: its first rung must be that of 0 batches")
    for below, rung in pairwise(rungs):
        if rung.batches <= below.batches:
            raise ValueError(f"reuse: the rung of {rung.batches} batches does not come after that of {below.batches}")


class ReuseCurve:
    """m(t) and w(n) of one table of `num_rows` rows. Linear between rungs.

    Beyond the last rung L, the `num_rows - w(L)` rows that L batches leave out are taken to be alike, which makes m
    fall as exp(-t m(L) / (num_rows - w(L))) and w end at num_rows.
    """

    def __init__(self, rungs: Sequence[ReuseRung], num_rows: int) -> None:
        check_reuse(rungs)
        self._num_rows = float(num_rows)
        self._batches = np.array([rung.batches for rung in rungs], dtype=np.float64)
        # a count of few samples may rise by chance; the truth does not
        self._touches = np.minimum.accumulate(np.array([rung.touches for rung in rungs], dtype=np.float64))
        self._distinct = np.array([0.0, *np.cumsum([self._sum(i) for i in range(len(rungs) - 1)])])
        np.minimum(self._distinct, self._num_rows, out=self._distinct)
        left = max(self._num_rows - self._distinct[-1], 0.0)
        self._left, self._decay = left, self._touches[-1] / left if left else math.inf

    def touches(self, batches: float) -> float:
        """m(batches): touches of a batch whose row the `batches` before it have not touched."""
        beyond = batches - self._batches[-1]
        if beyond <= 0.0:
            return float(np.interp(batches, self._batches, self._touches))
        return float(self._touches[-1] * math.exp(-beyond * self._decay)) if self._left else 0.0

    def distinct(self, batches: float) -> float:
        """w(batches): different rows of so many batches, one behind another."""
        beyond = batches - self._batches[-1]
        if beyond > 0.0:
            more = -self._left * math.expm1(-beyond * self._decay) if self._left else 0.0
            return float(min(self._num_rows, self._distinct[-1] + more))
        place = max(0, int(np.searchsorted(self._batches, batches, side="left")) - 1)
        whole = math.floor(batches)
        part = self._partial(place, whole - self._batches[place]) + (batches - whole) * self.touches(whole)
        return float(min(self._num_rows, self._distinct[place] + part))

    def _sum(self, place: int) -> float:
        """Of m over the batches from a rung up to the next one, that one left out."""
        return self._partial(place, self._batches[place + 1] - self._batches[place])

    def _partial(self, place: int, count: float) -> float:
        if place + 1 >= len(self._batches):
            return 0.0
        slope = (self._touches[place + 1] - self._touches[place]) / (self._batches[place + 1] - self._batches[place])
        return float(count * self._touches[place] + slope * count * (count - 1) / 2)


def characteristic_time(curves: Sequence[ReuseCurve], num_rows: float) -> float:
    """In how many batches the tables together have `num_rows` different rows; inf where they never have."""
    if sum(curve.distinct(_MOST_BATCHES) for curve in curves) <= num_rows:
        return math.inf
    low, high = 0.0, 1.0
    while sum(curve.distinct(high) for curve in curves) < num_rows:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if sum(curve.distinct(middle) for curve in curves) < num_rows:
            low = middle
        else:
            high = middle
    return high


def expected_reuse(
    widths: NDArray[np.int64], touched: NDArray[np.float64], *, most_batches: int = 1 << 16
) -> tuple[ReuseRung, ...]:
    """Of independent batches. Runs of `widths` rows (int64 [N]), each of which a batch touches with the probability
    `touched` (float64 [N]): m(t) = sum of widths · touched · (1 - touched)^t."""
    missed = np.log1p(-np.minimum(touched, 1.0 - 2.0**-53))
    return tuple(
        ReuseRung(batches=int(batches), touches=float((widths * touched * np.exp(batches * missed)).sum()))
        for batches in gap_grid(most_batches)
    )


def gap_grid(most: int) -> NDArray[np.int64]:
    """Ascending from 0: every number up to 4, then four to a doubling."""
    count = 1 + max(0, math.ceil(4 * math.log2(max(1, most / 4))))
    steep = np.rint(4.0 * np.exp2(np.arange(1, count) / 4)).astype(np.int64)
    grid = np.concatenate([np.arange(5), steep])
    return grid[grid <= most]


class ReuseCounter:
    """Counts m(t) of one table over `num_batches` batches, in at most `most_words` words of 4 bytes; t up to half of
    the batches, beyond which few touches have that many before them."""

    def __init__(self, num_rows: int, num_batches: int, most_words: int) -> None:
        self._one_in = max(1, -(-num_rows // max(1, most_words)))
        kept = -(-num_rows // self._one_in)
        self._scatter = Scatter(size=num_rows, key=stream_key(_STREAM)) if self._one_in > 1 else None
        self._kept, self._share = kept, num_rows / kept
        self._last = np.zeros(kept, np.int32)
        self._grid = gap_grid(max(0, num_batches // 2))
        self._longer = np.zeros(len(self._grid), np.int64)
        self._batches = 0

    def add(self, rows: NDArray[np.int64]) -> None:
        """One batch: its different rows, int64."""
        places = rows
        if self._scatter is not None:
            places = self._scatter(rows)
            places = places[places < self._kept]
        last = self._last[places]
        gaps = np.where(last == 0, np.iinfo(np.int32).max, self._batches + 1 - last)
        # The row of a gap g was left out by the g - 1 batches before.
        of_rung = np.bincount(np.searchsorted(self._grid, gaps - 1, side="right") - 1, minlength=len(self._grid))
        has_before = self._grid <= self._batches
        self._longer += np.where(has_before, of_rung[::-1].cumsum()[::-1], 0)
        self._batches += 1
        self._last[places] = self._batches

    def rungs(self) -> tuple[ReuseRung, ...]:
        """What was counted; at least one batch must have been."""
        num_counted = self._batches - self._grid
        return tuple(
            ReuseRung(batches=int(batches), touches=float(touches * self._share / count))
            for batches, touches, count in zip(self._grid, self._longer, num_counted, strict=True)
            if count > 0
        )
