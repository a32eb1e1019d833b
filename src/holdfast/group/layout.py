"""Which rows lie in which shard, and who owns it.

A table of more than `split_rows` rows is cut over all shards by a hash of the row (core/rows/shards.h); any other lies
whole in one, each in the next. Owners are found greedily: the shard with most lookups goes to the owner with fewest so
far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from holdfast import _core
from holdfast.data.loader import Loader
from holdfast.data.source import Source
from holdfast.errors import ConfigError

MAX_SHARDS = 4096
_LOAD_BATCHES = 8


@dataclass(frozen=True, slots=True)
class TableShards:
    """Where a table's rows lie. num_shards: 1, then `first_shard` has all of them, or all of the pool's, then it is
    what the table is turned by against others. keys: where its ids are keys, the pool's seed and the table's number,
    from which their shards follow."""

    first_shard: int
    num_shards: int
    keys: tuple[int, int] | None = None


def check_num_shards(num_shards: int, num_owners: int) -> None:
    """Raises ConfigError."""
    if not 1 <= num_shards <= MAX_SHARDS or num_shards & (num_shards - 1):
        raise ConfigError(f"group.shards = {num_shards}; it must be a power of two from 1 to {MAX_SHARDS}")
    if num_shards < num_owners:
        raise ConfigError(
            f"group.shards = {num_shards} is less than the {num_owners} ranks that own rows: some would own nothing; "
            "start fewer of them, or make a new pool with more shards"
        )


def lay_out(rows_of_tables: Sequence[int], *, num_shards: int, split_rows: int) -> list[TableShards]:
    """The shards of every table, by number."""
    layout = []
    turns = {1: 0, num_shards: 0}  # each table begins a shard further than the one before of its kind
    for rows in rows_of_tables:
        of_table = num_shards if rows > split_rows else 1
        layout.append(TableShards(turns[of_table] % num_shards, of_table))
        turns[of_table] += 1
    return layout


def measure_load(
    source: Source,
    table_of_feature: Sequence[int],
    rows_of_tables: Sequence[int | None],
    layout: Sequence[TableShards],
    *,
    num_shards: int,
    batch_size: int,
    seed: int,
    shuffle: bool,
    lanes: int = 1,
    first_sample: int = 0,
) -> list[int]:
    """Lookups of each shard in the first batches of training from `first_sample` on; features in the source's order.
    rows_of_tables: None where a table's ids are keys."""
    load = np.zeros(num_shards, np.int64)
    with Loader(source, batch_size=batch_size, seed=seed, shuffle=shuffle, lanes=lanes) as loader:
        loader.seek(first_sample)
        for batch in islice(loader, _LOAD_BATCHES):
            ids, offsets = batch.features.values().numpy(), batch.features.offsets().numpy()
            for feature, table in enumerate(table_of_feature):
                begin, end = offsets[feature * batch.size], offsets[(feature + 1) * batch.size]
                load += _count(ids[begin:end], rows_of_tables[table], layout[table], num_shards)
    return [int(count) for count in load]


def expected_load(features_of: Sequence[int], layout: Sequence[TableShards], num_shards: int) -> list[int]:
    """Lookups of each shard where nothing is known but how many features read each table: one of each in a sample."""
    load = [0] * num_shards
    for features, table in zip(features_of, layout, strict=True):
        if table.num_shards == 1:
            load[table.first_shard] += features * num_shards
        else:
            load = [count + features for count in load]
    return load


def _count(ids: NDArray[np.int64], num_rows: int | None, table: TableShards, num_shards: int) -> NDArray[np.int64]:
    if table.num_shards == 1:
        counts = np.zeros(num_shards, np.int64)
        counts[table.first_shard] = len(ids)
        return counts
    ids = np.ascontiguousarray(ids)
    shards: NDArray[np.int64]
    if table.keys is not None:
        shards = _core.shards_of_keys(*table.keys, num_shards, ids)
    else:
        assert num_rows is not None
        shards = _core.places_of(num_rows, num_shards, table.first_shard, ids) >> stride_bits(num_rows, num_shards)
    return np.bincount(shards, minlength=num_shards).astype(np.int64)


def stride_bits(num_rows: int, num_shards: int) -> int:
    """Of a split table, as core/rows/shards.h has it: a place is row ``place & (2**stride_bits - 1)`` of shard
    ``place >> stride_bits``."""
    return max(15, (-(-num_rows // num_shards) - 1).bit_length())


def assign(load: Sequence[int], num_owners: int) -> list[int]:
    """The owner of each shard, of which there are as many as owners at least. Every owner has one, since who has none
    comes before everybody else; shards that nobody asks for are dealt out evenly."""
    owner_of = [0] * len(load)
    owned: list[tuple[int, int]] = [(0, 0)] * num_owners  # lookups, shards
    for shard in sorted(range(len(load)), key=lambda shard: (-load[shard], shard)):
        owner = min(range(num_owners), key=lambda candidate: (*owned[candidate], candidate))
        owner_of[shard] = owner
        owned[owner] = (owned[owner][0] + load[shard], owned[owner][1] + 1)
    return owner_of
