"""What a process that dies now leaves of its pool, or of a group's."""

from __future__ import annotations

import shutil
from pathlib import Path


def left_behind(directory: Path, to: Path) -> Path:
    """Copies a pool that is open, and flushed.

    A merge may be at work in it: row logs are copied first, for home may have more than a log's checkpoint says, and
    never less.
    """
    for log in directory.rglob("row-log-*"):
        copy = to / log.relative_to(directory)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(log, copy)
    return shutil.copytree(directory, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns("row-log-*"))
