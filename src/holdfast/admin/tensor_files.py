"""Files of tensors: safetensors, written and read a slice at a time, those of torch.save, of which nothing is unpickled
but tensors and plain containers, and several of them together."""

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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast.errors import ConfigError, Corrupted, FormatMismatch
from holdfast.files.direct import DirectReader
from holdfast.pools.read_only import RowLayout

FROM_DISTRIBUTED = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER OUT.pt"
"""Makes a file of torch.save of a folder of torch.distributed.checkpoint."""
_CHUNK_BYTES = 8 << 20
_MAX_HEADER_BYTES = 100 << 20
DTYPES = {
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
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the file; `begin` counts from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


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
                header = json.loads(file.read(length), object_pairs_hook=_each_once)
                entries = {name: _entry_of(body) for name, body in header.items() if name != "__metadata__"}
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise Corrupted(f"{path} at offset 8: the header is not safetensors': {error!r}") from None
        self._begin = 8 + length
        end, before = 0, ""
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
            if entry.begin < end:
                raise Corrupted(f"{path} at offset 8: {name} begins within {before}")
            end, before = entry.begin + entry.num_bytes, name
            if self._begin + end > size:
                raise Corrupted(f"{path}: {name} ends beyond the file's {size} bytes; is the file complete?")
        self._entries = entries

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def rows(self, name: str, first: int, count: int) -> Tensor:
        entry = self._entries[name]
        if entry.dtype not in DTYPES:
            raise FormatMismatch(f"{self._path}: {name} is of type {entry.dtype}; read are {', '.join(DTYPES)}")
        shape = entry.shape or (1,)
        row_bytes = entry.num_bytes // max(1, shape[0])
        data = read_at(self._path, self._begin + entry.begin + first * row_bytes, count * row_bytes)
        if len(data) < count * row_bytes:
            raise Corrupted(f"{self._path}: {name} is cut short")
        return torch.from_numpy(data).view(DTYPES[entry.dtype]).reshape(count, *shape[1:])


def _entry_of(body: Mapping[str, Any]) -> Entry:
    """What the header says of a tensor; one of a type that is not read may lie beside those that are wanted."""
    shape = tuple(int(length) for length in body["shape"])
    begin, end = (int(offset) for offset in body["data_offsets"])
    dtype = str(body["dtype"])
    fits = dtype not in DTYPES or end - begin == math.prod(shape) * DTYPES[dtype].itemsize
    if not 0 <= begin <= end or min(shape, default=0) < 0 or not fits:
        raise ValueError("data_offsets do not fit dtype and shape")
    return Entry(dtype, shape, begin, end - begin)


class TorchFile:
    """A file of torch.save, mapped; of its pickle only tensors and plain containers are read. Nested dicts become names
    with dots."""

    def __init__(self, path: Path) -> None:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            other = re.search(r"GLOBAL (\S+)", str(error))
            raise FormatMismatch(
                f"{path} holds other things than tensors and plain containers, which are not unpickled"
                f"{f' (the first is of {other[1]})' if other else ''}: save a state_dict() of plain tensors, or "
                f"a sharded one by torch.distributed.checkpoint, and make a file of that ({FROM_DISTRIBUTED})"
            ) from None
        except (RuntimeError, ValueError, EOFError, KeyError) as error:
            with path.open("rb") as file:
                is_archive = file.read(2) == b"PK"
            what = (
                str(error).splitlines()[0]
                if is_archive
                else ("that is an archive of zip; what a PyTorch before 1.6 saved has to be loaded and saved again")
            )
            raise FormatMismatch(f"{path} is no file that torch.save wrote: {what}") from None
        self._path = path
        self._tensors: dict[str, Tensor] = {}
        try:
            self._collect("", loaded)
        except RecursionError:
            raise FormatMismatch(f"{path} holds dicts in dicts without end") from None

    def _collect(self, prefix: str, value: Any) -> None:
        if isinstance(value, Tensor):
            if prefix in self._tensors:
                raise ConfigError(f"import: {self._path} has two tensors {prefix}, one of them in a dict of its own")
            self._tensors[prefix] = value.detach()
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._collect(f"{prefix}.{key}" if prefix else str(key), item)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items() if not tensor.is_nested}

    def rows(self, name: str, first: int, count: int) -> Tensor:
        tensor = check_plain(name, self._tensors[name])
        return (tensor if tensor.dim() else tensor[None])[first : first + count]


class JoinedFiles:
    """The tensors of several files. Raises ConfigError for a name that two of them have."""

    def __init__(self, files: Mapping[Path, TensorFile]) -> None:
        self._file_of: dict[str, TensorFile] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        path_of: dict[str, Path] = {}
        for path, file in files.items():
            self._shapes |= (shapes := file.shapes())
            for name in shapes:
                if name in path_of:
                    raise ConfigError(f"import: both {path_of[name]} and {path} have {name}")
                self._file_of[name], path_of[name] = file, path

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def rows(self, name: str, first: int, count: int) -> Tensor:
        return self._file_of[name].rows(name, first, count)


def check_plain(name: str, tensor: Tensor) -> Tensor:
    """Raises ConfigError for a tensor of which no rows can be read."""
    for is_so, what in (
        (tensor.is_meta, "on the meta device, which has no values"),
        (tensor.is_quantized, "quantized; give it as floats, dequantize()"),
        (tensor.layout is not torch.strided, f"{tensor.layout}; give it in full, to_dense()"),
        (
            is_traceable_wrapper_subclass(tensor),
            f"a {type(tensor).__name__}; give it as a plain tensor (of a DTensor full_tensor())",
        ),
    ):
        if is_so:
            raise ConfigError(f"import: {name} is {what}")
    return tensor


def open_tensors(path: Path) -> TensorFile:
    """A safetensors file, or one of torch.save, by its suffix (.safetensors, or .pt, .pth, .bin)."""
    if path.is_dir():
        raise FormatMismatch(
            f"{path} is a folder: of one of torch.distributed.checkpoint make a file ({FROM_DISTRIBUTED}), and import "
            "that; a dump of dynamicemb is what `holdfast import` takes"
        )
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix in (".pt", ".pth", ".bin"):
        return TorchFile(path)
    raise ConfigError(f"import: the suffix of {path} says neither safetensors (.safetensors) nor torch.save (.pt)")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError for a name that it has twice: nobody knows which is meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)} twice")
    return found


def safetensors_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Entry]]:
    """The safetensors header, and where everything lies. Wider elements first, so that every tensor is aligned."""
    entries = {}
    begin = 0
    for name in sorted(tensors, key=lambda name: (-DTYPES[tensors[name][0]].itemsize, name)):
        dtype, shape = tensors[name]
        num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = Entry(dtype, shape, begin, num_bytes)
        begin += num_bytes
    described: dict[str, object] = {"__metadata__": dict(metadata)}
    described |= {
        name: {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (entry.begin, entry.begin + entry.num_bytes)}
        for name, entry in entries.items()
    }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, entries


def row_chunks(num_rows: int, layout: RowLayout, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each slice of a table, of so many bytes."""
    step = max(1, chunk_bytes // layout.row_bytes)
    for first in range(0, num_rows, step):
        yield first, min(step, num_rows - first)


def read_at(path: Path, offset: int, num_bytes: int) -> NDArray[np.uint8]:
    """So many bytes from there on, fewer where the file ends before, aligned for all types."""
    with DirectReader(path, offset, window_bytes=num_bytes) as file:
        data = file.read(num_bytes)
    return data if data.ctypes.data % 8 == 0 else data.copy()
