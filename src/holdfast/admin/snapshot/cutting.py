"""Where the rows of a snapshot go in a pool that is cut into shards anew, or whose tables have other numbers of rows.

A snapshot of one writer numbers rows by row, one of several by place where a table is split (group/manifest.py). A key
lies in the shard that its hash says, in any row of it: there rows are given one after another. A key that was left
behind gets none: shards that count anew what max_keys has room for would take it, and what it had learnt, for one that
stayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from holdfast import _core
from holdfast.admin.by_key import key_records
from holdfast.admin.snapshot.chain import Snapshot, merged_rows
from holdfast.admin.snapshot.rows import Rows
from holdfast.errors import ConfigError
from holdfast.group import manifest as manifests
from holdfast.group.founding import cut_tables
from holdfast.group.layout import check_num_shards, stride_bits
from holdfast.group.manifest import Manifest
from holdfast.pools.read_only import KEY_RECORD

Move = Callable[[Rows], Rows]


def cut(snapshot: Snapshot, *, shards: int, split_rows: int) -> Snapshot:
    """The snapshot as that of a group's pool of one writer, cut as a new one would be. Raises ConfigError."""
    check_num_shards(shards, num_owners=1)
    tables = cut_tables([table.spec for table in snapshot.tables], num_shards=shards, split_rows=split_rows)
    for table in tables:
        if 0 < table.max_keys < table.table_shards:
            raise ConfigError(
                f"table '{table.name}': its max_keys are {table.max_keys}, of which each of {shards} shards has its "
                "part: take fewer shards"
            )
    group = Manifest(
        uuid=manifests.new_uuid(),
        seed=snapshot.seed,
        store=snapshot.store,
        log_bytes=snapshot.log_bytes,
        row_checksums=snapshot.row_checksums,
        tables=tables,
        generation=1,
        owner_of=(0,) * shards,
        load=(1,) * shards,
    )
    return replace(snapshot, group=group)


def move_of(chain: Sequence[Snapshot], after: Snapshot, number: int) -> Move | None:
    """By what rows of a table, each of which comes once, find their numbers in `after`; None where all keep theirs. It
    raises ConfigError for a row that has no place there."""
    before = chain[0]
    table = after.tables[number]
    old, new = (None if of.group is None else of.group.split_table(number) for of in (before, after))
    where, there = ((1, 0) if of is None else (of.table_shards, of.first_shard) for of in (old, new))
    if before.tables[number] == table and where == there:
        return None
    if table.keys and where[0] != there[0]:
        return _KeyPlaces(after.seed, number, table.name, table.num_embeddings, there[0], _left_behind(chain, number))

    def move(rows: Rows) -> Rows:
        numbers = rows.rows.astype(np.int64)
        own = numbers if old is None else old.rows_of_places(numbers)
        if (last := int(own.max())) >= table.num_embeddings:
            raise ConfigError(
                f"table '{table.name}': row {last} is in use, and {table.num_embeddings} rows would end before it: a "
                "restore drops nothing, give the table more rows"
            )
        if new is None:
            return Rows(own.view(np.uint64), rows.data)
        if table.keys and old is not None:  # which lie in any row of their shard, and stay in theirs
            return Rows(old.moved(rows.rows, new), rows.data)
        return Rows(new.places_of(own).view(np.uint64), rows.data)

    return move


def _left_behind(chain: Sequence[Snapshot], number: int) -> NDArray[np.uint64]:
    """The rows, ascending, that keys of a table had and do not have any more at the end of the newest snapshot's
    step. Raises Corrupted."""
    newest = chain[0]
    table = newest.tables[number] if newest.group is None else newest.group.tables[number]
    if not table.ttl_steps and not table.max_keys:
        return np.empty(0, np.uint64)
    rows, records = [np.empty(0, np.uint64)], [np.empty(0, KEY_RECORD)]
    for found in merged_rows(chain, number):
        rows.append(found.rows.copy())
        records.append(key_records(found.data))
    as_bytes = np.concatenate(records).view(np.uint8).reshape(-1, KEY_RECORD.itemsize)
    counts = _core.living_keys(table.spec, newest.seed, number, newest.step, as_bytes)
    return np.concatenate(rows)[~counts]


class _KeyPlaces:
    """Gives the rows of keys their places in shards that are cut anew. left_behind: of keys that get none."""

    def __init__(
        self, seed: int, number: int, name: str, num_embeddings: int, num_shards: int, left_behind: NDArray[np.uint64]
    ) -> None:
        self._of_pool = seed, number, num_shards
        self._name = name
        self._most = num_embeddings // num_shards  # a shard may have one more
        self._bits = 0 if num_shards == 1 else stride_bits(num_embeddings, num_shards)
        self._used = np.zeros(num_shards, np.int64)
        self._left_behind = left_behind

    def __call__(self, rows: Rows) -> Rows:
        rows = rows[~rows.are_among(self._left_behind)]
        records = key_records(rows.data)
        has_key = records["updates"] != 0
        records, rows = records[has_key], rows[has_key]
        shards = _core.shards_of_keys(*self._of_pool, np.ascontiguousarray(records["key"]))
        counts = np.bincount(shards, minlength=len(self._used))
        by_shard = np.argsort(shards, kind="stable")
        among = np.empty(len(shards), np.int64)  # those of the same shard
        among[by_shard] = np.arange(len(shards)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = (shards << self._bits) | (self._used[shards] + among)
        self._used += counts
        if (fullest := int(self._used.max())) > self._most:
            raise ConfigError(
                f"table '{self._name}': a shard has room for {self._most} keys, and one would have {fullest} or more: "
                f"give the table more rows, as in --rows {self._name}={2 * len(self._used) * fullest}"
            )
        return Rows(places.view(np.uint64), rows.data)
