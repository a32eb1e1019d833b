"""Moving out: a pool to one safetensors file, a slice at a time, whatever the tables' size.

- ``embedding_bags.<table>.weight``: ``[rows, dim]``, TorchRec's name, in the table's dtype;
- ``optimizer.<table>.<state>``: float32, per row (``[rows]``) or per element (``[rows, dim]``): ``momentum1`` of both
  Adagrads, ``exp_avg`` and ``exp_avg_sq`` of both Adams, none of SGD. The names do not depend on how tables are cut;
- of a table with keys: ``embedding_bags.<table>.keys``, int64 ``[rows]``, ascending, beside the rows of these keys;
- ``model.<name>``: the dense part by the names of its state_dict (its optimizer stays behind);
- metadata: ``holdfast.step``, ``holdfast.row_updates`` and ``format`` = ``pt``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast import _core
from holdfast.admin.ahead import ahead
from holdfast.admin.by_key import KeyedRows, by_key, keyed_rows
from holdfast.admin.row_order import OrderedRows
from holdfast.admin.tensor_files import (
    DTYPE_NAMES,
    Entry,
    Progress,
    row_chunks,
    safetensors_header,
    write_at,
)
from holdfast.data.output import whole_file
from holdfast.errors import ConfigError
from holdfast.files.write_back import WriteBack
from holdfast.pools.read_only import PoolReader, layout_of
from holdfast.pools.tables import TORCH_DTYPES
from holdfast.state import state_tree


def export_pool(
    reader: PoolReader,
    out_path: Path,
    *,
    overwrite: bool = False,
    on_bytes: Progress | None = None,
    ordered: OrderedRows | None = None,
) -> int:
    """Writes the pool (at rest, see pools/read_only.py) to a file that is there when it is complete. Returns its
    bytes. ordered: its rows, where somebody has put them in order; without, each is read where it lies."""
    model = _dense_model(reader)
    keyed = {number: keyed_rows(reader, number) for number, table in enumerate(reader.tables) if table.keys}
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        f"model.{name}": (_dtype_name(name, tensor.dtype), tuple(tensor.shape)) for name, tensor in model.items()
    }
    for number, table in enumerate(reader.tables):
        num_rows = len(keyed[number].rows) if table.keys else table.num_embeddings
        if table.keys:
            tensors[_keys_name(table)] = ("I64", (num_rows,))
        tensors[_weight_name(table)] = (DTYPE_NAMES[TORCH_DTYPES[table.dtype]], (num_rows, table.embedding_dim))
        for name, width in layout_of(table).state:
            shape = (num_rows,) if width == 1 else (num_rows, width)
            tensors[f"optimizer.{table.name}.{name}"] = ("F32", shape)
    commit = reader.commit
    metadata = {
        "format": "pt",
        "holdfast.step": str(commit["step"]),
        "holdfast.row_updates": str(commit["row_updates"]),
    }
    header, entries = safetensors_header(tensors, metadata)
    with whole_file(out_path, overwrite=overwrite) as partial, partial.open("wb") as out:
        out.write(header)
        out.truncate(len(header) + sum(entry.num_bytes for entry in entries.values()))
        out.flush()
        for name, tensor in model.items():
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            write_at(out.fileno(), data, len(header) + entries[f"model.{name}"].begin)
        for number, table in enumerate(reader.tables):
            if table.keys:
                keys = np.ascontiguousarray(keyed[number].records["key"]).view(np.uint8)
                write_at(out.fileno(), keys, len(header) + entries[_keys_name(table)].begin)
                rows = _keyed_rows(reader, number, keyed[number])
                _export_table(reader, number, rows, out.fileno(), len(header), entries, on_bytes)
                continue
            rows = _rows_of(reader, number) if ordered is None else _ordered_rows(reader, number, ordered)
            _export_table(reader, number, rows, out.fileno(), len(header), entries, on_bytes)
        return out.seek(0, os.SEEK_END)


def export_bytes(reader: PoolReader) -> int:
    """Bytes of the tables' part of an export: what `on_bytes` adds up to."""
    total = 0
    for number, table in enumerate(reader.tables):
        layout = layout_of(table)
        num_rows = len(keyed_rows(reader, number).rows) if table.keys else table.num_embeddings
        total += num_rows * (layout.weight_bytes + layout.state_bytes)
    return total


_Slice = tuple[int, NDArray[np.uint8], NDArray[np.uint8]]
"""A first row, and from there on weights and state."""


def _rows_of(reader: PoolReader, number: int) -> Iterator[_Slice]:
    layout = layout_of(reader.tables[number])
    for first, count in row_chunks(reader.tables[number].num_embeddings, layout):
        weights = np.empty((count, layout.weight_bytes), np.uint8)
        state = np.empty((count, layout.state_bytes), np.uint8)
        reader.read_rows(number, first, count, weights.reshape(-1), state.reshape(-1))
        yield first, weights, state


def _keyed_rows(reader: PoolReader, number: int, keyed: KeyedRows) -> Iterator[_Slice]:
    first = 0
    for chunk in by_key(reader, number, keyed):
        yield first, chunk.weights, chunk.state
        first += len(chunk.rows)


def _ordered_rows(reader: PoolReader, number: int, ordered: OrderedRows) -> Iterator[_Slice]:
    layout = layout_of(reader.tables[number])
    touched = ordered.of(number)
    for first, count in row_chunks(reader.tables[number].num_embeddings, layout):
        data = np.empty((count, layout.weight_bytes + layout.state_bytes), np.uint8)
        is_untouched = np.ones(count, np.bool_)
        if (found := touched.take(first + count - 1)) is not None:
            places = (found.rows - np.uint64(first)).astype(np.int64)
            data[places] = found.data
            is_untouched[places] = False
        untouched = np.flatnonzero(is_untouched)
        if len(untouched):
            data[untouched] = ordered.initial(number, untouched.astype(np.uint64) + np.uint64(first)).data
        yield first, data[:, : layout.weight_bytes], data[:, layout.weight_bytes :]


def _export_table(
    reader: PoolReader,
    number: int,
    rows: Iterator[_Slice],
    out_fd: int,
    data_begin: int,
    entries: Mapping[str, Entry],
    on_bytes: Progress | None,
) -> None:
    table = reader.tables[number]
    layout = layout_of(table)
    begin_of_weights = data_begin + entries[_weight_name(table)].begin
    write_back = WriteBack(out_fd, begin_of_weights)
    with ahead(rows) as made:
        for first, weights, state in made:
            write_at(out_fd, np.ascontiguousarray(weights), begin_of_weights + first * layout.weight_bytes)
            write_back.reached(begin_of_weights + (first + len(weights)) * layout.weight_bytes)
            column = 0
            for name, width in layout.state:
                part = np.ascontiguousarray(state[:, column : column + 4 * width])
                begin = data_begin + entries[f"optimizer.{table.name}.{name}"].begin
                write_at(out_fd, part, begin + first * 4 * width)
                column += 4 * width
            if on_bytes is not None:
                on_bytes(len(weights) * (layout.weight_bytes + layout.state_bytes))


def _dense_model(reader: PoolReader) -> dict[str, Tensor]:
    dense = reader.dense_state()
    if dense is None:
        return {}
    _, structure, tensors = dense
    model = state_tree.unpack(structure, tensors).get("model", {})
    return {name: value for name, value in model.items() if isinstance(value, Tensor)}


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in DTYPE_NAMES:
        raise ConfigError(f"export: model.{name} is {dtype}, for which safetensors has no name here")
    return DTYPE_NAMES[dtype]


def _keys_name(table: _core.TableSpec) -> str:
    return f"embedding_bags.{table.name}.keys"


def _weight_name(table: _core.TableSpec) -> str:
    return f"embedding_bags.{table.name}.weight"
