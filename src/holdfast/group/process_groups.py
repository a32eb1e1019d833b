"""The process groups of torch.distributed that a Group has, and how they end.

Invariants
- The default group is the script's own, or the first Group of the process makes it. Later ones lie beside it: a program
  may have several pools open. The last of them to be closed ends it, whichever that is.
- What ends waits for nothing that is on its way and will never come.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch.distributed as dist


class DefaultGroup:
    """This process's, where a Group made it."""

    def __init__(self) -> None:
        self._made: Any = None
        self._users = 0  # Groups that are open

    def enter(self, make: Callable[[], None]) -> Any:
        """One more uses it. make: where there is no default group. None: it is the script's own."""
        if not dist.is_initialized():
            make()
            self._made, self._users = dist.group.WORLD, 0
        if dist.group.WORLD is not self._made:
            return None
        self._users += 1
        return self._made

    def leave(self, entered: Any) -> bool:
        """Whether who entered it is the last to leave it, and has to end it."""
        if entered is None or entered is not self._made:
            return False
        self._users -= 1
        if self._users:
            return False
        self._made = None
        return True


default_group = DefaultGroup()
_kept: list[tuple[float, Any]] = []  # process groups that failed, and when nothing of theirs is on its way any more


def end(groups: Iterable[Any], entered: Any, *, have_failed: bool, timeout: float) -> None:
    """Ends `groups`, and the default one with them where nobody else uses it. entered: what `enter` returned."""
    is_last = default_group.leave(entered)
    known = dist.distributed_c10d._world.pg_map  # a script may have destroyed all that there were
    ours = [group for group in groups if group in known]
    if have_failed:
        for group in [*ours, *([] if entered is None else [entered])]:
            _keep(group, timeout)
        for group in [None] if is_last else ours:
            with suppress(RuntimeError):
                dist.distributed_c10d._abort_process_group(group)
        return
    for group in [None] if is_last else ours:
        dist.destroy_process_group(group)


def _keep(process_group: Any, timeout: float) -> None:
    """Gloo's destructor waits until what is on its way has timed out, even when the interpreter exits."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
    _kept.append((time.monotonic() + 2 * timeout, process_group))


def let_go_of_failed() -> None:
    """Of the threads and connections of groups that failed so long ago that nothing has to be waited for."""
    while _kept and _kept[0][0] < time.monotonic():
        _, process_group = _kept.pop(0)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(process_group))
