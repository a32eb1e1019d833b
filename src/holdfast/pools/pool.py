"""A pool: the directory that holds everything a run needs to go on.

The protocol, the files and recovery are the core's (core/pool/pool.h); this is their Python face.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

from torch import Tensor, nn

from holdfast import _core
from holdfast.errors import ConfigError, HoldfastError, NonFiniteLoss, PoolNotFound, StateError, StepError
from holdfast.files.descriptors import fill_standard_descriptors
from holdfast.pools.behind import Behind
from holdfast.pools.dense_state import DenseState, commit_to, warn_of_lost_steps
from holdfast.pools.dial import MediumDial
from holdfast.pools.directory import (
    Medium,
    RecoveryMode,
    begins_a_group,
    below_home,
    check_options,
    check_vacant,
    describe_medium,
    exists,
    is_shared,
    make_directory_alone,
    refusal_of,
)
from holdfast.pools.log_medium import LogMedium, words_of_place
from holdfast.pools.machine import default_scratchpad_bytes, default_threads
from holdfast.pools.one_rank import OneRank
from holdfast.pools.opening_options import OpenOptions
from holdfast.pools.optim import OPTIMIZERS, RowOptimizerSpec
from holdfast.pools.proving_hook import pool_directory
from holdfast.pools.tables import EmbeddingBagConfig, features_of, find_tables, to_spec
from holdfast.pools.victim_cache import VictimCache

if TYPE_CHECKING:
    from holdfast.device.arrivals import ArrivingLoss
    from holdfast.device.options import DeviceConfig
    from holdfast.group.group import Group
    from holdfast.group.options import GroupOptions
    from holdfast.group.serving import Verb
    from holdfast.rows.collection import RowCollection
    from holdfast.rows.row_access import RowAccess
    from holdfast.slots.write_behind import WriteBehind

_ONE_RANK = OneRank()


class Pool(Behind):
    """Opens the pool in `directory` for writing and recovers it; a directory without one becomes a pool when the first
    tables are attached.

    directory: where the pool lies, ``~`` being the home directory; what that is decides what a durable step survives,
        see ``level``.
    medium: how a new pool keeps its rows. ``memory``: mapped and overwritten in place, with an undo log; level
        ``power`` on DAX memory, elsewhere ``process`` (survives any death of the process). ``block``: on an SSD, new
        versions appended to a row log, the rows of the coming batches in a scratchpad in DRAM; level ``power``.
        ``auto``: ``memory`` on DAX and tmpfs, ``block`` on anything else.
    seed: of a new pool; rows' initial values are a function of (seed, table, row).
    log_bytes: of a new pool's log. None: the undo log grows to what the batches need, a row log follows the tables.
    row_checksums: keep a checksum of every row of a new ``memory`` pool, and check it whenever the row is read; a
        ``block`` pool always does.
    scratchpad_bytes: DRAM for rows of a ``block`` pool; None: a quarter of the memory that this process may
        use, and for all ranks of a machine together half of it at most.
    scratchpad_nodes: NUMA nodes on which its rows lie, by turns; one may be a CXL device. None: on any.
    dense_interval: steps from one dense state to the next; 1 loses at most the step in flight. With more, flush last.
    recovery: ``exact`` rolls rows back to the newest dense state; ``relaxed`` keeps the newest rows beside it.
    trust_after_reboot: believe a ``process``-level pool that was open when the machine went down.
    synchronous: make nothing durable beside training; a commit returns when its step is durable. For comparison.
    dial: for measurements, a declared medium that the real one is made as slow as; ``level`` is the real one's.
    log: a medium of its own for the log of a ``block`` pool. ``level`` is that of the weaker medium.
    victims: memory, as a CXL device's, for rows of a ``block`` pool that leave the scratchpad for want of room.
    group: how several processes share a pool. Under torchrun, and in the directory of such a pool, what is made is a
        SharedPool; everywhere else this is of no effect. Under torchrun with one process it has to be given for that,
        and a pool that one process made without torchrun stays one.

    One thread at a time uses a pool and its collections: a row that another one reads while a step updates it may be of
    two steps. To serve beside training, read between steps, or from a copy (``holdfast snapshot``, ``export``).

    Raises PoolBusy, Corrupted, FormatMismatch, UntrustedPool, PoolReadOnly, PoolFull, PoolOfGroup. Nothing is made in a
    directory that holds parts of a pool.
    """

    # Of its Checkpoint, what may be ahead of the batch that trains; None once that is gone. A loader is among it, whose
    # threads know the pool: they end when nobody has the loader any more.
    kept: Callable[[], Mapping[str, Any] | None] = dict
    with_dense: tuple[int, ...] = ()  # steps, the newest that has a dense state among them; none before a resume

    def __new__(cls, directory: str | os.PathLike[str], *, group: GroupOptions | None = None, **_: Any) -> Self:
        """A SharedPool where one is wanted."""
        fill_standard_descriptors()
        _core.suggest_num_threads(default_threads())
        where = below_home(directory)
        asks = group is not None and (bool(group.memory_ranks_at) or begins_a_group(where))
        if cls is Pool and (is_shared(where) or asks):
            from holdfast.group.shared_pool import SharedPool  # imports this module

            return cast(Self, super().__new__(SharedPool))
        return super().__new__(cls)

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
    ) -> None:
        check_options(dense_interval, log_bytes, recovery, medium, scratchpad_bytes, scratchpad_nodes, seed)
        self.directory = pool_directory(directory)
        self.is_new = not exists(self.directory)
        if self.is_new:
            check_vacant(self.directory)
        self._seed, self._medium, self._log_bytes = seed, medium, log_bytes
        self._row_checksums, self._dense_interval = row_checksums, dense_interval
        self._options = OpenOptions(
            grow_log=log_bytes is None,
            scratchpad_bytes=default_scratchpad_bytes() if scratchpad_bytes is None else scratchpad_bytes,
            scratchpad_nodes=tuple(scratchpad_nodes),
            trust_after_reboot=trust_after_reboot,
            relaxed=recovery == "relaxed",
            synchronous=synchronous,
            dial=dial,
            log=log,
            victims=victims,
        )
        super().__init__()
        self._core: _core.Pool | None = None
        self.collections: list[RowCollection] = []
        if not self.is_new:
            self._open()

    def __getstate__(self) -> NoReturn:
        raise StateError(
            "a pool is neither copied nor pickled, one process has it: keep it outside of what is (a module, a data "
            "set), and give others its directory, to open when this one has closed it, or a `holdfast snapshot` of it"
        )

    @property
    def group(self) -> OneRank | Group:
        """The ranks that train this pool together."""
        return _ONE_RANK

    @property
    def part(self) -> tuple[int, int]:
        """Which part of every batch is this process's: (i, n) for the i-th of n, as a Loader takes it."""
        return (self.group.rank, self.group.num_trainers) if self.group.is_trainer else (0, 1)

    def _open(self) -> None:
        self._core = self._options.open(self.directory, dense_interval=self._dense_interval)
        lacks = self._row_checksums and not self.checks_rows
        if refusal := refusal_of(self.directory, self._medium, self.looks_forward, lacks_checksums=lacks):
            self._core.close()
            raise ConfigError(refusal)

    @property
    def looks_forward(self) -> bool:
        """Whether rows come through a scratchpad, so that it helps to announce batches (``collection.announce``)."""
        return bool(self.core.header["store"] == "log")

    @property
    def checks_rows(self) -> bool:
        """Whether every row has a checksum."""
        return self.looks_forward or bool(self.core.header["row_checksums"])

    @property
    def core(self) -> _core.Pool:
        if self._core is None:
            raise PoolNotFound(f"{self.directory} holds no pool yet: it is made when the first tables are attached")
        return self._core

    def open_rows(
        self, tables: Sequence[EmbeddingBagConfig], optimizer: RowOptimizerSpec, device: DeviceConfig
    ) -> RowAccess:
        """A collection's way to its rows; attaches its tables. Raises what `attach` does, OutOfDeviceMemory."""
        from holdfast.slots.access import open_access  # imports this module

        numbers, features = self.attach(tables, optimizer.kind, OPTIMIZERS), features_of(tables)
        return open_access(self, self.core.collection(numbers, features), numbers, features, device)

    def attach(self, tables: Sequence[EmbeddingBagConfig], optimizer: int, optimizers: Sequence[str]) -> list[int]:
        """The pool's numbers of `tables`; makes the pool with them where there is none yet.

        Raises ConfigError where a table is not the one that the pool was made with; names the field.
        """
        specs = [to_spec(table, optimizer) for table in tables]
        if self._core is None:
            self._create(specs)
        elif self._may_grow():
            names = {table.name for table in self._core.tables}
            if missing := [spec for spec in specs if spec.name not in names]:
                self._create([*self._core.tables, *missing])
        return find_tables(self.core.tables, specs, optimizers, f"the pool in {self.directory}")

    def _may_grow(self) -> bool:
        """Whether nothing has happened in the pool yet: it is made anew with the tables of a further collection."""
        if self.step > 0 or self.core.dense_state() is not None:
            return False
        reader = _core.Reader(str(self.directory))
        return not any(reader.touched_rows(table, 0, 1) for table in range(len(reader.tables)))

    def _create(self, specs: list[_core.TableSpec]) -> None:
        former = self._core
        if former is not None:
            self.drain()
            while self._before_closing:
                self._before_closing.pop()()
            former.close()
            _core.Pool.take_back(str(self.directory))
        try:
            self._make(specs)
        except BaseException:
            if former is not None:  # the collections that are there go on
                self._make(former.tables)
            raise
        finally:
            if former is not None and self.core is not former:
                self.core.take_keys(former)

    def _make(self, specs: list[_core.TableSpec]) -> None:
        make_directory_alone(self.directory)
        self._options.make(self.directory, specs, self._seed, self._medium, self._log_bytes, self._row_checksums)
        self._open()

    @property
    def recovered(self) -> _core.RecoveryReport:
        """What opening found and did."""
        return self.core.recovery

    @property
    def description(self) -> str:
        """What the pool lies on, and what its durable steps survive."""
        return describe_medium(self.core.medium, self.core.header, self._options.dial) + words_of_place(self.directory)

    @property
    def level(self) -> str:
        """``process`` or ``power``: what a committed step survives."""
        return self.core.level

    def write_behind(self) -> WriteBehind:
        """The steps that a device is ahead of the pool; from the first call on commits go through it."""
        if self._behind is None:
            from holdfast.slots.write_behind import WriteBehind

            self._behind = WriteBehind(lambda: self.core, self._dense_interval, fills_undo_log=not self.looks_forward)
        return self._behind

    @property
    def step(self) -> int:
        """The newest committed step; where rows are updated on a device, it may be on its way to the pool still."""
        return self.core.step if self._behind is None else self._behind.step

    @property
    def cursor(self) -> int:
        """Samples consumed by the steps that the pool has."""
        return self.core.cursor if self._behind is None else self._behind.reading.cursor

    @property
    def log_bytes_free(self) -> int:
        """That this process's log has left."""
        return self.core.log_bytes_free

    def traffic(self) -> dict[str, float] | None:
        """Rows and bytes since the pool was opened (core/step/row_backend.h); None where its rows are mapped."""
        return self.core.traffic() if self._behind is None else self._behind.reading.traffic

    def key_counts(self) -> dict[str, int] | None:
        """Keys that were admitted since the pool was opened, updates that were held back since, of keys that were not,
        and keys that were left behind; None where all of them train and stay."""
        return self.core.key_counts()

    def take_spans(self) -> list[tuple[str, str, float, float]]:
        """Stage, thread, begin and end of what the pool's own threads did; each is given once."""
        return self.core.take_spans()

    @property
    def retired_step(self) -> int:
        """The newest step that the pool is known to have."""
        return self.core.step if self._behind is None else self._behind.reading.step

    @property
    def dense_due(self) -> bool:
        """Whether the next commit wants the dense state."""
        return self.core.dense_due if self._behind is None else self._behind.dense_due

    @property
    def commits_behind(self) -> bool:
        """Whether steps are committed some time after `commit`: whatever is given to it must stay as it is until
        then."""
        return self._behind is not None

    @property
    def durable_step(self) -> int:
        """Exact recovery never goes below this step."""
        return self.core.durable_step

    @property
    def rows_durable_step(self) -> int:
        """Relaxed recovery never goes below this step."""
        return self.core.rows_durable_step

    def commit(self, cursor: int, dense: DenseState | None = None, loss: ArrivingLoss | None = None) -> int:
        """Ends the step that is under way and returns its number, without waiting until it is durable.

        cursor: samples consumed by committed steps. dense: the dense state at the end of the step. loss: the step does
        not count where it is not finite, nor where rows are not, or the gradient that they were updated with.
        Raises NonFiniteLoss: of this step, or where rows are updated on a device of an earlier one; the pool stays at
        the step before that.
        """
        if self._behind is not None:
            step = self._behind.issue(cursor, dense, loss)
        else:
            self._refuse_non_finite(loss)
            step = commit_to(self.core, cursor, dense)
        for collection in self.collections:
            collection.end_step()
        return step

    def _refuse_non_finite(self, loss: ArrivingLoss | None) -> None:
        """Raises NonFiniteLoss for the step that ends: of its loss, or the gradient that its rows were updated with."""
        if loss is not None:
            NonFiniteLoss.check(loss.value(), self.step + 1)
        for collection in self.collections:
            collection.check_update(self.step + 1)

    def average_gradients(self, parameters: nn.Module | Iterable[Tensor], beside: Tensor | None = None) -> None:
        """Makes the dense gradients the same on all ranks: their mean. Call it after the step's last backward, before
        gradients are clipped, unscaled or used. With one rank there is nothing to do.

        parameters: of the dense part, as the optimizers have them. beside: float32 values (a loss), averaged in place.
        """

    def serve_until(self, *last: Verb) -> None:
        """For ranks of a group that train nothing: see SharedPool."""
        raise StepError("this process trains: serve() is for ranks where pool.group.is_trainer is False")

    def serve(self) -> None:
        """For ranks of a group that train nothing: see SharedPool."""
        self.serve_until()

    def rest(self) -> None:
        """Says to ranks that serve that what was begun is over."""

    def dense_state(self) -> tuple[bytes, bytes] | None:
        """The newest dense state: JSON and bytes of tensors, as state_tree.unpack takes them; None in a new pool."""
        if self._behind is not None:
            self.drain()
        return self.core.dense_state()

    def write_dense(self, state: DenseState | None) -> None:
        """Writes the first dense state of a new pool; durable when it returns. Of other ranks than the first, None."""
        assert state is not None
        state.checked(self.step)
        self.core.write_dense(state.structure, state.tensors, state.tensors_bytes)

    def flush_with(self, collect: Callable[[], DenseState | None]) -> None:
        """Makes the newest step durable with its dense state, which is collected where it is not on its way yet."""
        self.flush()
        if self.durable_step < self.step:
            self.write_dense(collect())

    def watch_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Has them compared between ranks, as they are now."""

    def close(self) -> None:
        """Makes everything durable and marks the pool as cleanly closed; its memory and its files are given back, also
        where this raises. Safe to call twice; in a forked child, whose pool it is not, it does nothing."""
        if self._core is not None and not self._core.is_inherited:
            self._close(self._core.close)
            warn_of_lost_steps(self.step, self.with_dense)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except HoldfastError:
            if error is None:  # else that one says more than that the pool could not be closed after it
                raise
