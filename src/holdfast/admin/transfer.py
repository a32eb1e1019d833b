"""Moving in and out: pools to and from files of tensors, a slice at a time, whatever the tables' size.

An export is one safetensors file with these names:

- ``embedding_bags.<table>.weight``: ``[rows, dim]``, TorchRec's name, in the table's dtype;
- ``optimizer.<table>.<state>``: float32, per row (``[rows]``) or per element (``[rows, dim]``): ``momentum1`` of both
  Adagrads, ``exp_avg`` and ``exp_avg_sq`` of both Adams, none of SGD. The names do not depend on how tables are cut;
- ``model.<name>``: the dense part by the names of its state_dict (its optimizer stays behind);
- metadata: ``holdfast.step``, ``holdfast.row_updates`` and ``format`` = ``pt``.

An import takes such a file, or a ``state_dict`` of plain tensors (safetensors, or a ``.pt`` file, of which nothing is
unpickled but tensors and plain containers), into a new pool:

- every table of the configuration from a name that ends in ``embedding_bags.<table>.weight``, whatever is before it;
- optimizer state, where there is any, from ``optimizer.<table>.<state>`` or TorchRec's
  ``...embedding_bags.<table>.weight.<table>.<state>``;
- the dense part from names that end in the model's own; what the file lacks keeps its initial value.

Rows that equal their initial value stay untouched, so that a pool that was exported and imported again is as sparse as
before. A pool that is imported begins at step 0 (also for the bias correction of Adam).
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast import _core
from holdfast.admin.snapshot.output import new_directory
from holdfast.data.output import whole_file
from holdfast.errors import ConfigError, Corrupted, FormatMismatch, PoolExists
from holdfast.files.durable import make_directory
from holdfast.pools.read_only import PoolReader, RowLayout, layout_of
from holdfast.pools.tables import TORCH_DTYPES
from holdfast.state import state_tree
from holdfast.train.run import RunConfig, assemble
from holdfast.train.trainer import Trainer

_CHUNK_BYTES = 8 << 20
_PAGE_BYTES = 4096
_MAX_HEADER_BYTES = 100 << 20
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Other names under which the same state goes, by our own.
_STATE_ALIASES = {
    "momentum1": ("momentum1", "sum"),
    "exp_avg": ("exp_avg", "momentum1"),
    "exp_avg_sq": ("exp_avg_sq", "momentum2"),
}

Progress = Callable[[int], None]


# Export ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the file; `begin` counts from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


def export_pool(
    reader: PoolReader, out_path: Path, *, overwrite: bool = False, on_bytes: Progress | None = None
) -> int:
    """Writes the pool (at rest, see reading.py) to a file that is there when it is complete. Returns its bytes."""
    model = _dense_model(reader)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        f"model.{name}": (_dtype_name(name, tensor.dtype), tuple(tensor.shape)) for name, tensor in model.items()
    }
    for table in reader.tables:
        tensors[_weight_name(table)] = (
            _DTYPE_NAMES[TORCH_DTYPES[table.dtype]],
            (table.num_embeddings, table.embedding_dim),
        )
        for name, width in layout_of(table).state:
            shape = (table.num_embeddings,) if width == 1 else (table.num_embeddings, width)
            tensors[f"optimizer.{table.name}.{name}"] = ("F32", shape)
    commit = reader.commit
    metadata = {
        "format": "pt",
        "holdfast.step": str(commit["step"]),
        "holdfast.row_updates": str(commit["row_updates"]),
    }
    header, entries = _header(tensors, metadata)
    with whole_file(out_path, overwrite=overwrite) as partial, partial.open("wb") as out:
        out.write(header)
        out.truncate(len(header) + sum(entry.num_bytes for entry in entries.values()))
        out.flush()
        for name, tensor in model.items():
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            _write_at(out.fileno(), data, len(header) + entries[f"model.{name}"].begin)
        for number in range(len(reader.tables)):
            _export_table(reader, number, out.fileno(), len(header), entries, on_bytes)
        return out.seek(0, os.SEEK_END)


def export_bytes(reader: PoolReader) -> int:
    """Bytes of the tables' part of an export: what `on_bytes` adds up to."""
    layouts = [(table.num_embeddings, layout_of(table)) for table in reader.tables]
    return sum(rows * (layout.weight_bytes + layout.state_bytes) for rows, layout in layouts)


def _export_table(
    reader: PoolReader,
    number: int,
    out_fd: int,
    data_begin: int,
    entries: Mapping[str, _Entry],
    on_bytes: Progress | None,
) -> None:
    table = reader.tables[number]
    layout = layout_of(table)
    for first, count in _row_chunks(table.num_embeddings, layout):
        weights = np.empty((count, layout.weight_bytes), np.uint8)
        state = np.empty((count, layout.state_bytes), np.uint8)
        reader.read_rows(number, first, count, weights.reshape(-1), state.reshape(-1))
        _write_at(out_fd, weights, data_begin + entries[_weight_name(table)].begin + first * layout.weight_bytes)
        column = 0
        for name, width in layout.state:
            part = np.ascontiguousarray(state[:, column : column + 4 * width])
            begin = data_begin + entries[f"optimizer.{table.name}.{name}"].begin
            _write_at(out_fd, part, begin + first * 4 * width)
            column += 4 * width
        if on_bytes is not None:
            on_bytes(count * (layout.weight_bytes + layout.state_bytes))


def _header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, _Entry]]:
    """The safetensors header, and where everything lies. Wider elements first, so that every tensor is aligned."""
    entries = {}
    begin = 0
    for name in sorted(tensors, key=lambda name: (-_DTYPES[tensors[name][0]].itemsize, name)):
        dtype, shape = tensors[name]
        num_bytes = math.prod(shape) * _DTYPES[dtype].itemsize
        entries[name] = _Entry(dtype, shape, begin, num_bytes)
        begin += num_bytes
    described: dict[str, object] = {"__metadata__": dict(metadata)}
    described |= {
        name: {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (entry.begin, entry.begin + entry.num_bytes)}
        for name, entry in entries.items()
    }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, entries


def _dense_model(reader: PoolReader) -> dict[str, Tensor]:
    dense = reader.dense_state()
    if dense is None:
        return {}
    _, structure, tensors = dense
    model = state_tree.unpack(structure, tensors).get("model", {})
    return {name: value for name, value in model.items() if isinstance(value, Tensor)}


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in _DTYPE_NAMES:
        raise ConfigError(f"export: model.{name} is {dtype}, for which safetensors has no name here")
    return _DTYPE_NAMES[dtype]


def _weight_name(table: _core.TableSpec) -> str:
    return f"embedding_bags.{table.name}.weight"


def _row_chunks(num_rows: int, layout: RowLayout) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK_BYTES // (layout.weight_bytes + layout.state_bytes))
    for first in range(0, num_rows, step):
        yield first, min(step, num_rows - first)


def _write_at(fd: int, data: NDArray[np.uint8], offset: int) -> None:
    view = data.reshape(-1).data
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


# Import ---------------------------------------------------------------------------------------------------------------


class TensorFile(Protocol):
    """Tensors by name, of which slices are read."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Rows [first, first + count) of the first dimension."""


class SafetensorsFile:
    """A safetensors file. Raises Corrupted, FormatMismatch where it is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise FormatMismatch(f"{path} is no safetensors file: it begins with a header length of {length}")
            try:
                header = json.loads(file.read(length))
                entries = {name: self._entry(body) for name, body in header.items() if name != "__metadata__"}
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise Corrupted(f"{path} at offset 8: the header is not safetensors': {error!r}") from None
        self._begin = 8 + length
        for name, entry in entries.items():
            if self._begin + entry.begin + entry.num_bytes > size:
                raise Corrupted(f"{path}: {name} ends beyond the file's {size} bytes; is the file complete?")
        self._entries = entries

    @staticmethod
    def _entry(body: Mapping[str, Any]) -> _Entry:
        shape = tuple(int(length) for length in body["shape"])
        begin, end = (int(offset) for offset in body["data_offsets"])
        itemsize = _DTYPES[body["dtype"]].itemsize
        if begin < 0 or min(shape, default=0) < 0 or end - begin != math.prod(shape) * itemsize:
            raise ValueError("data_offsets do not fit dtype and shape")
        return _Entry(body["dtype"], shape, begin, end - begin)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def rows(self, name: str, first: int, count: int) -> Tensor:
        entry = self._entries[name]
        shape = entry.shape or (1,)
        row_bytes = entry.num_bytes // max(1, shape[0])
        out = torch.empty((count, *shape[1:]), dtype=_DTYPES[entry.dtype])
        view = out.reshape(-1).view(torch.uint8).numpy().data
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._begin + entry.begin + first * row_bytes)
            while view and (got := file.readinto(view)):
                view = view[got:]
        if view:
            raise Corrupted(f"{self._path}: {name} is cut short")
        return out


class TorchFile:
    """A file of torch.save, mapped; of its pickle only tensors and plain containers are read. Nested dicts become names
    with dots."""

    def __init__(self, path: Path) -> None:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise FormatMismatch(
                f"{path} holds other things than tensors and plain containers, which are not unpickled: save a "
                f"state_dict() of plain tensors ({str(error).splitlines()[0]})"
            ) from None
        except (RuntimeError, ValueError, EOFError, KeyError) as error:
            raise FormatMismatch(f"{path} is no file that torch.save wrote: {str(error).splitlines()[0]}") from None
        self._tensors: dict[str, Tensor] = {}
        self._collect("", loaded)

    def _collect(self, prefix: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self._tensors[prefix] = value.detach()
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._collect(f"{prefix}.{key}" if prefix else str(key), item)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def rows(self, name: str, first: int, count: int) -> Tensor:
        tensor = self._tensors[name]
        return (tensor if tensor.dim() else tensor[None])[first : first + count]


def open_tensors(path: Path) -> TensorFile:
    """A safetensors file, or one of torch.save, by its suffix (.safetensors, or .pt, .pth, .bin)."""
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix in (".pt", ".pth", ".bin"):
        return TorchFile(path)
    raise ConfigError(f"import: the suffix of {path} says neither safetensors (.safetensors) nor torch.save (.pt)")


def table_bytes(file: TensorFile) -> int:
    """About how many bytes of rows an import reads, for a progress bar."""
    return sum(4 * math.prod(shape) for name, shape in file.shapes().items() if "embedding_bags" in name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSummary:
    """What an import took, and what it did not find or use."""

    tables: int
    state: tuple[str, ...]
    dense: tuple[str, ...]
    dense_missing: tuple[str, ...]
    unused: tuple[str, ...]


def import_pool(
    file: TensorFile, config: RunConfig, directory: Path, *, on_bytes: Progress | None = None
) -> ImportSummary:
    """Makes a pool for the run `config` in `directory` with the values of `file`; it is there when it is complete.

    Raises PoolExists, and ConfigError that names the table or parameter that is missing or has another shape.
    """
    if directory.exists():
        raise PoolExists(f"{directory} is there already; an import makes a new pool, name another directory")
    make_directory(directory.parent)
    with new_directory(directory, "importing") as partial, assemble(config, partial) as trainer:
        summary = _import_all(file, trainer, partial, on_bytes)
        trainer.recover()
    return summary


def _import_all(file: TensorFile, trainer: Trainer, directory: Path, on_bytes: Progress | None) -> ImportSummary:
    shapes = file.shapes()
    tables = trainer.pool.core.tables
    sources = [_table_sources(table, shapes) for table in tables]
    dense = _import_dense(file, trainer, shapes)
    used = {name for source in sources for name in source.values()} | set(dense.values())
    reader = _core.Reader(str(directory))
    for number, source in enumerate(sources):
        _import_table(file, trainer.pool.core, reader, number, source, on_bytes)
    return ImportSummary(
        tables=len(tables),
        state=tuple(name for source in sources for key, name in source.items() if key != "weight"),
        dense=tuple(dense),
        dense_missing=tuple(name for name in trainer.model.state_dict() if name not in dense),
        unused=tuple(name for name in shapes if name not in used),
    )


def _table_sources(table: _core.TableSpec, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Where the table's weights ("weight") and each part of its state lie in the file, checked."""
    name = re.escape(table.name)
    weight = _only(shapes, rf"(?:^|\.)embedding_bags\.{name}\.weight$", f"table '{table.name}'")
    if weight is None:
        there = sorted(
            found.rpartition("embedding_bags.")[2].removesuffix(".weight")
            for found in shapes
            if "embedding_bags." in found and found.endswith(".weight")
        )
        raise ConfigError(
            f"table '{table.name}': the file has no name that ends in embedding_bags.{table.name}.weight "
            f"(it has tables {', '.join(there) or 'none'})"
        )
    _check_shape(weight, shapes[weight], ((table.num_embeddings, table.embedding_dim),))
    sources = {"weight": weight}
    for state, width in layout_of(table).state:
        for alias in _STATE_ALIASES[state]:
            pattern = rf"(?:^|\.)(?:optimizer\.{name}|embedding_bags\.{name}\.weight(?:\.{name})?)\.{alias}$"
            found = _only(shapes, pattern, f"optimizer state {state} of table '{table.name}'")
            if found is not None:
                rows = table.num_embeddings
                _check_shape(found, shapes[found], ((rows, width), (rows,)) if width == 1 else ((rows, width),))
                sources[state] = found
                break
    parts = len(layout_of(table).state)
    if 0 < len(sources) - 1 < parts:
        raise ConfigError(f"table '{table.name}': the file has only {', '.join(sources)}; part of its state is missing")
    return sources


def _import_table(
    file: TensorFile,
    pool: _core.Pool,
    reader: PoolReader,
    number: int,
    source: Mapping[str, str],
    on_bytes: Progress | None,
) -> None:
    table = pool.tables[number]
    layout = layout_of(table)
    dtype = TORCH_DTYPES[table.dtype]
    for first, count in _row_chunks(table.num_embeddings, layout):
        weights = _as_bytes(file.rows(source["weight"], first, count).to(dtype), count)
        state = np.zeros((count, layout.state_bytes), np.uint8)
        column = 0
        for name, width in layout.state:
            if name in source:
                part = file.rows(source[name], first, count).to(torch.float32)
                state[:, column : column + 4 * width] = _as_bytes(part, count)
            column += 4 * width
        initial = np.empty_like(weights)
        zeros = np.empty_like(state)
        reader.read_rows(number, first, count, initial.reshape(-1), zeros.reshape(-1))
        differs = (weights != initial).any(axis=1) | state.any(axis=1)
        for begin, end in _spans(differs, max_gap=max(1, _PAGE_BYTES // layout.weight_bytes)):
            floats = state[begin:end].reshape(-1).view(np.float32) if layout.state else None
            pool.import_rows(number, first + begin, weights[begin:end].reshape(-1), floats)
        if on_bytes is not None:
            on_bytes(count * (layout.weight_bytes + layout.state_bytes))


def _import_dense(file: TensorFile, trainer: Trainer, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Gives the model what the file has; returns parameter → name in the file."""
    state = trainer.model.state_dict()
    found = {}
    for name, tensor in state.items():
        source = _only(shapes, rf"(?:^|\.){re.escape(name)}$", f"model parameter {name}")
        if source is None:
            continue
        _check_shape(source, shapes[source], (tuple(tensor.shape),))
        rows = max(1, tensor.shape[0] if tensor.dim() else 1)
        state[name] = file.rows(source, 0, rows).reshape(tensor.shape).to(tensor.dtype).clone()
        found[name] = source
    trainer.model.load_state_dict(state)
    return found


def _only(shapes: Mapping[str, tuple[int, ...]], pattern: str, what: str) -> str | None:
    found = [name for name in shapes if re.search(pattern, name)]
    if len(found) > 1:
        raise ConfigError(f"{what}: more than one name in the file fits: {', '.join(found)}")
    return found[0] if found else None


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[tuple[int, ...], ...]) -> None:
    if found not in wanted:
        raise ConfigError(f"{name} in the file has the shape {found}, the configuration's is {wanted[0]}")


def _as_bytes(tensor: Tensor, count: int) -> NDArray[np.uint8]:
    data: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return data.reshape(count, -1)


def _spans(chosen: NDArray[np.bool_], max_gap: int) -> Iterator[tuple[int, int]]:
    """Ranges that hold every chosen row; gaps of `max_gap` rows or fewer are bridged."""
    rows = np.flatnonzero(chosen)
    if rows.size == 0:
        return
    breaks = np.flatnonzero(np.diff(rows) > max_gap + 1)
    begins = np.concatenate(([rows[0]], rows[breaks + 1]))
    ends = np.concatenate((rows[breaks], [rows[-1]])) + 1
    yield from zip(begins.tolist(), ends.tolist(), strict=True)
