"""A rank of a run, as its TOML file describes it: from the configuration to a Trainer that is ready for its step.

Whatever cannot be, any rank's refusal, ends all ranks with the same error before anything is written.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch

from holdfast.data import Source
from holdfast.errors import ConfigError
from holdfast.files.config import differences, to_plain
from holdfast.group.group import Group
from holdfast.group.remote_rows import device_of_ranks
from holdfast.pools.directory import RecoveryMode
from holdfast.pools.proving_hook import refuse_group
from holdfast.run.assembly import open_trainer
from holdfast.run.sections import RunConfig
from holdfast.run.sources import open_source
from holdfast.train.trainer import Trainer

_OF_ONE_RANK = (
    "data.criteo.paths",
    "data.parquet.paths",
    "data.path:",
    "data.paths:",
    "validation.paths",
    "validation.path:",
    "pool.scratchpad_bytes",
)


def open_group_trainer(
    config: RunConfig,
    directory: Path,
    group: Group,
    *,
    source: Source | None = None,
    recovery: RecoveryMode = "exact",
    trust_after_reboot: bool = False,
) -> Trainer:
    """Makes the group's pool in `directory`, or opens and recovers it. All ranks call it at once.

    source: instead of the configuration's data; the same on all ranks.

    Raises ConfigError where ranks or pool differ in what must be the same, PoolBusy, PoolNotFound, Corrupted,
    GroupError.
    """
    refuse_group()
    try:
        _check_same_everywhere(group, config)
        device_of_ranks(config.device, group.roles)  # refuses before data and pool are looked at
        source = group.all_or_none(
            lambda: source or open_source(config.data), "the data", among_trainers=group.are_apart
        )
        return open_trainer(
            config, directory, recovery=recovery, trust_after_reboot=trust_after_reboot, ranks=group, source=source
        )
    except BaseException as error:
        group.notices.leave_failure(error)
        group.close()
        raise


def _check_same_everywhere(group: Group, config: RunConfig) -> None:
    mine = {
        "holdfast": version("holdfast"),
        "torch": torch.__version__,
        "memory_ranks": group.roles.memory_ranks,
        "config": to_plain(config),
    }
    everyones = group.gather(mine, "everyone's configuration", among_trainers=group.are_apart)
    for rank, theirs in enumerate(everyones):
        for name, value in everyones[0].items():
            if name == "config":
                changes = [line for line in differences(value, theirs[name]) if not line.startswith(_OF_ONE_RANK)]
                if changes:
                    raise ConfigError(f"rank {rank} has another configuration than rank 0: {changes[0]}")
            elif theirs[name] != value:
                raise ConfigError(f"rank {rank} has {name} {theirs[name]}, rank 0 has {value}: make them the same")
