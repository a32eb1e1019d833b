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
from holdfast.errors import ConfigError
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
from holdfast.sharding.founding import Foundation, Measure
from holdfast.sharding.group import Group
from holdfast.sharding.joining import found_or_open
from holdfast.sharding.layout import TableShards, measure_load
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
    wanted = Foundation(
        tables=tuple(to_spec(table, config.embedding.spec().kind) for table in tables),
        seed=config.pool.seed,
        medium=config.pool.medium,
        log_bytes=config.pool.log_bytes,
        row_checksums=config.pool.row_checksums,
        num_shards=config.group.shards,
        split_rows=config.group.split_rows,
    )
    options = OpenOptions(
        grow_log=config.pool.log_bytes is None,
        scratchpad_bytes=config.pool.scratchpad_bytes or default_scratchpad_bytes(),
        trust_after_reboot=trust_after_reboot,
    )
    return found_or_open(
        directory,
        group,
        wanted,
        options,
        _measure(config, source),
        dense_interval=config.pool.dense_interval,
        on_phase=timings.lap,
    )


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
