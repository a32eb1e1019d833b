"""Rows that outsiders keep: mapped files and RocksDB, each as kindly set up as we know how."""

from __future__ import annotations

import importlib
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from larger.systems import Outsider, RowStore, Settings, initial_rows
from larger.workload import FileOfBatches, Workload


class MappedFiles(RowStore):
    """One plainly mapped file a table. The page cache decides what stays in memory; nothing is ever made durable.

    MADV_RANDOM: with the default a fault reads a whole window of the file, and takes a millisecond.
    """

    durable = "nothing: the kernel writes pages back when it likes"

    def __init__(self, workload: Workload, directory: Path, *, new_tables: bool) -> None:
        self._paths = [directory / f"table-{n:04}" for n in range(workload.shape.num_tables)]
        if not self._paths[0].exists():
            (self._make_holes if new_tables else self._fill)(workload)
        self._maps: list[mmap.mmap] = []
        self._tables: list[Tensor] = []
        for path in self._paths:
            with path.open("r+b") as file:
                # Pages that filling left in memory would be a larger memory than is allowed.
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                mapping = mmap.mmap(file.fileno(), 0)
            mapping.madvise(mmap.MADV_RANDOM)
            self._maps.append(mapping)
            table = torch.frombuffer(mapping, dtype=torch.float32)
            self._tables.append(table.view(-1, workload.shape.embedding_dim + 1))

    def _fill(self, workload: Workload) -> None:
        for table, first, rows in initial_rows(workload):
            with self._paths[table].open("wb" if first == 0 else "ab") as file:
                rows.tofile(file)

    def _make_holes(self, workload: Workload) -> None:
        for path in self._paths:
            with path.open("wb") as file:
                file.truncate(workload.shape.num_embeddings * workload.row_bytes)

    def read(self, rows: list[Tensor]) -> list[Tensor]:
        return [table.index_select(0, wanted) for table, wanted in zip(self._tables, rows, strict=True)]

    def write(self, rows: list[Tensor], values: list[Tensor]) -> None:
        for table, wanted, new in zip(self._tables, rows, values, strict=True):
            table.index_copy_(0, wanted, new)

    def close(self) -> None:
        self._tables.clear()
        for mapping in self._maps:
            mapping.close()


class RocksDb(RowStore):
    """All tables in one RocksDB: the scratchpad's bytes as block cache, direct reads, one multi-get and one synced
    write batch a step. ``packages``: where rocksdict was installed."""

    durable = "every step's rows, write-ahead log synced; not the dense part"

    def __init__(
        self, workload: Workload, directory: Path, cache_bytes: int, packages: Path, *, new_tables: bool
    ) -> None:
        sys.path.append(str(packages))
        self._rocksdict: Any = importlib.import_module("rocksdict")
        self._shape = workload.shape
        self._width = workload.shape.embedding_dim + 1
        options = self._options(cache_bytes)
        is_new = not (directory / "CURRENT").exists()
        self._db: Any = self._rocksdict.Rdict(str(directory), options)
        write_options = self._rocksdict.WriteOptions()
        write_options.sync = True
        self._write_options = write_options
        self._absent = bytes(workload.row_bytes)
        if is_new and not new_tables:
            self._fill(workload, directory, options)

    def _options(self, cache_bytes: int) -> Any:
        rocksdict = self._rocksdict
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())  # random floats do not compress
        options.set_write_buffer_size(32 << 20)
        options.increase_parallelism(2)
        table = rocksdict.BlockBasedOptions()
        table.set_block_size(4096)
        table.set_block_cache(rocksdict.Cache.new_hyper_clock_cache(cache_bytes, 4096))
        table.set_bloom_filter(10.0, False)
        # Filters and indexes stay outside of the cache: of every row's bytes they are a few percent, to its advantage.
        table.set_cache_index_and_filter_blocks(False)
        options.set_block_based_table_factory(table)
        return options

    def _fill(self, workload: Workload, directory: Path, options: Any) -> None:
        """Sorted files that are taken in whole: a fully compacted database, at the speed of writing."""
        for table, first, rows in initial_rows(workload):
            path = directory.parent / f"{directory.name}-{table}-{first}.sst"
            writer = self._rocksdict.SstFileWriter(options=options)
            writer.open(str(path))
            for key, value in zip(_keys(table, np.arange(first, first + len(rows))), _values(rows), strict=True):
                writer[key] = value
            writer.finish()
            self._db.ingest_external_file([str(path)])
            path.unlink(missing_ok=True)

    def read(self, rows: list[Tensor]) -> list[Tensor]:
        keys = [key for table, wanted in enumerate(rows) for key in _keys(table, wanted.numpy())]
        found = [self._absent if value is None else value for value in self._db.get(keys)]
        # bytearray: a tensor over bytes could not be written to
        values = torch.frombuffer(bytearray(b"".join(found)), dtype=torch.float32).view(-1, self._width)
        return list(torch.split(values, [len(wanted) for wanted in rows]))

    def write(self, rows: list[Tensor], values: list[Tensor]) -> None:
        batch = self._rocksdict.WriteBatch(raw_mode=True)
        for table, (wanted, new) in enumerate(zip(rows, values, strict=True)):
            for key, value in zip(_keys(table, wanted.numpy()), _values(new.numpy()), strict=True):
                batch.put(key, value)
        self._db.write(batch, self._write_options)

    def facts(self) -> dict[str, object]:
        return {"levels": [self._db.property_value(f"rocksdb.num-files-at-level{level}") for level in range(7)]}

    def close(self) -> None:
        self._db.close()


def make_outsider(name: str, workload: Workload, source: FileOfBatches, settings: Settings, packages: Path) -> Outsider:
    """``mmap`` or ``rocksdb``, whose block cache is as large as a scratchpad would be."""
    store: RowStore
    if name == "mmap":
        store = MappedFiles(workload, settings.directory, new_tables=settings.new_tables)
    else:
        store = RocksDb(
            workload, settings.directory, settings.scratchpad_bytes, packages, new_tables=settings.new_tables
        )
    return Outsider(workload, source, store, new_tables=settings.new_tables)


def _keys(table: int, rows: np.ndarray[Any, Any]) -> list[bytes]:
    """Eight bytes each, big-endian, so that RocksDB's order is that of (table, row)."""
    return _pieces((rows.astype(np.uint64) | np.uint64(table << 48)).astype(">u8").tobytes(), 8)


def _values(rows: np.ndarray[Any, Any]) -> list[bytes]:
    return _pieces(np.ascontiguousarray(rows).tobytes(), 4 * rows.shape[1])


def _pieces(data: bytes, size: int) -> list[bytes]:
    return [data[begin : begin + size] for begin in range(0, len(data), size)]
