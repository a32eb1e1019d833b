"""What the files of a snapshot are called, what they say, and how it is sealed. docs/FORMAT.md has the bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast import _core
from holdfast.files.manifests import TableFields
from holdfast.pools.directory import SNAPSHOT_FORMAT, SNAPSHOT_MANIFEST
from holdfast.pools.read_only import RowLayout, layout_of

FORMAT, MANIFEST = SNAPSHOT_FORMAT, SNAPSHOT_MANIFEST
ASCENDING_VERSION = 1  # of a snapshot whose layers are one ascending run each
VERSION = 2
DENSE_FILES = ("dense.structure", "dense.tensors")
LAYERS = ("corrections", "rows")  # of one snapshot, the one that counts first
CHUNK = struct.Struct("<8sQQQQI16sI")  # magic, num_rows, first_row, last_row, payload_bytes, payload_crc, reserved, crc
RUN_BYTES = 256 << 20  # of rows that are put in order at a time,
RUN_CHUNK_BYTES = 1 << 20  # and of a chunk of them: one of every run is in memory where runs are read as one
CHUNK_MAGIC = b"HFSNAPCH"


class TableInfo(TableFields):
    """A table as a snapshot's manifest has it."""

    __slots__ = ()

    @property
    def layout(self) -> RowLayout:
        return layout_of(self.spec)

    @property
    def row_bytes(self) -> int:
        """Weights and state."""
        return self.layout.row_bytes


@dataclass(frozen=True, slots=True)
class FileInfo:
    """bytes: of the file; crc32c: of all of them."""

    bytes: int
    crc32c: int


def layer_name(number: int, layer: str) -> str:
    """The file of a table's rows, or of what corrects them."""
    return f"table-{number:04}.{layer}"


def crc_of(data: bytes | memoryview | NDArray[np.uint8], crc: int = 0) -> int:
    """CRC-32C; of what gave `crc`, followed by these, where that is given."""
    return _core.crc32c(crc, np.frombuffer(data, np.uint8))
