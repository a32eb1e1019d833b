"""OwnPart: a writer's part of the pool, and how far a device is ahead of it.

Invariants
- Where rows are updated on a device, verbs that change the part are called in the pool's thread of its WriteBehind, or
  while both of its threads are settled. How far it is may be read from any thread.
- What this rank tells the others of its part is what the part has, not what the device has: the group never counts on a
  step that is on its way.
"""

from __future__ import annotations

from pathlib import Path

from holdfast import _core
from holdfast.pools.behind import Behind
from holdfast.pools.directory import describe_medium
from holdfast.slots.write_behind import WriteBehind

# From what a rank says of its log to what all do about it: it says so with a batch's ids, which travel ahead.
_STEPS_TO_LISTEN = 2


class OwnPart(Behind):
    """See slots.slot_pool.SlotPool. core: the part in `directory`, open for training; it stays open where it
    `is_kept`."""

    def __init__(self, core: _core.Pool, directory: Path, *, is_kept: bool) -> None:
        super().__init__()
        self.directory = directory
        self._core = core
        self._is_kept = is_kept

    @property
    def core(self) -> _core.Pool:
        return self._core

    @property
    def description(self) -> str:
        return describe_medium(self.core.medium, self.core.header)

    def write_behind(self) -> WriteBehind:
        """The steps that a device is ahead of it; from the first call on commits go through it."""
        if self._behind is None:
            self._behind = WriteBehind(
                lambda: self.core, 1, fills_undo_log=not self.looks_forward, steps_to_spare=_STEPS_TO_LISTEN
            )
        return self._behind

    @property
    def looks_forward(self) -> bool:
        return bool(self.core.header["store"] == "log")

    @property
    def commits_behind(self) -> bool:
        return self._behind is not None

    @property
    def step(self) -> int:
        """The newest that was issued."""
        return self.core.step if self._behind is None else self._behind.step

    @property
    def retired_step(self) -> int:
        """The newest that the part is known to have."""
        return self.core.step if self._behind is None else self._behind.reading.step

    @property
    def durable_step(self) -> int:
        """The newest whose rows are durable here."""
        return self.core.rows_durable_step

    @property
    def log_is_low(self) -> bool:
        return self.core.log_is_low if self._behind is None else self._behind.log_is_low

    def traffic(self) -> dict[str, float] | None:
        """See Pool."""
        return self.core.traffic() if self._behind is None else self._behind.reading.traffic

    def commit(self, cursor: int) -> None:
        """Ends its step; the dense state is the group's."""
        if self._behind is None:
            self.core.commit(cursor, None, [], 0)
        else:
            self._behind.issue(cursor, None, None)

    def note_durable(self, step: int) -> None:
        """All ranks have it: what is kept to go back further is given up."""
        if self._behind is None:
            self.core.note_group_durable(step)
        else:
            self._behind.ask(lambda: self.core.note_group_durable(step))

    def close(self) -> None:
        """Marks it as cleanly closed, or where it is kept makes it durable."""
        self._close(self.core.flush if self._is_kept else self.core.close)
