"""Commands on a pool of several ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.cli.training import StopSignals
    from holdfast.pools.directory import RecoveryMode
    from holdfast.pools.pool import Pool
    from holdfast.run.sections import RunConfig
    from holdfast.train.trainer import Trainer


def is_of_group(pool: Path) -> bool:
    """Whether this process is one of a group: a launcher says so, or the pool is a group's."""
    from holdfast.group import manifest

    return "RANK" in os.environ or manifest.exists(pool)


def open_in_group(
    config: RunConfig,
    pool: Path,
    stop: StopSignals,
    memory_ranks: int,
    *,
    recovery: RecoveryMode,
    trust_after_reboot: bool,
) -> Trainer:
    """This process's part of the group that trains `pool`."""
    from holdfast.group.group import Group
    from holdfast.run.ranks import open_group_trainer

    group = Group.from_environment(memory_ranks=memory_ranks, timeout=config.group.timeout, stopping=stop.is_wanted)
    return open_group_trainer(config, pool, group, recovery=recovery, trust_after_reboot=trust_after_reboot)


def end_steps(pool: Pool) -> None:
    """No further step follows the one under way: this process's commits are not held up for the sake of later ones.
    From any thread."""
    from holdfast.group.shared_pool import SharedPool

    if not isinstance(pool, SharedPool):
        pool.core.end_steps()
    elif pool.opened.member is not None:
        pool.opened.member.end_steps()
