"""A medium of its own for a pool's row log."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from holdfast import _core
from holdfast.errors import ConfigError
from holdfast.pools.dial import DialFigures, MediumDial

ROW_LOG = "row-log-0000"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMedium:
    """Where the row log of a ``block`` pool lies, if it is to lie on another medium than the rows' home: on the one
    that syncs fastest, as a small persistent CXL device. The log has the rows that were updated last, so it is a tier
    between the scratchpad and home, as large as ``log_bytes`` says.

    directory: on that medium; it is there already, may have the logs of several pools, and matters to a new pool only:
        one that is there finds its log by the link ``row-log-0000`` in its directory. None: beside the rows.
    dial: for measurements, a declared medium that the log's is made as slow as; None: the pool's own dial.
    """

    directory: str | os.PathLike[str] | None = None
    dial: MediumDial | None = None

    def check(self, directory: Path) -> None:
        """Raises ConfigError where the pool that is there has its log elsewhere than this says."""
        if self.directory is None:
            return
        found = place_of_log(directory)
        if not _is_same(found, Path(self.directory)):
            raise ConfigError(
                f"log.directory = {os.fspath(self.directory)!r}, but the log of the pool in {directory} lies in "
                f"{found}: leave it out, or, while no run is open, move the log there and make {directory / ROW_LOG} "
                "a link to it"
            )


def directory_of_log(log: LogMedium | None, log_store: bool) -> str:
    """For a new pool, which keeps its rows in a log store or in place; empty: beside the rows. Raises ConfigError."""
    if log is None or log.directory is None:
        return ""
    directory = os.fspath(log.directory)
    if not log_store:
        raise ConfigError(
            f"log.directory = {directory!r}, but this pool overwrites its rows in place, and has its log beside them: "
            "leave it out, or ask for medium = 'block'"
        )
    if not Path(directory).is_dir():
        raise ConfigError(
            f"log.directory = {directory!r}: no such directory; make it on the medium that is to have the pool's log"
        )
    return directory


def figures_of_log(log: LogMedium | None) -> DialFigures | None:
    """Of its dial, as the core takes them."""
    return None if log is None or log.dial is None else log.dial.figures


def place_of_log(directory: Path) -> Path:
    """The directory that has the row log of the pool in `directory`."""
    return Path(_core.row_log_path(str(directory))).parent


def place_apart(directory: Path) -> Path | None:
    """The same where it is another directory than the pool's own."""
    place = place_of_log(directory)
    return None if _is_same(place, directory) else place


def remove_log(directory: Path) -> None:
    """Before a pool that nobody wants any more is removed: its row log goes, wherever it lies."""
    log = directory / ROW_LOG
    if log.is_symlink():
        _core.remove_row_log(str(log))


def words_of_place(directory: Path) -> str:
    """Where the log of the pool in `directory` is, behind a description of its medium; empty where it is beside the
    rows."""
    place = place_apart(directory)
    return "" if place is None else f"; row log in {place}"


def _is_same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
