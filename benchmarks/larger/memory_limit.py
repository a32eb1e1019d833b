"""A memory control group of a limited size, for the process that asks for it. Linux, as root; versions 1 and 2.

What the process had before it joined is not counted: the interpreter, PyTorch and whatever others read first. Pages of
the page cache that it brings in afterwards are.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


def _is_v1() -> bool:
    return (_V1 / "cgroup.procs").exists()


def _own_group() -> Path:
    """Where this process is now."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if _is_v1() and "memory" in controllers.split(","):
            found = _V1 / path.lstrip("/")
            return found if found.exists() else _V1  # within a container the path may be the host's
        if not _is_v1() and controllers == "":
            found = _V2 / path.lstrip("/")
            return found if found.exists() else _V2
    return _V1 if _is_v1() else _V2


class MemoryLimit:
    """Joins a new group that may use ``limit_bytes``; ``leave`` ends that. Raises OSError where it is not allowed."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._parent = _own_group()
        self._group = self._parent / f"holdfast-bench-{os.getpid()}"
        if not _is_v1():
            (self._parent / "cgroup.subtree_control").write_text("+memory")
        self._group.mkdir(exist_ok=True)
        (self._group / ("memory.limit_in_bytes" if _is_v1() else "memory.max")).write_text(str(limit_bytes))
        if not _is_v1():
            (self._group / "memory.swap.max").write_text("0")
        (self._group / "cgroup.procs").write_text(str(os.getpid()))

    def facts(self) -> dict[str, int]:
        """The limit, the most that was used, and how often the limit was met."""
        if _is_v1():
            peak, met = self._group / "memory.max_usage_in_bytes", self._group / "memory.failcnt"
            times_met = int(met.read_text())
        else:
            peak, met = self._group / "memory.peak", self._group / "memory.events"
            times_met = next((int(line.split()[1]) for line in met.read_text().splitlines() if line[:4] == "max "), 0)
        return {
            "limit_bytes": self.limit_bytes,
            "peak_bytes": int(peak.read_text()) if peak.exists() else 0,
            "times_met": times_met,
        }

    def leave(self) -> None:
        with suppress(OSError):
            (self._parent / "cgroup.procs").write_text(str(os.getpid()))
            self._group.rmdir()


def remove_group_of(process: int) -> None:
    """What a process that was killed has left behind."""
    with suppress(OSError):
        (_own_group() / f"holdfast-bench-{process}").rmdir()
