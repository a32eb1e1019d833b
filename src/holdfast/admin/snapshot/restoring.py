"""Making a pool of a snapshot and those that it is based on: each of their files is read before anything is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from holdfast import _core
from holdfast.admin.snapshot.chain import Merged, Snapshot, open_chain
from holdfast.admin.snapshot.form import DENSE_FILES
from holdfast.admin.snapshot.output import new_directory
from holdfast.admin.snapshot.rows import Rows
from holdfast.errors import PoolExists
from holdfast.files.durable import make_directory
from holdfast.pools.directory import Medium, default_scratchpad_bytes, wants_log_store
from holdfast.pools.read_only import RowLayout, new_log_bytes, open_untrained

_PAGE_BYTES = 4096


class Homes(Protocol):
    """Where a table's rows go."""

    def of(self, number: int, rows: Rows) -> Iterator[tuple[_core.Pool, _core.Reader, Rows]]:
        """The rows, cut so that each part goes to one pool, in one piece."""


@dataclass(frozen=True, slots=True)
class OneHome:
    """Of a pool of one writer."""

    core: _core.Pool
    reader: _core.Reader

    def of(self, number: int, rows: Rows) -> Iterator[tuple[_core.Pool, _core.Reader, Rows]]:
        yield self.core, self.reader, rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreSummary:
    """What was restored. snapshots: how many the chain has."""

    step: int
    rows: int
    snapshots: int


def restore_snapshot(
    snapshot: Path,
    pool: Path,
    *,
    medium: Medium = "auto",
    on_bytes: Callable[[int], None] | None = None,
    on_rows: Callable[[int], None] | None = None,
) -> RestoreSummary:
    """Makes a pool of a snapshot and those that it is based on; it is there when it is complete, and training goes on
    from it as it would have from the pool of that step. A snapshot of a pool of several writers makes one of as many.

    medium: as in `holdfast.Pool`. on_bytes: told how much was just verified, on_rows: how many rows were just written.

    Raises PoolExists, BrokenChain, Corrupted, FormatMismatch, PoolFull, PoolFailed; then there is no pool.
    """
    if pool.exists():
        raise PoolExists(f"{pool} is there already; a restore makes a new pool, name another directory")
    chain = open_chain(snapshot)
    for part in chain:
        part.verify(on_bytes)
    newest = chain[0]
    make_directory(pool.parent)
    rows = 0
    with new_directory(pool, "restoring") as partial:
        log_store = wants_log_store(partial, medium)
        log_bytes = newest.log_bytes
        if (newest.store == "log") != log_store:
            specs = [table.spec for table in newest.tables]
            num_writers = 1 if newest.group is None else newest.group.num_writers
            log_bytes = new_log_bytes(log_store, specs, default_scratchpad_bytes(), num_writers=num_writers)
        with _made(partial, newest, log_store=log_store, log_bytes=log_bytes) as homes:
            for number in range(len(newest.tables)):
                rows += _restore_table(chain, number, homes, on_rows)
    return RestoreSummary(step=newest.step, rows=rows, snapshots=len(chain))


def _made(directory: Path, newest: Snapshot, *, log_store: bool, log_bytes: int) -> AbstractContextManager[Homes]:
    if newest.group is None:
        return _made_alone(directory, newest, log_store=log_store, log_bytes=log_bytes)
    from holdfast.admin.snapshot.group_restoring import made_in_group  # imports this package

    return made_in_group(directory, newest, newest.group, log_store=log_store, log_bytes=log_bytes)


@contextmanager
def _made_alone(directory: Path, newest: Snapshot, *, log_store: bool, log_bytes: int) -> Iterator[Homes]:
    _core.Pool.create(
        str(directory),
        newest.seed,
        log_bytes,
        [table.spec for table in newest.tables],
        log_store=log_store,
        row_checksums=newest.row_checksums and not log_store,
        begin=newest.mark,
    )
    core = open_untrained(directory)
    try:
        yield OneHome(core, _core.Reader(str(directory)))
        write_dense(core, newest)
    finally:
        core.close()


def write_dense(core: _core.Pool, newest: Snapshot) -> None:
    """The snapshot's dense state, where it has one."""
    if DENSE_FILES[0] in newest.files:
        structure, tensors = (newest.read(name) for name in DENSE_FILES)
        data = np.frombuffer(tensors, np.uint8)
        parts = [(data.ctypes.data, len(data), 0)] if len(data) else []
        core.write_dense(structure, parts, len(data))


def _restore_table(chain: Sequence[Snapshot], number: int, homes: Homes, on_rows: Callable[[int], None] | None) -> int:
    total = 0
    for found in Merged.of(chain, number):
        for core, reader, rows in homes.of(number, found):
            _import(core, reader, number, chain[0].tables[number].layout, rows)
        total += len(found)
        if on_rows is not None:
            on_rows(len(found))
    return total


def _import(core: _core.Pool, reader: _core.Reader, number: int, layout: RowLayout, found: Rows) -> None:
    max_gap = max(1, _PAGE_BYTES // layout.weight_bytes)
    breaks = np.flatnonzero(np.diff(found.rows) > max_gap + 1) + 1
    for begin, end in zip((0, *breaks), (*breaks, len(found)), strict=True):
        part = found[begin:end]
        first = int(part.rows[0])
        count = int(part.rows[-1]) - first + 1
        weights = np.empty((count, layout.weight_bytes), np.uint8)
        state = np.empty((count, layout.state_bytes), np.uint8)
        if count > len(part):  # what lies between has its initial value
            reader.read_rows(number, first, count, weights.reshape(-1), state.reshape(-1))
        place = (part.rows - np.uint64(first)).astype(np.int64)
        weights[place] = part.data[:, : layout.weight_bytes]
        state[place] = part.data[:, layout.weight_bytes :]
        floats = state.reshape(-1).view(np.float32) if layout.state else None
        core.import_rows(number, first, weights.reshape(-1), floats)
