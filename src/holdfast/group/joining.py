"""Making a group's pool, or opening the one that is there: what all ranks do together, until their parts are recovered.

Whatever cannot be, any rank's refusal, ends all ranks with the same error before anything is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from holdfast.errors import PoolNotFound
from holdfast.group.findings import find_pool
from holdfast.group.founding import (
    DENSE_DIRECTORY,
    Foundation,
    GroupLock,
    Measure,
    check_kept_as,
    deal_out_anew,
    found,
    publish,
    settle,
)
from holdfast.group.group import Group
from holdfast.group.layout import check_num_shards
from holdfast.group.manifest import Manifest
from holdfast.group.opening import KeptPart
from holdfast.group.pool_share import PoolShare
from holdfast.group.relaxing import keep_newest_rows
from holdfast.pools.opening_options import OpenOptions
from holdfast.pools.optim import OPTIMIZERS
from holdfast.pools.tables import find_tables


class Phases:
    """How long each phase took, in seconds, from when this is made."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._last = time.perf_counter()

    def __call__(self, phase: str) -> None:
        """Is over."""
        now = time.perf_counter()
        self._seconds[phase], self._last = now - self._last, now


def found_or_open(
    directory: Path,
    group: Group,
    wanted: Foundation,
    options: OpenOptions,
    measure: Measure,
    *,
    dense_interval: int,
    on_phase: Callable[[str], None] = lambda phase: None,
    kept: KeptPart | None = None,
) -> PoolShare:
    """This rank's share of the pool in `directory`, recovered. All ranks call it at once.

    wanted: of a new pool; one that is there must have the same tables, and keep its rows as is asked for. on_phase:
    told when a phase is over. kept: this rank's part, which stays open.

    Raises ConfigError, PoolBusy, PoolExists, PoolNotFound, Corrupted, GroupError.
    """
    lock: GroupLock | None = None

    def take_lock() -> None:
        nonlocal lock
        if kept is not None and options.relaxed:
            kept.close()  # it is opened for a look at what it holds
        if group.rank == 0:
            lock = GroupLock(directory)

    group.all_or_none(take_lock, "the pool's lock")
    with ExitStack() as on_error:
        if lock is not None:
            on_error.callback(lock.release)
        manifest = find_pool(directory, group)
        is_new = manifest is None
        rows_kept: int | None = None
        if manifest is None:
            manifest = found(directory, group, wanted, measure, options.log)
        else:
            find_tables(
                [table.spec for table in manifest.tables], wanted.tables, OPTIMIZERS, f"the pool in {directory}"
            )
            check_kept_as(directory, manifest, wanted.medium, row_checksums=wanted.row_checksums)
            num_owners = len(group.roles.owners)
            check_num_shards(manifest.num_shards, num_owners)
            if manifest.num_writers != num_owners:
                manifest = _deal_out_anew(directory, group, manifest, options, measure)
            _check_reachable(directory, group, manifest)
            settle(directory, group, manifest)
            if options.relaxed:
                writers = [group.rank - group.roles.owners[0]] if group.is_owner else []
                has_dense = group.rank == group.roles.keeper
                rows_kept = keep_newest_rows(directory, manifest, writers, group, options, has_dense=has_dense)
        on_phase("layout")
        pool = PoolShare.open(
            directory, group, manifest, options, dense_interval=dense_interval, lock=lock, is_new=is_new, kept=kept
        )
        pool.dense_state_of = rows_kept
        on_error.pop_all()
    on_phase("recovery")
    return pool


def _deal_out_anew(
    directory: Path, group: Group, manifest: Manifest, options: OpenOptions, measure: Measure
) -> Manifest:
    """By rank 0, however long its logs take; the others wait for as long as it lives."""

    def deal() -> Manifest:
        return deal_out_anew(directory, manifest, len(group.roles.owners), options, measure)

    fresh = group.let_rank_0(deal, "rank 0 to deal out the shards anew")
    said = group.broadcast(None if fresh is None else fresh.to_json().encode(), "the shards' new owners")
    dealt = Manifest.from_json(said.decode(), "rank 0's manifest")
    publish(directory, group, dealt)
    return dealt


def _check_reachable(directory: Path, group: Group, manifest: Manifest) -> None:
    def reach(path: Path, what: str) -> None:
        if not path.is_dir():
            raise PoolNotFound(
                f"{path}, {what} of the pool that rank {group.rank} has, cannot be reached from its machine: start the "
                "ranks where they were, or on storage that all of them share. If that storage is lost, so is the pool, "
                "for no part replaces another: put a copy of all parts back. Nothing was changed"
            )

    def look() -> None:
        if group.rank == group.roles.keeper:
            reach(directory / DENSE_DIRECTORY, "the dense states")
            manifest.check_dense(directory / DENSE_DIRECTORY)
        if group.is_owner:
            writer = group.rank - group.roles.owners[0]
            reach(manifest.writer_directory(directory, writer), "the part")
            manifest.check_part(directory, writer)

    group.all_or_none(look, "everyone's part of the pool")
