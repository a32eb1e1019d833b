"""Making the pool of a group, and dealing its shards out anew when another number of ranks owns them.

Invariants
- The directory becomes a group's pool, or its next generation's, with one rename: of the keeper's `group.json`, when
  all that it names is durable.
- What is made before that lies beside a mark, which says that it is unpublished (core/layout/unpublished.h): the
  directory's on every storage, or the generation's. The mark is durable before the first part is made, and has gone
  from every storage before any rank trains.
- Only what is marked is ever removed. A generation that is not in force any more is marked first.
- Shards are dealt out anew over empty logs: everything is recovered to one step and merged home first. So no row is
  rewritten, and until the rename the old generation can still be opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from holdfast import _core
from holdfast.errors import ConfigError, Corrupted, PoolBusy, PoolExists, PoolNotFound
from holdfast.files.durable import make_directory
from holdfast.files.locks import FileLock, is_lock_shared, outlasting_readers, signed_by
from holdfast.group import manifest as manifests
from holdfast.group.group import Group
from holdfast.group.layout import TableShards, assign, check_num_shards, lay_out
from holdfast.group.manifest import Manifest, TableEntry, generation_directory
from holdfast.group.opening import open_together
from holdfast.pools.directory import SUPERBLOCK, Medium, pool_error, refusal_of, wants_log_store
from holdfast.pools.log_medium import LogMedium, directory_of_log, place_apart
from holdfast.pools.one_rank import OneRank
from holdfast.pools.opening_options import Mark, OpenOptions
from holdfast.pools.read_only import BEING_READ, new_log_bytes

DENSE_DIRECTORY = "dense"
LOCK_FILE = "lock"
_DENSE_LOG_BYTES = 1 << 20  # of a pool without rows

Measure = Callable[[Sequence[TableShards], int, int], list[int]]
"""Lookups of each shard, given the tables' layout, the number of shards and the samples consumed so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foundation:
    """What a new pool is made of. split_rows: larger tables are cut over all shards. scratchpad_bytes: of each process,
    by which a log's size is chosen where log_bytes is None."""

    tables: tuple[_core.TableSpec, ...]
    seed: int
    medium: Medium
    log_bytes: int | None
    row_checksums: bool
    num_shards: int
    split_rows: int
    scratchpad_bytes: int


class GroupLock:
    """Keeps other groups out, as long as the process lives."""

    def __init__(self, directory: Path) -> None:
        try:
            make_directory(directory)
            file = directory / LOCK_FILE
            self._lock = outlasting_readers(file, lambda: FileLock(file, os.O_RDWR | os.O_CREAT), BlockingIOError)
        except FileExistsError as error:
            raise PoolExists(f"{directory} is there already, and is no directory") from error
        except BlockingIOError:
            if is_lock_shared(directory / LOCK_FILE):
                raise PoolBusy(f"{directory} {BEING_READ}") from None
            raise PoolBusy(
                f"{directory} is open for writing by another group, whose rank 0 is process "
                f"{signed_by(directory / LOCK_FILE)}; wait for it, or stop it"
            ) from None
        except OSError as error:
            raise pool_error(error, f"locking {directory / LOCK_FILE}") from error
        self._lock.sign()

    def release(self) -> None:
        self._lock.release()


def found(
    directory: Path, group: Group, foundation: Foundation, measure: Measure, log: LogMedium | None = None
) -> Manifest:
    """Makes the pool: every owner its own part, one of them the dense states' too. log: of this rank's. All ranks call
    it, where `findings` says that none has a part of one that was published; rank 0 holds the lock."""

    log_store = _wants_log_store(directory, group, foundation.medium)

    def decide() -> str | None:
        if group.rank != 0:
            return None
        check_num_shards(foundation.num_shards, len(group.roles.owners))
        return _first_manifest(foundation, len(group.roles.owners), measure, log_store=log_store).to_json()

    text = group.all_or_none(decide, "the new pool's layout")
    said = group.broadcast(None if text is None else text.encode(), "the new pool's layout").decode()
    manifest = Manifest.from_json(said, "the new pool's layout")
    _clear(directory, group)
    group.all_or_none(lambda: make_parts(directory, group, manifest, log), "the new pool's parts")
    publish(directory, group, manifest)
    return manifest


def _wants_log_store(directory: Path, group: Group, medium: Medium) -> bool:
    """By the keeper's storage, of which nothing need be there yet."""

    def look() -> bool:
        there = next(path for path in (directory, *directory.absolute().parents) if path.is_dir())
        return wants_log_store(there, medium)

    mine = group.all_or_none(look, "everyone's storage")
    return bool(group.gather(mine, "everyone's storage")[group.roles.keeper])


def make_parts(directory: Path, group: Group, manifest: Manifest, log: LogMedium | None) -> None:
    """This rank's."""
    if group.is_owner:
        log_directory = directory_of_log(log, manifest.store == "log")
        writer = group.rank - group.roles.owners[0]
        make_writer(directory, manifest, writer, begin=(0, 0, 0), adopt=False, log_directory=log_directory)
    if group.rank == group.roles.keeper:
        make_dense(directory, manifest)


def _clear(directory: Path, group: Group) -> None:
    """Marks what is going to lie on every rank's storage as unpublished, and removes what was. One rank after another:
    several may have one storage."""

    def clear(turn: int) -> None:
        if turn != group.rank or not (group.is_owner or group.rank == 0 or _core.is_unpublished(str(directory))):
            return
        _make_directory(directory)
        _core.remove_unpublished_parts(str(directory))
        _core.mark_unpublished(str(directory))

    for turn in range(group.world_size):
        group.all_or_none(partial(clear, turn), "leftovers to be removed")


def publish(directory: Path, group: Group, manifest: Manifest) -> None:
    """The keeper's `group.json`, and one on every storage of its own that other ranks have under the same path."""

    def write() -> None:
        if group.rank == group.roles.keeper:
            manifests.write(directory, manifest)

    group.all_or_none(write, "the new pool's manifest")
    settle(directory, group, manifest)


def settle(directory: Path, group: Group, manifest: Manifest) -> None:
    """What the keeper's `group.json` published is published on every rank's storage. All of it is before any rank
    writes a part: a mark that outlived that would call trained rows unpublished."""

    def copy() -> None:
        has_part = directory.is_dir() and (group.is_owner or group.rank == 0 or manifests.exists(directory))
        if has_part and not (manifests.exists(directory) and manifests.read(directory) == manifest):
            manifests.write(directory, manifest)

    group.all_or_none(copy, "everyone's copy of the manifest")
    group.all_or_none(lambda: _unmark(directory, manifest), "the pool to be published everywhere")
    group.let_rank_0(lambda: retire_others(directory, manifest), "older generations to go")


def _unmark(directory: Path, manifest: Manifest) -> None:
    for marked in (directory, generation_directory(directory, manifest.generation)):
        if _core.is_unpublished(str(marked)):
            _core.mark_published(str(marked))


def deal_out_anew(
    directory: Path, manifest: Manifest, num_owners: int, options: OpenOptions, measure: Measure
) -> Manifest:
    """Recovers the pool and gives its shards to `num_owners` writers. By one process, which reaches all of them and
    holds the lock. Raises what opening a writer raises; the old generation is in force until this returns, and `settle`
    comes next."""
    check_num_shards(manifest.num_shards, num_owners)
    writers = [manifest.writer_directory(directory, writer) for writer in range(manifest.num_writers)]
    for number, writer in enumerate(writers):
        if not writer.is_dir():
            raise PoolNotFound(
                f"{writer} cannot be reached from here: to give shards to other ranks, rank 0 needs all of them; start "
                f"{manifest.num_writers} ranks that own rows, as before, or make the directories reachable"
            )
        manifest.check_part(directory, number)
    manifest.check_dense(directory / DENSE_DIRECTORY)
    _unmark(directory, manifest)
    retire_others(directory, manifest)
    if options.relaxed:
        from holdfast.group.relaxing import keep_newest_rows  # imports this module

        keep_newest_rows(directory, manifest, range(len(writers)), OneRank(), options, has_dense=True)
    pools, dense, mark = open_together(writers, directory / DENSE_DIRECTORY, options, OneRank())
    try:
        for pool in pools:
            pool.note_group_durable(mark[0])
            pool.empty_log()
    finally:
        for pool in [*pools, *([] if dense is None else [dense])]:
            pool.close()
    layout = shards_of_tables(manifest.tables, manifest.seed)
    load = measure(layout, manifest.num_shards, mark[1])
    log_directory = str(place_apart(writers[0]) or "")
    fresh = manifest.next_generation(assign(load, num_owners), load)
    generation = generation_directory(directory, fresh.generation)
    _make_directory(generation)
    _core.mark_unpublished(str(generation))
    for number in range(num_owners):
        make_writer(directory, fresh, number, begin=mark, adopt=True, log_directory=log_directory)
    manifests.write(directory, fresh)
    return fresh


def retire_others(directory: Path, manifest: Manifest) -> None:
    """Removes generations that are not in force: one that was never published, and those that `manifest` came after.
    Raises Corrupted where there is a later one, which was."""
    check_newest(directory, manifest)
    for path in generations_in(directory):
        if path == generation_directory(directory, manifest.generation):
            continue
        _core.mark_unpublished(str(path))  # a removal that dies goes on from there
        for writer in path.iterdir():
            if writer.is_dir() and writer.name.isdecimal():
                _remove_part(writer)
        _core.mark_published(str(path))
        with suppress(OSError):  # files that are no parts are somebody's
            path.rmdir()


def check_newest(directory: Path, manifest: Manifest) -> None:
    """Raises Corrupted where a generation after the manifest's was published: the manifest is an older copy."""
    parts = _core.pool_parts(str(directory)) if directory.is_dir() else []
    for path in generations_in(directory):
        has_parts = any(part.startswith(f"{path.name}/") for part in parts)
        is_later = int(path.name.removeprefix("writers-")) > manifest.generation
        if is_later and has_parts and not _core.is_unpublished(str(path)):
            raise Corrupted(
                f"{path} is a later generation than {manifests.MANIFEST} names ({manifest.generation}), which is an "
                f"older copy: put the newer {manifests.MANIFEST} back. Nothing was changed"
            )


def generations_in(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.glob("writers-*")) if path.name.removeprefix("writers-").isdecimal()]


def _remove_part(writer: Path) -> None:
    """A writer's directory, of a generation that is not in force."""
    (writer / SUPERBLOCK).unlink(missing_ok=True)
    _core.mark_unpublished(str(writer))
    _core.remove_unpublished_parts(str(writer))
    (writer / LOCK_FILE).unlink(missing_ok=True)
    _core.mark_published(str(writer))
    with suppress(OSError):
        writer.rmdir()


def make_writer(
    directory: Path, manifest: Manifest, writer: int, *, begin: Mark, adopt: bool, log_directory: str = ""
) -> None:
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
        format_version=manifest.part_version,
        log_directory=log_directory,
    )


def make_dense(directory: Path, manifest: Manifest, *, begin: Mark = (0, 0, 0)) -> None:
    """The pool of the dense states, as of the end of a step."""
    path = directory / DENSE_DIRECTORY
    _make_directory(path)
    _core.Pool.create(
        str(path),
        manifest.seed,
        _DENSE_LOG_BYTES,
        [],
        log_store=manifest.store == "log",
        begin=begin,
        group_uuid=bytes.fromhex(manifest.uuid),
        format_version=manifest.part_version,
    )


def _first_manifest(foundation: Foundation, num_owners: int, measure: Measure, *, log_store: bool) -> Manifest:
    entries = cut_tables(foundation.tables, num_shards=foundation.num_shards, split_rows=foundation.split_rows)
    load = measure(shards_of_tables(entries, foundation.seed), foundation.num_shards, 0)
    log_bytes = foundation.log_bytes or new_log_bytes(
        log_store, foundation.tables, foundation.scratchpad_bytes, num_writers=num_owners
    )
    return Manifest(
        uuid=manifests.new_uuid(),
        seed=foundation.seed,
        store="log" if log_store else "in_place",
        log_bytes=log_bytes,
        row_checksums=foundation.row_checksums and not log_store,
        tables=entries,
        generation=1,
        owner_of=tuple(assign(load, num_owners)),
        load=tuple(load),
    )


def cut_tables(tables: Sequence[_core.TableSpec], *, num_shards: int, split_rows: int) -> tuple[TableEntry, ...]:
    """A new pool's."""
    layout = lay_out([table.num_embeddings for table in tables], num_shards=num_shards, split_rows=split_rows)
    return tuple(
        replace(TableEntry.of(table), first_shard=shards.first_shard, table_shards=shards.num_shards)
        for table, shards in zip(tables, layout, strict=True)
    )


def shards_of_tables(tables: Sequence[TableEntry], seed: int) -> list[TableShards]:
    return [
        TableShards(table.first_shard, table.table_shards, (seed, number) if table.keys else None)
        for number, table in enumerate(tables)
    ]


def check_kept_as(directory: Path, manifest: Manifest, medium: Medium, *, row_checksums: bool) -> None:
    """Raises ConfigError where the pool keeps its rows in another way than is asked for."""
    is_log = manifest.store == "log"
    lacks_checksums = row_checksums and not is_log and not manifest.row_checksums
    if refusal := refusal_of(directory, medium, is_log, lacks_checksums=lacks_checksums):
        raise ConfigError(refusal)


def _make_directory(path: Path) -> None:
    try:
        make_directory(path)
    except OSError as error:
        raise pool_error(error, f"making {path}") from error
