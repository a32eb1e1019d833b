"""Making the pool of a group, and dealing its shards out anew when another number of ranks owns them.

Invariants
- The directory becomes a group's pool, or its next generation's, with one rename: of `group.json`, when all that it
  names is durable. Whatever else lies there belongs to an attempt that did not end, and is removed by the next.
- Shards are dealt out anew over empty logs: everything is recovered to one step and merged home first. So no row is
  rewritten, and until the rename the old generation can still be opened.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BufferedRandom
from pathlib import Path

from holdfast import _core
from holdfast.durable import make_directory
from holdfast.errors import ConfigError, PoolBusy, PoolExists, PoolNotFound
from holdfast.pool import exists as is_plain_pool
from holdfast.pool import log_bytes_of, wants_log_store
from holdfast.sharding import manifest as manifests
from holdfast.sharding.group import Group
from holdfast.sharding.layout import TableShards, assign, check_num_shards, lay_out
from holdfast.sharding.manifest import Manifest, TableEntry, generation_directory, pool_error
from holdfast.sharding.opening import Alone, Mark, OpenOptions, open_together

DENSE_DIRECTORY = "dense"
LOCK_FILE = "lock"
_DENSE_LOG_BYTES = 1 << 20  # of a pool without rows

Measure = Callable[[Sequence[TableShards], int, int], list[int]]
"""Lookups of each shard, given the tables' layout, the number of shards and the samples consumed so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foundation:
    """What a new pool is made of. split_rows: larger tables are cut over all shards."""

    tables: tuple[_core.TableSpec, ...]
    seed: int
    medium: str
    log_bytes: int | None
    row_checksums: bool
    num_shards: int
    split_rows: int


class GroupLock:
    """Keeps other groups out, as long as the process lives."""

    def __init__(self, directory: Path) -> None:
        try:
            make_directory(directory)
            self._file: BufferedRandom = (directory / LOCK_FILE).open("a+b")
        except FileExistsError as error:
            raise PoolExists(f"{directory} is there already, and is no directory") from error
        except OSError as error:
            raise pool_error(error, f"locking {directory / LOCK_FILE}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise PoolBusy(f"{directory} is open for writing by another group; wait for it, or stop it") from None
        with suppress(OSError):  # only what is said to others that find it locked suffers
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}".encode())
            self._file.flush()

    def release(self) -> None:
        self._file.close()


def found(directory: Path, group: Group, foundation: Foundation, measure: Measure) -> Manifest:
    """Makes the pool: every owner its own part, rank 0 the rest. All ranks call it; rank 0 holds the lock."""

    def decide() -> str | None:
        if group.rank != 0:
            return None
        if is_plain_pool(directory):
            raise PoolExists(
                f"{directory} holds a pool that one process made, which is not cut into shards; train it without "
                "torchrun, or start a new pool"
            )
        check_num_shards(foundation.num_shards, len(group.roles.owners))
        _remove_leftovers(directory, keep=None)
        return _first_manifest(directory, foundation, len(group.roles.owners), measure).to_json()

    text = group.all_or_none(decide, "the new pool's layout")
    said = group.broadcast(None if text is None else text.encode(), "the new pool's layout").decode()
    manifest = Manifest.from_json(said, "the new pool's layout")

    def make() -> None:
        if group.is_owner:
            make_writer(directory, manifest, group.rank - group.roles.owners[0], begin=(0, 0, 0), adopt=False)
        if group.rank == 0:
            _make_dense(directory, manifest)

    group.all_or_none(make, "the new pool's parts")
    publish(directory, group, manifest)
    return manifest


def publish(directory: Path, group: Group, manifest: Manifest) -> None:
    """Rank 0's `group.json`, and one on every storage of its own that other ranks have under the same path."""

    def write() -> None:
        if group.rank == 0:
            manifests.write(directory, manifest)

    def copy() -> None:
        if not manifests.exists(directory) or manifests.read(directory) != manifest:
            manifests.write(directory, manifest)

    group.all_or_none(write, "the new pool's manifest")
    group.all_or_none(copy, "the new pool's manifest")


def deal_out_anew(
    directory: Path, manifest: Manifest, num_owners: int, options: OpenOptions, measure: Measure
) -> Manifest:
    """Recovers the pool and gives its shards to `num_owners` writers. By one process, which reaches all of them and
    holds the lock. Raises what opening a writer raises; the old generation is in force until this returns."""
    check_num_shards(manifest.num_shards, num_owners)
    _remove_leftovers(directory, keep=manifest.generation)
    writers = [manifest.writer_directory(directory, writer) for writer in range(manifest.num_writers)]
    for number, writer in enumerate(writers):
        if not writer.is_dir():
            raise PoolNotFound(
                f"{writer} cannot be reached from here: to give shards to other ranks, rank 0 needs all of them; start "
                f"{manifest.num_writers} ranks that own rows, as before, or make the directories reachable"
            )
        manifest.check_part(directory, number)
    pools, dense, mark = open_together(writers, directory / DENSE_DIRECTORY, options, Alone())
    try:
        for pool in pools:
            pool.note_group_durable(mark[0])
            pool.empty_log()
    finally:
        for pool in [*pools, *([] if dense is None else [dense])]:
            pool.close()
    layout = [TableShards(table.first_shard, table.table_shards) for table in manifest.tables]
    load = measure(layout, manifest.num_shards, mark[1])
    fresh = manifest.next_generation(assign(load, num_owners), load)
    for number in range(num_owners):
        make_writer(directory, fresh, number, begin=mark, adopt=True)
    manifests.write(directory, fresh)
    _remove_leftovers(directory, keep=fresh.generation)
    return fresh


def make_writer(directory: Path, manifest: Manifest, writer: int, *, begin: Mark, adopt: bool) -> None:
    """The pool of one writer, over shards that are new, or that are there as of the end of a step (`adopt`)."""
    path = manifest.writer_directory(directory, writer)
    _make_directory(path)
    _core.Pool.create(
        str(path),
        manifest.seed,
        manifest.log_bytes,
        [table.spec for table in manifest.tables],
        log_store=manifest.store == "log",
        row_checksums=manifest.row_checksums,
        begin=begin,
        num_shards=manifest.num_shards,
        owned=manifest.owned(writer),
        group_uuid=bytes.fromhex(manifest.uuid),
        adopt=adopt,
    )


def _make_dense(directory: Path, manifest: Manifest) -> None:
    path = directory / DENSE_DIRECTORY
    _make_directory(path)
    _core.Pool.create(str(path), manifest.seed, _DENSE_LOG_BYTES, [], log_store=manifest.store == "log")


def _first_manifest(directory: Path, foundation: Foundation, num_owners: int, measure: Measure) -> Manifest:
    rows = [table.num_embeddings for table in foundation.tables]
    layout = lay_out(rows, num_shards=foundation.num_shards, split_rows=foundation.split_rows)
    load = measure(layout, foundation.num_shards, 0)
    log_store = wants_log_store(directory, foundation.medium)  # type: ignore[arg-type]
    entries = (
        replace(TableEntry.of(table), first_shard=shards.first_shard, table_shards=shards.num_shards)
        for table, shards in zip(foundation.tables, layout, strict=True)
    )
    return Manifest(
        uuid=manifests.new_uuid(),
        seed=foundation.seed,
        store="log" if log_store else "in_place",
        log_bytes=log_bytes_of(log_store) if foundation.log_bytes is None else foundation.log_bytes,
        row_checksums=foundation.row_checksums and not log_store,
        tables=tuple(entries),
        generation=1,
        owner_of=tuple(assign(load, num_owners)),
        load=tuple(load),
    )


def check_kept_as(directory: Path, manifest: Manifest, medium: str, *, row_checksums: bool) -> None:
    """Raises ConfigError where the pool keeps its rows in another way than is asked for."""
    kept_as = "block" if manifest.store == "log" else "memory"
    if medium not in ("auto", kept_as):
        raise ConfigError(
            f"medium = {medium!r}, but the pool in {directory} was made as {kept_as!r}: a pool cannot change that, "
            "leave it out or start a new pool"
        )
    if row_checksums and manifest.store != "log" and not manifest.row_checksums:
        raise ConfigError(
            f"row_checksums = true, but the pool in {directory} was made without: a pool cannot change that, leave it "
            "out or start a new pool"
        )


def _make_directory(path: Path) -> None:
    try:
        make_directory(path)
    except OSError as error:
        raise pool_error(error, f"making {path}") from error


def _remove_leftovers(directory: Path, *, keep: int | None) -> None:
    """What attempts have left that did not end; with keep=None all parts, for there is no manifest that names any."""
    kept = None if keep is None else generation_directory(directory, keep)
    with suppress(FileNotFoundError):
        (directory / f"{manifests.MANIFEST}.new").unlink()
    for path in directory.glob("writers-*"):
        if path != kept:
            shutil.rmtree(path)
    if keep is None:
        for path in [*directory.glob("shard-*"), directory / DENSE_DIRECTORY]:
            if path.exists():
                shutil.rmtree(path)
