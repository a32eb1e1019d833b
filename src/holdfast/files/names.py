"""Names of files and directories: those that the core and Arrow take, and the one that an error lacks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def trouble_with(path: str | os.PathLike[str]) -> str | None:
    """What is wrong with a path that is not UTF-8 from the root on, which Linux allows, or has no root any more; None
    where nothing is."""
    try:
        whole = str(Path(path).absolute())
    except FileNotFoundError:
        return f"{os.fspath(path)!a} is relative, and the working directory was removed: give a path from / on"
    try:
        whole.encode()
    except UnicodeEncodeError:
        return f"{whole!a} is not UTF-8: give it, or its folder, another name"
    return None


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
