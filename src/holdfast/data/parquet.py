"""Parquet files as a source: columns by name; a row group is a block.

    source = ParquetSource(ParquetConfig(
        paths=("day_0.parquet",), label="click", dense=("age",), dense_transform="log1p",
        sparse={"item": SparseColumn(column="item_id", num_embeddings=1_000_000),
                "genres": SparseColumn(column="genre_ids", num_embeddings=30, hashing="identity")},
    ))

- A sparse column holds integers or texts (then every sample has one id), or lists of them (then the feature is
  multi-hot); in one file the one, in another the other.
- ``"hash"``: ids as hashing.py says; null is id 0, whether it stands for a row, a list or an item of a list. An empty
  list is an empty bag.
- ``keys``: each value is a key of the table, which takes as many as come (up to num_embeddings): an integer itself, of
  a text what ``text_keys`` gives. Null is ``missing_id``, as with ``"identity"``.
- ``"identity"``: integers that are ids already, in [0, num_embeddings); IdError names file and row of another. Null is
  ``missing_id``; without one it is a DataError.
- A column holds integers in all files, or texts in all: a number and the text that spells it are two values.
- The label is 0 or 1 (integer, bool or floating), never null. Dense columns are integers or floating: see dense.py for
  nulls and NaN; infinity, and what float32 cannot hold, is a DataError.
- A file that was edited in place is another one for `fingerprint`, and so for a run that is resumed: any byte of a file
  of up to 64 MiB; of a larger one only 64 MiB, 4 KiB at a time, are looked at, so that a change of less than
  size / 16,384 in one place may go unseen. That costs 0.1 s a file, or about 1 s where it is not in memory, once.
- Shuffling reads whole row groups; 10,000 to 100,000 rows each are good, as ``convert_criteo`` writes. Rows are counted
  from 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from holdfast.data.arrow_file import Column, ListColumn, NumberColumn, ParquetReader, TextColumn
from holdfast.data.block import Bags, FixedBags, JaggedBags, SampleBlock
from holdfast.data.dense import DenseTransform, check_dense_transform, check_missing_dense_value, dense_features
from holdfast.data.hashing import MISSING_ID, hash_values, key_values, text_values
from holdfast.data.source import DEFAULT_CAPACITY, Feature
from holdfast.errors import ConfigError, DataError, IdError
from holdfast.files.config import UNRECORDED

Hashing = Literal["hash", "identity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseColumn:
    """Which column a categorical feature comes from, the rows of its table, and how values become ids.

    column: of integers or texts, or of lists of them. num_embeddings: rows of the table; with keys, that it can have
    (default 2^26). hashing: ``"hash"`` any values to ids, or take ``"identity"`` where they are ids already.
    missing_id: of null, with identity or keys. keys: each value has a row of its own, found by its key: an integer is
    one, of a text it is what text_keys gives.
    """

    column: str
    num_embeddings: int | None = None
    hashing: Hashing = "hash"
    missing_id: int | None = None
    keys: bool = field(default=False, metadata=UNRECORDED)

    def __post_init__(self) -> None:
        if self.num_embeddings is None and not self.keys:
            raise ConfigError(f"parquet sparse {self.column}: num_embeddings is missing; or say keys = true")
        if self.num_embeddings is not None and self.num_embeddings < 1:
            raise ConfigError(f"parquet sparse {self.column}: num_embeddings is {self.num_embeddings}, not at least 1")
        if self.hashing not in ("hash", "identity"):
            raise ConfigError(
                f"parquet sparse {self.column}: hashing must be 'hash' or 'identity', not {self.hashing!r}"
            )
        if self.keys:
            if self.hashing != "hash":
                raise ConfigError(f"parquet sparse {self.column}: hashing is {self.hashing!r}, where keys need none")
            return
        if self.missing_id is not None and self.hashing == "hash":
            raise ConfigError(f"parquet sparse {self.column}: missing_id is {MISSING_ID} where values are hashed")
        if self.missing_id is not None and not 0 <= self.missing_id < self.num_rows:
            raise ConfigError(f"parquet sparse {self.column}: missing_id {self.missing_id} is no row of the table")

    @property
    def num_rows(self) -> int:
        """That the table has, or can have."""
        return DEFAULT_CAPACITY if self.num_embeddings is None else self.num_embeddings

    @property
    def null_id(self) -> int | None:
        """What stands for null; None where nothing does."""
        return MISSING_ID if self.hashing == "hash" and not self.keys else self.missing_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetConfig:
    """Which files, and what their columns mean.

    paths: one or more files; their samples follow each other. label: a column of 0 and 1. dense: columns of numbers.
    sparse: per feature name its column. dense_transform: ``"log1p"`` or ``"none"``. missing_dense_value: what stands
    for null. Raises ConfigError that names the field.
    """

    paths: Sequence[Path | str]
    label: str
    dense: tuple[str, ...] = ()
    sparse: Mapping[str, SparseColumn]
    dense_transform: DenseTransform = "none"
    missing_dense_value: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.paths, str) or not self.paths:
            raise ConfigError(f"parquet paths: must be a sequence of one or more paths, not {self.paths!r}")
        if not self.dense and not self.sparse:
            raise ConfigError("parquet dense, sparse: at least one column is needed beside the label")
        check_dense_transform("parquet dense_transform", self.dense_transform)
        check_missing_dense_value("parquet missing_dense_value", self.missing_dense_value)


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """A row group of a file, and the number of its first row in the file, from 1."""

    reader: ParquetReader
    index: int
    first_row: int
    num_rows: int

    def row(self, position: int) -> str:
        """How an error names the row at ``position`` in the group."""
        return f"{self.reader.path}, row {self.first_row + position}"


class ParquetSource:
    """A source (see source.py) of the rows of Parquet files. Opening reads the footers and checks that the columns are
    there."""

    def __init__(self, config: ParquetConfig, *, beside: Sequence[Path | str] = ()) -> None:
        """beside: other files of the run, whose values must become the same ids; only their footers are read."""
        self._config = config
        self._readers = tuple(ParquetReader(Path(path)) for path in config.paths)
        others = [ParquetReader(Path(path)) for path in beside]
        for reader in (*others, *self._readers):
            _check_columns(reader, config)
        _check_kinds_of_values([*others, *self._readers], config)
        self._columns = list(
            dict.fromkeys([config.label, *config.dense, *(sparse.column for sparse in config.sparse.values())])
        )
        groups: list[_RowGroup] = []
        for reader in self._readers:
            first_row = 1
            for index, num_rows in enumerate(reader.row_group_sizes):
                if num_rows:
                    groups.append(_RowGroup(reader, index, first_row, num_rows))
                first_row += num_rows
        self._groups = tuple(groups)

    @property
    def config(self) -> ParquetConfig:
        return self._config

    @property
    def features(self) -> tuple[Feature, ...]:
        return tuple(
            Feature(name=name, num_embeddings=sparse.num_rows, keys=sparse.keys)
            for name, sparse in self._config.sparse.items()
        )

    @property
    def num_dense(self) -> int:
        return len(self._config.dense)

    @property
    def num_samples(self) -> int:
        return sum(group.num_rows for group in self._groups)

    @property
    def sample_bytes(self) -> int:
        # of a list column nothing is known before it is read; a handful of ids is a fair guess
        kinds = [self._readers[0].kind(sparse.column) for sparse in self._config.sparse.values()]
        return 4 + 4 * self.num_dense + sum(8 * 10 if kind.startswith("list") else 8 for kind in kinds)

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        return np.array([group.num_rows for group in self._groups], np.int64)

    def read_block(self, index: int) -> SampleBlock:
        group = self._groups[index]
        columns = group.reader.read_row_group(group.index, self._columns)
        dense = np.empty((group.num_rows, self.num_dense), np.float32)
        for position, name in enumerate(self._config.dense):
            dense[:, position] = self._dense(group, name, columns[name])
        return SampleBlock(
            labels=_labels(group, self._config.label, columns[self._config.label]),
            dense=dense,
            bags=tuple(
                _bags(group, name, sparse, columns[sparse.column]) for name, sparse in self._config.sparse.items()
            ),
        )

    def fingerprint(self) -> Mapping[str, str | int]:
        """Without the numbers of rows from which no id is made."""
        return self._fingerprint(with_ids=False)

    @property
    def former_fingerprint(self) -> Mapping[str, str | int]:
        """As it was with the rows of tables with ``"identity"`` in it, as states have it that were saved then."""
        return self._fingerprint(with_ids=True)

    def _fingerprint(self, *, with_ids: bool) -> Mapping[str, str | int]:
        config = self._config
        sparse: list[tuple[object, ...]] = []
        for name, column in config.sparse.items():
            if column.keys:
                sparse.append((name, column.column, "keys", column.missing_id))
            elif column.hashing == "identity" and not with_ids:
                sparse.append((name, column.column, column.hashing, column.missing_id))
            else:
                sparse.append((name, column.column, column.num_embeddings, column.hashing, column.missing_id))
        columns = (config.label, config.dense, sparse, config.dense_transform, float(config.missing_dense_value))
        files = [reader.fingerprint for reader in self._readers]
        return {"kind": "parquet", "columns": _digest(columns), "files": _digest(files)}

    def _dense(self, group: _RowGroup, name: str, column: Column) -> NDArray[np.float32]:
        assert isinstance(column, NumberColumn), "checked when the file was opened"
        features = dense_features(
            column.values,
            column.missing,
            transform=self._config.dense_transform,
            missing_dense_value=self._config.missing_dense_value,
        )
        # of infinity log1p makes infinity, or, where it is negative, 0
        is_infinite = np.isinf(column.values) | np.isinf(features)
        if is_infinite.any():
            position = int(np.argmax(is_infinite))
            value = column.values[position]
            what = "the value is infinite" if np.isinf(value) else f"{value} is too large for float32"
            raise DataError(f"{group.row(position)}: column {name}: {what}")
        return features


def _check_columns(reader: ParquetReader, config: ParquetConfig) -> None:
    for name in (config.label, *config.dense):
        if reader.kind(name) not in ("integer", "number"):
            raise ConfigError(f"{reader.path}: column {name!r} must hold numbers, but holds {reader.kind(name)}")
    for name, sparse in config.sparse.items():
        item_kind = reader.item_kind(sparse.column)
        way = "keys" if sparse.keys else sparse.hashing
        allowed = ("integer",) if way == "identity" else ("integer", "text")
        if item_kind not in allowed:
            # As pandas makes them of integers with nulls, unless it is told otherwise.
            remedy = "; write integers with nulls as pandas' Int64, not float64" if item_kind == "number" else ""
            raise ConfigError(
                f"{reader.path}: column {sparse.column!r} of feature {name!r} must hold {' or '.join(allowed)} values "
                f"to be used with {way!r}, but holds {item_kind}{remedy}"
            )


def _check_kinds_of_values(readers: Sequence[ParquetReader], config: ParquetConfig) -> None:
    """A number and the text that spells it are different keys, and hashed to different rows."""
    for name, sparse in config.sparse.items():
        first = readers[0].item_kind(sparse.column)
        for reader in readers[1:]:
            if (kind := reader.item_kind(sparse.column)) != first:
                raise ConfigError(
                    f"{reader.path}: column {sparse.column!r} of feature {name!r} holds {kind} values, where "
                    f"{readers[0].path} holds {first} values: their {'keys' if sparse.keys else 'ids'} would not be "
                    "the same"
                )


def _labels(group: _RowGroup, name: str, column: Column) -> NDArray[np.float32]:
    assert isinstance(column, NumberColumn), "checked when the file was opened"
    is_bad = column.missing | ((column.values != 0) & (column.values != 1))
    if is_bad.any():
        position = int(np.argmax(is_bad))
        shown = "null" if column.missing[position] else column.values[position]
        raise DataError(f"{group.row(position)}: column {name}: the label is {shown}, not 0 or 1")
    return column.values.astype(np.float32)


def _bags(group: _RowGroup, name: str, sparse: SparseColumn, column: Column) -> Bags:
    if not isinstance(column, ListColumn):
        return FixedBags(_ids(group, name, sparse, column, rows=None)[:, None])
    rows = np.repeat(np.arange(column.lengths.shape[0]), column.lengths)
    ids = _ids(group, name, sparse, column.items, rows)
    lengths = column.lengths
    if column.missing.any():
        if sparse.null_id is None:
            raise _null_error(group, name, int(np.argmax(column.missing)))
        lengths = np.where(column.missing, 1, lengths)
        ids = np.insert(ids, np.searchsorted(rows, np.flatnonzero(column.missing)), sparse.null_id)
    return JaggedBags(ids, np.concatenate([[0], np.cumsum(lengths)]))


def _ids(
    group: _RowGroup,
    name: str,
    sparse: SparseColumn,
    column: NumberColumn | TextColumn,
    rows: NDArray[np.intp] | None,
) -> NDArray[np.int64]:
    """The ids of the values of a column, or of a list column's items; ``rows`` says which row an item belongs to."""
    if isinstance(column, TextColumn):
        to_values = key_values if sparse.keys else text_values
        values = to_values(column.data, column.starts, column.lengths)
    else:
        # an unsigned number beyond int64 keeps its bits
        values = column.values.astype(np.int64, copy=False)
    if sparse.hashing == "hash" and not sparse.keys:
        return hash_values(values, sparse.num_rows, column.missing)
    if column.missing.any():
        if sparse.missing_id is None:
            first = int(np.argmax(column.missing))
            raise _null_error(group, name, first if rows is None else int(rows[first]))
        values = np.where(column.missing, sparse.missing_id, values)
    if sparse.keys:
        return values
    is_bad = (values < 0) | (values >= sparse.num_rows)
    if is_bad.any():
        first = int(np.argmax(is_bad))
        place = group.row(first if rows is None else int(rows[first]))
        assert isinstance(column, NumberColumn), "checked when the file was opened"
        raise IdError(
            f"{place}: feature {name}: id {column.values[first]} is not in [0, {sparse.num_rows}); where more of them "
            "came, a restore gives a table more rows (holdfast restore --rows), and num_embeddings says so"
        )
    return values


def _null_error(group: _RowGroup, name: str, position: int) -> DataError:
    return DataError(f"{group.row(position)}: feature {name}: null; missing_id says which id stands for it")


def _digest(described: object) -> str:
    return hashlib.blake2b(repr(described).encode(), digest_size=16).hexdigest()
