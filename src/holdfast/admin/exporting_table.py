"""Moving out: one table to Parquet or an Arrow file, for an index of nearest neighbours, a warehouse, a notebook.

- ``key`` (of a table with keys, ascending) or ``row``: int64;
- ``vector``: a fixed-size list of float32, or float16 where rows are; bfloat16 becomes float32, which loses nothing;
- of a table with keys ``updates`` and ``last_step``, uint32: how many steps brought the key, and the newest of them.

Rows that no step updated are left out: of these an export to safetensors has the initial values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from holdfast import _core
from holdfast.admin.ahead import ahead
from holdfast.admin.by_key import by_key
from holdfast.admin.inspection import count_touched
from holdfast.admin.tensor_files import Progress
from holdfast.data.output import whole_file
from holdfast.errors import ConfigError
from holdfast.pools.read_only import PoolReader, touched_rows
from holdfast.pools.tables import TORCH_DTYPES

SUFFIXES = (".parquet", ".pq", ".arrow", ".feather")
_ARROW_DTYPES = {torch.float32: pa.float32(), torch.float16: pa.float16(), torch.bfloat16: pa.float32()}


def number_of(reader: PoolReader, name: str | None) -> int:
    """Of the table called `name`, or of the only one. Raises ConfigError that lists what there is."""
    names = [table.name for table in reader.tables]
    if name is None and len(names) == 1:
        return 0
    if name not in names:
        asked = "say which table (--table)" if name is None else f"there is no table '{name}'"
        raise ConfigError(f"export: {asked}; the pool has {', '.join(names)}")
    return names.index(name)


def export_table(
    reader: PoolReader, number: int, out_path: Path, *, overwrite: bool = False, on_bytes: Progress | None = None
) -> int:
    """Writes a table of the pool (at rest, see pools/read_only.py) to a file that is there when it is complete; its
    suffix says of which kind. Returns how many rows it has. Raises ConfigError for another suffix."""
    table = reader.tables[number]
    schema = _schema(table, reader.commit["step"])
    num_rows = 0
    with (
        whole_file(out_path, overwrite=overwrite) as partial,
        _writer(out_path, partial, schema) as writer,
        ahead(_batches(reader, number, schema)) as batches,
    ):
        for batch in batches:
            writer.write_batch(batch)
            num_rows += batch.num_rows
            if on_bytes is not None:
                on_bytes(batch.num_rows * _vector_bytes(table))
    return num_rows


def table_bytes(reader: PoolReader, number: int) -> int:
    """What `on_bytes` adds up to, at most: keys that were left behind are not exported."""
    return count_touched(reader, number) * _vector_bytes(reader.tables[number])


def _vector_bytes(table: _core.TableSpec) -> int:
    return table.embedding_dim * TORCH_DTYPES[table.dtype].itemsize


def _writer(path: Path, partial: Path, schema: pa.Schema) -> AbstractContextManager[Any]:
    if path.suffix in (".parquet", ".pq"):
        return pq.ParquetWriter(partial, schema)  # type: ignore[no-any-return]
    if path.suffix in SUFFIXES:
        return pa.ipc.new_file(partial, schema)  # type: ignore[no-any-return]
    raise ConfigError(f"export: the suffix of {path} says neither Parquet (.parquet) nor Arrow (.arrow)")


def _schema(table: _core.TableSpec, step: int) -> pa.Schema:
    vector = pa.list_(_ARROW_DTYPES[TORCH_DTYPES[table.dtype]], table.embedding_dim)
    fields = [("key" if table.keys else "row", pa.int64()), ("vector", vector)]
    if table.keys:
        fields += [("updates", pa.uint32()), ("last_step", pa.uint32())]
    metadata = {"holdfast.table": table.name, "holdfast.step": str(step)}
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields], metadata)


def _batches(reader: PoolReader, number: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    table = reader.tables[number]
    if not table.keys:
        for rows in touched_rows(reader, number):
            yield _batch(schema, table, rows.weights, rows.rows.astype(np.int64))
        return
    for chunk in by_key(reader, number):
        records = chunk.records
        counts = (np.ascontiguousarray(records[name], np.uint32) for name in ("updates", "step"))
        yield _batch(schema, table, chunk.weights, np.ascontiguousarray(records["key"]).view(np.int64), *counts)


def _batch(
    schema: pa.Schema, table: _core.TableSpec, weights: NDArray[np.uint8], *columns: NDArray[Any]
) -> pa.RecordBatch:
    values = torch.from_numpy(np.ascontiguousarray(weights).reshape(-1)).view(TORCH_DTYPES[table.dtype])
    values = values.float() if values.dtype is torch.bfloat16 else values
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.numpy()), type=schema.field("vector").type)
    first, *others = (pa.array(column) for column in columns)
    return pa.record_batch([first, vectors, *others], schema=schema)
