"""Which rows training asks for, and how often: one streaming pass over the ids of a run, in bounded memory.

For every table: how many accesses, how many different rows a batch touches, and both again for the hottest k rows, for
a ladder of k. The second is what a memory tier serves: a batch reads each of its rows once, into the working set, and
writes it once, however often it looks it up.

Two ways to count, chosen by the memory that there is, smallest tables first:
- **exact**: one 64-bit word a row, 40 bits of accesses and 24 bits of batches that touched the row.
- **sketch**: a fixed number m of counters that the most frequent rows hold (Misra-Gries, in the merged form of Agarwal
  et al., *Mergeable Summaries*, 2012). When more than m rows are held, the (m + 1)-th largest count is subtracted from
  all, and those that reach zero are dropped. A count is never too high, and too low by at most the sum of what was
  subtracted, which is at most accesses / (m + 1). That sum is kept and told with the result: unlike that of a count-min
  sketch the bound is certain. Rows beyond the m hottest appear only in the totals, which are exact.

Where a table's ids are keys, a first pass numbers those that come (`KeyNumbers`), and the table is taken to have as
many rows: what is counted is a row's accesses, whatever row of the pool the key would have.

How soon rows come again is counted beside that (`reuse.py`), of a sample of the rows where there are many.

A profile is a JSON file: `version`, and the fields of AccessProfile.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from holdfast.data.batch import Batch
from holdfast.data.output import whole_file
from holdfast.data.source import Feature, Source
from holdfast.errors import ConfigError, IdError
from holdfast.files.config import read_json, to_plain
from holdfast.train.batches import make_loader
from holdfast.train.options import TrainConfig
from holdfast_lab.placement.ladder import Rung, check_ladder
from holdfast_lab.placement.reuse import ReuseCounter, ReuseRung, check_reuse

PROFILE_VERSION = 2
DEFAULT_MEMORY_BYTES = 1 << 30

_TOUCH_BITS = 24
_TOUCH_MASK = (1 << _TOUCH_BITS) - 1
_MAX_ACCESSES = (1 << (64 - _TOUCH_BITS)) - 1
_COUNTER_BYTES = 96  # row and count, as many again that wait to be merged, and both sorted
_MIN_COUNTERS, _MAX_COUNTERS = 1024, 1 << 20
_KEY_BYTES = 32  # a key, and as many again that wait to be merged, and both sorted


@dataclass(frozen=True, slots=True, kw_only=True)
class TableAccesses:
    """One table's part of a profile.

    num_embeddings: rows of the table; of one with keys, the keys that came. accesses: ids in all batches.
    max_undercount_per_row: by how many accesses a single row may be understated; 0 where counting was exact. So the
    hottest k rows have at least `access_share` of the accesses, and at most k times this many more. ladder: hottest
    rows first, the last rung is the whole table. reuse: how soon rows come again.
    """

    name: str
    num_embeddings: int
    accesses: int
    unique_rows_per_batch: float
    method: Literal["exact", "sketch"]
    max_undercount_per_row: int
    ladder: tuple[Rung, ...]
    reuse: tuple[ReuseRung, ...]

    def __post_init__(self) -> None:
        for field in ("accesses", "unique_rows_per_batch", "max_undercount_per_row"):
            _require_at_least(0, field, getattr(self, field))
        check_ladder(self.ladder, self.num_embeddings)
        check_reuse(self.reuse)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessProfile:
    """What a pass over `batches` batches of `batch_size` samples has counted; tables in the order of the features."""

    batch_size: int
    batches: int
    tables: tuple[TableAccesses, ...]

    def __post_init__(self) -> None:
        for field in ("batch_size", "batches"):
            _require_at_least(1, field, getattr(self, field))


def read_profile(path: Path) -> AccessProfile:
    """Raises ConfigError that names file and key for whatever is wrong with it."""
    return read_json(AccessProfile, path, version=PROFILE_VERSION)


def write_profile(profile: AccessProfile, path: Path, *, overwrite: bool) -> None:
    """Whole or not at all. Raises ConfigError if `path` is there and `overwrite` is not set."""
    with whole_file(path, overwrite=overwrite) as partial:
        text = json.dumps({"version": PROFILE_VERSION, **to_plain(profile)}, indent=1)
        partial.write_text(text + "\n", encoding="utf-8")


def batches_per_epoch(source: Source, config: TrainConfig) -> int:
    """Batches of one pass over the training data; the last one is filled up from the next epoch."""
    return math.ceil(source.num_samples / config.batch_size)


def profile_accesses(
    source: Source,
    config: TrainConfig,
    *,
    num_batches: int,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    on_batch: Callable[[int], None] | None = None,
) -> AccessProfile:
    """Counts the ids of the first `num_batches` batches that training with `config` would see.

    memory_bytes: about how much the counters may take, and the numbers of keys before them; while the largest table is
    evaluated, its touched rows take 8 bytes each on top, and when rows come again is counted in at most half as much.
    on_batch: told 1 after every batch of each of the `num_passes`.
    Raises ConfigError for numbers out of range, and for more keys than there is memory for; IdError for an id outside
    of its table, and what the source raises.
    """
    if not 1 <= num_batches <= _TOUCH_MASK:
        raise ConfigError(f"profile: {num_batches} batches; it must be 1 to {_TOUCH_MASK:,}, say fewer with --steps")
    features = source.features
    numbers = _number_keys(source, config, num_batches, memory_bytes, on_batch) if num_passes(source) > 1 else {}
    sizes = [max(1, len(numbers[f.name])) if f.name in numbers else f.num_embeddings for f in features]
    counters = _counters(sizes, memory_bytes)
    words = memory_bytes // 2 // 4 // len(features)
    reuses = [ReuseCounter(size, num_batches, words) for size in sizes]
    accesses, touches = [0] * len(features), [0] * len(features)
    with make_loader(source, config, lambda batch: _unique_rows(batch, features, numbers)) as loader:
        for _, (_, unique) in zip(range(num_batches), loader, strict=False):
            for table, (rows, counts) in enumerate(unique):
                counters[table].add(rows, counts)
                reuses[table].add(rows)
                accesses[table] += int(counts.sum())
                touches[table] += len(rows)
                if accesses[table] > _MAX_ACCESSES:
                    raise ConfigError(f"profile: table '{features[table].name}' is accessed too often; say --steps")
            if on_batch is not None:
                on_batch(1)
    tables = []
    for table, feature in enumerate(features):
        counter = counters[table]
        ladder = _ladder(counter.hottest(), sizes[table], accesses[table], touches[table], num_batches)
        tables.append(
            TableAccesses(
                name=feature.name,
                num_embeddings=sizes[table],
                accesses=accesses[table],
                unique_rows_per_batch=touches[table] / num_batches,
                method="exact" if isinstance(counter, ExactCounts) else "sketch",
                max_undercount_per_row=counter.max_undercount,
                ladder=ladder,
                reuse=reuses[table].rungs(),
            )
        )
    return AccessProfile(batch_size=config.batch_size, batches=num_batches, tables=tuple(tables))


def num_passes(source: Source) -> int:
    """Over the data: one more where ids are keys, to number them."""
    return 2 if any(feature.keys for feature in source.features) else 1


def _number_keys(
    source: Source, config: TrainConfig, num_batches: int, memory_bytes: int, on_batch: Callable[[int], None] | None
) -> dict[str, NDArray[np.int64]]:
    """The different keys of each table that has some, ascending: a key's number is its place."""
    keyed = [feature.name for feature in source.features if feature.keys]
    most = memory_bytes // _KEY_BYTES // len(keyed)
    numbers = {name: KeyNumbers(name, most) for name in keyed}
    with make_loader(source, config, lambda batch: _unique_keys(batch, source.features)) as loader:
        for _, (_, unique) in zip(range(num_batches), loader, strict=False):
            for name, keys in unique.items():
                numbers[name].add(keys)
            if on_batch is not None:
                on_batch(1)
    return {name: of_table.sorted() for name, of_table in numbers.items()}


class KeyNumbers:
    """The keys of a table, `most` at most. Raises ConfigError beyond that."""

    def __init__(self, table: str, most: int) -> None:
        self._table, self._most = table, most
        self._keys = np.empty(0, np.int64)
        self._waiting: list[NDArray[np.int64]] = []
        self._num_waiting = 0

    def add(self, keys: NDArray[np.int64]) -> None:
        self._waiting.append(keys)
        self._num_waiting += len(keys)
        if self._num_waiting > max(len(self._keys), 1 << 16):
            self.sorted()

    def sorted(self) -> NDArray[np.int64]:
        self._keys = np.unique(np.concatenate([self._keys, *self._waiting]))
        self._waiting, self._num_waiting = [], 0
        if len(self._keys) > self._most:
            raise ConfigError(
                f"profile: table '{self._table}' has more than {self._most:,} different keys, for which memory was "
                "given: say more with --memory-bytes, or fewer batches with --steps"
            )
        return self._keys


class ExactCounts:
    """A word for every row of a table."""

    max_undercount = 0

    def __init__(self, num_rows: int) -> None:
        self._packed = np.zeros(num_rows, np.uint64)

    def add(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """One batch: different rows, and how often each is looked up."""
        self._packed[rows] += _pack(counts)

    def hottest(self) -> NDArray[np.uint64]:
        """The packed counts of the rows that were touched, hottest first. Ends the counting."""
        touched = self._packed[self._packed != 0]
        touched.sort()
        return np.flip(touched)


class SketchedCounts:
    """Counters for the `num_counters` hottest rows; see the module's text.

    max_undercount: by how many accesses the count of a row, held or not, may be too low by now.
    """

    def __init__(self, num_counters: int) -> None:
        self._num_counters = num_counters
        self._rows = [np.empty(0, np.int64)]
        self._packed = [np.empty(0, np.uint64)]
        self._num_waiting = 0
        self.max_undercount = 0

    def add(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """One batch: different rows, and how often each is looked up."""
        self._rows.append(rows)
        self._packed.append(_pack(counts))
        self._num_waiting += len(rows)
        if self._num_waiting >= self._num_counters:
            self._merge()

    def hottest(self) -> NDArray[np.uint64]:
        """The packed counts of the rows that are held, hottest first."""
        self._merge()
        return np.flip(np.sort(self._packed[0]))

    def _merge(self) -> None:
        rows, packed = np.concatenate(self._rows), np.concatenate(self._packed)
        if rows.size:
            order = np.argsort(rows, kind="stable")
            rows, packed = rows[order], packed[order]
            begins = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
            rows, packed = rows[begins], np.add.reduceat(packed, begins)
        if rows.size > self._num_counters:
            counts = packed >> np.uint64(_TOUCH_BITS)
            place = rows.size - self._num_counters - 1
            subtracted = np.partition(counts, place)[place]
            is_kept = counts > subtracted
            rows, packed = rows[is_kept], packed[is_kept] - (subtracted << np.uint64(_TOUCH_BITS))
            self.max_undercount += int(subtracted)
        self._rows, self._packed, self._num_waiting = [rows], [packed], 0


def _counters(sizes: Sequence[int], memory_bytes: int) -> list[ExactCounts | SketchedCounts]:
    """Exact counts for all tables where they fit; else for the smallest, in half of the memory, and sketches."""
    room = memory_bytes if 8 * sum(sizes) <= memory_bytes else memory_bytes // 2
    exact = set()
    for table in sorted(range(len(sizes)), key=lambda table: sizes[table]):
        room -= 8 * sizes[table]
        if room < 0:
            break
        exact.add(table)
    num_sketches = max(1, len(sizes) - len(exact))
    num_counters = memory_bytes // 2 // num_sketches // _COUNTER_BYTES
    num_counters = min(max(num_counters, _MIN_COUNTERS), _MAX_COUNTERS)
    return [ExactCounts(size) if table in exact else SketchedCounts(num_counters) for table, size in enumerate(sizes)]


def _ids_by_feature(batch: Batch, features: Sequence[Feature]) -> Iterator[tuple[Feature, NDArray[np.int64]]]:
    values = batch.features.values().numpy()
    bounds = batch.features.offsets()[:: batch.size].tolist()
    for feature, begin, end in zip(features, bounds, bounds[1:], strict=False):
        yield feature, values[begin:end]


def _unique_keys(batch: Batch, features: Sequence[Feature]) -> dict[str, NDArray[np.int64]]:
    """The different keys of a batch, of the features that have keys."""
    return {feature.name: np.unique(ids) for feature, ids in _ids_by_feature(batch, features) if feature.keys}


def _unique_rows(
    batch: Batch, features: Sequence[Feature], numbers: Mapping[str, NDArray[np.int64]]
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Per feature the different rows of a batch, ascending, and how often each occurs; of keys their `numbers`."""
    unique = []
    for feature, ids in _ids_by_feature(batch, features):
        rows, counts = np.unique(ids, return_counts=True)
        if feature.keys:
            rows = np.searchsorted(numbers[feature.name], rows)
        elif rows.size and not 0 <= rows[0] <= rows[-1] < feature.num_embeddings:
            wrong = int(rows[0] if rows[0] < 0 else rows[-1])
            raise IdError(
                f"feature '{feature.name}', batch {batch.number}: id {wrong} lies outside of [0, "
                f"{feature.num_embeddings})"
            )
        unique.append((rows, counts))
    return unique


def _ladder(
    hottest: NDArray[np.uint64], num_rows: int, accesses: int, touches: int, num_batches: int
) -> tuple[Rung, ...]:
    """Rungs at powers of two while rows were counted, at the last one that was, and at the whole table."""
    ends = [1 << power for power in range(hottest.size.bit_length()) if 1 << power < hottest.size]
    if 0 < hottest.size < num_rows:
        ends.append(hottest.size)
    rungs = []
    below = counted_accesses = counted_touches = 0
    for end in ends:
        part = hottest[below:end]
        counted_accesses += int((part >> np.uint64(_TOUCH_BITS)).sum())
        counted_touches += int((part & np.uint64(_TOUCH_MASK)).sum())
        below = end
        rungs.append(_rung(end, counted_accesses, accesses, counted_touches, num_batches))
    return (*rungs, _rung(num_rows, accesses, accesses, touches, num_batches))


def _rung(rows: int, accesses: int, all_accesses: int, touches: int, num_batches: int) -> Rung:
    share = accesses / all_accesses if all_accesses else 0.0
    return Rung(rows=rows, access_share=share, unique_rows_per_batch=touches / num_batches)


def _pack(counts: NDArray[np.int64]) -> NDArray[np.uint64]:
    return (counts.astype(np.uint64) << np.uint64(_TOUCH_BITS)) + np.uint64(1)


def _require_at_least(least: int, field: str, value: float) -> None:
    if not value >= least:
        raise ValueError(f"{field} = {value}; it must be at least {least}")
