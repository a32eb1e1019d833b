"""How several processes share a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from holdfast.errors import ConfigError
from holdfast.group.layout import check_num_shards

LONGEST_TIMEOUT = 1e6  # seconds: what sockets, torch's store and gloo count in stays within its numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """How several processes share a pool (``torchrun -m holdfast train``); one process alone does without.

    shards: into which a new pool is cut, a power of two, at least as many as there will ever be ranks that own rows.
    split_rows: tables with more rows are cut over all shards by a hash of the row, any other lies whole in one.
    timeout: seconds that a rank may keep the others waiting; 1,000,000 at most.
    shared_memory: ranks that are all on one machine hand each other ids, vectors and gradients through memory. Where it
    is off, or ranks are on several machines, these travel over gloo. The bits are the same.
    """

    shards: int = 64
    split_rows: int = 1 << 20
    timeout: float = 60.0
    shared_memory: bool = True

    def __post_init__(self) -> None:
        check_num_shards(self.shards, num_owners=1)
        if self.split_rows < 0:
            raise ConfigError(f"group.split_rows = {self.split_rows}; it must not be negative")
        if not self.timeout > 0.0:
            raise ConfigError(f"group.timeout = {self.timeout}; it must be positive")
        if self.timeout > LONGEST_TIMEOUT:
            raise ConfigError(f"group.timeout = {self.timeout}; it must be {LONGEST_TIMEOUT:,.0f} seconds at most")

    def with_ranks(self, *, memory_ranks: int = 0, memory_ranks_at: Sequence[str] = ()) -> GroupOptions:
        shared = {field.name: getattr(self, field.name) for field in fields(GroupConfig)}
        return GroupOptions(**shared, memory_ranks=memory_ranks, memory_ranks_at=memory_ranks_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions(GroupConfig):
    """The same, for a loop of one's own.

    memory_ranks: how many of the last ranks own all rows and train nothing (``pool.serve()``); 0: every rank trains and
    owns a share of the rows.
    memory_ranks_at: HOST:PORT of each memory rank that runs by itself (``holdfast serve``), in their order; then all
    ranks of the launcher train, or this process alone does.
    """

    memory_ranks: int = 0
    memory_ranks_at: Sequence[str] = ()

    def __post_init__(self) -> None:
        GroupConfig.__post_init__(self)
        if self.memory_ranks and self.memory_ranks_at:
            raise ConfigError("memory_ranks are started with the trainers, memory_ranks_at by themselves: name one")
