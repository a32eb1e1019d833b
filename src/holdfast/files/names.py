"""Names of files and directories, as the core and Arrow take them."""

from __future__ import annotations

import os
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
