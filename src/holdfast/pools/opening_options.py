"""How a pool is opened for writing, alone or as a part of a group's."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast import _core
from holdfast.errors import ConfigError, PoolBusy
from holdfast.files.locks import outlasting_readers
from holdfast.pools.dial import MediumDial
from holdfast.pools.directory import Medium, wants_log_store
from holdfast.pools.log_medium import LogMedium, directory_of_log, figures_of_log
from holdfast.pools.read_only import LOCK_FILE, new_log_bytes
from holdfast.pools.victim_cache import VictimCache

Mark = tuple[int, int, int]
"""Step, cursor, row_updates."""
InGroup = tuple[Callable[[Mark, Sequence[Mark]], Mark], Callable[[], None]]
"""What a part asks its group while it is opened (core/pool/pool.h)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """See holdfast.Pool. grow_log: the undo log becomes larger where batches want it."""

    grow_log: bool
    scratchpad_bytes: int
    scratchpad_nodes: tuple[int, ...] = ()
    trust_after_reboot: bool = False
    relaxed: bool = False
    synchronous: bool = False
    dial: MediumDial | None = None
    log: LogMedium | None = None
    victims: VictimCache | None = None

    def make(
        self,
        directory: Path,
        specs: Sequence[_core.TableSpec],
        seed: int,
        medium: Medium,
        log_bytes: int | None,
        row_checksums: bool,
    ) -> None:
        """A new pool in `directory`, which is there. Raises ConfigError, PoolFull, PoolReadOnly, PoolFailed."""
        log_store = wants_log_store(directory, medium)
        log_bytes = log_bytes or new_log_bytes(log_store, specs, self.scratchpad_bytes)
        _core.Pool.create(
            *(str(directory), seed, log_bytes, specs),
            log_store=log_store,
            row_checksums=row_checksums and not log_store,
            log_directory=self._log_directory_of_new(log_store),
        )

    def _log_directory_of_new(self, log_store: bool) -> str:
        """Of a new pool, whose rows are kept in a log store or in place; empty: beside them. Raises ConfigError."""
        if self.victims is not None and not log_store:
            raise ConfigError(
                "victims: this pool overwrites its rows in place, and has no scratchpad that they could leave: leave "
                "them out, or ask for medium = 'block'"
            )
        return directory_of_log(self.log, log_store)

    def open(self, directory: Path, *, dense_interval: int, group: InGroup | None = None) -> _core.Pool:
        """The pool in `directory`. Of a group's parts none is opened relaxed by itself. Raises what opening does."""
        if self.log is not None:
            self.log.check(directory)
        with suppress(PoolBusy):
            return outlasting_readers(
                directory / LOCK_FILE, lambda: self._open(directory, dense_interval, group), PoolBusy
            )
        # Perhaps by a pool that nobody has any more: its collections and it know each other, so it is there until then.
        # The threads of a loader know it, too: the first time they end, with the loader.
        gc.collect()
        gc.collect()
        return self._open(directory, dense_interval, group)

    def _open(self, directory: Path, dense_interval: int, group: InGroup | None) -> _core.Pool:
        return _core.Pool(
            str(directory),
            relaxed=self.relaxed and group is None,
            dense_interval=dense_interval,
            grow_log=self.grow_log,
            scratchpad_bytes=self.scratchpad_bytes,
            scratchpad_nodes=self.scratchpad_nodes,
            trust_after_reboot=self.trust_after_reboot,
            synchronous=self.synchronous,
            dial=None if self.dial is None else self.dial.figures,
            log_dial=figures_of_log(self.log),
            victims=None if self.victims is None else self.victims.figures,
            group=group,
        )
