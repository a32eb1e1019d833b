"""All of pyarrow that the data package uses, behind NumPy types. (pyarrow has no type stubs; elsewhere nothing is
untyped.)

Parquet, and texts that a script has. Every read of a file opens it anew with the footer that was read once, since
pyarrow's readers are not safe to share between threads; pyarrow's own threads are not used, because the loader brings
its own.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from holdfast.data.unchanged import Unchanged, check_is_file
from holdfast.errors import ConfigError, DataError
from holdfast.files.names import trouble_with

_BLOCK_BYTES = 4096
_MAX_SAMPLES = 16_384  # blocks of a file
_BLOCKS_A_READER = 128


@dataclass(frozen=True, slots=True)
class NumberColumn:
    """values: int64, uint64 or float64 ``[n]`` (meaningless where missing); missing: bool ``[n]``."""

    values: NDArray[np.int64] | NDArray[np.uint64] | NDArray[np.float64]
    missing: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TextColumn:
    """Text ``i`` is ``data[starts[i] : starts[i] + lengths[i]]``; uint8, int64 ``[n]``; missing: bool ``[n]``."""

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    missing: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ListColumn:
    """Row ``i`` holds ``lengths[i]`` consecutive items, none where missing; lengths: int64 ``[n]``; missing: bool
    ``[n]``."""

    items: NumberColumn | TextColumn
    lengths: NDArray[np.int64]
    missing: NDArray[np.bool_]


Column = NumberColumn | TextColumn | ListColumn


class ParquetReader:
    """One Parquet file. Raises ConfigError when it is missing, DataError when it is not Parquet or damaged; both name
    it."""

    def __init__(self, path: Path) -> None:
        check_is_file(path)
        if trouble := trouble_with(path):
            raise ConfigError(f"paths: {trouble}")
        self.path = path
        try:
            self._unchanged = Unchanged(path)
            self._metadata = pq.read_metadata(path)
            self._schema = self._metadata.schema.to_arrow_schema()
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a readable Parquet file: {error}") from error
        self.row_group_sizes = tuple(
            int(self._metadata.row_group(index).num_rows) for index in range(self._metadata.num_row_groups)
        )

    def kind(self, column: str) -> str:
        """``"integer"``, ``"number"`` (floating), ``"text"``, or ``"list of "`` one of these. ConfigError that names
        the column if there is none of that name, or it holds something else."""
        index = self._schema.get_field_index(column)
        if index < 0:
            raise ConfigError(f"{self.path}: there is no column {column!r} (or more than one)")
        kind = _kind(self._schema.field(index).type)
        if kind is None:
            raise ConfigError(
                f"{self.path}: column {column!r} is of type {self._schema.field(index).type}, which is not read: write "
                "it as integers, floating numbers, texts or binaries, or lists of these"
            )
        return kind

    def item_kind(self, column: str) -> str:
        """The same of the column's values, or of those in its lists."""
        return self.kind(column).removeprefix("list of ")

    def is_utf8(self, column: str) -> bool:
        """Whether the column's texts, or those in its lists, are said to be UTF-8."""
        kind = self._schema.field(column).type
        while not _is_string(kind):
            if not hasattr(kind, "value_type"):
                return False
            kind = kind.value_type
        return True

    def read_row_group(self, index: int, columns: Sequence[str]) -> dict[str, Column]:
        """The named columns of a row group. DataError that names file and row group if it cannot be read, or the file
        is not the one that was opened."""
        try:
            with pq.ParquetFile(self.path, metadata=self._metadata) as file:
                table = file.read_row_group(index, columns=list(columns), use_threads=False)
            found = {name: _column(table.column(name)) for name in columns}
        except (pa.ArrowException, OSError) as error:
            self._unchanged.check(self._has_its_fingerprint)  # which says more
            raise DataError(f"{self.path}, row group {index}: it cannot be read: {error}") from error
        self._unchanged.check(self._has_its_fingerprint)
        return found

    @cached_property
    def fingerprint(self) -> tuple[int, str, int]:
        """The file's size, a digest of its footer (which holds sizes and places of all its parts, and statistics), and
        a checksum of its contents: of all of them where they have 64 MiB at most, of 16,384 blocks of 4 KiB that lie
        evenly in a larger file. Read once."""
        found = self._read_fingerprint()
        self._unchanged.check(lambda: False)
        return found

    def _has_its_fingerprint(self) -> bool:
        return "fingerprint" in self.__dict__ and self._read_fingerprint() == self.fingerprint

    def _read_fingerprint(self) -> tuple[int, str, int]:
        try:
            with self.path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                footer_bytes = int.from_bytes(os.pread(file.fileno(), 4, size - 8), "little")
                footer = os.pread(file.fileno(), 8 + footer_bytes, max(0, size - 8 - footer_bytes))
                contents = _sampled_checksum(file.fileno(), size)
        except OSError as error:
            raise DataError(f"{self.path}: it cannot be read: {error.strerror}") from error
        return size, hashlib.blake2b(footer, digest_size=16).hexdigest(), contents


def _sampled_checksum(fd: int, size: int) -> int:
    num_blocks = -(-size // _BLOCK_BYTES)
    count = min(num_blocks, _MAX_SAMPLES)
    places = [num_blocks * i // count * _BLOCK_BYTES for i in range(count)]
    parts = [places[begin : begin + _BLOCKS_A_READER] for begin in range(0, count, _BLOCKS_A_READER)]

    def checksum_of(part: list[int]) -> int:
        checksum = 0
        for place in part:
            checksum = zlib.crc32(os.pread(fd, _BLOCK_BYTES, place), checksum)
        return checksum

    # A disk answers many at once as fast as one.
    with ThreadPoolExecutor(16) as readers:
        return zlib.crc32(repr(list(readers.map(checksum_of, parts))).encode())


class ParquetAppender:
    """Writes a Parquet file, a row group per call; ``columns``: per name the type, ``"int8"``, ``"int64"``, ``"list"``
    (of int64), ``"text"``, ``"texts"`` (a list) or ``"binary"``; texts are bytes."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        types = {
            "int8": pa.int8(),
            "int64": pa.int64(),
            "list": pa.list_(pa.int64()),
            "text": pa.string(),
            "texts": pa.list_(pa.string()),
            "binary": pa.binary(),
        }
        self._schema = pa.schema([(name, types[kind]) for name, kind in columns.items()])
        # on real Criteo rows a fifth smaller than snappy, for some 0.1 µs a row more to read
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd", compression_level=1)

    def append(self, columns: Mapping[str, tuple[NDArray[Any], NDArray[np.bool_] | None]]) -> None:
        """A row group: per column its values, ``[n]`` (for a list ``[n, L]``), and which are null."""
        arrays = [_array(*columns[field.name], field.type) for field in self._schema]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema), row_group_size=len(arrays[0]) or 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.close()


def _array(values: NDArray[Any], missing: NDArray[np.bool_] | None, kind: Any) -> Any:
    if pa.types.is_list(kind):
        offsets = np.arange(values.shape[0] + 1, dtype=np.int32) * np.int32(values.shape[1])
        return pa.ListArray.from_arrays(pa.array(offsets), _array(values.ravel(), None, kind.value_type), type=kind)
    if pa.types.is_string(kind):
        return pa.array(values, pa.binary(), mask=missing).cast(kind)
    return pa.array(values, type=kind, mask=missing)


def text_column(values: Any) -> TextColumn:
    """Texts (str or bytes) of a list, a NumPy array or an Arrow array, whatever its shape, one after the other.
    DataError for anything else."""
    if isinstance(values, str | bytes | set | frozenset):
        raise DataError(f"texts: a sequence of str or of bytes is wanted, not a {type(values).__name__}")
    flat = values.ravel() if isinstance(values, np.ndarray) else values
    try:
        array = flat if isinstance(flat, pa.Array | pa.ChunkedArray) else pa.array(flat, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"texts: not a sequence of str or of bytes: {error}") from None
    kind = _kind(array.type)
    if kind == "text":
        column = _column(array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array]))
        assert isinstance(column, TextColumn), "what the type says"
        return column
    if pa.types.is_null(array.type):  # nothing in it, or nothing but None
        nothing = np.zeros(len(array), np.int64)
        return TextColumn(np.empty(0, np.uint8), nothing, nothing, np.ones(len(array), np.bool_))
    raise DataError(f"texts: not a sequence of str or of bytes, but of {array.type}")


def _kind(kind: Any) -> str | None:
    if pa.types.is_dictionary(kind):
        return _kind(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        item_kind = _kind(kind.value_type)
        return None if item_kind is None or item_kind.startswith("list") else f"list of {item_kind}"
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "integer"
    if pa.types.is_floating(kind):
        return "number"
    if _is_string(kind):
        return "text"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or str(kind) == "binary_view":
        return "text"
    return None


def _is_string(kind: Any) -> bool:
    # the views by name: pyarrow 15 has no test for them
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or str(kind) == "string_view"


def _column(chunks: Any) -> Column:
    array = chunks.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], type=array.type)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        return _list_column(array)
    return _flat_column(array)


def _list_column(array: Any) -> ListColumn:
    missing = _missing(array)
    if pa.types.is_fixed_size_list(array.type):
        begins = (np.arange(len(array) + 1) + array.offset) * array.type.list_size
    else:
        begins = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    lengths = np.diff(begins)
    # a null row may still have items beneath it; they are not its
    lengths[missing] = 0
    items = array.values
    if (begins[:-1] + lengths == begins[1:]).all():
        items = items.slice(int(begins[0]), int(begins[-1] - begins[0]))
    else:
        ends = np.cumsum(lengths)
        wanted = np.repeat(begins[:-1] - (ends - lengths), lengths) + np.arange(int(ends[-1]))
        items = items.take(pa.array(wanted))
    return ListColumn(_flat_column(items), lengths, missing)


def _flat_column(array: Any) -> NumberColumn | TextColumn:
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    missing = _missing(array)
    kind = _kind(array.type)
    if kind == "text":
        array = array.cast(pa.large_binary())
        _, offset_buffer, data_buffer = array.buffers()
        offsets = np.frombuffer(offset_buffer, np.int64)[array.offset : array.offset + len(array) + 1]
        data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
        return TextColumn(data, offsets[:-1], np.diff(offsets), missing)
    if kind == "number":
        values = array.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)
        return NumberColumn(values, missing | np.isnan(values))
    integer = pa.uint64() if pa.types.is_uint64(array.type) else pa.int64()
    return NumberColumn(array.cast(integer).fill_null(0).to_numpy(zero_copy_only=False), missing)


def _missing(array: Any) -> NDArray[np.bool_]:
    if array.null_count == 0:
        return np.zeros(len(array), np.bool_)
    missing: NDArray[np.bool_] = array.is_null().to_numpy(zero_copy_only=False)
    return missing
