"""What slots of a device need of the pool that keeps their rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from holdfast import _core
from holdfast.slots.write_behind import WriteBehind


class SlotPool(Protocol):
    """A Pool, or an owner's part of the pool of a group (group/own_part.py)."""

    @property
    def core(self) -> _core.Pool: ...
    @property
    def directory(self) -> Path: ...
    @property
    def description(self) -> str:
        """What it is on, in words."""

    @property
    def looks_forward(self) -> bool: ...
    @property
    def step(self) -> int:
        """The newest step that was issued."""

    def write_behind(self) -> WriteBehind: ...
    def drain(self) -> None:
        """Waits until the pool has every issued step."""

    def before_closing(self, callback: Callable[[], object]) -> None:
        """Calls it once, before the pool lets go of its memory."""
