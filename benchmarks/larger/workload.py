"""The batches of the benchmark: ids with the skew of OpenEmbedding's industrial trace, hot rows on pages all over.

- The trace gives three points: the top 0.05, 0.1 and 1% of a table's rows take 85.7, 89.5 and 95.7% of the accesses.
  Between them (and from the first row to the first point) the share of accesses is linear in the logarithm of the rank,
  so that a row's popularity falls with 1/rank within each piece, and nowhere rises.
- Rank to row is a bijection (``holdfast.data.scatter``) of each table's own.
- Ids are a pure function of (workload, seed, batch number). They are drawn before anything is timed, into a file on
  memory: drawing one batch of rm1 takes longer than training on it.
- Dense features and labels go round after a few batches: nothing measured here depends on their values, and a batch of
  rm3 has 10 MB of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.data.block import FixedBags, SampleBlock
from holdfast.data.counter import stream_key, uniforms
from holdfast.data.scatter import Scatter
from holdfast.data.source import Feature
from peers.shapes import KAGGLE, RM1, RM3, Shape

TRACE_POINTS = ((0.0005, 0.857), (0.001, 0.895), (0.01, 0.957), (1.0, 1.0))
"""(fraction of a table's rows, the share of accesses that the most popular ones of that number take)."""

MIN_ROWS = 2000
"""Of a table: fewer, and its top 0.05% is no row."""

_IDS_STREAM, _ROWS_STREAM = 1, 2
_NUM_DENSE_BATCHES = 8
_CLICK_RATE = 0.25


class TraceLaw:
    """Popularity ranks of a table of ``num_rows`` rows (at least MIN_ROWS), by inversion: one uniform number a rank."""

    def __init__(self, num_rows: int) -> None:
        if num_rows < MIN_ROWS:
            raise ValueError(f"num_rows = {num_rows}; it must be at least {MIN_ROWS}")
        self.num_rows = num_rows
        ends = [round(fraction * num_rows) for fraction, _ in TRACE_POINTS]
        # A rank r covers [r, r + 1), so the first piece, which has no logarithm at 0, is that of r + 1.
        self._starts = np.array([0, *ends[:-1]], dtype=np.float64)
        self._shifts = np.array([1.0] + [0.0] * (len(ends) - 1))
        self._log_ratios = np.log((np.array(ends) + self._shifts) / (self._starts + self._shifts))
        self._shares = np.array([0.0, *(share for _, share in TRACE_POINTS)])
        self._last = np.array(ends, dtype=np.int64) - 1

    def ranks(self, numbers: NDArray[np.float64]) -> NDArray[np.int64]:
        """Ranks from 0, int64 of the same shape, of uniform numbers in [0, 1)."""
        flat = numbers.ravel()
        piece = np.searchsorted(self._shares[1:-1], flat, side="right")
        within = (flat - self._shares[piece]) / np.diff(self._shares)[piece]
        shift = self._shifts[piece]
        ranks = (self._starts[piece] + shift) * np.exp(within * self._log_ratios[piece]) - shift
        # rounding of exp may step over an end by one
        return np.asarray(np.minimum(ranks.astype(np.int64), self._last[piece]).reshape(numbers.shape))


class ZipfLaw:
    """Popularity ranks of a table of ``num_rows`` rows: rank r is wanted as often as 1 / (r + 1) ** exponent says, by
    inversion of the continuous law; exponent > 1."""

    def __init__(self, num_rows: int, exponent: float) -> None:
        self.num_rows = num_rows
        self._power = 1.0 - exponent
        self._tail = num_rows**self._power - 1.0

    def ranks(self, numbers: NDArray[np.float64]) -> NDArray[np.int64]:
        """Ranks from 0, int64 of the same shape, of uniform numbers in [0, 1)."""
        ranks = (1.0 + numbers * self._tail) ** (1.0 / self._power) - 1.0
        return np.asarray(np.minimum(ranks.astype(np.int64), self.num_rows - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and where its ids fall. uniform_share: of the ids, drawn evenly over the table; the rest has the trace's
    skew, or Zipf's with that exponent."""

    name: str
    shape: Shape
    uniform_share: float = 0.0
    zipf: float | None = None
    seed: int = 1

    @property
    def row_bytes(self) -> int:
        """Weights and the state of row-wise Adagrad."""
        return 4 * (self.shape.embedding_dim + 1)

    @property
    def num_rows(self) -> int:
        return self.shape.num_tables * self.shape.num_embeddings

    @property
    def table_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    @property
    def ids_per_table(self) -> int:
        """In a batch."""
        return self.shape.batch_size * self.shape.lookups_per_bag

    @property
    def ids_per_batch(self) -> int:
        return self.shape.num_tables * self.ids_per_table


# So many rows that the files of one run take about 4 GB at home, and a scratchpad of a tenth is full after a few
# thousand steps of kaggle.
_SHAPES = {
    "kaggle": replace(KAGGLE, num_embeddings=2_000_000),
    "rm1": replace(RM1, num_embeddings=4_000_000),
    "rm3": replace(RM3, num_embeddings=3_000_000),
    "wide": replace(
        KAGGLE,
        name="wide",
        num_tables=8,
        num_embeddings=2_000_000,
        embedding_dim=64,
        lookups_per_bag=2,
        bottom=(512, 256, 64),
    ),
}
_QUICK_ROWS = 200_000  # a tenth of them still holds a batch of rm1


def make_workload(name: str, *, quick: bool = False, uniform_share: float | None = None) -> Workload:
    """kaggle, rm1, rm3, wide (rows of 260 bytes), or uniform, which is kaggle with its ids spread evenly. quick: small
    tables."""
    shape = _SHAPES["kaggle" if name == "uniform" else name]
    if quick:
        shape = replace(shape, num_embeddings=_QUICK_ROWS)
    share = (1.0 if name == "uniform" else 0.0) if uniform_share is None else uniform_share
    return Workload(name=name, shape=shape, uniform_share=share)


class IdDrawer:
    """Draws the ids of any batch of a workload."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        num_rows = workload.shape.num_embeddings
        self._law = TraceLaw(num_rows) if workload.zipf is None else ZipfLaw(num_rows, workload.zipf)
        self._scatters = [
            Scatter(size=workload.shape.num_embeddings, key=stream_key(workload.seed, _ROWS_STREAM, table))
            for table in range(workload.shape.num_tables)
        ]

    def draw(self, number: int) -> NDArray[np.int64]:
        """The ids of batch ``number`` (from 0): int64 ``[num_tables, batch_size, lookups_per_bag]``."""
        shape, count = self._workload.shape, self._workload.ids_per_table
        ids = np.empty((shape.num_tables, count), dtype=np.int64)
        for table, scatter in enumerate(self._scatters):
            key = stream_key(self._workload.seed, _IDS_STREAM, table)
            ids[table] = scatter(self._ranks(uniforms(key, number * count, count)))
        return ids.reshape(shape.num_tables, shape.batch_size, shape.lookups_per_bag)

    def hottest(self, table: int, count: int) -> NDArray[np.int64]:
        """The rows of a table that come up most, ascending: a perfect profile. Evenly spread ids have none."""
        return np.sort(self._scatters[table](np.arange(count)))

    def _ranks(self, numbers: NDArray[np.float64]) -> NDArray[np.int64]:
        """The trace's ranks, but for numbers below ``uniform_share``, which name a row themselves."""
        share = self._workload.uniform_share
        if share == 0.0:
            return self._law.ranks(numbers)
        if share == 1.0:
            return (numbers * self._law.num_rows).astype(np.int64)
        even = numbers < share
        ranks = (numbers / share * self._law.num_rows).astype(np.int64)
        ranks[~even] = self._law.ranks((numbers[~even] - share) / (1.0 - share))
        return ranks


def write_ids(workload: Workload, path: Path, num_batches: int) -> None:
    """Draws batches 0 to ``num_batches`` - 1 into a file of uint32, batch after batch."""
    drawer = IdDrawer(workload)
    with path.open("wb") as file:
        for number in range(num_batches):
            drawer.draw(number).astype(np.uint32).tofile(file)


class FileOfBatches:
    """A source (see holdfast.data.source) of the batches that ``write_ids`` wrote; a block is a batch.

    To be read by a loader that does not shuffle, with the workload's batch size. After the last batch comes the first.
    """

    def __init__(self, workload: Workload, path: Path) -> None:
        self.workload = workload
        self._path = path
        self.num_batches = path.stat().st_size // (4 * workload.ids_per_batch)

    @property
    def features(self) -> tuple[Feature, ...]:
        shape = self.workload.shape
        return tuple(Feature(name=f"f{n}", num_embeddings=shape.num_embeddings) for n in range(shape.num_tables))

    @property
    def num_dense(self) -> int:
        return self.workload.shape.num_dense

    @property
    def num_samples(self) -> int:
        return self.num_batches * self.workload.shape.batch_size

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        return np.full(self.num_batches, self.workload.shape.batch_size, dtype=np.int64)

    @property
    def sample_bytes(self) -> int:
        shape = self.workload.shape
        return 8 * shape.num_tables * shape.lookups_per_bag + 4 * shape.num_dense + 4

    def read_ids(self, index: int) -> NDArray[np.uint32]:
        """uint32 ``[num_tables, batch_size, lookups_per_bag]``."""
        count, shape = self.workload.ids_per_batch, self.workload.shape
        ids = np.fromfile(self._path, dtype=np.uint32, count=count, offset=4 * count * index)
        return ids.reshape(shape.num_tables, shape.batch_size, shape.lookups_per_bag)

    def read_block(self, index: int) -> SampleBlock:
        ids = self.read_ids(index).astype(np.int64)
        dense, labels = _dense_batch(
            self.workload.shape.batch_size, self.num_dense, self.workload.seed, index % _NUM_DENSE_BATCHES
        )
        return SampleBlock(labels=labels, dense=dense, bags=tuple(FixedBags(of_table) for of_table in ids))

    def fingerprint(self) -> Mapping[str, str | int]:
        return {"kind": "benchmarks.larger", "workload": repr(self.workload), "num_batches": self.num_batches}


@functools.cache
def _dense_batch(
    batch_size: int, num_dense: int, seed: int, number: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Dense features float32 ``[batch_size, num_dense]`` and labels float32 ``[batch_size]``."""
    generator = np.random.default_rng((seed, number))
    dense = generator.standard_normal((batch_size, num_dense), dtype=np.float32)
    return dense, (generator.random(batch_size) < _CLICK_RATE).astype(np.float32)


def initial_weights(shape: Shape, table: int, first: int, count: int) -> NDArray[np.float32]:
    """What rows ``[first, first + count)`` start with in every system: float32 ``[count, embedding_dim]``, uniform in
    ±1/sqrt(num_embeddings). A function of the arguments, so all must cut a table alike."""
    bound = np.float32(1.0 / math.sqrt(shape.num_embeddings))
    numbers = np.random.default_rng((table, first)).random((count, shape.embedding_dim), dtype=np.float32)
    numbers *= 2 * bound
    numbers -= bound
    return numbers


CHUNK_ROWS = 250_000
"""How tables are cut when they are filled."""
