"""SharedPool: the pool of a loop that runs in several processes at once, one rank each.

Invariants
- All ranks run the same program: they attach the same tables, and make the same calls in the same order. What they
  agree on is compared when the pool opens, and where it differs all of them end with the same error.
- The pool opens when it is first asked for something that is in it, once every table is attached: on the thread that
  made it, because all ranks open it together.
- A rank that ends with an error says so, and the others end with it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from holdfast import _core
from holdfast.device.options import DeviceConfig
from holdfast.errors import ConfigError, HoldfastError, StepError
from holdfast.group.agreement import check_same_everywhere
from holdfast.group.asking import ask
from holdfast.group.founding import Foundation, Measure
from holdfast.group.gradients import GradientAverage
from holdfast.group.group import Group, Pending
from holdfast.group.joining import Phases, found_or_open
from holdfast.group.layout import TableShards, expected_load
from holdfast.group.opening import KeptPart
from holdfast.group.options import GroupOptions
from holdfast.group.pool_share import PoolShare, Status
from holdfast.group.rank_states import checksums_of
from holdfast.group.remote_rows import RemoteRows, device_of_ranks
from holdfast.group.serving import Verb, message, serve_until
from holdfast.pools.dense_state import DenseState, warn_of_lost_steps
from holdfast.pools.dial import MediumDial
from holdfast.pools.directory import Medium, RecoveryMode, check_options
from holdfast.pools.log_medium import LogMedium
from holdfast.pools.machine import default_scratchpad_bytes
from holdfast.pools.opening_options import OpenOptions
from holdfast.pools.optim import RowOptimizerSpec
from holdfast.pools.pool import Pool
from holdfast.pools.proving_hook import pool_directory, refuse_group
from holdfast.pools.tables import EmbeddingBagConfig, to_spec
from holdfast.pools.victim_cache import VictimCache
from holdfast.slots.access import check_same_way

if TYPE_CHECKING:
    from holdfast.device.arrivals import ArrivingLoss

_MOST_MESSAGES = 8  # on their way to ranks that serve


class SharedPool(Pool):
    """``holdfast.Pool`` under torchrun, or in the directory of a pool that a group made. See Pool for the arguments.

    Every rank that trains takes its part of each batch (``part``), and calls `average_gradients` before it uses them;
    a rank that does not (``group.is_trainer``) calls `serve` where the others have their loop.

    ranks: instead of the environment's. measure: a shard's lookups, which decide its owner; else features count alike.

    Raises ConfigError where ranks ask for different things, GroupError where one of them dies or does not answer; and
    what Pool raises.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        seed: int = 0,
        medium: Medium = "auto",
        log_bytes: int | None = None,
        row_checksums: bool = False,
        scratchpad_bytes: int | None = None,
        scratchpad_nodes: Sequence[int] = (),
        dense_interval: int = 1,
        recovery: RecoveryMode = "exact",
        trust_after_reboot: bool = False,
        synchronous: bool = False,
        dial: MediumDial | None = None,
        log: LogMedium | None = None,
        victims: VictimCache | None = None,
        group: GroupOptions | None = None,
        ranks: Group | None = None,
        measure: Measure | None = None,
    ) -> None:
        refuse_group()
        check_options(dense_interval, log_bytes, recovery, medium, scratchpad_bytes, scratchpad_nodes, seed)
        self.directory, options = pool_directory(directory), group or GroupOptions()
        self.collections = []
        self.rows: list[RemoteRows] = []
        self._wanted = Foundation(
            tables=(),
            seed=seed,
            medium=medium,
            log_bytes=log_bytes,
            row_checksums=row_checksums,
            num_shards=options.shards,
            split_rows=options.split_rows,
            scratchpad_bytes=default_scratchpad_bytes() if scratchpad_bytes is None else scratchpad_bytes,
        )
        self._specs: list[_core.TableSpec] = []
        self._options = OpenOptions(
            grow_log=log_bytes is None,
            scratchpad_bytes=self._wanted.scratchpad_bytes,
            trust_after_reboot=trust_after_reboot,
            relaxed=recovery == "relaxed",
            synchronous=synchronous,
            dial=dial,
            log=log,
            victims=victims,
            scratchpad_nodes=tuple(scratchpad_nodes),
        )
        self._scratchpad_asked, self._dense_interval = scratchpad_bytes, dense_interval
        self._kept: KeptPart | None = None  # this rank's, of a process that outlives its trainers
        self._opened: PoolShare | None = None
        self._process, self._thread, self._dense_crc = os.getpid(), threading.get_ident(), -1
        self._messages: deque[tuple[Tensor, Pending]] = deque()
        self._is_closed = self._stop_is_wanted = self._is_released = False  # released: rank 0 said that it closes
        self._measure = measure or self._expect
        self.opening_seconds: dict[str, float] = {}
        self._group = ranks or Group.from_environment(options)
        self._average = GradientAverage(self._group)

    # Opening.

    @property
    def group(self) -> Group:
        return self._group

    def open_rows(
        self, tables: Sequence[EmbeddingBagConfig], optimizer: RowOptimizerSpec, device: DeviceConfig
    ) -> RemoteRows:
        device = device_of_ranks(device, self._group.roles)
        check_same_way(self, device)
        if self._opened is not None:
            raise StepError(
                "a collection is made after the pool of several ranks was opened: make all of them before its first use"
            )
        for table in tables:
            if any(table.name == spec.name for spec in self._specs):
                raise ConfigError(f"table '{table.name}' is declared by two collections")
            self._specs.append(to_spec(table, optimizer.kind))
        self.rows.append(RemoteRows(self, len(self.rows), tables, device))
        return self.rows[-1]

    @property
    def opened(self) -> PoolShare:
        """This rank's share; the first time, all ranks open the pool together."""
        if self._opened is None:
            self.check_open()
            self._group.sum_on_devices(self.rows[0].device, self.rows[0].config.all_reduce)
            self._opened = self._open_together()
            for rows in self.rows:
                rows.bind()
        return self._opened

    def check_open(self) -> None:
        """Raises StepError where the pool is not open, and cannot be opened from here."""
        if self._opened is not None:
            return
        if self._is_closed:
            raise StepError(f"the pool in {self.directory} is closed")
        if not self.rows:
            raise StepError(f"the pool in {self.directory} is opened once its first collection is made")
        if threading.get_ident() != self._thread:
            raise StepError(
                "a batch is planned in another thread before the pool of several ranks is open: make the Checkpoint "
                "and call resume() before the loader's first batch"
            )

    def _open_together(self) -> PoolShare:
        wanted = replace(self._wanted, tables=tuple(self._specs))
        tables = [rows.tables for rows in self.rows]
        ask(self._group, wanted, self._options, tables, self._scratchpad_asked, self._dense_interval)
        check_same_everywhere(self._group, wanted, self._options, self._dense_interval)
        return found_or_open(
            self.directory,
            self._group,
            wanted,
            self._options,
            self._measure,
            dense_interval=self._dense_interval,
            on_phase=Phases(self.opening_seconds),
            kept=self._kept,
        )

    def _expect(self, layout: Sequence[TableShards], num_shards: int, _: int) -> list[int]:
        features = [len(table.feature_names) for rows in self.rows for table in rows.tables]
        return expected_load(features, layout, num_shards)

    # What it is.

    @property
    def is_new(self) -> bool:  # type: ignore[override]
        return self.opened.is_new

    @property
    def core(self) -> _core.Pool:
        raise StepError(
            "a pool of several ranks is no single pool: ask the pool itself, or this rank's `opened.member`"
        )

    @property
    def looks_forward(self) -> bool:
        return self.opened.looks_forward

    @property
    def checks_rows(self) -> bool:
        return self.opened.looks_forward or self.opened.manifest.row_checksums

    @property
    def description(self) -> str:
        return self.opened.description

    @property
    def level(self) -> str:
        """The weakest of all parts."""
        return self.opened.level

    @property
    def recovered(self) -> Any:
        """What opening found and did on all ranks, in words."""
        return self.opened.recovered

    # A step.

    @property
    def step(self) -> int:
        return self.opened.step

    @property
    def cursor(self) -> int:
        return self.opened.cursor

    @property
    def retired_step(self) -> int:
        return self.opened.retired_step

    @property
    def log_bytes_free(self) -> int:
        return 0 if self.opened.member is None else self.opened.member.log_bytes_free

    def traffic(self) -> dict[str, float] | None:
        return None if self.opened.part is None else self.opened.part.traffic()

    def key_counts(self) -> dict[str, int] | None:
        """Of this rank's shards."""
        return None if self.opened.member is None else self.opened.member.key_counts()

    def take_spans(self) -> list[tuple[str, str, float, float]]:
        return [] if self.opened.member is None else self.opened.member.take_spans()

    @property
    def durable_step(self) -> int:
        return self.opened.durable_step

    @property
    def rows_durable_step(self) -> int:
        return self.opened.durable_step

    @property
    def dense_due(self) -> bool:
        return self.opened.dense_is_due

    @property
    def commits_behind(self) -> bool:
        return any(rows.config.way != "near_memory" for rows in self.rows)

    def status(self) -> Status:
        """How far this rank is."""
        self._group.notices.step = self.opened.step + 1
        return self.opened.status(stops=self._group.stopping(), dense_crc=self._dense_crc)

    def take_note(self, statuses: Sequence[Status]) -> None:
        """Of how far all ranks are. Raises GroupError where they differ in what must be the same."""
        self.opened.take_note(statuses)
        self._stop_is_wanted = self._stop_is_wanted or any(status.stops for status in statuses)

    def wants_to_stop(self) -> bool:
        """Whether a rank was asked to stop: the same on all ranks between two steps."""
        return self._stop_is_wanted

    def average_gradients(self, parameters: nn.Module | Iterable[Tensor], beside: Tensor | None = None) -> None:
        self._average.take(parameters, [collection.anchor for collection in self.collections], beside)

    def watch_parameters(self, parameters: Sequence[Tensor]) -> None:
        optimizers, updates = [collection.optimizer for collection in self.collections], self.opened.row_updates_done
        self._dense_crc = checksums_of(parameters, optimizers, updates) if self._group.is_trainer else -1

    def dense_state(self) -> tuple[bytes, bytes] | None:
        """On all ranks, which call it together."""
        return self._after_telling(Verb.DENSE_STATE).dense_state()

    def write_dense(self, state: DenseState | None) -> None:
        self._after_telling(Verb.FIRST_DENSE).write_first_dense(None if state is None else state.checked(0))

    def commit(self, cursor: int, dense: DenseState | None = None, loss: ArrivingLoss | None = None) -> int:
        self._refuse_non_finite(loss)
        if self._group.rank == 0 and dense is None and self.dense_due:
            raise StepError("a pool of several ranks needs a dense state to go back to: commit with a Checkpoint")
        ready = None if dense is None else dense.checked(self.step + 1)  # before others hear of it: this rank is named
        self.tell(Verb.COMMIT, cursor)
        step = self.opened.commit(cursor, ready)
        for collection in self.collections:
            collection.end_step()
        return step

    def flush(self) -> None:
        """Waits until all that was committed is durable on all ranks."""
        self.tell(Verb.SETTLE)
        self.opened.settle("rows to be durable")

    def flush_with(self, collect: Callable[[], DenseState | None]) -> None:
        self.tell(Verb.FLUSH)
        self.opened.flush(collect)

    def retire(self) -> bool:
        return self.opened.retire()

    # Ranks that only own rows.

    def serve(self) -> None:
        """Does a memory rank's half of the training, until the trainers close the pool. Raises GroupError."""
        self.serve_until(Verb.CLOSE)

    def serve_until(self, *last: Verb) -> None:
        """The same, until rank 0 has done one of `last`."""
        if self._group.is_trainer:
            super().serve_until(*last)
        _ = self.opened
        self._is_released = serve_until(self, *last) is Verb.CLOSE

    def rest(self) -> None:
        self.tell(Verb.REST)

    def tell(self, verb: Verb, *numbers: float) -> None:
        """Rank 0's word to the ranks that serve, of the call that it is about to make."""
        if self._group.rank != 0 or not self._group.roles.memory_ranks:
            return
        said = message(verb, *numbers)
        self._messages.append((said, self._group.tell_memory_ranks(said, "ranks that own rows to listen")))
        while len(self._messages) > _MOST_MESSAGES:
            self._messages.popleft()[1].wait()

    def _after_telling(self, verb: Verb) -> PoolShare:
        """This rank's share, when memory ranks without a script of their own know what comes, or that serve by now."""
        opened = self.opened
        if self._group.are_apart or self._messages:
            self.tell(verb)
        return opened

    # The end.

    def close(self) -> None:
        """Makes everything durable, marks this rank's parts as cleanly closed, and leaves the group. Safe to call
        twice; in a forked child, whose pool it is not, it does nothing."""
        opened = self._opened
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        with ExitStack() as stack:
            stack.callback(self._leave)
            if opened is not None:
                stack.callback(opened.close)
                if self._group.is_trainer:
                    for rows in self.rows:
                        rows.finish()
                elif not self._is_released:
                    serve_until(self, Verb.CLOSE)
                self.tell(Verb.CLOSE)
                while self._messages:
                    self._messages.popleft()[1].wait()
                self._group.notices.leave_end(opened.step)
                warn_of_lost_steps(opened.step, self.with_dense if self._group.rank == 0 else ())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._is_closed and os.getpid() == self._process:
            self._is_closed = True
            self._group.notices.leave_failure(error)
            with suppress(HoldfastError):
                if self._opened is not None:
                    self._opened.abandon()
            self._leave()

    def _leave(self) -> None:
        for rows in self.rows:
            rows.forget()
        self._messages.clear()
        self._group.close()
