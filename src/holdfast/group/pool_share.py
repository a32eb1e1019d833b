"""PoolShare: a rank's share of the pool that all ranks have as one.

Invariants
- A step is durable when the rows of every writer and the dense state are. Ranks tell each other how far they are with
  every step; each log is given up only to the newest step that all are known to have.
- There are two dense slots. The older one is overwritten only when the newer one's step is durable on every writer: so
  there is always one that all can go back to.
- What is decided from what ranks told (a dense state is due, everything waits until it is durable) is decided from
  the same numbers on all ranks.
- Rank 0 holds the lock of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from holdfast import _core
from holdfast.errors import GroupError, HoldfastError
from holdfast.group.dense_states import DenseStates
from holdfast.group.founding import DENSE_DIRECTORY, GroupLock
from holdfast.group.group import Group
from holdfast.group.manifest import Manifest
from holdfast.group.opening import KeptPart, open_together
from holdfast.group.own_part import OwnPart
from holdfast.pools.dense_state import DenseState
from holdfast.pools.directory import describe_medium
from holdfast.pools.opening_options import Mark, OpenOptions

_OF_PARAMETERS = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank tells the others with every step. rows: its newest durable step, dense: that of the dense states
    where it has them; -1: it has none to tell of. dense_crc: at the end of the last step (rank_states.checksums_of)."""

    rows: int = -1
    dense: int = -1
    log_is_low: int = 0
    stops: int = 0
    dense_crc: int = -1

    WIDTH = 5

    def numbers(self) -> list[int]:
        return [self.rows, self.dense, self.log_is_low, self.stops, self.dense_crc]


@dataclass(frozen=True, slots=True)
class OpenedPart:
    """How a part of the pool came to where the group is, and what it survives. rank: whose it is. was_closed: cleanly,
    or it stayed open, and had nothing to take back."""

    rank: int
    level: str
    was_closed: bool
    steps_back: int
    seconds: float

    @classmethod
    def of(cls, rank: int, pool: _core.Pool, *, stayed_open: bool) -> OpenedPart:
        report = pool.recovery
        steps_back = report.rows_step - report.step
        was_closed = report.clean or (stayed_open and steps_back == 0)
        return cls(rank, pool.level, was_closed, steps_back, report.seconds)


class PoolShare:
    """A rank's share of the group's pool, open for training."""

    def __init__(
        self,
        directory: Path,
        group: Group,
        manifest: Manifest,
        *,
        part: OwnPart | None,
        dense: _core.Pool | None,
        mark: Mark,
        dense_interval: int,
        lock: GroupLock | None,
        is_new: bool,
        parts: Sequence[OpenedPart],
    ) -> None:
        self.directory = directory
        self.group = group
        self.manifest = manifest
        self.part = part  # this rank's rows
        self.is_new = is_new
        self.parts = parts  # all ranks'
        self.step, self.cursor, self.row_updates = mark
        self.durable_step = self.step
        self._dense = DenseStates(group, dense)
        self._dense_interval = dense_interval
        self._dense_step = self.step  # of the newest dense state, durable or on its way
        self._rows_durable = self.step  # on every writer, as far as is known
        self._log_is_low = False
        self._updated = False  # in the step that is under way
        self._updates_crc = 0  # of the updates of rows since this was opened, whatever their order in a step
        self.dense_state_of: int | None = None  # an older step's lies beside the rows (relaxed recovery)
        self._lock = lock

    @classmethod
    def open(
        cls,
        directory: Path,
        group: Group,
        manifest: Manifest,
        options: OpenOptions,
        *,
        dense_interval: int,
        lock: GroupLock | None,
        is_new: bool,
        kept: KeptPart | None = None,
    ) -> PoolShare:
        """Opens every rank's pools and recovers them to one step. All ranks call it at once, and all raise what any of
        them meets: Corrupted, PoolBusy, PoolNotFound, UntrustedPool... kept: this rank's part, which may be open, and
        stays so when this is closed."""
        writers = [group.rank - group.roles.owners[0]] if group.is_owner else []
        parts = [manifest.writer_directory(directory, writer) for writer in writers]
        of_dense = directory / DENSE_DIRECTORY if group.rank == group.roles.keeper else None
        if kept is not None:
            kept.prepare((parts[0], manifest.uuid, options, dense_interval))
        members, dense, mark = open_together(parts, of_dense, options, group, dense_interval=dense_interval, kept=kept)
        opened = [pool for pool in (*members, dense) if pool is not None]
        stayed = None if kept is None else kept.pool
        mine = [asdict(OpenedPart.of(group.rank, pool, stayed_open=pool is stayed)) for pool in opened]
        if kept is not None:
            kept.keep(members[0])
        everyones = group.gather(mine, "how everyone's part was opened")
        return cls(
            directory,
            group,
            manifest,
            part=OwnPart(members[0], parts[0], is_kept=kept is not None) if members else None,
            dense=dense,
            mark=mark,
            dense_interval=dense_interval,
            lock=lock,
            is_new=is_new,
            parts=[OpenedPart(**part) for of_rank in everyones for part in of_rank],
        )

    @property
    def looks_forward(self) -> bool:
        """Whether rows come through a scratchpad."""
        return self.manifest.store == "log"

    @property
    def member(self) -> _core.Pool | None:
        """The rows that this rank owns."""
        return None if self.part is None else self.part.core

    def most_rows(self, tables: Sequence[int]) -> list[int]:
        """Of each of these tables (numbers), a bound on the rows that this rank owns."""
        writer = self.group.rank - self.group.roles.owners[0]
        return [self.manifest.most_rows(writer, table) for table in tables]

    def retire(self) -> bool:
        """Waits until this rank's part has one step more that a device is ahead of it; False where there is none."""
        return self.part is not None and self.part.retire()

    @property
    def retired_step(self) -> int:
        """The newest step that this rank's part is known to have."""
        return self.step if self.part is None else self.part.retired_step

    @property
    def level(self) -> str:
        """The weakest of all parts."""
        return "power" if all(part.level == "power" for part in self.parts) else "process"

    @property
    def pools(self) -> list[_core.Pool]:
        return [pool for pool in (self.member, self._dense.pool) if pool is not None]

    @property
    def description(self) -> str:
        """What this rank's part lies on and survives, and how the rows are shared."""
        roles = self.group.roles
        shared = f"{self.manifest.num_shards} shards, {len(roles.owners)} owners, {len(roles.trainers)} trainers"
        mediums = [describe_medium(pool.medium, pool.header) for pool in self.pools[:1]]
        way = [] if roles.world_size == 1 else [self.group.way]
        return ", ".join([*mediums, shared, *way])

    @property
    def recovered(self) -> str:
        """What opening found and did on all ranks, in words."""
        worst = max(self.parts, key=lambda part: part.steps_back)
        milliseconds = max(part.seconds for part in self.parts) * 1e3
        older = self.dense_state_of
        beside = "" if older is None else f", beside the dense state of step {older} (relaxed)"
        if all(part.was_closed and part.steps_back == 0 for part in self.parts):
            return f"{self.description}: closed cleanly at step {self.step}{beside}, opened in {milliseconds:.1f} ms"
        what = "1 step" if worst.steps_back == 1 else f"{worst.steps_back} steps"
        return (
            f"{self.description}: not closed cleanly; the newest step that all ranks have is {self.step}{beside}, rank "
            f"{worst.rank} rolled back {what} in {milliseconds:.1f} ms"
        )

    def dense_state(self) -> tuple[bytes, bytes] | None:
        """The dense state that training goes on with; None in a new pool. On all ranks."""
        return self._dense.load()

    def write_first_dense(self, state: DenseState | None) -> None:
        """A new pool's, before its first step: rank 0's. Durable when it returns, on any rank."""
        self._dense.write_first(state)
        self.group.barrier("the first dense state")

    # A step.

    def status(self, *, stops: bool, dense_crc: int) -> Status:
        """How far this rank is."""
        self._dense.arrive()
        return Status(
            rows=-1 if self.part is None else self.part.durable_step,
            dense=self._dense.durable_step,
            log_is_low=int(self.part is not None and self.part.log_is_low),
            stops=int(stops),
            dense_crc=dense_crc,
        )

    def take_note(self, statuses: Sequence[Status]) -> None:
        """Of how far all ranks are, in order of rank. Raises GroupError where their dense parameters differ, or how
        they update rows."""
        self._rows_durable = min(status.rows for status in statuses if status.rows >= 0)
        self._log_is_low = any(status.log_is_low for status in statuses)
        dense = statuses[self.group.roles.keeper].dense
        if dense <= self._rows_durable:
            self._note_durable(dense)
        crcs = {rank: status.dense_crc for rank, status in enumerate(statuses) if status.dense_crc >= 0}
        if odd := [rank for rank, crc in crcs.items() if crc & _OF_PARAMETERS != crcs[0] & _OF_PARAMETERS]:
            raise GroupError(
                f"step {self.step}: the dense parameters of rank {odd[0]} differ from rank 0's, which must never be: "
                "average their gradients before each step, and give all ranks one instruction set (where CPUs differ, "
                "ATEN_CPU_CAPABILITY=avx2) and one MKL_CBWR; else look at what that machine computes"
            )
        if odd := [rank for rank, crc in crcs.items() if crc != crcs[0]]:
            raise GroupError(
                f"step {self.step}: the row optimizers of rank {odd[0]} have other settings than rank 0's (lr, eps, "
                "betas, weight_decay), have taken other steps, or scaled gradients otherwise: each rank updates the "
                "rows that it owns, so they must be the same; a schedule that looks at a loss needs the mean over all "
                "ranks (average_gradients(..., beside=loss))"
            )

    @property
    def row_updates_done(self) -> tuple[int, int]:
        """How many there were, that of the step under way included; and a checksum of what those did that this life
        had."""
        return self.row_updates + self._updated, self._updates_crc

    def note_update(self, how: Sequence[float]) -> None:
        """Of rows, on all ranks: the step that is under way is one of the row optimizer, as writers count them. how:
        what must be the same on all ranks."""
        self._updated = True
        crc = _core.crc32c(0, np.array([self.step, *how], np.float64).view(np.uint8))
        self._updates_crc = (self._updates_crc + crc) % (1 << 32)

    @property
    def dense_is_due(self) -> bool:
        """Does the step that is under way end with a dense state? The same on all ranks."""
        return self._log_is_low or self.step + 1 - self._dense_step >= self._dense_interval

    def commit(self, cursor: int, dense: DenseState | None) -> int:
        """Ends the step on this rank; returns its number at once. dense: rank 0's, where it is due."""
        with_dense = self.dense_is_due
        if with_dense and self._rows_durable < self._dense_step:
            self.settle("rows to be durable")  # the older slot is the only one that all can go back to
        if self.part is not None:
            self.part.commit(cursor)
        self.step, self.cursor, self.row_updates = self.step + 1, cursor, self.row_updates + self._updated
        self._updated = False
        if with_dense:
            self._stage_dense(dense)
        if self._log_is_low:
            self.settle("room in the logs")
        return self.step

    def flush(self, collect: Callable[[], DenseState | None]) -> None:
        """Makes the newest step durable everywhere, its dense state included; waits. collect: rank 0's gives that,
        where it is not there yet; all trainers' are called then."""
        self.settle("rows to be durable")
        if self._dense_step < self.step:
            dense = collect()
            self._stage_dense(None if dense is None else dense.checked(self.step))
            self.settle("the dense state to be durable")

    def _stage_dense(self, dense: DenseState | None) -> None:
        self._dense.stage((self.step, self.cursor, self.row_updates), dense)
        self._dense_step = self.step

    def settle(self, what: str) -> None:
        """Waits until everything that was committed is durable, on every rank."""
        self._dense.arrive()
        if self.part is not None:
            self.part.flush()
        if self._dense.pool is not None:
            self._dense.pool.flush()
        self.group.barrier(what)
        self._rows_durable = self.step
        self._log_is_low = False
        self._note_durable(self._dense_step)

    def _note_durable(self, step: int) -> None:
        if step <= self.durable_step:
            return
        self.durable_step = step
        if self.part is not None:
            self.part.note_durable(step)
        if self._dense.pool is not None:
            self._dense.pool.note_group_durable(step)

    def close(self) -> None:
        """Marks this rank's pools as cleanly closed, but for a part that is kept open, which is durable then; waits for
        no other rank. Safe to call twice."""
        with ExitStack() as stack:
            if self._lock is not None:
                stack.callback(self._lock.release)
            if self.part is not None:
                stack.callback(self.part.close)
            stack.callback(self._dense.close)

    def abandon(self) -> None:
        """The same, quietly: for when another error is on its way."""
        self._dense.forget()
        with suppress(HoldfastError):
            self.close()
