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
