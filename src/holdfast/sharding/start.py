"""A rank of a run, as its TOML file describes it: from the configuration to a GroupTrainer that is ready for its step.

Whatever cannot be, any rank's refusal, ends all ranks with the same error before anything is written.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import torch

from holdfast.config import differences, to_plain
from holdfast.data import Source
from holdfast.device.options import DeviceConfig
from holdfast.errors import ConfigError, PoolNotFound
from holdfast.optim import OPTIMIZERS
from holdfast.pool import default_scratchpad_bytes
from holdfast.proving.hook import refuse_group
from holdfast.run import (
    RunConfig,
    apply_hyperparameters,
    build_model,
    open_source,
    refuse_changes,
    saved_config,
    seed_generators,
)
from holdfast.sharding.findings import find_pool
from holdfast.sharding.founding import (
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
from holdfast.sharding.group import Group
from holdfast.sharding.layout import TableShards, check_num_shards, measure_load
from holdfast.sharding.manifest import Manifest, check_same_tables
from holdfast.sharding.opening import OpenOptions
from holdfast.sharding.pool import GroupPool
from holdfast.sharding.rows import ShardedRows
from holdfast.sharding.train import GroupTrainer
from holdfast.tables import normalize_all, to_spec


def open_group_trainer(
    config: RunConfig, directory: Path, group: Group, *, source: Source | None = None, trust_after_reboot: bool = False
) -> GroupTrainer:
    """Makes the group's pool in `directory`, or opens and recovers it. All ranks call it at once.

    source: instead of the configuration's data; the same on all ranks.

    Raises ConfigError where ranks or pool differ in what must be the same, PoolBusy, PoolNotFound, Corrupted,
    GroupError.
    """
    refuse_group()
    timings = _Timings()
    try:
        _check_same_everywhere(group, config)
        if config.device != DeviceConfig():
            raise ConfigError(
                f"device.kind = {config.device.kind!r}, device.rows = {config.device.rows!r}: several ranks train on "
                "their processors alone yet; leave [device] out, or train with one process"
            )
        source = group.all_or_none(lambda: source or open_source(config.data), "the data")
        seed_generators(config.train.seed)
        with ExitStack() as on_error:
            pool = _open_pool(config, directory, group, source, timings, trust_after_reboot=trust_after_reboot)
            on_error.callback(pool.abandon)
            trainer = _assemble(config, group, source, pool)
            timings.lap("dense_state")
            on_error.pop_all()
    except BaseException as error:
        group.tell_failure(error)
        group.close()
        raise
    trainer.opening_seconds = timings.seconds
    return trainer


class _Timings:
    """Where the time of an opening goes, in seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now


def _check_same_everywhere(group: Group, config: RunConfig) -> None:
    mine = {
        "holdfast": version("holdfast"),
        "torch": torch.__version__,
        "memory_ranks": group.roles.memory_ranks,
        "config": to_plain(config),
    }
    everyones = group.gather(mine, "everyone's configuration")
    for rank, theirs in enumerate(everyones):
        for name, value in everyones[0].items():
            if name == "config":
                changes = [line for line in differences(value, theirs[name]) if not line.startswith(_OF_ONE_RANK)]
                if changes:
                    raise ConfigError(f"rank {rank} has another configuration than rank 0: {changes[0]}")
            elif theirs[name] != value:
                raise ConfigError(f"rank {rank} has {name} {theirs[name]}, rank 0 has {value}: make them the same")


_OF_ONE_RANK = ("data.criteo.paths", "data.parquet.paths", "validation.paths", "pool.scratchpad_bytes")


def _open_pool(
    config: RunConfig,
    directory: Path,
    group: Group,
    source: Source,
    timings: _Timings,
    *,
    trust_after_reboot: bool,
) -> GroupPool:
    tables = normalize_all(config.embedding.tables(source.features))
    specs = [to_spec(table, config.embedding.spec().kind) for table in tables]
    options = OpenOptions(
        grow_log=config.pool.log_bytes is None,
        scratchpad_bytes=config.pool.scratchpad_bytes or default_scratchpad_bytes(),
        trust_after_reboot=trust_after_reboot,
    )
    lock: GroupLock | None = None

    def take_lock() -> None:
        nonlocal lock
        if group.rank == 0:
            lock = GroupLock(directory)

    group.all_or_none(take_lock, "the pool's lock")
    with ExitStack() as on_error:
        if lock is not None:
            on_error.callback(lock.release)
        manifest = find_pool(directory, group)
        is_new = manifest is None
        measure = _measure(config, source)
        if manifest is None:
            foundation = Foundation(
                tables=tuple(specs),
                seed=config.pool.seed,
                medium=config.pool.medium,
                log_bytes=config.pool.log_bytes,
                row_checksums=config.pool.row_checksums,
                num_shards=config.group.shards,
                split_rows=config.group.split_rows,
            )
            manifest = found(directory, group, foundation, measure)
        else:
            check_same_tables(manifest, specs, OPTIMIZERS)
            check_kept_as(directory, manifest, config.pool.medium, row_checksums=config.pool.row_checksums)
            num_owners = len(group.roles.owners)
            check_num_shards(manifest.num_shards, num_owners)
            if manifest.num_writers != num_owners:
                manifest = _deal_out_anew(directory, group, manifest, options, measure)
            _check_reachable(directory, group, manifest)
            settle(directory, group, manifest)
        timings.lap("layout")
        pool = GroupPool.open(
            directory,
            group,
            manifest,
            options,
            dense_interval=config.pool.dense_interval,
            lock=lock,
            is_new=is_new,
        )
        on_error.pop_all()
    timings.lap("recovery")
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
    def look() -> None:
        if group.rank == 0:
            manifest.check_dense(directory / DENSE_DIRECTORY)
        if not group.is_owner:
            return
        writer = group.rank - group.roles.owners[0]
        path = manifest.writer_directory(directory, writer)
        if not path.is_dir():
            raise PoolNotFound(
                f"{path}, the part of the pool that rank {group.rank} has, cannot be reached from its machine: start "
                "the ranks where they were, or on storage that all of them share. If that storage is lost, so is the "
                "pool, for no part replaces another: put a copy of all parts back. Nothing was changed"
            )
        manifest.check_part(directory, writer)

    group.all_or_none(look, "everyone's part of the pool")


def _measure(config: RunConfig, source: Source) -> Measure:
    rows = [feature.num_embeddings for feature in source.features]

    def measure(layout: Sequence[TableShards], num_shards: int, first_sample: int) -> list[int]:
        return measure_load(
            source,
            range(len(rows)),
            rows,
            layout,
            num_shards=num_shards,
            batch_size=config.train.batch_size,
            seed=config.train.seed,
            shuffle=config.train.shuffle,
            first_sample=first_sample,
        )

    return measure


def _assemble(config: RunConfig, group: Group, source: Source, pool: GroupPool) -> GroupTrainer:
    plain = to_plain(config)
    dense_state = pool.dense_state()
    saved = saved_config(dense_state)
    if saved is not None:
        refuse_changes(saved, plain)
    tables = normalize_all(config.embedding.tables(source.features))
    rows = ShardedRows(pool.manifest, group.roles, pool.member, tables, config.embedding.spec())
    model, dense_optimizer = build_model(config, source, rows.as_module())
    if group.is_trainer and group.rank != 0:
        seed_generators(config.train.seed + group.rank)  # the same parameters, other random numbers from here on
    trainer = GroupTrainer(
        config.train,
        pool=pool,
        rows=rows,
        model=model,
        dense_optimizer=dense_optimizer,
        source=source,
        extra={"config": plain},
    )
    try:
        trainer.recover(dense_state)
        if saved is not None:
            apply_hyperparameters(saved, plain, trainer)
    except BaseException:
        trainer.loader.close()
        raise
    return trainer
