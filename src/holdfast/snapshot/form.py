"""What the files of a snapshot are called, what they say, and how it is sealed. docs/FORMAT.md has the bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast import _core
from holdfast.reading import RowLayout, layout_of

FORMAT = "holdfast snapshot"
VERSION = 1
MANIFEST = "manifest.json"
DENSE_FILES = ("dense.structure", "dense.tensors")
LAYERS = ("corrections", "rows")  # of one snapshot, the one that counts first
CHUNK = struct.Struct("<8sQQQQI16sI")  # magic, num_rows, first_row, last_row, payload_bytes, payload_crc, reserved, crc
CHUNK_MAGIC = b"HFSNAPCH"


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table as a snapshot's manifest has it; dtype, optimizer and pooling by number."""

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: int
    optimizer: int
    pooling: int
    init_low: float
    init_high: float

    @classmethod
    def of(cls, spec: _core.TableSpec) -> TableInfo:
        return cls(**{name: getattr(spec, name) for name in cls.__slots__})

    @property
    def spec(self) -> _core.TableSpec:
        return _core.TableSpec(**asdict(self))

    @property
    def layout(self) -> RowLayout:
        return layout_of(self.spec)

    @property
    def row_bytes(self) -> int:
        """Weights and state."""
        return self.layout.weight_bytes + self.layout.state_bytes


@dataclass(frozen=True, slots=True)
class FileInfo:
    """bytes: of the file; crc32c: of all of them."""

    bytes: int
    crc32c: int


def layer_name(number: int, layer: str) -> str:
    """The file of a table's rows, or of what corrects them."""
    return f"table-{number:04}.{layer}"


def canonical(said: Mapping[str, Any]) -> bytes:
    """The bytes that a manifest's checksum is of."""
    return json.dumps(said, sort_keys=True, separators=(",", ":")).encode()


def crc_of(data: bytes | memoryview | NDArray[np.uint8], crc: int = 0) -> int:
    """CRC-32C; of what gave `crc`, followed by these, where that is given."""
    return _core.crc32c(crc, np.frombuffer(data, np.uint8))
