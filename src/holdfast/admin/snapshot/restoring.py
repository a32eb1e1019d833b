"""Making a pool of a snapshot and those that it is based on: it has its name when each of their files was read and
holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from holdfast import _core
from holdfast.admin.ahead import ahead
from holdfast.admin.snapshot.chain import Snapshot, open_chain
from holdfast.admin.snapshot.cutting import cut, move_of
from holdfast.admin.snapshot.form import LAYERS
from holdfast.admin.snapshot.output import new_directory
from holdfast.admin.snapshot.rows import Rows
from holdfast.errors import ConfigError, PoolExists
from holdfast.files.durable import is_taken, make_directory
from holdfast.files.manifests import TableFields
from holdfast.group.options import GroupConfig
from holdfast.pools.directory import Medium, wants_log_store
from holdfast.pools.machine import default_scratchpad_bytes
from holdfast.pools.read_only import new_log_bytes, open_untrained
from holdfast.pools.tables import MAX_CAPACITY, MAX_ROWS

_IMPORT_BYTES = 32 << 20

_Table = TypeVar("_Table", bound=TableFields)


class Homes(Protocol):
    """Where a table's rows go."""

    def of(self, number: int, rows: Rows) -> Iterator[tuple[_core.Pool, Rows]]:
        """The rows, by the pool that they go to."""


@dataclass(frozen=True, slots=True)
class OneHome:
    """Of a pool of one writer."""

    core: _core.Pool

    def of(self, number: int, rows: Rows) -> Iterator[tuple[_core.Pool, Rows]]:
        yield self.core, rows


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
    rows: Mapping[str, int] | None = None,
    shards: GroupConfig | None = None,
    row_checksums: bool | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> RestoreSummary:
    """Makes a pool of a snapshot and those that it is based on; it is there when it is complete, and training goes on
    from it as it would have from the pool of that step. A snapshot of a pool of several writers makes one of as many.

    medium: as in `holdfast.Pool`. rows: of tables that get more of them than they had, or fewer, by name; of one with
    keys, its capacity. shards: into which the pool is cut, for a group of ranks, however it was. row_checksums: as in
    `holdfast.Pool`; default: as it was. on_bytes: told how many bytes of rows were just written.

    Raises PoolExists, BrokenChain, Corrupted, FormatMismatch, PoolFull, PoolFailed, ConfigError where a table cannot
    have so many rows, or one beyond them is in use; then there is no pool.
    """
    if is_taken(pool):
        raise PoolExists(f"{pool} is there already; a restore makes a new pool, name another directory")
    chain = open_chain(snapshot)
    for part in chain:
        part.check_files()
        part.dense()
    newest = chain[0] if not rows else resized(chain[0], rows)
    if row_checksums is not None:
        newest = replace(newest, row_checksums=row_checksums)
    if shards is not None:
        newest = cut(newest, shards=shards.shards, split_rows=shards.split_rows)
    make_directory(pool.parent)
    num_rows = 0
    with new_directory(pool, "restoring") as partial:
        log_store = wants_log_store(partial, medium)
        log_bytes = newest.log_bytes
        if (newest.store == "log") != log_store:
            specs = [table.spec for table in newest.tables]
            num_writers = 1 if newest.group is None else newest.group.num_writers
            log_bytes = new_log_bytes(log_store, specs, default_scratchpad_bytes(), num_writers=num_writers)
        with made(partial, newest, log_store=log_store, log_bytes=log_bytes) as homes:
            for number in range(len(newest.tables)):
                num_rows += _restore_table(chain, newest, number, homes, on_bytes)
    return RestoreSummary(step=newest.step, rows=num_rows, snapshots=len(chain))


def resized(newest: Snapshot, rows: Mapping[str, int]) -> Snapshot:
    """The snapshot as that of a pool whose tables have so many rows. Initial values stay those of the pool: of a row
    that nobody has touched, a function of its seed, table and number, or key."""
    names = [table.name for table in newest.tables]
    for name, num_rows in rows.items():
        if name not in names:
            raise ConfigError(f"{newest.path} has no table '{name}' (it has {', '.join(names)})")
        table = newest.tables[names.index(name)]
        least, most = max(1, table.max_keys), MAX_CAPACITY if table.keys else MAX_ROWS
        if not least <= num_rows <= most:
            why = f" (its max_keys are {table.max_keys})" if table.max_keys else ""
            raise ConfigError(f"table '{name}': {num_rows} rows; it can have between {least} and {most}{why}")

    def with_rows(tables: Sequence[_Table]) -> tuple[_Table, ...]:
        return tuple(replace(table, num_embeddings=rows.get(table.name, table.num_embeddings)) for table in tables)

    group = newest.group
    if group is not None:
        group = replace(group, tables=with_rows(group.tables))
    return replace(newest, tables=with_rows(newest.tables), group=group)


def made(directory: Path, newest: Snapshot, *, log_store: bool, log_bytes: int) -> AbstractContextManager[Homes]:
    """A new pool in `directory`, which is empty, with the snapshot's tables and dense state; it takes rows, and all of
    it is durable when the block ends well."""
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
        yield OneHome(core)
        write_dense(core, newest)
    finally:
        core.close()


def write_dense(core: _core.Pool, newest: Snapshot) -> None:
    """The snapshot's dense state, where it has one."""
    if (dense := newest.dense()) is not None:
        structure, tensors = dense
        data = np.frombuffer(tensors, np.uint8)
        parts = [(data.ctypes.data, len(data), 0)] if len(data) else []
        core.write_dense(structure, parts, len(data))


def _restore_table(
    chain: Sequence[Snapshot], newest: Snapshot, number: int, homes: Homes, on_bytes: Callable[[int], None] | None
) -> int:
    """newest: the chain's, with the numbers of rows that tables get."""
    total = 0
    move = move_of(chain, newest, number)
    for layer, newer in reversed(_layers(chain, number)):
        with ahead(_some_chunks(layer)) as found:
            for chunks in found:
                taken: defaultdict[_core.Pool, list[Rows]] = defaultdict(list)
                for rows in chunks:
                    are_newer = rows.are_among(newer)
                    kept = rows[~are_newer] if are_newer.any() else rows
                    if len(kept) and move is not None:
                        kept = move(kept)
                    for core, part in homes.of(number, kept):
                        taken[core].append(part)
                    total += len(kept)
                for core, parts in taken.items():
                    _import(core, number, parts)
                if on_bytes is not None:
                    on_bytes(sum(rows.num_bytes for rows in chunks))
    return total


def _layers(chain: Sequence[Snapshot], number: int) -> list[tuple[Iterator[Rows], NDArray[np.uint64]]]:
    """The files of a table's rows, the newest one first, each with the numbers of the rows that newer ones have."""
    newer = np.empty(0, np.uint64)
    layers = []
    files = [(snapshot, layer) for snapshot in chain for layer in LAYERS]
    for snapshot, layer in files:
        layers.append((snapshot.chunks(number, layer), newer))
        if (snapshot, layer) != files[-1]:
            newer = np.union1d(newer, snapshot.numbers(number, layer))
    return layers


def _some_chunks(chunks: Iterator[Rows]) -> Iterator[list[Rows]]:
    """Several at a time: home is written by long requests."""
    some: list[Rows] = []
    for rows in chunks:
        some.append(rows)
        if sum(part.num_bytes for part in some) >= _IMPORT_BYTES:
            yield some
            some = []
    if some:
        yield some


def _import(core: _core.Pool, number: int, parts: Sequence[Rows]) -> None:
    rows = np.concatenate([part.rows for part in parts])
    core.import_values(number, rows, np.concatenate([part.data.reshape(-1) for part in parts]))
