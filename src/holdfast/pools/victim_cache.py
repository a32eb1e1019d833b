"""Memory for rows that leave a scratchpad."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast import _core
from holdfast.errors import ConfigError
from holdfast.pools.dial import DialFigures, MediumDial


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimCache:
    """A tier between the scratchpad of a ``block`` pool and its rows' home: byte-addressable memory that is larger than
    DRAM, for the rows that leave the scratchpad for want of room. When such a row is wanted again it is copied from
    there, and not read from the drive. Nothing in it outlives the process, and rows and resumes do not depend on it.

    bytes: that it may take. Of DRAM, 65 bytes for each eight rows count towards ``scratchpad_bytes``.
    directory: where it lies, of a DAX file system or tmpfs; a file without a name is made there. None: in the machine's
        memory.
    nodes: NUMA nodes of the machine's memory on which it lies, as those of CXL devices. None: on any.
    dial: for measurements, a declared medium that it is made as slow as.
    """

    bytes: int
    directory: str | os.PathLike[str] | None = None
    nodes: tuple[int, ...] = ()
    dial: MediumDial | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if not 1 <= self.bytes < 1 << 63:
            raise ConfigError(f"victims.bytes = {self.bytes}; it must be positive, and less than 2^63")
        if not all(0 <= node < 1 << 32 for node in self.nodes):
            raise ConfigError(
                f"victims.nodes = {list(self.nodes)}; nodes are counted from 0, and "
                "/sys/devices/system/node/has_memory says which there are"
            )

    def check(self) -> None:
        """Raises ConfigError where this machine has no such directory, or no memory on one of the nodes."""
        if self.directory is not None and not Path(self.directory).is_dir():
            raise ConfigError(f"victims.directory = {os.fspath(self.directory)!r}: no such directory; name one that is")
        _core.check_nodes(list(self.nodes), "victims.nodes")

    @property
    def figures(self) -> tuple[int, str, Sequence[int], DialFigures | None]:
        """As the core takes them."""
        directory = "" if self.directory is None else os.fspath(self.directory)
        return self.bytes, directory, list(self.nodes), None if self.dial is None else self.dial.figures
