"""Dumps of NVIDIA's dynamicemb (recsys-examples, corelib/dynamicemb; its DynamicEmbDump) as tensors.

Read from commits 0c45b80 to 01eaaf9 of dump_load.py, batched_dynamicemb_tables.py and key_value_table.py. A dump is a
folder for each collection of tables, and in it files for each table and rank, named
``<table>_emb_<part>.rank_<rank>.world_size_<ranks>``. They are arrays without headers, little-endian, entry i of each
being of one key:

- ``keys``: int64; ``values``: float32 ``[n, dim]``, whatever type the table has;
- ``opt_values``: float32 ``[n, width]``, where the dump was told to have them (of early versions
  ``<table>_opt_values``): Adam's first moments, then its second ones (width 2 dim); Adagrad's sums (dim); of row-wise
  Adagrad the sum, and three that are not used, so that a row's state has 16 bytes;
- ``scores``: eight bytes, by which keys are evicted there. They are no part of what is imported, nor are the files of
  admission counters and ``<table>_opt_args.json``.

Ranks follow each other. Nothing is held in memory: each slice is read when it is asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from holdfast.admin.tensor_files import FROM_DISTRIBUTED, read_at
from holdfast.errors import ConfigError, Corrupted, FormatMismatch

_KEYS_FILE = re.compile(r"(?P<table>.+)_emb_keys\.rank_(?P<rank>\d{1,9})\.world_size_(?P<ranks>\d{1,9})")
_STATE_PARTS = ("emb_opt_values", "opt_values")
_KEY_BYTES = 8
_VALUE_BYTES = 4
_ROWWISE_WIDTH = 4  # 16 bytes


@dataclass(frozen=True, slots=True)
class _Column:
    """Some columns of an array that is cut over files, one for each rank: of `width` entries those from `begin` on, in
    the shape `row` for each entry of the array."""

    paths: tuple[Path, ...]
    dtype: np.dtype[np.generic]
    width: int
    begin: int
    row: tuple[int, ...]


class DynamicembDump:
    """The tables in a dump, by the names of an export. Raises FormatMismatch where the folder is none, ConfigError,
    Corrupted where files of it are missing, or do not fit each other.

    rowwise: whether optimizer state of four numbers a row is row-wise Adagrad's; of a table of that dimension it could
    be either's.
    """

    def __init__(self, folder: Path, *, rowwise: bool) -> None:
        self._columns: dict[str, _Column] = {}
        self._counts: dict[str, tuple[int, ...]] = {}
        places = _tables_in(folder)
        if not places and any(folder.glob("*.distcp")):
            raise FormatMismatch(
                f"{folder} is a checkpoint of torch.distributed: make a file ({FROM_DISTRIBUTED}), and import that"
            )
        if not places:
            raise FormatMismatch(f"{folder} is no dump of dynamicemb: no file in it is named <table>_emb_keys.rank_...")
        self._claimed: dict[Path, str] = {}
        for table, (place, ranks) in places.items():
            self._add_table(place, table, ranks, rowwise)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: (sum(self._counts[name]), *column.row) for name, column in self._columns.items()}

    def rows(self, name: str, first: int, count: int) -> Tensor:
        column = self._columns[name]
        found = np.empty((count, column.width), column.dtype)
        begin, done = 0, 0
        for path, num_rows in zip(column.paths, self._counts[name], strict=True):
            low, high = max(first, begin), min(first + count, begin + num_rows)
            if low < high:
                offset = (low - begin) * found[:1].nbytes
                wanted = found[done : done + high - low].reshape(-1).view(np.uint8)
                data = read_at(path, offset, len(wanted))
                if len(data) < len(wanted):
                    raise Corrupted(f"{path} at offset {offset}: it is cut short")
                wanted[:] = data
                done += high - low
            begin += num_rows
        rows = found[:, column.begin : column.begin + int(np.prod(column.row, dtype=np.int64))]
        return torch.from_numpy(np.ascontiguousarray(rows).reshape(count, *column.row))

    def _add_table(self, place: Path, table: str, ranks: int, rowwise: bool) -> None:
        keys = self._files(place, f"{table}_emb_keys", ranks)
        counts = tuple(_entries(path, _KEY_BYTES) for path in keys)
        values = self._files(place, f"{table}_emb_values", ranks)
        width = _width(values, keys, counts)
        self._add(f"embedding_bags.{table}.keys", counts, _Column(keys, np.dtype("<i8"), 1, 0, ()))
        self._add(f"embedding_bags.{table}.weight", counts, _Column(values, np.dtype("<f4"), width, 0, (width,)))
        for part in _STATE_PARTS:
            if any(_path(place, f"{table}_{part}", rank, ranks).exists() for rank in range(ranks)):
                paths = self._files(place, f"{table}_{part}", ranks)
                self._add_state(table, counts, paths, _width(paths, keys, counts), width, rowwise)
                break

    def _add_state(
        self, table: str, counts: tuple[int, ...], paths: tuple[Path, ...], width: int, dim: int, rowwise: bool
    ) -> None:
        def part(begin: int, *row: int) -> _Column:
            return _Column(paths, np.dtype("<f4"), width, begin, row)

        if rowwise and width == _ROWWISE_WIDTH:
            self._add(f"optimizer.{table}.momentum1", counts, part(0))
        elif width == dim:
            self._add(f"optimizer.{table}.momentum1", counts, part(0, dim))
        elif width == 2 * dim:
            self._add(f"optimizer.{table}.exp_avg", counts, part(0, dim))
            self._add(f"optimizer.{table}.exp_avg_sq", counts, part(dim, dim))
        elif width:
            self._add(f"optimizer.{table}.opt_values", counts, part(0, width))

    def _add(self, name: str, counts: tuple[int, ...], column: _Column) -> None:
        self._columns[name] = column
        self._counts[name] = counts

    def _files(self, place: Path, stem: str, ranks: int) -> tuple[Path, ...]:
        """The files of all ranks. ConfigError names one that is missing, or that is of two tables' names."""
        paths = []
        for rank in range(ranks):  # how many there are is no more than what a name says
            path = _path(place, stem, rank, ranks)
            if not path.is_file():
                raise ConfigError(f"{path} is not there: the dump is of {ranks} ranks, and each has such a file")
            if path in self._claimed:
                raise FormatMismatch(f"{path} could be of two tables, by its name: {self._claimed[path]} and {stem}")
            self._claimed[path] = stem
            paths.append(path)
        return tuple(paths)


def _tables_in(folder: Path) -> dict[str, tuple[Path, int]]:
    """Where each table's files are, and of how many ranks. ConfigError where that is not clear."""
    found: dict[str, tuple[Path, int]] = {}
    for path in _files_under(folder):
        named = _KEYS_FILE.fullmatch(path.name)
        if named is None:
            continue
        table, place = named["table"], (path.parent, int(named["ranks"]))
        if found.setdefault(table, place) != place:
            there, ranks = found[table]
            raise ConfigError(
                f"{path}: table '{table}' is there twice, in {there} of {ranks} ranks; name the folder of one of them"
            )
        if int(named["rank"]) >= place[1]:
            raise ConfigError(f"{path}: a rank beyond its {place[1]} ranks")
    return found


def _files_under(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders.sort()
        yield from (Path(place, name) for name in sorted(files))


def _path(place: Path, stem: str, rank: int, ranks: int) -> Path:
    return place / f"{stem}.rank_{rank}.world_size_{ranks}"


def _entries(path: Path, entry_bytes: int) -> int:
    entries, rest = divmod(path.stat().st_size, entry_bytes)
    if rest:
        raise Corrupted(f"{path}: its {path.stat().st_size} bytes are no multiple of {entry_bytes}; is it complete?")
    return entries


def _width(paths: tuple[Path, ...], keys: tuple[Path, ...], counts: tuple[int, ...]) -> int:
    """How many numbers each key has in these files: as many in all of them."""
    width: int | None = None
    for path, of_keys, count in zip(paths, keys, counts, strict=True):
        numbers = _entries(path, _VALUE_BYTES)
        if numbers % max(1, count) or (numbers and not count):
            raise Corrupted(f"{path}: {numbers} numbers do not belong to the {count} keys of {of_keys.name}")
        if not count:
            continue
        if width is not None and numbers // count != width:
            raise Corrupted(f"{path}: {numbers // count} numbers for each key, where ranks before it have {width}")
        width = numbers // count
    return width or 0
