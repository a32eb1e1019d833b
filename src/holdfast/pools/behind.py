"""Behind: what a pool, or a rank's part of one, does where a device may be ahead of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from holdfast import _core

if TYPE_CHECKING:
    from holdfast.slots.write_behind import WriteBehind


class Behind:
    """A base class; `_behind` is None where no rows are updated on a device."""

    def __init__(self) -> None:
        self._behind: WriteBehind | None = None
        self._before_closing: list[Callable[[], object]] = []

    @property
    def core(self) -> _core.Pool:
        raise NotImplementedError

    def retire(self) -> bool:
        """Waits until the pool has one step more that a device is ahead of it; False where there is none."""
        return self._behind is not None and self._behind.retire()

    def drain(self) -> None:
        """Waits until the pool has every committed step: rows that were updated on a device have come back."""
        while self.retire():
            pass

    def flush(self) -> None:
        """Waits until every committed step is durable. Raises PoolFailed where a device's were lost on their way."""
        self.drain()
        if self._behind is not None:
            self._behind.check()
        self.core.flush()

    def before_closing(self, callback: Callable[[], object]) -> None:
        """Calls it once, before the pool lets go of its memory."""
        self._before_closing.append(callback)

    def _close(self, end: Callable[[], object]) -> None:
        """Calls `end` when the pool has every committed step, and nobody uses its memory."""
        with ExitStack() as stack:
            stack.callback(end)
            while self._before_closing:
                stack.callback(self._before_closing.pop())
            if self._behind is not None:
                stack.callback(self._behind.close)
            self.drain()
