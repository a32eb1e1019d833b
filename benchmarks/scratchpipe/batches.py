"""The workload and its batches: ids by Zipf's law, hot rows scattered over their table, drawn before anything is timed.

Scaled: a table has 1/SCALE of the rows, a batch 1/SCALE of the samples that the declared hardware is asked for, and the
medium is dialled SCALE times as slow, so that each row stands for SCALE. Batches then touch as large a part of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.data import Feature, Source
from holdfast.data.block import FixedBags, SampleBlock
from holdfast.data.zipf import ZipfLaw

SCALE = 64
FULL_ROWS, FULL_BATCH = 10_000_000, 2048
TABLES, ROWS, BATCH = 8, FULL_ROWS // SCALE, FULL_BATCH // SCALE
NUM_DENSE = 128
_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    name: str
    exponent: float  # of Zipf's law


# What the hottest 2, 5 and 10 % of the rows are asked for: their own part; 20, 30, 39 %; 55, 64, 71 %; 89, 93, 95 %.
SKEWS = {
    skew.name: skew
    for skew in (
        Skew(name="uniform", exponent=0.0),
        Skew(name="low", exponent=0.6),
        Skew(name="medium", exponent=0.9),
        Skew(name="high", exponent=1.2),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """cache: the part of the rows that a cache has room for."""

    skew: str
    cache: float = 0.05
    dim: int = 128
    lookups: int = 20

    @property
    def name(self) -> str:
        return f"{self.skew}/{self.cache:g}/{self.dim}/{self.lookups}"

    @property
    def exponent(self) -> float:
        return SKEWS[self.skew].exponent

    @property
    def row_bytes(self) -> int:
        return 4 * self.dim

    @property
    def cached_rows(self) -> int:
        """Of a table."""
        return round(self.cache * ROWS)

    @property
    def fill_batches(self) -> int:
        """That bring as many rows as the cache has room for."""
        return -(-self.cached_rows // (BATCH * self.lookups))


class Drawn:
    """A Source of whole batches, each a block: see holdfast.data.source.

    The first `fill` batches bring the rows that were used last before a moment in a long run, the longest ago first:
    how long ago is exponentially distributed, by each row's rate. So a cache that they fill is as LRU leaves it.
    """

    def __init__(self, *, lookups: int, exponent: float, fill: int, batches: int) -> None:
        self._lookups, self._fill = lookups, fill
        self._law = ZipfLaw(num_ranks=ROWS, exponent=exponent)
        rng = np.random.default_rng(_SEED)
        self.features = tuple(Feature(name=f"t{table}", num_embeddings=ROWS) for table in range(TABLES))
        self.num_dense = NUM_DENSE
        self.num_samples = BATCH * (fill + batches)
        self.block_sizes: NDArray[np.int64] = np.full(fill + batches, BATCH, np.int64)
        self.sample_bytes = 8 * TABLES * lookups + 4 * NUM_DENSE
        self.places = [rng.permutation(ROWS) for _ in range(TABLES)]  # the row of each rank
        shape = (batches, BATCH, lookups)
        ids = [
            np.concatenate([self._filling(place, rng), place[self._law.ranks(rng.random(shape)) - 1]])
            for place in self.places
        ]
        self.ids = np.stack(ids)  # int64 [TABLES, fill + batches, BATCH, lookups]
        self._dense = rng.random((BATCH, NUM_DENSE), np.float32)
        self._labels = rng.integers(0, 2, BATCH).astype(np.float32)

    def _filling(self, place: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        rates = self._law.probability(np.arange(1, ROWS + 1))
        ages = rng.exponential(size=ROWS) / rates
        count = self._fill * BATCH * self._lookups
        used = place[np.argsort(ages)[:count]][::-1]
        return used.reshape(self._fill, BATCH, self._lookups)

    def hottest(self, table: int, count: int) -> NDArray[np.int64]:
        """The rows that are asked for most, ascending: a perfect profile."""
        return np.sort(self.places[table][:count])

    def unique_rows(self) -> float:
        """Different rows of a batch, in the mean of those after the filling."""
        return self._mean_rows(0)

    def most_missed(self, kept: int) -> int:
        """Different rows of a batch beside the `kept` hottest of each table, where these are most."""
        return int(max(self._missed_of(number, kept) for number in range(self._fill, self.ids.shape[1])))

    def missed_rows(self, kept: int) -> float:
        return self._mean_rows(kept)

    def _mean_rows(self, kept: int) -> float:
        return float(np.mean([self._missed_of(number, kept) for number in range(self._fill, self.ids.shape[1])]))

    def _missed_of(self, number: int, kept: int) -> int:
        return sum(np.setdiff1d(self.ids[table, number], place[:kept]).size for table, place in enumerate(self.places))

    def read_block(self, index: int) -> SampleBlock:
        bags = tuple(FixedBags(self.ids[table, index]) for table in range(TABLES))
        return SampleBlock(labels=self._labels, dense=self._dense, bags=bags)

    def fingerprint(self) -> Mapping[str, str | int]:
        return {"kind": "drawn", "tables": TABLES, "samples": self.num_samples}


def drawn(lookups: int, exponent: float, fill: int, batches: int) -> Source:
    """What a run's file names as data.source."""
    return Drawn(lookups=lookups, exponent=exponent, fill=fill, batches=batches)
