"""Output files that are there in whole, and for good, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.files.attempts import attempt_at
from holdfast.files.durable import sync_path
from holdfast.files.names import advice_on


def check_output(path: Path, *, overwrite: bool, inputs: Sequence[Path | str] = ()) -> None:
    """The same errors as ``whole_file``, for whoever has long to work before it writes."""
    if path.is_dir():
        raise ConfigError(f"output: {path} is a directory; name a file")
    if path.exists() and not path.is_file():
        raise ConfigError(f"output: {path} is a pipe or a device, in whose place a file would be put; name another")
    if path.exists() and not overwrite:
        raise ConfigError(f"output: {path} is there already; remove it, or say overwrite")
    if path.exists() and any(Path(given).exists() and path.samefile(given) for given in inputs):
        raise ConfigError(f"output: {path} is one of the files that are read; name another")
    if not (directory := _led_to(path).parent).is_dir():
        raise ConfigError(f"output: there is no directory {directory}")


@contextmanager
def whole_file(path: Path, *, overwrite: bool, inputs: Sequence[Path | str] = ()) -> Iterator[Path]:
    """A file beside ``path`` to write to; it becomes ``path``, durably, if the block ends well, and is removed if not.
    Where that is a link, what it leads to is written, maybe on another disk, and the link stays.

    Raises ConfigError if ``path`` is there already and ``overwrite`` is not set, or is no file but a directory or a
    device, or one of ``inputs``, which are never overwritten, or its directory is not there, and OSError that names
    ``path`` where it cannot be written.
    """
    check_output(path, overwrite=overwrite, inputs=inputs)
    path = _led_to(path)
    with attempt_at(path, "partial", is_directory=False) as partial:
        try:
            yield partial
            sync_path(partial)
            partial.replace(path)
            sync_path(path.parent)
        except OSError as error:
            advice = advice_on(error)
            is_of_this = error.filename == str(partial) or (error.filename is None and advice)  # which no read has
            if error.errno is None or not is_of_this:
                raise
            refused = f"{os.strerror(error.errno)}{advice}"
            raise OSError(error.errno, f"{refused}. Nothing is left of what was being written", str(path)) from error
        finally:
            partial.unlink(missing_ok=True)


def _led_to(path: Path) -> Path:
    """What is there, or is going to be, where `path` may be a link."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path
