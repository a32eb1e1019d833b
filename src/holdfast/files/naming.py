"""The name in an error of the system's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def named(path: Path) -> Iterator[None]:
    """A request to a file that is open, which the system refuses without a word of which file that is. Raises OSError
    that names it."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
