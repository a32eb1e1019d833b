"""Commands on a pool of several ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.options import PoolArgument

if TYPE_CHECKING:
    from holdfast.cli.stop_signals import StopSignals
    from holdfast.pools.directory import RecoveryMode
    from holdfast.pools.pool import Pool
    from holdfast.run.sections import RunConfig
    from holdfast.train.trainer import Trainer


def is_of_group(pool: Path, memory_ranks_at: list[str]) -> bool:
    """Whether this process is one of a group: a launcher says so, memory ranks are named, or the pool is a group's."""
    from holdfast.group import manifest

    return "RANK" in os.environ or bool(memory_ranks_at) or manifest.exists(pool)


def open_in_group(
    config: RunConfig,
    pool: Path,
    stop: StopSignals,
    memory_ranks: int,
    memory_ranks_at: list[str],
    *,
    recovery: RecoveryMode,
    trust_after_reboot: bool,
) -> Trainer:
    """This process's part of the group that trains `pool`. Raises typer.Exit where it is stopped before it has one."""
    from holdfast.errors import GroupError
    from holdfast.group.group import Group
    from holdfast.run.ranks import open_group_trainer

    options = config.group.with_ranks(memory_ranks=memory_ranks, memory_ranks_at=memory_ranks_at)
    try:
        group = Group.from_environment(options, stopping=stop.is_wanted)
        return open_group_trainer(config, pool, group, recovery=recovery, trust_after_reboot=trust_after_reboot)
    except GroupError as error:
        if stop.number is None:
            raise
        print(f"holdfast: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(128 + stop.number) from None


def end_steps(pool: Pool) -> None:
    """No further step follows the one under way: this process's commits are not held up for the sake of later ones.
    From any thread."""
    from holdfast.group.shared_pool import SharedPool

    if not isinstance(pool, SharedPool):
        pool.core.end_steps()
    elif pool.opened.member is not None:
        pool.opened.member.end_steps()


def serve(
    pool: PoolArgument,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where trainers find it, the only address that it listens at.")
    ],
    memory_rank: Annotated[
        str, typer.Option(metavar="I/M", help="Which of the pool's memory ranks it is, from 1, of how many.")
    ] = "1/1",
    log_directory: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A directory on a medium of its own for the row log of a new part, as pool.log.directory.",
        ),
    ] = None,
    scratchpad_node: Annotated[
        list[int] | None, typer.Option(help="A NUMA node on which the scratchpad's rows lie; may be repeated.")
    ] = None,
    victim_bytes: Annotated[
        int | None, typer.Option(min=1, help="Memory for rows that leave the scratchpad, as pool.victims.bytes.")
    ] = None,
    victim_directory: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where that memory is: on a DAX file system or tmpfs, as a CXL device's."),
    ] = None,
) -> None:
    """Own a share of a pool's rows for trainers that come and go: a memory rank that outlives them.

    Trainers are started with train --memory-ranks-at HOST:PORT (of all memory ranks, in their order), one or many. When
    they have ended or died, it waits for the next ones, with its part of the pool open and its rows in memory.

    Stop it with Ctrl-C or SIGTERM: trainers finish the step, make it durable and end; then the part is closed cleanly.
    Whoever reaches the address can train the pool: let it be one that only trainers reach.
    """
    from holdfast.cli.stop_signals import StopSignals
    from holdfast.group.outliving import MemoryRank, OwnMedia
    from holdfast.pools.log_medium import LogMedium
    from holdfast.pools.victim_cache import VictimCache
    from holdfast.state.reproducibility import keep_freed_memory

    keep_freed_memory()
    if victim_directory is not None and victim_bytes is None:
        raise typer.BadParameter("say how much of it with --victim-bytes", param_hint="--victim-directory")
    number, _, memory_ranks = memory_rank.partition("/")
    if not (number.isdecimal() and memory_ranks.isdecimal()):
        raise typer.BadParameter(f"{memory_rank!r} is no I/M, as in 1/2", param_hint="--memory-rank")
    with StopSignals() as stop:
        served = MemoryRank(
            pool,
            number=int(number),
            memory_ranks=int(memory_ranks),
            address=listen,
            media=OwnMedia(
                log=None if log_directory is None else LogMedium(directory=log_directory),
                scratchpad_nodes=scratchpad_node or (),
                victims=None if victim_bytes is None else VictimCache(bytes=victim_bytes, directory=victim_directory),
            ),
            stopping=stop.is_wanted,
            say=lambda words: print(words, flush=True),  # noqa: T201
        )
        with stop.calling(served.end_steps):
            served.run()
    raise typer.Exit(128 + (stop.number or 0))
