"""Names that are made, and files that are written, durably."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.files.names import named


def sync_path(path: Path) -> None:
    """Returns when the file's bytes, or the directory's names, are on the medium. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with named(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_taken(path: Path) -> bool:
    """Whether the name is there, be it of a link whose target is not: no rename makes a directory of that."""
    return path.exists() or path.is_symlink()


def make_directory(path: Path) -> None:
    """Makes the directory, unless it is there, and those above it that are missing: all of their names are durable.
    Raises OSError."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync_path(place.parent)
