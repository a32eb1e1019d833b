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
from contextlib import ExitStack
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
)
from holdfast.data.output import whole_file
from holdfast.errors import ConfigError
from holdfast.files.direct import DirectWriter, write_at
from holdfast.files.names import named
from holdfast.files.recycled import recycled
from holdfast.pools.read_only import PoolReader, RowLayout, layout_of
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
        with named(partial):
            out.write(header)
            out.truncate(len(header) + sum(entry.num_bytes for entry in entries.values()))
            out.flush()
        for name, tensor in model.items():
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            write_at(out.fileno(), data, len(header) + entries[f"model.{name}"].begin, partial)
        for number, table in enumerate(reader.tables):
            if table.keys:
                keys = np.ascontiguousarray(keyed[number].records["key"]).view(np.uint8)
                write_at(out.fileno(), keys, len(header) + entries[_keys_name(table)].begin, partial)
                rows = _keyed_rows(reader, number, keyed[number])
                _export_table(reader, number, rows, partial, len(header), entries, on_bytes)
                continue
            rows = _rows_of(reader, number) if ordered is None else _ordered_rows(reader, number, ordered)
            _export_table(reader, number, rows, partial, len(header), entries, on_bytes)
        return out.seek(0, os.SEEK_END)


def export_bytes(reader: PoolReader) -> int:
    """Bytes of the tables' part of an export: what `on_bytes` adds up to."""
    total = 0
    for number, table in enumerate(reader.tables):
        layout = layout_of(table)
        num_rows = len(keyed_rows(reader, number).rows) if table.keys else table.num_embeddings
        total += num_rows * layout.row_bytes
    return total


_Slice = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Weights and state of the rows that follow: of a table's first ones, the next ones."""


def _rows_of(reader: PoolReader, number: int) -> Iterator[_Slice]:
    layout = layout_of(reader.tables[number])
    for first, count in row_chunks(reader.tables[number].num_embeddings, layout):
        weights, state = _room(count, layout)
        reader.read_rows(number, first, count, weights.reshape(-1), state.reshape(-1))
        yield weights, state


def _room(count: int, layout: RowLayout) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """For weights and state of so many rows."""
    weights, state = (recycled(count * width) for width in (layout.weight_bytes, layout.state_bytes))
    return weights.reshape(count, layout.weight_bytes), state.reshape(count, layout.state_bytes)


def _keyed_rows(reader: PoolReader, number: int, keyed: KeyedRows) -> Iterator[_Slice]:
    for chunk in by_key(reader, number, keyed):
        yield chunk.weights, chunk.state


def _ordered_rows(reader: PoolReader, number: int, ordered: OrderedRows) -> Iterator[_Slice]:
    layout = layout_of(reader.tables[number])
    with ordered.of(number) as touched:
        for first, count in row_chunks(reader.tables[number].num_embeddings, layout):
            weights, state = _room(count, layout)
            is_untouched = np.ones(count, np.bool_)
            if (found := touched.take(first + count - 1)) is not None:
                places = (found.rows - np.uint64(first)).astype(np.int64)
                weights[places] = found.data[:, : layout.weight_bytes]
                state[places] = found.data[:, layout.weight_bytes :]
                is_untouched[places] = False
            untouched = np.flatnonzero(is_untouched)
            if len(untouched):
                weights[untouched] = ordered.initial_weights(number, untouched.astype(np.uint64) + np.uint64(first))
                state[untouched] = 0
            yield weights, state


def _export_table(
    reader: PoolReader,
    number: int,
    rows: Iterator[_Slice],
    path: Path,
    data_begin: int,
    entries: Mapping[str, Entry],
    on_bytes: Progress | None,
) -> None:
    table = reader.tables[number]
    layout = layout_of(table)
    names = [_weight_name(table), *(f"optimizer.{table.name}.{name}" for name, _ in layout.state)]
    with ExitStack() as stack:
        out, *outs = (stack.enter_context(DirectWriter(path, data_begin + entries[name].begin)) for name in names)
        for weights, state in stack.enter_context(ahead(rows)):
            out.write(np.ascontiguousarray(weights).reshape(-1))
            column = 0
            for out_of_state, (_, width) in zip(outs, layout.state, strict=True):
                out_of_state.write(np.ascontiguousarray(state[:, column : column + 4 * width]).reshape(-1))
                column += 4 * width
            if on_bytes is not None:
                on_bytes(len(weights) * layout.row_bytes)


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
