"""Names of files and directories: those that the core and Arrow take, and the one that an error lacks; and what to do
where there is no room for them."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_ROOM = {  # no read ends with these
    errno.ENOSPC: "free space there, or inodes (df -i)",
    errno.EDQUOT: "free space of this user there, or have the quota raised",
    errno.EFBIG: "the limit on the size of files (ulimit -f), or the filesystem, allows no larger one",
}


def trouble_with(path: str | os.PathLike[str]) -> str | None:
    """What is wrong with a path that is not UTF-8 from the root on, which Linux allows, that Python has in another
    encoding than the core, that has no root any more, or is longer than it may be; None where nothing is."""
    try:
        whole = str(Path(path).absolute())
    except FileNotFoundError:
        return f"{os.fspath(path)!a} is relative, and the working directory was removed: give a path from / on"
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8" and not whole.isascii():
        return (
            f"{whole!a} would have two names, as Python takes names of files for {encoding}, which is the locale's, and"
            " the core for UTF-8: set PYTHONUTF8=1, or a locale in UTF-8"
        )
    try:
        whole.encode()
    except UnicodeEncodeError:
        return f"{whole!a} is not UTF-8: give it, or its folder, another name"
    try:
        os.lstat(whole)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return f"{whole!a} has a name that is longer than the filesystem allows: give it a shorter one"
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


def advice_on(error: OSError) -> str:
    """What to do where there was no room, to follow what the system says; empty for other errors, and where the error
    says it already."""
    advice = _NO_ROOM.get(error.errno or 0, "")
    return "" if not advice or advice in (error.strerror or "") else f"; {advice}"
