"""The digest of a pool: SHA-256 over its logical state, whatever the pool's files look like.

What counts, in this order; integers are 8 bytes, little-endian, texts UTF-8 with their length in bytes before them:

1. the text ``holdfast digest 1``; step; cursor (samples consumed by committed steps); row_updates (the row optimizer's
   step);
2. the digest of the dense state: its tree walked in order of keys. Every node is a letter for its type, then: for
   mappings (keys as texts) and sequences their length and their items, for tensors dtype, shape and bytes, for texts
   and bytes the bytes, for numbers ``repr``. The dense state holds the model, optimizers (the row optimizers'
   hyperparameters too), schedulers, loader position and random number generators. ``extra['config']`` is left out: it
   says how the run was started (steps, workers, paths), and where it matters it shows in the rest. So is
   ``provenance``, and that ``_of_ranks``, which say what computed it;
3. per table in order of name: the digest of name, rows, dim, dtype, optimizer, and then of each row whose value or
   optimizer state differs from its initial one, in order: row number, bytes of the weights, bytes of the state. Of a
   table with keys: the text ``keys``, name, dim, dtype, optimizer, and of each key that has a row, in order of the
   keys: its record (key, newest step, number of updates), bytes of the weights, bytes of the optimizer's state. Which
   row it has, and how many rows there could be, does not count.

Left out: epochs, the pool's id and seed, logs, which rows were touched only to end with their initial bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.admin.ahead import ahead
from holdfast.admin.by_key import by_key
from holdfast.admin.row_order import OrderedRows
from holdfast.errors import StateError
from holdfast.files.recycled import recycled
from holdfast.pools.optim import OPTIMIZERS
from holdfast.pools.read_only import PoolReader, RowChunk, RowLayout, layout_of, touched_rows
from holdfast.pools.tables import DTYPES
from holdfast.state import loading, provenance, state_tree

_LEFT_OUT = ("extra['config']", provenance.RECORD, provenance.OF_RANKS, loading.ORDER)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDigest:
    """Hexadecimal; `tables` by name."""

    step: int
    cursor: int
    row_updates: int
    dense: str
    tables: dict[str, str]
    rows_counted: int

    @property
    def whole(self) -> str:
        sha = hashlib.sha256()
        _text(sha, "holdfast digest 1")
        for number in (self.step, self.cursor, self.row_updates):
            _integer(sha, number)
        for part in (self.dense, *(self.tables[name] for name in sorted(self.tables))):
            sha.update(bytes.fromhex(part))
        return sha.hexdigest()


def digest_pool(
    reader: PoolReader, on_rows: Callable[[int], None] | None = None, ordered: OrderedRows | None = None
) -> PoolDigest:
    """The digest of a pool that is at rest (see pools/read_only.py). on_rows: told how many touched rows were just
    read. ordered: its rows, where somebody has put them in order; without, each is read where it lies."""
    commit = reader.commit
    tables = {}
    rows_counted = 0
    for number, table in enumerate(reader.tables):
        tables[table.name], counted = _table_digest(reader, number, on_rows, ordered)
        rows_counted += counted
    return PoolDigest(
        step=commit["step"],
        cursor=commit["cursor"],
        row_updates=commit["row_updates"],
        dense=_dense_digest(reader),
        tables=tables,
        rows_counted=rows_counted,
    )


def _table_digest(
    reader: PoolReader, number: int, on_rows: Callable[[int], None] | None, ordered: OrderedRows | None
) -> tuple[str, int]:
    table = reader.tables[number]
    if table.keys:
        return _keyed_table_digest(reader, number, on_rows)
    layout = layout_of(table)
    sha = hashlib.sha256()
    _text(sha, table.name)
    _integer(sha, table.num_embeddings)
    _integer(sha, table.embedding_dim)
    _text(sha, DTYPES[table.dtype])
    _text(sha, OPTIMIZERS[table.optimizer])
    counted = 0
    with ahead(_lines(touched_rows(reader, number) if ordered is None else ordered.chunks(number), layout)) as found:
        for num_rows, lines in found:
            sha.update(lines.data)
            counted += len(lines)
            if on_rows is not None:
                on_rows(num_rows)
    return sha.hexdigest(), counted


def _lines(chunks: Iterator[RowChunk], layout: RowLayout) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """By chunk, how many rows it has, and what counts of those that differ: uint8 ``[n, bytes]``."""
    width = 8 + layout.row_bytes
    for chunk in chunks:
        lines = recycled(len(chunk.rows) * width).reshape(-1, width)
        lines[:, :8] = chunk.rows.astype("<u8").view(np.uint8).reshape(-1, 8)
        lines[:, 8 : 8 + layout.weight_bytes] = chunk.weights
        lines[:, 8 + layout.weight_bytes :] = chunk.state
        yield len(chunk.rows), lines if chunk.differs.all() else lines[chunk.differs]


def _keyed_table_digest(reader: PoolReader, number: int, on_rows: Callable[[int], None] | None) -> tuple[str, int]:
    table = reader.tables[number]
    sha = hashlib.sha256()
    _text(sha, "keys")
    _text(sha, table.name)
    _integer(sha, table.embedding_dim)
    _text(sha, DTYPES[table.dtype])
    _text(sha, OPTIMIZERS[table.optimizer])
    counted = 0
    for chunk in by_key(reader, number):
        records = chunk.records.view(np.uint8).reshape(len(chunk.rows), -1)
        sha.update(np.concatenate((records, chunk.weights, chunk.state), axis=1).data)
        counted += len(chunk.rows)
        if on_rows is not None:
            on_rows(len(chunk.rows))
    return sha.hexdigest(), counted


def dense_parts(reader: PoolReader) -> dict[str, str]:
    """The digest of each part of the dense state that counts, by name, of random numbers that of each generator: where
    two pools differ."""
    parts = _counting(reader) or {}
    generators = parts.pop("rng", {})
    return {name: _digest_of(value) for name, value in parts.items()} | {
        f"rng.{name}": _digest_of(value) for name, value in generators.items()
    }


def _dense_digest(reader: PoolReader) -> str:
    tree = _counting(reader)
    return hashlib.sha256().hexdigest() if tree is None else _digest_of(tree)


def _counting(reader: PoolReader) -> dict[str, Any] | None:
    """What counts of the dense state; None where there is none."""
    dense = reader.dense_state()
    if dense is None:
        return None
    _, structure, tensors = dense
    tree = state_tree.unpack(structure, tensors)
    return {name: value for name, value in tree.items() if name not in _LEFT_OUT}


def _digest_of(value: Any) -> str:
    sha = hashlib.sha256()
    _node(sha, value)
    return sha.hexdigest()


def _node(sha: Any, value: Any) -> None:
    match value:
        case torch.Tensor():
            sha.update(b"T")
            _text(sha, str(value.dtype))
            _node(sha, list(value.shape))
            sha.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        case None | bool() | int() | float() | complex():
            sha.update(type(value).__name__[:1].encode())
            _text(sha, repr(value))
        case str():
            sha.update(b"s")
            _text(sha, value)
        case torch.dtype() | torch.device():
            sha.update(b"d")
            _text(sha, str(value))
        case bytes():
            sha.update(b"y")
            _integer(sha, len(value))
            sha.update(value)
        case Mapping():
            sha.update(b"M")
            _integer(sha, len(value))
            for key in sorted(value, key=lambda key: (type(key).__name__, key)):
                _node(sha, key)
                _node(sha, value[key])
        case Sequence():
            sha.update(b"L")
            _integer(sha, len(value))
            for item in value:
                _node(sha, item)
        case np.ndarray() | np.generic():
            sha.update(b"A")
            _text(sha, str(value.dtype))
            _node(sha, list(value.shape))
            sha.update(np.ascontiguousarray(value).tobytes())
        case _:
            raise StateError(f"a dense state with a {type(value).__name__} in it has no digest")


def _text(sha: Any, text: str) -> None:
    data = text.encode()
    _integer(sha, len(data))
    sha.update(data)


def _integer(sha: Any, number: int) -> None:
    sha.update(number.to_bytes(8, "little"))
