"""Making files and names durable."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Returns when the file's bytes, or the directory's names, are on the medium. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """A directory that lasts, with those above it that were not there either. Raises OSError."""
    made = [path]
    while not made[-1].parent.exists():
        made.append(made[-1].parent)
    for directory in reversed(made):
        directory.mkdir(exist_ok=True)
        sync_path(directory.parent)
