"""What slots of a device need of the pool that keeps their rows."""

from __future__ import annotations

from typing import Protocol

from holdfast import _core
from holdfast.slots.write_behind import WriteBehind


class SlotPool(Protocol):
    """A Pool, or an owner's part of the pool of a group (group/own_part.py)."""

    @property
    def core(self) -> _core.Pool: ...
    @property
    def looks_forward(self) -> bool: ...
    @property
    def step(self) -> int:
        """The newest step that was issued."""

    def write_behind(self) -> WriteBehind: ...
    def drain(self) -> None:
        """Waits until the pool has every issued step."""
