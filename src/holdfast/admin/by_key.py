"""The rows of a table with keys in order of their keys, whatever rows the keys have.

A row is its key's where the record at the end of its state says so, and the key is not left behind (ttl_steps,
max_keys). Two rows may have records of one key, where it left one of them and came back: the one that was updated later
is its row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast import _core
from holdfast.pools.read_only import KEY_RECORD, PoolReader, layout_of, touched_rows

_CHUNK_ROWS = 16_384


@dataclass(frozen=True, slots=True)
class KeyedChunk:
    """Some keys of a table, ascending, and their rows. rows: their numbers. records: KEY_RECORD ``[n]``; weights and
    state: uint8 ``[n, bytes]``, the state of the optimizer alone."""

    rows: NDArray[np.uint64]
    records: NDArray[np.void]
    weights: NDArray[np.uint8]
    state: NDArray[np.uint8]


def key_records(state: NDArray[np.uint8]) -> NDArray[np.void]:
    """The records at the end of rows' states, uint8 ``[n, bytes]``."""
    return np.ascontiguousarray(state[:, -KEY_RECORD.itemsize :]).view(KEY_RECORD).reshape(-1)


class KeyedRows(NamedTuple):
    """Rows, uint64 ``[n]``, and their records, KEY_RECORD ``[n]``, in order of their keys."""

    rows: NDArray[np.uint64]
    records: NDArray[np.void]


def keyed_rows(reader: PoolReader, number: int) -> KeyedRows:
    """Of a table with keys: the rows that are some key's, in order of their keys, and their records. Keys that are left
    behind have none."""
    rows, records = [np.empty(0, np.uint64)], [np.empty(0, KEY_RECORD)]
    for chunk in touched_rows(reader, number):
        of_chunk = key_records(chunk.state)
        has_key = of_chunk["updates"] != 0
        rows.append(chunk.rows[has_key])
        records.append(of_chunk[has_key])
    all_rows, all_records = np.concatenate(rows), np.concatenate(records)
    counts = living_keys(reader, number, all_records)
    all_rows, all_records = all_rows[counts], all_records[counts]
    order = np.lexsort((all_records["step"], all_records["key"]))
    all_rows, all_records = all_rows[order], all_records[order]
    is_last = np.ones(len(order), np.bool_)
    is_last[:-1] = all_records["key"][1:] != all_records["key"][:-1]
    return KeyedRows(all_rows[is_last], all_records[is_last])


def first_admissions(reader: PoolReader, number: int, keys: NDArray[np.int64]) -> NDArray[np.uint32]:
    """How many steps have to bring each key before it is trained, that one among them."""
    spec, seed = reader.tables[number], reader.header["seed"]
    return _core.first_admissions(spec, seed, number, np.ascontiguousarray(keys))


def living_keys(reader: PoolReader, number: int, records: NDArray[np.void]) -> NDArray[np.bool_]:
    """Of all records that rows of a table have: which are of keys that are not left behind."""
    step, seed = reader.commit["step"], reader.header["seed"]
    as_bytes = np.ascontiguousarray(records).view(np.uint8).reshape(-1, KEY_RECORD.itemsize)
    return _core.living_keys(reader.tables[number], seed, number, step, as_bytes)


def by_key(reader: PoolReader, number: int, keyed: KeyedRows | None = None) -> Iterator[KeyedChunk]:
    """The rows of a table with keys, in order of their keys. keyed: which they are, where that was found before."""
    layout = layout_of(reader.tables[number])
    rows, records = keyed or keyed_rows(reader, number)
    for first in range(0, len(rows), _CHUNK_ROWS):
        some = rows[first : first + _CHUNK_ROWS]
        order = np.argsort(some)
        weights = np.empty((len(some), layout.weight_bytes), np.uint8)
        state = np.empty((len(some), layout.state_bytes), np.uint8)
        differs = np.empty(len(some), np.uint8)
        reader.gather_rows(number, some[order].tolist(), weights.reshape(-1), state.reshape(-1), differs)
        place = np.argsort(order)
        yield KeyedChunk(
            some, records[first : first + _CHUNK_ROWS], weights[place], state[place, : -KEY_RECORD.itemsize]
        )
